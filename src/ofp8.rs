//! The 8-bit floats of the OCP 8-bit Floating Point Specification (OFP8), revision 1.0, where the library computes outside of its
//! kernels: as those convert them.

/// A number in one of the formats; `E4M3` and `E5M2`, below.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Ofp8<const MANTISSA: u32>(u8);

/// Without infinities: what is beyond the largest number, 448, is NaN.
pub(crate) type E4M3 = Ofp8<3>;
/// With infinities.
pub(crate) type E5M2 = Ofp8<2>;

impl<const MANTISSA: u32> Ofp8<MANTISSA> {
    const BIAS: u32 = (1 << (6 - MANTISSA)) - 1;
    /// The least magnitude that is no finite number: e4m3's NaN, e5m2's infinity.
    const SPECIAL: u32 = if MANTISSA == 3 { 0x7F } else { 0x7C };
    const DROPPED: u32 = f32::MANTISSA_DIGITS - 1 - MANTISSA;

    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    pub const fn from_ne_bytes([bits]: [u8; 1]) -> Self {
        Self(bits)
    }

    #[cfg(test)]
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    pub fn to_f32(self) -> f32 {
        let magnitude = u32::from(self.0 & 0x7F);
        let sign = u32::from(self.0 & 0x80) << 24;
        let shifted = magnitude << Self::DROPPED;
        let bits = match magnitude < Self::SPECIAL {
            // The factor rebiases the exponent, exactly, and normalises subnormals.
            true => (f32::from_bits(shifted) * f32::from_bits((254 - Self::BIAS) << 23)).to_bits(),
            false => shifted | 0x7F80_0000,
        };
        f32::from_bits(sign | bits)
    }

    /// To nearest, ties to even; what is then too large overflows. A NaN has no sign.
    pub fn from_f32(value: f32) -> Self {
        let (bits, magnitude) = (value.to_bits(), value.abs().to_bits());
        if value.is_nan() {
            return Self(0x7F);
        }
        let least_normal = (128 - Self::BIAS) << 23;
        let code = if magnitude < least_normal {
            // The last place of this sum is that of subnormals.
            let unit_place = f32::from_bits((151 - Self::BIAS - MANTISSA) << 23);
            (value.abs() + unit_place).to_bits() - unit_place.to_bits()
        } else {
            let half = (1 << (Self::DROPPED - 1)) - 1 + ((magnitude >> Self::DROPPED) & 1);
            (magnitude - ((127 - Self::BIAS) << 23) + half) >> Self::DROPPED
        };
        match code.min(Self::SPECIAL) {
            0x7F => Self(0x7F),
            code => Self((code | bits >> 24 & 0x80) as u8),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every number and what lies around it, around the middle to the next, and around the overflow.
    fn rounds<const MANTISSA: u32>(finite: u8, next: f32) {
        let number = |code: u8| Ofp8::<MANTISSA>::from_bits(code).to_f32();
        let is = |value: f32, code: u8| {
            assert_eq!(Ofp8::<MANTISSA>::from_f32(value).to_bits(), code, "{value:e}");
            let negative = if code == 0x7F { code } else { code | 0x80 };
            assert_eq!(Ofp8::<MANTISSA>::from_f32(-value).to_bits(), negative, "-{value:e}");
        };
        let (before, after) = (
            |value: f32| f32::from_bits(value.to_bits() - 1),
            |value: f32| f32::from_bits(value.to_bits() + 1),
        );
        for code in 0..=finite {
            let above = if code == finite { next } else { number(code + 1) };
            assert!(number(code) < above && number(code | 0x80).to_bits() == (-number(code)).to_bits());
            let middle = (number(code) + above) / 2.0;
            is(number(code), code);
            is(before(middle), code);
            is(middle, code + (code & 1));
            is(after(middle), code + 1);
        }
        is(f32::MAX, finite + 1);
        is(f32::INFINITY, finite + 1);
        is(f32::NAN, 0x7F);
    }

    #[test]
    fn every_number_and_every_middle() {
        assert_eq!(E4M3::from_bits(0x7E).to_f32(), 448.0);
        assert_eq!(E4M3::from_bits(1).to_f32(), 2f32.powi(-9));
        assert_eq!(E4M3::from_bits(0x38).to_f32(), 1.0);
        assert_eq!(E5M2::from_bits(0x7B).to_f32(), 57344.0);
        assert_eq!(E5M2::from_bits(1).to_f32(), 2f32.powi(-16));
        assert_eq!(E5M2::from_bits(0x3C).to_f32(), 1.0);
        assert_eq!(E5M2::from_bits(0xFC).to_f32(), f32::NEG_INFINITY);
        assert!([0x7F, 0xFF].iter().all(|&code| E4M3::from_bits(code).to_f32().is_nan()));
        assert!([0x7D, 0x7E, 0xFF].iter().all(|&code| E5M2::from_bits(code).to_f32().is_nan()));
        rounds::<3>(0x7E, 480.0);
        rounds::<2>(0x7B, 65536.0);
    }
}
