//! Collectives and messages of the CUDA device on raw pointers and raw streams.

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use crate::call::{
    check_transfers, sharded_operands, Call, CallKind, Collective, Direction, FusedOperand, ShardedOperand,
    Transfer,
};
use crate::catalogue::DType;
use crate::communicator::Communicator;
use crate::device::cuda::driver::capture::is_captured;
use crate::device::cuda::Cuda;
use crate::device::sealed::Device as _;
use crate::error::{Error, Result};

impl Communicator<Cuda> {
    /// Runs any collective on raw pointers, in the order of a raw stream.
    ///
    /// [`Collective`] says for each collective what `count` counts. Buffers are disjoint, or placed as in the
    /// collective's in-place form: the same buffer for allreduce, broadcast and reduce; this rank's own share for
    /// gathers, scatters and reduce-scatters. The all-to-alls have no such form. A pointer to no elements is ignored.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # unsafe fn example(communicator: &Communicator<Cuda>, stream: CUstream, data: u64) -> Result<()> {
    /// let average = Collective::AllReduce(ReduceOp::Avg);
    /// communicator.collective_raw(stream, average, data, data, 4096, DType::F16)?; // In place.
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidPointer`] for pointers that are null, misaligned, or not of this device's memory;
    /// [`Error::Overlap`] for any other placement; [`Error::InvalidSetting`] and [`Error::RankOutOfRange`] for
    /// arguments that the collective's method refuses; [`Error::Unavailable`] for an order that a capture does not
    /// permit; [errors of every call](Communicator#errors-of-every-call).
    ///
    /// # Safety
    ///
    /// Until the work on `stream` is done, `input` is valid for reads of [`Collective::input_len`] and `output` for
    /// writes of [`Collective::output_len`] elements of `dtype`. Nothing outside the order of the stream writes the
    /// input or accesses the output. `stream` is a stream of this device's context. It lives until after the
    /// communicator's next call, or until the communicator is dropped.
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
            for FusedOperand { name, operand, .. } in fused.operands(call.share(rank), dtype)? {
                if operand.bytes > 0 {
                    self.check_address(name, operand.address, dtype.size())?;
                }
            }
        }
        if let Some(rows) = collective.gathered() {
            let all = collective.output_len(count, rank, world_size);
            for (name, operand) in rows.operands(call.share(rank), all)? {
                if operand.bytes > 0 {
                    self.check_address(name, operand.address, rows.scaling.scale_type().size())?;
                }
            }
        }
        if let Some(parts) = collective.sharded() {
            for ShardedOperand { name, operand, .. } in sharded_operands(parts, count, dtype)? {
                if operand.bytes > 0 {
                    self.check_address(name, operand.address, dtype.size())?;
                }
            }
        }
        // SAFETY: the caller's obligation; the pointers have been checked for alignment, overlap and device.
        unsafe {
            let captured = self.or_poison(is_captured(stream))?;
            self.run(call, stream, None, captured)
        }
    }

    /// Refuses a raw stream that is not of this device's context.
    ///
    /// This is for callers who get streams from elsewhere: a call on a stream of another context fails in the driver,
    /// and poisons the communicator.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # unsafe fn example(communicator: &Communicator<Cuda>, stream: CUstream, computation: CUstream) -> Result<()> {
    /// communicator.check_raw_stream(stream)?;
    /// communicator.order_raw_streams(computation, stream)?; // Later work on `stream` waits.
    /// communicator.synchronize_raw(stream)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidStream`] for a stream of another context; [`Error::Driver`], which poisons the communicator only
    /// if the device's context is lost; [`Error::Forked`].
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of any context, or the handle of a default stream.
    pub unsafe fn check_raw_stream(&self, stream: CUstream) -> Result<()> {
        self.not_forked()?;
        // The default streams, of a context and of a thread, belong to the context that is current.
        if stream as usize <= 2 {
            return Ok(());
        }
        self.or_poison(self.device().bind())?;
        // SAFETY: the caller's obligation.
        unsafe { self.device().check_context_of(stream) }.map_err(|error| {
            // If the context works, the stream is at fault, and the communicator stays usable.
            let is_lost = matches!(error, Error::Driver { .. }) && self.device().is_lost();
            if is_lost {
                self.poison(error)
            } else {
                error
            }
        })
    }

    /// Waits for the work on a raw stream, and returns `Ok` if no call has failed.
    ///
    /// [`Communicator::check_raw_stream`] has an example.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidStream`] for a stream of another context; [`Error::Unavailable`] for a stream that is being
    /// captured; [errors of every call](Communicator#errors-of-every-call).
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of any context, or the handle of a default stream.
    pub unsafe fn synchronize_raw(&self, stream: CUstream) -> Result<()> {
        self.not_forked()?;
        // SAFETY: the caller's obligation; a stream that passes the check is of the device's context, which is current.
        unsafe {
            self.check_raw_stream(stream)?;
            self.or_poison(self.device().bind())?;
            self.wait_for_stream(stream)
        }
    }

    /// Makes later work on `stream` wait for the work that is on `earlier` now, by an event.
    ///
    /// It does nothing if both are the same stream. [`Communicator::check_raw_stream`] has an example.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidStream`] for a stream of another context; [`Error::Unavailable`], if only one of the two is
    /// being captured (the capture goes on); [`Error::Driver`]; [`Error::Forked`].
    ///
    /// # Safety
    ///
    /// Both are live streams of any context, or handles of default streams.
    pub unsafe fn order_raw_streams(&self, earlier: CUstream, stream: CUstream) -> Result<()> {
        self.not_forked()?;
        // SAFETY: the caller's obligation; streams that pass the checks are of the device's context, which is current.
        unsafe {
            self.check_raw_stream(earlier)?;
            self.check_raw_stream(stream)?;
            self.device().bind()?;
            self.device().calls.order_streams(earlier, stream)
        }
    }

    /// Sends and receives `transfers` in one launch: at most 64 messages.
    ///
    /// The messages are moved concurrently. Ranks may list them in different orders: messages to one peer are matched
    /// by tag, and those of one tag in the order of the list. A message to this rank itself needs its receive in the
    /// same list. A replay of a graph sends and receives again.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # unsafe fn example(communicator: &Communicator<Cuda>, stream: CUstream, mine: u64, theirs: u64) -> Result<()> {
    /// let (direction, peer, dtype) = (Direction::Send, 1 - communicator.rank(), DType::F32);
    /// let send = Transfer { direction, peer, address: mine, count: 1000, dtype, tag: 0 };
    /// let recv = Transfer { direction: Direction::Recv, address: theirs, ..send };
    /// communicator.transfer_raw(stream, &[send, recv])?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for more than 64 messages; [`Error::RankOutOfRange`]; [`Error::InvalidPointer`] for
    /// addresses that are null, misaligned, or not of this device's memory; [`Error::Overlap`] where a message is
    /// received into the memory of another message; [`Error::Unavailable`] for an order that a capture does not permit;
    /// later [`Error::Disagreement`], if a message that arrives has another tag or length; [errors of every
    /// call](Communicator#errors-of-every-call).
    ///
    /// # Safety
    ///
    /// Until the work on `stream` is done, memory that is sent is valid for reads, and memory that is received into for
    /// writes. Nothing outside the order of the stream writes the former or accesses the latter. `stream` is a stream
    /// of this device's context. It lives until after the communicator's next call, or until the communicator is
    /// dropped.
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
        // SAFETY: the caller's obligation; the pointers have been checked for alignment, overlap and device.
        unsafe {
            let captured = self.or_poison(is_captured(stream))?;
            self.run_transfers(CallKind::Group, transfers, stream, None, captured)
        }
    }
}
