//! Rust types that can be reduced.

use crate::catalogue::{with_elements, DType};

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that can be reduced: a number, [`half`](https://docs.rs/half)'s `f16` or `bf16`, or with the feature
/// `float8` an 8-bit float.
///
/// ```
/// use fast_allreduce::{DType, Element};
///
/// fn bytes<T: Element>(data: &[T]) -> usize {
///     data.len() * T::DTYPE.size()
/// }
/// assert_eq!((bytes(&[1.0_f32; 3]), <i64 as Element>::DTYPE), (12, DType::I64));
/// ```
///
/// # Safety
///
/// `DTYPE` describes the type's layout, and every bit pattern is a value of the type. The trait is sealed.
pub unsafe trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The [`DType`] of this type.
    const DTYPE: DType;
}

macro_rules! element {
    ($($rust:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $rust {}
        // SAFETY: a plain number with the representation that the DType names. Its size is asserted below.
        unsafe impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
        }
        const _: () = assert!(size_of::<$rust>() == DType::$dtype.size());
    )*};
}

with_elements!(element);

#[cfg(any(feature = "float8", feature = "mpi"))]
element! { float8::F8E4M3 => F8E4M3, float8::F8E5M2 => F8E5M2 }
