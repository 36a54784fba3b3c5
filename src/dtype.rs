//! Element types.

use crate::abi;

/// The type of the elements of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum DType {
    /// IEEE binary16; accumulated in f32.
    F16 = abi::FA_F16,
    /// bfloat16; accumulated in f32.
    Bf16 = abi::FA_BF16,
    /// IEEE binary32.
    F32 = abi::FA_F32,
    /// IEEE binary64.
    F64 = abi::FA_F64,
    /// Signed 8-bit integer.
    I8 = abi::FA_I8,
    /// Unsigned 8-bit integer.
    U8 = abi::FA_U8,
    /// Signed 32-bit integer.
    I32 = abi::FA_I32,
    /// Unsigned 32-bit integer.
    U32 = abi::FA_U32,
    /// Signed 64-bit integer.
    I64 = abi::FA_I64,
    /// Unsigned 64-bit integer.
    U64 = abi::FA_U64,
    /// 8-bit float with 4 bits of exponent and 3 of mantissa, without infinities (OCP OFP8 e4m3; `float8_e4m3fn`); accumulated
    /// in f32. What rounds beyond 448 is NaN.
    F8E4M3 = abi::FA_F8E4M3,
    /// 8-bit float with 5 bits of exponent and 2 of mantissa (OCP OFP8 e5m2; `float8_e5m2`); accumulated in f32. What rounds
    /// beyond 57344 is infinite.
    F8E5M2 = abi::FA_F8E5M2,
}

impl DType {
    /// All types, in the order of their codes.
    pub const ALL: [Self; 12] = [
        Self::F16,
        Self::Bf16,
        Self::F32,
        Self::F64,
        Self::I8,
        Self::U8,
        Self::I32,
        Self::U32,
        Self::I64,
        Self::U64,
        Self::F8E4M3,
        Self::F8E5M2,
    ];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    /// Whether it is a floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16 | Self::F32 | Self::F64 | Self::F8E4M3 | Self::F8E5M2)
    }

    /// The name that the field uses: `"f16"`, `"bf16"`, `"i8"`, ...
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::I64 => "i64",
            Self::U64 => "u64",
            Self::F8E4M3 => "f8e4m3",
            Self::F8E5M2 => "f8e5m2",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for DType {
    type Err = crate::Error;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or_else(|| crate::Error::InvalidSetting {
            name: "element type",
            value: name.to_owned(),
            expected: "one of f16, bf16, f32, f64, i8, u8, i32, u32, i64, u64, f8e4m3, f8e5m2",
        })
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that can be reduced.
///
/// # Safety
///
/// `DTYPE` describes the type's layout, and every bit pattern is a value of the type. The trait is sealed.
pub unsafe trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// Its [`DType`].
    const DTYPE: DType;
}

macro_rules! element {
    ($($rust:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $rust {}
        // SAFETY: a plain number of the size and representation that the DType names; asserted below for the size.
        unsafe impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
        }
        const _: () = assert!(size_of::<$rust>() == DType::$dtype.size());
    )*};
}

element! {
    half::f16 => F16, half::bf16 => Bf16, f32 => F32, f64 => F64, i8 => I8, u8 => U8, i32 => I32, u32 => U32,
    i64 => I64, u64 => U64,
}

#[cfg(feature = "mpi")]
element! { crate::ofp8::E4M3 => F8E4M3, crate::ofp8::E5M2 => F8E5M2 }

#[cfg(feature = "float8")]
element! { float8::F8E4M3 => F8E4M3, float8::F8E5M2 => F8E5M2 }

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed() {
        for dtype in DType::ALL {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
        }
        for name in ["", "F32", "f32 ", "float"] {
            let error = name.parse::<DType>().unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
            assert!(DType::ALL.into_iter().all(|dtype| error.contains(dtype.name())), "{error}");
        }
    }
}
