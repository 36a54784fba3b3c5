//! Collectives on candle's storage in the memory of the host.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result};
use fast_allreduce::{Collective, DType, Element, ReduceOp};

use super::rms_norm::Norm;
use super::{contiguous, element, scaled};
use crate::comm::{error, Comm};
use crate::dtype::reducible;

/// Runs a collective from a storage to a new one. `count` is the collective's, in elements.
pub(super) fn call(
    comm: &Comm,
    collective: Collective<'_>,
    storage: &CpuStorage,
    layout: &Layout,
    count: usize,
) -> Result<CpuStorage> {
    let op = collective.name();
    let (dtype, range) = (storage.dtype(), contiguous(layout, op)?);
    let (dtype, factor) = element(dtype, collective)?;
    macro_rules! of_types {
        ($($variant:ident),*) => {
            match storage {
                $(CpuStorage::$variant(data) => {
                    CpuStorage::$variant(run(comm, collective, &data[range], count, dtype, factor)?)
                })*
                _ => candle_core::bail!("{op}: {:?} is not supported", storage.dtype()),
            }
        };
    }
    Ok(of_types!(U8, U32, I16, I32, I64, BF16, F16, F32, F64, F8E4M3))
}

fn run<T: Copy>(
    comm: &Comm,
    collective: Collective<'_>,
    input: &[T],
    count: usize,
    dtype: DType,
    factor: usize,
) -> Result<Vec<T>> {
    debug_assert_eq!(size_of::<T>(), dtype.size() * factor);
    let host = comm.for_tensor(collective.name(), false)?;
    let (rank, ranks) = (host.rank(), host.world_size());
    let written = collective.output_len(count, rank, ranks);
    debug_assert_eq!(collective.input_len(count, rank, ranks), input.len());
    let mut output = Vec::<T>::with_capacity(written);
    let addresses = [input.as_ptr() as u64, output.as_mut_ptr() as u64];
    // SAFETY: `dtype` and `factor` describe T. The input has the number of elements that the collective reads, and the
    // output has room for the number that it writes. Nothing else accesses them: the input is borrowed, and the output
    // is new.
    scaled(collective, factor, |collective| unsafe {
        host.collective(0, collective, addresses, count * factor, dtype)
    })
    .map_err(error)?;
    // SAFETY: a collective that succeeds has written all of this rank's output, which fits the capacity.
    unsafe { output.set_len(written) };
    Ok(output)
}

pub(super) fn all_reduce_in_place(
    comm: &Comm,
    op: ReduceOp,
    storage: &mut CpuStorage,
    layout: &Layout,
) -> Result<()> {
    let range = contiguous(layout, "all_reduce")?;
    let dtype = reducible(storage.dtype(), "all_reduce")?;
    macro_rules! of_types {
        ($($variant:ident),*) => {
            match storage {
                $(CpuStorage::$variant(data) => run_in_place(comm, op, data, range, dtype),)*
                _ => candle_core::bail!("all_reduce: {:?} is not supported", storage.dtype()),
            }
        };
    }
    of_types!(U8, U32, I32, I64, BF16, F16, F32, F64, F8E4M3)
}

fn run_in_place<T>(
    comm: &Comm,
    op: ReduceOp,
    data: &mut [T],
    range: Range<usize>,
    dtype: DType,
) -> Result<()> {
    debug_assert_eq!(size_of::<T>(), dtype.size());
    let data = &mut data[range];
    let address = data.as_mut_ptr() as u64;
    let host = comm.for_tensor("all_reduce", false)?;
    // SAFETY: `dtype` describes T; the slice is borrowed for the call; equal addresses mean in place.
    unsafe { host.collective(0, Collective::AllReduce(op), [address; 2], data.len(), dtype) }.map_err(error)
}

/// Returns the normalised rows, then the sum with the residual, then the sum alone if `norm` has it.
///
/// Operands are the input, the residual and the weight.
pub(super) fn rms_norm<T: Element + Copy>(
    comm: &Comm,
    norm: &Norm,
    [input, residual, weight]: [&[T]; 3],
) -> Result<Vec<T>> {
    let host = comm.for_tensor("all_reduce_fused", false)?;
    let (count, written) = (input.len(), norm.results() * input.len());
    let mut output = Vec::<T>::with_capacity(written);
    let [residual, weight] = [residual, weight].map(|operand| operand.as_ptr() as u64);
    let fused = norm.at(residual, weight, output.as_mut_ptr() as u64, size_of_val(input));
    let (collective, from) = (Collective::AllReduceFused(&fused), input.as_ptr() as u64);
    // SAFETY: input and residual have `count` elements of T and the weight those of a row, as checked before; the
    // output is new, and has room for all results.
    unsafe { host.collective(0, collective, [from, 0], count, T::DTYPE) }.map_err(error)?;
    // SAFETY: a call that succeeds has written all of them.
    unsafe { output.set_len(written) };
    Ok(output)
}
