//! Rust types that are elements.

use crate::catalogue::DType;

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
