//! Generated from catalogue/ by `cargo run -p fast-allreduce-catalogue --example generate`: do not edit.

use fast_allreduce::{DType, ReduceOp};
use mpi::ffi;

pub(super) fn datatype(dtype: DType) -> Option<ffi::MPI_Datatype> {
    // SAFETY: these statics are constants of the MPI library.
    unsafe {
        Some(match dtype {
            DType::F32 => ffi::RSMPI_FLOAT,
            DType::F64 => ffi::RSMPI_DOUBLE,
            DType::I8 => ffi::RSMPI_INT8_T,
            DType::U8 => ffi::RSMPI_UINT8_T,
            DType::I32 => ffi::RSMPI_INT32_T,
            DType::U32 => ffi::RSMPI_UINT32_T,
            DType::I64 => ffi::RSMPI_INT64_T,
            DType::U64 => ffi::RSMPI_UINT64_T,
            // MPI has no equivalent.
            _ => return None,
        })
    }
}

pub(super) fn operation(op: ReduceOp) -> Option<ffi::MPI_Op> {
    // SAFETY: these statics are constants of the MPI library.
    unsafe {
        Some(match op {
            ReduceOp::Sum => ffi::RSMPI_SUM,
            ReduceOp::Prod => ffi::RSMPI_PROD,
            ReduceOp::Min => ffi::RSMPI_MIN,
            ReduceOp::Max => ffi::RSMPI_MAX,
            ReduceOp::BitAnd => ffi::RSMPI_BAND,
            ReduceOp::BitOr => ffi::RSMPI_BOR,
            ReduceOp::BitXor => ffi::RSMPI_BXOR,
            // MPI has no equivalent.
            _ => return None,
        })
    }
}
