//! The 8-bit floats of the OCP 8-bit Floating Point Specification (OFP8), revision 1.0, from its tables of exponents and special
//! values: the reference for what the kernels convert.

use fast_allreduce::DType;

/// A format.
#[derive(Clone, Copy)]
pub struct Ofp8 {
    mantissa: u32,
    bias: i32,
    /// The code of the largest finite number.
    largest: u64,
    infinity: Option<u64>,
}

pub const E4M3: Ofp8 = Ofp8 { mantissa: 3, bias: 7, largest: 0x7E, infinity: None };
pub const E5M2: Ofp8 = Ofp8 { mantissa: 2, bias: 15, largest: 0x7B, infinity: Some(0x7C) };

/// The NaN of results.
const NAN: u64 = 0x7F;

impl Ofp8 {
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F8E4M3 => Some(E4M3),
            DType::F8E5M2 => Some(E5M2),
            _ => None,
        }
    }

    /// What a code stands for.
    pub fn number(self, code: u64) -> f64 {
        let magnitude = code & 0x7F;
        let value = match magnitude {
            finite if finite <= self.largest => self.magnitude(finite),
            infinite if Some(infinite) == self.infinity => f64::INFINITY,
            _ => f64::NAN,
        };
        if code & 0x80 == 0 {
            value
        } else {
            -value
        }
    }

    /// As the number that follows the largest one would be read, too.
    pub fn magnitude(self, code: u64) -> f64 {
        let (exponent, fraction) = ((code >> self.mantissa) as i32, code & ((1 << self.mantissa) - 1));
        let fraction = fraction as f64 / f64::from(1 << self.mantissa);
        match exponent {
            0 => fraction * 2f64.powi(1 - self.bias),
            _ => (1.0 + fraction) * 2f64.powi(exponent - self.bias),
        }
    }

    /// The code of the number that is nearest, the even one of two; without saturation.
    pub fn round(self, value: f64) -> u64 {
        if value.is_nan() {
            return NAN;
        }
        let (sign, magnitude) = (u64::from(value.is_sign_negative()) << 7, value.abs());
        // What rounds to the number that would follow the largest one overflows.
        let (mut low, mut high) = (0, self.largest + 1);
        while high - low > 1 {
            let middle = (low + high) / 2;
            if self.magnitude(middle) <= magnitude {
                low = middle;
            } else {
                high = middle;
            }
        }
        let (below, above) = (magnitude - self.magnitude(low), self.magnitude(high) - magnitude);
        let code = if below < above || (below == above && low % 2 == 0) { low } else { high };
        match self.infinity {
            _ if code <= self.largest => sign | code,
            Some(infinity) => sign | infinity,
            None => NAN,
        }
    }
}
