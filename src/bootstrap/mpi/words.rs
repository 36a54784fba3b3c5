//! What MPI reduces: numbers of the types, and by the operations, that every MPI library gets right.

use std::ffi::c_void;

use ::mpi::ffi::{self, MPI_Datatype, MPI_Op};

/// Numbers of one type.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Words {
    F32(Vec<f32>),
    F64(Vec<f64>),
    I32(Vec<i32>),
    I64(Vec<i64>),
    U32(Vec<u32>),
    U64(Vec<u64>),
}

impl Words {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::F32(words) => words.len(),
            Self::F64(words) => words.len(),
            Self::I32(words) => words.len(),
            Self::I64(words) => words.len(),
            Self::U32(words) => words.len(),
            Self::U64(words) => words.len(),
        }
    }

    /// As many zeros of the same type.
    pub(super) fn zeros(&self) -> Self {
        let len = self.len();
        match self {
            Self::F32(_) => Self::F32(vec![0.0; len]),
            Self::F64(_) => Self::F64(vec![0.0; len]),
            Self::I32(_) => Self::I32(vec![0; len]),
            Self::I64(_) => Self::I64(vec![0; len]),
            Self::U32(_) => Self::U32(vec![0; len]),
            Self::U64(_) => Self::U64(vec![0; len]),
        }
    }

    /// Where they are: the place stays when `self` is moved.
    pub(super) fn address(&mut self) -> *mut c_void {
        match self {
            Self::F32(words) => words.as_mut_ptr().cast(),
            Self::F64(words) => words.as_mut_ptr().cast(),
            Self::I32(words) => words.as_mut_ptr().cast(),
            Self::I64(words) => words.as_mut_ptr().cast(),
            Self::U32(words) => words.as_mut_ptr().cast(),
            Self::U64(words) => words.as_mut_ptr().cast(),
        }
    }

    pub(super) fn datatype(&self) -> MPI_Datatype {
        // SAFETY: MPI's constants do not change.
        unsafe {
            match self {
                Self::F32(_) => ffi::RSMPI_FLOAT,
                Self::F64(_) => ffi::RSMPI_DOUBLE,
                Self::I32(_) => ffi::RSMPI_INT32_T,
                Self::I64(_) => ffi::RSMPI_INT64_T,
                Self::U32(_) => ffi::RSMPI_UINT32_T,
                Self::U64(_) => ffi::RSMPI_UINT64_T,
            }
        }
    }
}

/// How they are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Combine {
    Sum,
    Prod,
    Min,
    Max,
}

impl Combine {
    pub(super) fn operation(self) -> MPI_Op {
        // SAFETY: MPI's constants do not change.
        unsafe {
            match self {
                Self::Sum => ffi::RSMPI_SUM,
                Self::Prod => ffi::RSMPI_PROD,
                Self::Min => ffi::RSMPI_MIN,
                Self::Max => ffi::RSMPI_MAX,
            }
        }
    }
}
