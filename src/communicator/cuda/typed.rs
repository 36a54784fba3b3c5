//! The collectives of the CUDA device on cudarc's slices and views.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};

use super::slices::Addresses;
use crate::call::{same_length, Collective, Message};
use crate::communicator::Communicator;
use crate::device::cuda::Cuda;
use crate::dtype::Element;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::op::ReduceOp;

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
        self.on_slices(stream, Collective::AllReduce(op), input.len(), Some(input), Some(output))
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
        self.on_slice(stream, Collective::AllReduce(op), data)
    }

    /// Brings the ranks' `input`s, in the order of the ranks, into every rank's `output`, which has room for all.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`].
    pub fn all_gather<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        output: &mut impl DevicePtrMut<T>,
    ) -> Result<()> {
        self.on_slices(stream, Collective::AllGather, input.len(), Some(input), Some(output))
    }

    /// The same with `counts[r]` elements from rank r.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`], and [`Error::InvalidSetting`] unless there is a count for each rank.
    pub fn all_gather_v<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        output: &mut impl DevicePtrMut<T>,
        counts: &[usize],
    ) -> Result<()> {
        self.on_slices(stream, Collective::AllGatherV(counts), 0, Some(input), Some(output))
    }

    /// Reduces the ranks' `input`s, of which rank r gets share r: as many elements as `output` has, after those of the ranks before.
    /// The bits are those of an allreduce by a direct algorithm.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`].
    pub fn reduce_scatter<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        output: &mut impl DevicePtrMut<T>,
        op: ReduceOp,
    ) -> Result<()> {
        self.on_slices(stream, Collective::ReduceScatter(op), output.len(), Some(input), Some(output))
    }

    /// The same with `counts[r]` elements for rank r.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_gather_v`].
    pub fn reduce_scatter_v<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        output: &mut impl DevicePtrMut<T>,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<()> {
        self.on_slices(stream, Collective::ReduceScatterV(op, counts), 0, Some(input), Some(output))
    }

    /// Copies the root's `data` to all ranks.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`], and [`Error::RankOutOfRange`] for the root.
    pub fn broadcast<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        data: &mut impl DevicePtrMut<T>,
        root: usize,
    ) -> Result<()> {
        self.on_slice(stream, Collective::Broadcast { root }, data)
    }

    /// Reduces the ranks' `input`s into the root's `output`. That of other ranks is not looked at.
    /// The bits are those of an allreduce by a direct algorithm.
    ///
    /// # Errors
    ///
    /// As [`Communicator::broadcast`].
    pub fn reduce<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        output: &mut impl DevicePtrMut<T>,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        let output = (self.rank() == root).then_some(output);
        self.on_slices(stream, Collective::Reduce { op, root }, input.len(), Some(input), output)
    }

    /// Brings the ranks' `input`s, in the order of the ranks, into the root's `output`. That of other ranks is not looked at.
    ///
    /// # Errors
    ///
    /// As [`Communicator::broadcast`].
    pub fn gather<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        output: &mut impl DevicePtrMut<T>,
        root: usize,
    ) -> Result<()> {
        let output = (self.rank() == root).then_some(output);
        self.on_slices(stream, Collective::Gather { root }, input.len(), Some(input), output)
    }

    /// Brings share r of the root's `input` to rank r: as many elements as `output` has. The input of other ranks is not looked at.
    ///
    /// # Errors
    ///
    /// As [`Communicator::broadcast`].
    pub fn scatter<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        output: &mut impl DevicePtrMut<T>,
        root: usize,
    ) -> Result<()> {
        let input = (self.rank() == root).then_some(input);
        self.on_slices(stream, Collective::Scatter { root }, output.len(), input, Some(output))
    }

    /// Brings share r of every rank's `input` to rank r, in the order of the ranks. Shares are equal.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`].
    pub fn all_to_all<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        output: &mut impl DevicePtrMut<T>,
    ) -> Result<()> {
        let count = input.len() / self.world_size();
        self.on_slices(stream, Collective::AllToAll, count, Some(input), Some(output))
    }

    /// The same with `send_counts[r]` elements for rank r, and `receive_counts[r]` from it.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_gather_v`], and [`Error::Disagreement`] if a rank sends another number than is to be received.
    pub fn all_to_all_v<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        send_counts: &[usize],
        output: &mut impl DevicePtrMut<T>,
        receive_counts: &[usize],
    ) -> Result<()> {
        let collective = Collective::AllToAllV { send: send_counts, receive: receive_counts };
        self.on_slices(stream, collective, 0, Some(input), Some(output))
    }

    /// A collective from one slice to another. A rank has those that it uses.
    fn on_slices<T: Element, I: DevicePtr<T>, O: DevicePtrMut<T>>(
        &self,
        stream: &Arc<CudaStream>,
        collective: Collective<'_>,
        count: usize,
        input: Option<&I>,
        output: Option<&mut O>,
    ) -> Result<()> {
        let (rank, world_size) = (self.rank(), self.world_size());
        let message = Message { collective, input: 0, output: 0, count, dtype: T::DTYPE };
        message.check_arguments(rank, world_size)?;
        let (has, has_room) = (input.map_or(0, I::len), output.as_ref().map_or(0, |output| output.len()));
        same_length(collective.input_len(count, rank, world_size), has)?;
        same_length(collective.output_len(count, rank, world_size), has_room)?;
        self.with_slices(stream, input, output, |Addresses { input, output, captured }| {
            let message = Message { input, output, ..message };
            // SAFETY: both hold what the collective reads and writes until the work on the stream is done, which cudarc orders
            // frees after; an exclusive borrow overlaps with no other. The stream is of this context and kept alive.
            unsafe { self.run(message, stream.cu_stream(), Some(stream), captured) }
        })
    }

    /// A collective in place, in all of one slice.
    fn on_slice<T: Element, O: DevicePtrMut<T>>(
        &self,
        stream: &Arc<CudaStream>,
        collective: Collective<'_>,
        data: &mut O,
    ) -> Result<()> {
        let message = Message { collective, input: 0, output: 0, count: data.len(), dtype: T::DTYPE };
        message.check_arguments(self.rank(), self.world_size())?;
        let nothing = None::<&CudaSlice<T>>;
        self.with_slices(stream, nothing, Some(data), |Addresses { output, captured, .. }| {
            let message = Message { input: output, output, ..message };
            // SAFETY: as in on_slices; in place is input == output.
            unsafe { self.run(message, stream.cu_stream(), Some(stream), captured) }
        })
    }
}
