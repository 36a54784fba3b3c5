//! Collectives on candle's storage in the memory of a GPU, on the stream of its device.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, DevicePtr, DevicePtrMut, DeviceRepr};
use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::{CudaDevice, CudaStorage, Layout, Result};
use fast_allreduce::{Collective, DType, Element, ReduceOp};

use super::rms_norm::Norm;
use super::{contiguous, element, scaled};
use crate::comm::{error, Collectives, Comm};
use crate::dtype::reducible;

/// Enqueues a collective from a storage to a new one on the device's stream. `count` is the collective's, in elements.
pub(super) fn call(
    comm: &Comm,
    collective: Collective<'_>,
    storage: &CudaStorage,
    layout: &Layout,
    count: usize,
) -> Result<CudaStorage> {
    let op = collective.name();
    let (dtype, range, device) = (storage.dtype(), contiguous(layout, op)?, storage.device());
    let (dtype, factor) = element(dtype, collective)?;
    let call = Call { communicator: comm.for_tensor(op, true)?, collective, count, dtype, factor, device };
    macro_rules! of_types {
        ($($variant:ident),*) => {
            match &storage.slice {
                $(CudaStorageSlice::$variant(data) => CudaStorageSlice::$variant(call.run(&data.slice(range))?),)*
                _ => candle_core::bail!("{op}: {:?} is not supported", storage.dtype()),
            }
        };
    }
    let slice = of_types!(U8, U32, I16, I32, I64, BF16, F16, F32, F64, F8E4M3);
    Ok(CudaStorage { slice, device: device.clone() })
}

struct Call<'a> {
    communicator: &'a dyn Collectives,
    collective: Collective<'a>,
    count: usize,
    dtype: DType,
    /// Number of elements of `dtype` in one element of candle's type.
    factor: usize,
    device: &'a CudaDevice,
}

impl Call<'_> {
    fn run<T: DeviceRepr>(&self, input: &impl DevicePtr<T>) -> Result<CudaSlice<T>> {
        let (rank, ranks) = (self.communicator.rank(), self.communicator.world_size());
        let stream = self.device.cuda_stream();
        let written = self.collective.output_len(self.count, rank, ranks);
        // SAFETY: the collective writes all of it, in the order of the stream on which it is used.
        let mut output = unsafe { stream.alloc::<T>(written) }.w()?;
        {
            let ((from, _reads), (to, _writes)) = (input.device_ptr(&stream), output.device_ptr_mut(&stream));
            let count = self.count * self.factor;
            // SAFETY: `dtype` and `factor` describe T. The input has the number of elements that the collective reads,
            // and the output the number that it writes. cudarc orders later work on other streams after this call, and
            // frees neither before.
            scaled(self.collective, self.factor, |collective| unsafe {
                let stream = stream.cu_stream() as u64;
                self.communicator.collective(stream, collective, [from, to], count, self.dtype)
            })
            .map_err(error)?;
        }
        Ok(output)
    }
}

pub(super) fn all_reduce_in_place(
    comm: &Comm,
    op: ReduceOp,
    storage: &mut CudaStorage,
    layout: &Layout,
) -> Result<()> {
    let range = contiguous(layout, "all_reduce")?;
    let dtype = reducible(storage.dtype(), "all_reduce")?;
    let (communicator, stream) = (comm.for_tensor("all_reduce", true)?, storage.device.cuda_stream());
    let (count, handle) = (range.len(), stream.cu_stream() as u64);
    macro_rules! of_types {
        ($($variant:ident),*) => {
            match &mut storage.slice {
                $(CudaStorageSlice::$variant(data) => {
                    let mut data = data.slice_mut(range);
                    let (address, _writes) = data.device_ptr_mut(&stream);
                    // SAFETY: `dtype` is the slice's type; the slice has `count` elements and is borrowed; equal
                    // addresses mean in place. cudarc orders later work on other streams after this call, and does not
                    // free it before.
                    unsafe { communicator.collective(handle, Collective::AllReduce(op), [address; 2], count, dtype) }
                        .map_err(error)
                })*
                _ => candle_core::bail!("all_reduce: {dtype} is not supported"),
            }
        };
    }
    of_types!(U8, U32, I32, I64, BF16, F16, F32, F64, F8E4M3)
}

/// Returns the normalised rows, then the sum with the residual, then the sum alone if `norm` has it.
///
/// Operands are the input, the residual and the weight.
pub(super) fn rms_norm<T: DeviceRepr + Element>(
    comm: &Comm,
    norm: &Norm,
    device: &CudaDevice,
    [input, residual, weight]: [CudaView<'_, T>; 3],
) -> Result<CudaSlice<T>> {
    let communicator = comm.for_tensor("all_reduce_fused", true)?;
    let (stream, count) = (device.cuda_stream(), input.len());
    // SAFETY: the call writes all of it, in the order of the stream on which it is used.
    let mut output = unsafe { stream.alloc::<T>(norm.results() * count) }.w()?;
    {
        let [(from, _a), (residual, _b), (weight, _c)] =
            [&input, &residual, &weight].map(|operand| operand.device_ptr(&stream));
        let (normed, _writes) = output.device_ptr_mut(&stream);
        let fused = norm.at(residual, weight, normed, count * size_of::<T>());
        let collective = Collective::AllReduceFused(&fused);
        // SAFETY: input and residual have `count` elements of T and the weight those of a row, as checked before; the
        // output is new, and has room for all results. cudarc orders later work on other streams after this call, and
        // frees none before.
        unsafe { communicator.collective(stream.cu_stream() as u64, collective, [from, 0], count, T::DTYPE) }
            .map_err(error)?;
    }
    Ok(output)
}
