//! The collectives of the CUDA device on raw pointers and raw streams.

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use crate::call::{check_transfers, Call, CallKind, Collective, Direction, Transfer, Use};
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;
use crate::communicator::Communicator;
use crate::device::cuda::driver::capture::is_captured;
use crate::device::cuda::Cuda;
use crate::device::sealed::Device as _;
use crate::error::{Error, Result};

impl Communicator<Cuda> {
    /// Any collective on raw pointers and a raw stream. A pointer to no elements is not looked at.
    ///
    /// # Errors
    ///
    /// As the collective's method, [`Error::InvalidPointer`](crate::Error::InvalidPointer) also for null, misaligned and host
    /// pointers, and [`Error::Overlap`](crate::Error::Overlap) unless the buffers are disjoint or placed as the collective's
    /// in-place form is: the same for allreduce, broadcast and reduce; this rank's own share for the gathers, the scatters and
    /// the reduce-scatters; never for the all-to-alls.
    ///
    /// # Safety
    ///
    /// Until the work on `stream` is done, `input` is valid for reads of [`Collective::input_len`], and `output` for writes of
    /// [`Collective::output_len`] elements of `dtype`, and nothing outside the order of the stream writes the one or accesses
    /// the other. `stream` is a stream of this device's context and lives until after the communicator's next call, or its end.
    pub unsafe fn collective_raw(
        &self,
        stream: CUstream,
        collective: Collective<'_>,
        input: CUdeviceptr,
        output: CUdeviceptr,
        count: usize,
        dtype: DType,
    ) -> Result<()> {
        let (rank, world_size) = (self.rank(), self.world_size());
        let output = collective.output(output);
        let call = Call { collective, input, output, count, dtype };
        self.healthy()?;
        call.check(rank, world_size)?;
        self.check_row(&call)?;
        self.or_poison(self.device().bind())?;
        if collective.input_len(count, rank, world_size) > 0 {
            self.check_address("input", input, dtype.size())?;
        }
        if collective.output_len(count, rank, world_size) > 0 {
            self.check_address("output", output, dtype.size())?;
        }
        if let Some(fused) = collective.fused() {
            for Use { name, operand, .. } in fused.operands(count, dtype)? {
                if operand.bytes > 0 {
                    self.check_address(name, operand.address, dtype.size())?;
                }
            }
        }
        // SAFETY: the caller's; the pointers have been checked for alignment, overlap and device.
        unsafe {
            let captured = self.or_poison(is_captured(stream))?;
            self.run(call, stream, None, captured)
        }
    }

    /// Whether a raw stream is of this device's context, for callers who are given streams by others: a call on another one fails
    /// in the driver, and poisons the communicator.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidStream`](crate::Error::InvalidStream), [`Error::Driver`](crate::Error::Driver).
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of any context, or one of the default streams' handles.
    pub unsafe fn check_raw_stream(&self, stream: CUstream) -> Result<()> {
        self.not_forked()?;
        // Those of a context and of a thread are of whichever context is current.
        if stream as usize <= 2 {
            return Ok(());
        }
        self.or_poison(self.device().bind())?;
        // SAFETY: the caller's.
        unsafe { self.device().check_context_of(stream) }.map_err(|error| {
            // Else it is the stream's fault.
            let is_lost = matches!(error, Error::Driver { .. }) && self.device().is_lost();
            if is_lost {
                self.poison(error)
            } else {
                error
            }
        })
    }

    /// [`Communicator::synchronize`] on a raw stream.
    ///
    /// # Errors
    ///
    /// As [`Communicator::synchronize`], and [`Error::InvalidStream`](crate::Error::InvalidStream).
    ///
    /// # Safety
    ///
    /// As [`Communicator::check_raw_stream`].
    pub unsafe fn synchronize_raw(&self, stream: CUstream) -> Result<()> {
        self.not_forked()?;
        // SAFETY: the caller's; a stream that passes is of the device's context, which is current.
        unsafe {
            self.check_raw_stream(stream)?;
            self.or_poison(self.device().bind())?;
            self.wait_for_stream(stream)
        }
    }

    /// Makes what comes on `stream` wait for what is on `earlier` now, through an event, where they are two streams.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidStream`](crate::Error::InvalidStream); [`Error::Unavailable`](crate::Error::Unavailable) where only one of the
    /// two is being captured, which goes on; [`Error::Driver`](crate::Error::Driver).
    ///
    /// # Safety
    ///
    /// As [`Communicator::check_raw_stream`], of both.
    pub unsafe fn order_raw_streams(&self, earlier: CUstream, stream: CUstream) -> Result<()> {
        self.not_forked()?;
        // SAFETY: the caller's; streams that pass are of the device's context, which is current.
        unsafe {
            self.check_raw_stream(earlier)?;
            self.check_raw_stream(stream)?;
            self.device().bind()?;
            self.device().calls.order_streams(earlier, stream)
        }
    }

    /// [`Communicator::collective_raw`] of an allreduce.
    ///
    /// # Errors
    ///
    /// As [`Communicator::collective_raw`].
    ///
    /// # Safety
    ///
    /// As [`Communicator::collective_raw`], of `count` elements each.
    pub unsafe fn all_reduce_raw(
        &self,
        stream: CUstream,
        input: CUdeviceptr,
        output: CUdeviceptr,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.collective_raw(stream, Collective::AllReduce(op), input, output, count, dtype) }
    }

    /// Sends and receives all of `transfers`, side by side in one launch: at most 64 messages. Ranks need not name theirs in
    /// the same order: to each peer, messages go in the order of their tags, and of one tag in the order of the list. A message
    /// to this rank itself needs its receive in the same list. A replay of a graph sends and receives again.
    ///
    /// # Errors
    ///
    /// As [`Communicator::recv`], [`Error::InvalidPointer`](crate::Error::InvalidPointer),
    /// [`Error::InvalidSetting`](crate::Error::InvalidSetting) for more than 64 messages, and
    /// [`Error::Overlap`](crate::Error::Overlap) where a message is received into another's memory.
    ///
    /// # Safety
    ///
    /// As [`Communicator::collective_raw`]: what is sent is valid for reads, and what is received into for writes.
    pub unsafe fn transfer_raw(&self, stream: CUstream, transfers: &[Transfer]) -> Result<()> {
        self.healthy()?;
        check_transfers(transfers, self.world_size())?;
        self.or_poison(self.device().bind())?;
        for transfer in transfers.iter().filter(|transfer| transfer.count > 0) {
            let which = match transfer.direction {
                Direction::Send => "send",
                Direction::Recv => "receive",
            };
            self.check_address(which, transfer.address, transfer.dtype.size())?;
        }
        // SAFETY: the caller's; the pointers have been checked for alignment, overlap and device.
        unsafe {
            let captured = self.or_poison(is_captured(stream))?;
            self.run_transfers(CallKind::Group, transfers, stream, None, captured)
        }
    }
}
