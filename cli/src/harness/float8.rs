//! The 8-bit floats of the OCP specification (OFP8, revision 1.0), bit by bit: `fast-allreduce` has calls on them without a type.

/// Four bits of exponent: no infinity, one NaN of each sign.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct F8E4M3(u8);

/// Five bits of exponent, as an f16 that was cut off.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct F8E5M2(u8);

macro_rules! float8 {
    ($type:ident, $exponent_bits:literal, $beyond:literal) => {
        impl $type {
            const MANTISSA_BITS: u32 = 7 - $exponent_bits;
            const BIAS: i32 = (1 << ($exponent_bits - 1)) - 1;
            /// What follows the largest finite number: infinity, or NaN where there is none.
            const BEYOND: u8 = $beyond;

            pub const fn from_bits(bits: u8) -> Self {
                Self(bits)
            }

            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// Exact.
            pub fn to_f32(self) -> f32 {
                let magnitude = self.0 & 0x7f;
                if magnitude >= Self::BEYOND {
                    let is_infinite = $exponent_bits == 5 && magnitude == Self::BEYOND;
                    let value = if is_infinite { f32::INFINITY } else { f32::NAN };
                    return if self.0 > 0x7f { -value } else { value };
                }
                let exponent = i32::from(magnitude >> Self::MANTISSA_BITS);
                let mantissa = i32::from(magnitude) & ((1 << Self::MANTISSA_BITS) - 1);
                let hidden = if exponent > 0 { 1 << Self::MANTISSA_BITS } else { 0 };
                let value = (mantissa + hidden) as f32 * Self::unit(exponent.max(1) - Self::BIAS);
                if self.0 > 0x7f {
                    -value
                } else {
                    value
                }
            }

            /// To nearest, ties to even. What is too large becomes what follows the largest number.
            pub fn from_f32(value: f32) -> Self {
                let sign = u8::from(value.is_sign_negative()) << 7;
                let magnitude = value.abs();
                if magnitude.is_nan() {
                    return Self(sign | 0x7f);
                }
                let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(1 - Self::BIAS);
                // One more than the mantissa holds carries into the exponent.
                let mantissa = (magnitude / Self::unit(exponent)).round_ties_even() as i32;
                let bits = ((exponent + Self::BIAS - 1) << Self::MANTISSA_BITS).saturating_add(mantissa);
                Self(sign | bits.min(i32::from(Self::BEYOND)) as u8)
            }

            /// The last place of numbers of this exponent.
            fn unit(exponent: i32) -> f32 {
                2f32.powi(exponent - Self::MANTISSA_BITS as i32)
            }
        }

        impl From<$type> for f64 {
            fn from(value: $type) -> Self {
                value.to_f32().into()
            }
        }
    };
}

float8!(F8E4M3, 4, 0x7f);
float8!(F8E5M2, 5, 0x7c);

#[cfg(test)]
mod tests {
    use super::*;

    macro_rules! all_bits {
        ($type:ident, $largest:literal, $least:literal, $tie:literal, $beyond:literal) => {
            let mut before = f32::NEG_INFINITY;
            for bits in 0..=u8::MAX {
                let value = $type::from_bits(bits);
                if value.to_f32().is_nan() {
                    assert!($type::from_f32(value.to_f32()).to_f32().is_nan());
                    continue;
                }
                assert_eq!($type::from_f32(value.to_f32()).to_bits(), bits, "{value:?}");
                if bits < $beyond {
                    assert!(value.to_f32() > before, "{value:?}");
                    let middle = (value.to_f32() + before) / 2.0;
                    if bits > 0 {
                        // To the even one of the two.
                        assert_eq!($type::from_f32(middle).to_bits(), (bits - 1) + (bits - 1) % 2);
                        assert_eq!($type::from_f32(middle * 1.0001).to_bits(), bits);
                    }
                    before = value.to_f32();
                }
            }
            assert_eq!(before, $largest);
            assert_eq!($type::from_bits(1).to_f32(), $least);
            assert_eq!($type::from_f32($tie * 1.0001).to_bits(), $beyond);
            assert_eq!($type::from_f32(-f32::INFINITY).to_bits(), 0x80 | $beyond);
        };
    }

    #[test]
    fn every_number_is_read_and_rounded_to() {
        all_bits!(F8E4M3, 448.0, 0.001_953_125, 464.0, 0x7f);
        all_bits!(F8E5M2, 57344.0, 0.000_015_258_789, 61440.0, 0x7c);
        assert_eq!(F8E4M3::from_f32(464.0).to_bits(), 0x7e, "a tie, to even");
        assert_eq!(F8E5M2::from_f32(61440.0).to_bits(), 0x7c, "a tie, to infinity");
    }
}
