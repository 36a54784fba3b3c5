//! Quantised transport: formats that an allreduce moves instead of its elements, and their error bounds.

use serde::{Deserialize, Serialize};

use crate::abi::{self, FA_QUANTIZED_GROUP};
use crate::catalogue::DType;
use crate::error::{Error, Result};

/// Format of quantised transport: one byte for each element, and a 16-bit scale for each group of 32 elements.
/// `docs/quantized.md` defines the formats, to the bit.
///
/// ```
/// use fast_allreduce::{DType, Transport};
///
/// let transport: Transport = "int8".parse()?;
/// assert_eq!(transport, Transport::Int8);
/// assert!(transport.error_bound(DType::Bf16).is_some_and(|bound| bound < 0.012));
/// assert_eq!(transport.error_bound(DType::I32), None);
/// # Ok::<(), fast_allreduce::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
#[repr(u32)]
pub enum Transport {
    /// Integers from -127 to 127. The error is at most 1/252 of the largest magnitude of the group, for all elements.
    Int8 = abi::FA_TRANSPORT_INT8,
    /// OCP e4m3. The error is at most 1/16 of the element itself: smaller than that of [`Transport::Int8`] for elements
    /// that are far smaller than the largest of their group, and larger for others.
    F8E4M3 = abi::FA_TRANSPORT_F8E4M3,
}

impl Transport {
    /// All formats.
    pub const ALL: [Self; 2] = [Self::Int8, Self::F8E4M3];

    /// Returns the name: `"int8"` or `"f8e4m3"`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::F8E4M3 => "f8e4m3",
        }
    }

    /// Returns the error bound that [`Communicator::all_reduce_quantized`](crate::Communicator::all_reduce_quantized)
    /// guarantees; `None` for types that quantised transport does not support.
    ///
    /// The bound is relative to M, the sum over the ranks of the largest magnitude in the element's group: each
    /// element of the result differs from the exact sum by at most the bound times M. The rounding to the type is
    /// included.
    pub const fn error_bound(self, dtype: DType) -> Option<f32> {
        // Computed at compile time, so that the state of the caller's floating-point unit has no influence.
        const BOUNDS: [[f32; 3]; 2] = [Transport::Int8.bounds(), Transport::F8E4M3.bounds()];
        let of = &BOUNDS[self as usize];
        match dtype {
            DType::F16 => Some(of[0]),
            DType::Bf16 => Some(of[1]),
            DType::F32 => Some(of[2]),
            _ => None,
        }
    }

    /// Returns the bounds for f16, bf16 and f32.
    const fn bounds(self) -> [f32; 3] {
        [self.bound(exp2(-11)), self.bound(exp2(-8)), self.bound(0.0)]
    }

    /// Returns the bound for a type with this relative rounding error.
    const fn bound(self, rounding: f64) -> f32 {
        // Half of the distance between the largest values of the format, over the largest.
        let (half_step, most) = match self {
            Self::Int8 => (0.5, 127.0),
            Self::F8E4M3 => (16.0, 448.0),
        };
        // Error of one quantisation: scales are rounded up to 8 bits, and the rounded value is a product in f32.
        let once = (half_step / most + exp2(-22)) * (1.0 + exp2(-7)) * (1.0 + exp2(-22));
        // Error of adding 16 parts in f32.
        let sum = exp2(-20);
        let grown = (1.0 + once) * (1.0 + sum);
        // Each input is quantised once, the sum is quantised once, and the result is rounded once.
        let bound = once + sum + once * grown + rounding * grown * (1.0 + once);
        // The conversion must not round down.
        (bound * (1.0 + exp2(-23))) as f32
    }
}

impl std::fmt::Display for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Transport {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|transport| transport.name() == name).ok_or_else(|| {
            Error::InvalidSetting {
                name: "transport",
                value: name.to_owned(),
                expected: "one of int8, f8e4m3",
            }
        })
    }
}

