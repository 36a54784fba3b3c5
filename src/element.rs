//! Rust types that are elements.

use crate::catalogue::{with_elements, DType};

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

with_elements!(element);

#[cfg(any(feature = "float8", feature = "mpi"))]
element! { float8::F8E4M3 => F8E4M3, float8::F8E5M2 => F8E5M2 }
