//! `MPI_Allreduce` on the host's memory.

use std::ffi::c_void;

use fast_allreduce::{bootstrap, DType, ReduceOp};
use mpi::datatype::Equivalence;
use mpi::environment::is_initialized;
use mpi::ffi;
use mpi::raw::AsRaw;

use crate::bench::contender::Rival;
use crate::bench::device::host::{Cpu, Memory};
use crate::bench::reference::Number;
use crate::failure::Failure;

/// The world that a launcher started, which is that of this crate's ranks.
pub struct Mpi {
    /// `MPI_IN_PLACE`.
    in_place: *const c_void,
}

impl Mpi {
    /// Says how to come to a world where there is none.
    pub fn new() -> Result<Self, String> {
        if !is_initialized() {
            return Err("this run has no world of MPI: start it under mpirun, as in \
                 `mpirun -np 4 fast-allreduce compare --vs mpi`"
                .into());
        }
        // A macro of the library's mpi.h, which bindings have no constant for.
        let library = bootstrap::Mpi::library();
        let address = match &library {
            name if name.starts_with("Open MPI") => 1,
            name if name.starts_with("MPICH") => usize::MAX,
            _ => return Err(format!("MPI_IN_PLACE of {library} is not known here: take Open MPI or MPICH")),
        };
        Ok(Self { in_place: address as *const c_void })
    }

    /// # Safety
    ///
    /// `output` points to `count` elements of T that nobody else uses, and so does `input`, or it is `MPI_IN_PLACE`.
    unsafe fn call<T: Number>(
        &self,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        op: ReduceOp,
    ) -> Result<(), Failure> {
        let refuse = |what: String| Failure::Usage(format!("MPI_Allreduce {what}"));
        let elements = i32::try_from(count)
            .map_err(|_| refuse(format!("takes no {count} elements: give a smaller --maxbytes")))?;
        let missing = || refuse(format!("has no {op} of {}", T::DTYPE));
        let dtype = datatype(T::DTYPE).ok_or_else(missing)?;
        let op = operation(op).ok_or_else(missing)?;
        // SAFETY: the pointers are the caller's promise, and `dtype` is the type of T. `new` saw that MPI runs, it ends with
        // this process, and all calls to it are of this thread.
        let status = unsafe { ffi::MPI_Allreduce(input, output, elements, dtype, op, ffi::RSMPI_COMM_WORLD) };
        match status {
            0 => Ok(()),
            status => Err(refuse(format!("answered {status}"))),
        }
    }
}

impl Rival<Cpu> for Mpi {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn library(&self) -> String {
        bootstrap::Mpi::library()
    }

    fn refusal(&self, dtype: DType, op: ReduceOp) -> Option<&'static str> {
        match (datatype(dtype), operation(op)) {
            (None, _) => Some("MPI has no such type"),
            (_, None) => Some("MPI has no such operation"),
            _ => None,
        }
    }

    fn all_reduce<T: Number>(
        &self,
        _: &Cpu,
        input: &Memory<T>,
        output: &mut Memory<T>,
        op: ReduceOp,
    ) -> Result<(), Failure> {
        assert_eq!(input.len(), output.len());
        // SAFETY: two slices of as many elements, borrowed for the call, which returns when it is done with them.
        unsafe { self.call::<T>(input.as_ptr().cast(), output.as_mut_ptr().cast(), output.len(), op) }
    }

    fn all_reduce_in_place<T: Number>(
        &self,
        _: &Cpu,
        data: &mut Memory<T>,
        op: ReduceOp,
    ) -> Result<(), Failure> {
        // SAFETY: a slice, borrowed for the call.
        unsafe { self.call::<T>(self.in_place, data.as_mut_ptr().cast(), data.len(), op) }
    }
}

fn datatype(dtype: DType) -> Option<ffi::MPI_Datatype> {
    Some(match dtype {
        DType::F32 => f32::equivalent_datatype().as_raw(),
        DType::F64 => f64::equivalent_datatype().as_raw(),
        DType::I8 => i8::equivalent_datatype().as_raw(),
        DType::U8 => u8::equivalent_datatype().as_raw(),
        DType::I32 => i32::equivalent_datatype().as_raw(),
        DType::U32 => u32::equivalent_datatype().as_raw(),
        DType::I64 => i64::equivalent_datatype().as_raw(),
        DType::U64 => u64::equivalent_datatype().as_raw(),
        _ => return None,
    })
}

fn operation(op: ReduceOp) -> Option<ffi::MPI_Op> {
    // SAFETY: constants of the library.
    unsafe {
        Some(match op {
            ReduceOp::Sum => ffi::RSMPI_SUM,
            ReduceOp::Prod => ffi::RSMPI_PROD,
            ReduceOp::Min => ffi::RSMPI_MIN,
            ReduceOp::Max => ffi::RSMPI_MAX,
            _ => return None,
        })
    }
}