/// Returns two to the power of an exponent that is not positive.
const fn exp2(exponent: i32) -> f64 {
    let (mut power, mut left) = (1.0, exponent);
    while left < 0 {
        power /= 2.0;
        left += 1;
    }
    power
}

/// Transport of a call, and the error that the caller accepts.
///
/// ```
/// use fast_allreduce::{Collective, QuantizedTransport, Transport};
///
/// let quantized = QuantizedTransport { transport: Transport::Int8, tolerance: 0.012 };
/// assert_eq!(Collective::AllReduceQuantized(quantized).name(), "all_reduce_quantized");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct QuantizedTransport {
    /// Format.
    pub transport: Transport,
    /// Accepted error: at least [`Transport::error_bound`] of the element type.
    pub tolerance: f32,
}

// A tolerance that is NaN is refused.
impl Eq for QuantizedTransport {}

impl QuantizedTransport {
    /// Encodes in one word the facts that ranks must agree on. It is not a hash, so that errors can decode it.
    pub(crate) fn digest(self) -> u64 {
        let Self { transport, tolerance } = self;
        u64::from(tolerance.to_bits()) << 32 | u64::from(FA_QUANTIZED_GROUP) << 8 | transport as u64
    }

    /// Describes a digest.
    pub(crate) fn describe(digest: u64) -> String {
        let transport = Transport::ALL.into_iter().find(|&known| known as u64 == digest & 0xFF);
        let (name, group) = (transport.map_or("unknown", Transport::name), digest >> 8 & 0xFF_FFFF);
        let tolerance = f32::from_bits((digest >> 32) as u32);
        format!("{name} in groups of {group}, tolerance {tolerance}")
    }

    /// Refuses types that quantised transport does not support, and tolerances below the error bound.
    pub(crate) fn check(self, dtype: DType) -> Result<()> {
        let Self { transport, tolerance } = self;
        match transport.error_bound(dtype) {
            None => Err(Error::InvalidSetting {
                name: "element type",
                value: dtype.to_string(),
                expected: "f16, bf16 or f32 for quantized transport",
            }),
            // The bits of floats that are not negative are in the order of their values.
            Some(bound) if (bound.to_bits()..=f32::INFINITY.to_bits()).contains(&tolerance.to_bits()) => {
                Ok(())
            }
            Some(bound) => Err(Error::InvalidSetting {
                name: "tolerance",
                value: format!("{tolerance:e}, where {transport} guarantees {bound} for {dtype}"),
                expected: "at least the error bound of the transport",
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_those_of_the_documentation() {
        let bounds = Transport::ALL
            .map(|transport| [DType::F16, DType::Bf16, DType::F32].map(|dtype| transport.error_bound(dtype)));
        let rounded = bounds.map(|row| row.map(|bound| (bound.unwrap() * 1e5).ceil() as u32));
        assert_eq!(rounded, [[845, 1190, 796], [7381, 7748, 7329]]);
        assert_eq!(Transport::Int8.error_bound(DType::F64), None);
    }

    #[test]
    fn names_are_parsed() {
        for transport in Transport::ALL {
            assert_eq!(transport.to_string().parse(), Ok(transport));
        }
        assert!("int4".parse::<Transport>().unwrap_err().to_string().contains("int8, f8e4m3"));
    }

    #[test]
    fn a_tolerance_just_below_the_bound_is_refused() {
        for transport in Transport::ALL {
            let bound = transport.error_bound(DType::Bf16).unwrap();
            let check = |tolerance| QuantizedTransport { transport, tolerance }.check(DType::Bf16);
            assert_eq!((check(bound), check(f32::INFINITY)), (Ok(()), Ok(())));
            for tolerance in [f32::from_bits(bound.to_bits() - 1), 0.0, -1.0, f32::NAN] {
                let text = check(tolerance).unwrap_err().to_string();
                assert!(text.contains(&format!("{transport} guarantees {bound:?} for bf16")), "{text}");
            }
        }
    }
}
