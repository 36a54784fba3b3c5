//! The collectives of the CUDA device on cudarc's slices and views.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};

use super::slices::Addresses;
use crate::call::{same_length, Call, Collective, QuantizedTransport, Transport};
use crate::catalogue::ReduceOp;
use crate::communicator::typed::typed_collectives;
use crate::communicator::Communicator;
use crate::device::cuda::Cuda;
use crate::element::Element;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;

typed_collectives!(Cuda, impl DevicePtr<T>, impl DevicePtrMut<T>, stream: &Arc<CudaStream>);

impl Communicator<Cuda> {
    /// Reduces the ranks' `input`s element by element into every rank's `output`, in the order of `stream`.
    ///
    /// It returns when the kernels are launched. Any slice or view of this device works, those of stream-ordered pools and
    /// views at odd offsets too, also while the stream is captured into a graph. With cudarc's event tracking the call waits for
    /// the slices' last uses on other streams; without it, that is the caller's. A call on another stream than the last one
    /// waits for it. Per-thread default streams count as one stream for each thread.
    ///
    /// While the stream is captured, event tracking makes no difference but for uses of the slices that are a part of the same
    /// capture, which the call comes after. A graph runs when it is launched, which cudarc does not track: whoever launches it
    /// orders that after the slices' other uses, and those after it. So it is with the communicator's other calls where they are
    /// on another stream than the one that the graph was captured on and is launched on. The first captured call on another
    /// stream than the last call's follows a synchronisation with that one.
    ///
    /// A graph's launches run the communicator's kernels in its memory, which stay until the communicator and all of its buffers have
    /// been dropped: one of them is kept until the last launch has ended.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`]; [`Error::InvalidStream`] for a stream of another context, [`Error::InvalidPointer`] for a slice
    /// of another device; [`Error::Unavailable`] for a call in an order that a capture does not admit. None of these changes
    /// anything. [`Error::Driver`], which poisons the communicator: the other ranks may be in the call, and have an error too. What goes
    /// wrong in a kernel, such as a rank that does not come, is the error of the next call, of [`Communicator::synchronize`] or
    /// [`Communicator::check`].
    pub fn all_reduce<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        output: &mut impl DevicePtrMut<T>,
        op: ReduceOp,
    ) -> Result<()> {
        self.between(stream, Collective::AllReduce(op), input.len(), input, output)
    }

    /// Reduces the ranks' `data` element by element, in place, in the order of `stream`.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`].
    pub fn all_reduce_in_place<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        data: &mut impl DevicePtrMut<T>,
        op: ReduceOp,
    ) -> Result<()> {
        self.in_place(stream, Collective::AllReduce(op), data)
    }

    /// A collective from one slice to another. Where it has a root, what this rank does not use is not looked at.
    fn between<T: Element, I: DevicePtr<T>, O: DevicePtrMut<T>>(
        &self,
        stream: &Arc<CudaStream>,
        collective: Collective<'_>,
        count: usize,
        input: &I,
        output: &mut O,
    ) -> Result<()> {
        let (rank, world_size) = (self.rank(), self.world_size());
        let call = Call { collective, input: 0, output: 0, count, dtype: T::DTYPE };
        call.check_arguments(rank, world_size)?;
        let input = collective.uses_input(rank).then_some(input);
        let output = collective.uses_output(rank).then_some(output);
        let (has, has_room) = (input.map_or(0, I::len), output.as_ref().map_or(0, |output| output.len()));
        same_length(collective.input_len(count, rank, world_size), has)?;
        same_length(collective.output_len(count, rank, world_size), has_room)?;
        self.with_slices(stream, input, output, |Addresses { input, output, captured }| {
            let call = Call { input, output, ..call };
            // SAFETY: both hold what the collective reads and writes until the work on the stream is done, which cudarc orders
            // frees after; an exclusive borrow overlaps with no other. The stream is of this context and kept alive.
            unsafe { self.run(call, stream.cu_stream(), Some(stream), captured) }
        })
    }

    /// A collective in place, in all of one slice.
    fn in_place<T: Element, O: DevicePtrMut<T>>(
        &self,
        stream: &Arc<CudaStream>,
        collective: Collective<'_>,
        data: &mut O,
    ) -> Result<()> {
        let call = Call { collective, input: 0, output: 0, count: data.len(), dtype: T::DTYPE };
        call.check_arguments(self.rank(), self.world_size())?;
        let nothing = None::<&CudaSlice<T>>;
        self.with_slices(stream, nothing, Some(data), |Addresses { output, captured, .. }| {
            let call = Call { input: output, output, ..call };
            // SAFETY: as in `between`; in place is input == output.
            unsafe { self.run(call, stream.cu_stream(), Some(stream), captured) }
        })
    }
}
