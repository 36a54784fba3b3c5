//! Collectives and messages of the host device, on slices. A call has ended when it returns.

use std::ffi::c_void;

use super::typed::{example, typed_collectives};
use super::Communicator;
use crate::call::{
    check_transfers, same_length, transfers_id, Call, CallKind, Collective, Group, QuantizedTransport,
    Transfer, Transport,
};
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;
use crate::device::host::Pages;
use crate::device::Host;
use crate::element::Element;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;

typed_collectives!(host, Host, [T], [T]);

impl Communicator<Host> {
    /// Returns where the pages of this rank's region are: its NUMA node, and how many are huge.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if the communicator has left its world.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// println!("{}", communicator.pages()?);
    /// # Ok(()) });
    /// ```
    pub fn pages(&self) -> Result<Pages> {
        self.endpoint.membership().map(|membership| membership.region.memory().pages())
    }

    /// Reduces the ranks' `input`s element by element into every rank's `output`.
    ///
    /// `input` and `output` have the same length. The call allocates nothing. Peers read an input in a
    /// [`Buffer`](crate::Buffer) where it is; any other is copied once.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// let input = [communicator.rank() as f32 + 1.0; 3];
    /// let mut output = [0.0; 3];
    /// communicator.all_reduce(&input, &mut output, ReduceOp::Sum)?;
    /// assert_eq!(output, [3.0; 3]);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`]; [`Error::InvalidSetting`] for an operation that the type does not have;
    /// [errors of every call](Communicator#errors-of-every-call).
    pub fn all_reduce<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        op.check(T::DTYPE)?;
        same_length(input.len(), output.len())?;
        let (input, output, count) = (input.as_ptr() as u64, output.as_mut_ptr() as u64, input.len());
        let collective = Collective::AllReduce(op);
        // SAFETY: both slices hold that many elements of T for the length of the call, which the host runs to its end;
        // an exclusive borrow overlaps with no other.
        unsafe { self.run(Call { collective, input, output, count, dtype: T::DTYPE }) }
    }

    /// Reduces the ranks' `data` element by element, in place.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// let mut data = [communicator.rank() as i64, 7];
    /// communicator.all_reduce_in_place(&mut data, ReduceOp::Max)?;
    /// assert_eq!(data, [1, 7]);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for an operation that the type does not have;
    /// [errors of every call](Communicator#errors-of-every-call).
    pub fn all_reduce_in_place<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        op.check(T::DTYPE)?;
        let (address, collective) = (data.as_mut_ptr() as u64, Collective::AllReduce(op));
        let call = Call { collective, input: address, output: address, count: data.len(), dtype: T::DTYPE };
        // SAFETY: the slice holds that many elements for the length of the call; in place is input == output.
        unsafe { self.run(call) }
    }

    /// Sends `data` to rank `to`, which receives it with the same tag.
    ///
    /// It returns when `data` may be changed; the receiver may not have it yet. It may wait for the receiver, so ranks
    /// that send to each other use [`Communicator::send_recv`] or [`Communicator::group`]. Messages between two ranks
    /// arrive in the order in which they are sent.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// let mut data = [1.0_f32, 2.0];
    /// match communicator.rank() {
    ///     0 => communicator.send(&data, 1, 5)?, // To rank 1, with the tag 5.
    ///     _ => communicator.recv(&mut data, 0, 5)?,
    /// }
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::RankOutOfRange`]; [`Error::Disagreement`] for a message to this rank itself, which needs
    /// [`Communicator::group`]; [`Error::Timeout`] also if the message is not received;
    /// [errors of every call](Communicator#errors-of-every-call).
    pub fn send<T: Element>(&self, data: &[T], to: usize, tag: u32) -> Result<()> {
        // SAFETY: the slice is borrowed for the call.
        unsafe { self.exchange(CallKind::Send, &[Transfer::send(data, to, tag)]) }
    }

    /// Receives a message from rank `from`, with as many elements as `data` has.
    ///
    /// [`Communicator::send`] has an example.
    ///
    /// # Errors
    ///
    /// [`Error::RankOutOfRange`]; [`Error::Disagreement`] if the message that arrives has another tag or length, and
    /// for a message from this rank itself, which needs [`Communicator::group`]; [errors of every
    /// call](Communicator#errors-of-every-call).
    pub fn recv<T: Element>(&self, data: &mut [T], from: usize, tag: u32) -> Result<()> {
        // SAFETY: the slice is borrowed for the call.
        unsafe { self.exchange(CallKind::Recv, &[Transfer::recv(data, from, tag)]) }
    }

    /// Sends `input` to rank `to` and at the same time receives `output` from rank `from`, which may be the same rank.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(3, |communicator| {
    /// let rank = communicator.rank();
    /// let (right, left) = ((rank + 1) % 3, (rank + 2) % 3);
    /// let mut received = [0];
    /// communicator.send_recv(&[rank as u64], right, &mut received, left, 0)?;
    /// assert_eq!(received, [left as u64]);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::RankOutOfRange`]; [`Error::Disagreement`] if the message that arrives has another tag or length;
    /// [errors of every call](Communicator#errors-of-every-call).
    pub fn send_recv<T: Element>(
        &self,
        input: &[T],
        to: usize,
        output: &mut [T],
        from: usize,
        tag: u32,
    ) -> Result<()> {
        let transfers = [Transfer::send(input, to, tag), Transfer::recv(output, from, tag)];
        // SAFETY: the slices are borrowed for the call.
        unsafe { self.exchange(CallKind::SendRecv, &transfers) }
    }

    /// Sends and receives the messages that `add` puts into the group, in one launch: at most 64.
    ///
    /// The messages are moved concurrently. Ranks may list them in different orders: messages to one peer are matched
    /// by tag, and those of one tag in the order of the group. A message to this rank itself needs its receive in the
    /// same group.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(3, |communicator| {
    /// let rank = communicator.rank();
    /// let (right, left) = ((rank + 1) % 3, (rank + 2) % 3);
    /// let (mine, mut from_left, mut from_right) = ([rank as i32], [0], [0]);
    /// communicator.group(|group| {
    ///     group.send(&mine, right, 0).send(&mine, left, 0);
    ///     group.recv(&mut from_right, right, 0).recv(&mut from_left, left, 0);
    ///     Ok(())
    /// })?;
    /// assert_eq!([from_left[0], from_right[0]], [left as i32, right as i32]);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// The error that `add` returns; [`Error::InvalidSetting`] for more than 64 messages; [`Error::RankOutOfRange`];
    /// [`Error::Disagreement`] if a message that arrives has another tag or length;
    /// [errors of every call](Communicator#errors-of-every-call).
    pub fn group<'a, R>(&self, add: impl FnOnce(&mut Group<'a>) -> Result<R>) -> Result<R> {
        let mut group = Group::default();
        let result = add(&mut group)?;
        // SAFETY: the group borrows what it sends and receives into.
        unsafe { self.exchange(CallKind::Group, group.transfers()) }?;
        Ok(result)
    }

    /// Waits until every rank has called it.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// communicator.barrier()?;
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// [Errors of every call](Communicator#errors-of-every-call).
    pub fn barrier(&self) -> Result<()> {
        self.between::<u8>(Collective::Barrier, 0, &[], &mut [])
    }

    /// Runs any collective on raw pointers, for callers that know the element type only at run time.
    ///
    /// [`Collective`] says for each collective what `count` counts. Buffers are disjoint, or placed as in the
    /// collective's in-place form: the same buffer for allreduce, broadcast and reduce; this rank's own share for
    /// gathers, scatters and reduce-scatters. The all-to-alls have no such form. A pointer to no elements is ignored.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// let (input, mut output) = ([1.0_f32, 2.0], [0.0_f32; 4]);
    /// let (from, to) = (input.as_ptr().cast(), output.as_mut_ptr().cast());
    /// // SAFETY: 2 elements are read and 4 written, in arrays that only this thread has.
    /// unsafe { communicator.collective_raw(Collective::AllGather, from, to, 2, DType::F32)? };
    /// assert_eq!(output, [1.0, 2.0, 1.0, 2.0]);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidPointer`] for null and misaligned pointers; [`Error::Overlap`] for any other placement;
    /// [`Error::InvalidSetting`] and [`Error::RankOutOfRange`] for arguments that the collective's method refuses;
    /// [errors of every call](Communicator#errors-of-every-call).
    ///
    /// # Safety
    ///
    /// During the call, `input` is valid for reads of [`Collective::input_len`] and `output` for writes of
    /// [`Collective::output_len`] elements of `dtype`. No other thread writes the input or accesses the output.
    pub unsafe fn collective_raw(
        &self,
        collective: Collective<'_>,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: DType,
    ) -> Result<()> {
        let (input, output) = (input as u64, collective.output(output as u64));
        let call = Call { collective, input, output, count, dtype };
        call.check(self.rank(), self.world_size())?;
        self.check_row(&call)?;
        // SAFETY: the caller's obligation; the pointers have been checked for alignment and overlap.
        unsafe { self.run(call) }
    }

    /// Sends and receives `transfers` in one launch: [`Communicator::group`] on addresses.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// let peer = 1 - communicator.rank();
    /// let (mine, mut theirs) = ([communicator.rank() as u32], [9_u32]);
    /// let send = Transfer {
    ///     direction: Direction::Send,
    ///     address: mine.as_ptr() as u64,
    ///     peer,
    ///     count: 1,
    ///     dtype: DType::U32,
    ///     tag: 0,
    /// };
    /// let (direction, address) = (Direction::Recv, theirs.as_mut_ptr() as u64);
    /// let recv = Transfer { direction, address, ..send };
    /// // SAFETY: both arrays have one element, and only this thread has them.
    /// unsafe { communicator.transfer_raw(&[send, recv])? };
    /// assert_eq!(theirs, [peer as u32]);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for more than 64 messages; [`Error::RankOutOfRange`]; [`Error::InvalidPointer`] for
    /// null and misaligned addresses; [`Error::Overlap`] where a message is received into the memory of another
    /// message; [`Error::Disagreement`] if a message that arrives has another tag or length; [errors of every
    /// call](Communicator#errors-of-every-call).
    ///
    /// # Safety
    ///
    /// During the call, memory that is sent is valid for reads, and memory that is received into for writes. No other
    /// thread writes the former or accesses the latter.
    pub unsafe fn transfer_raw(&self, transfers: &[Transfer]) -> Result<()> {
        // SAFETY: the caller's obligation.
        unsafe { self.exchange(CallKind::Group, transfers) }
    }

    /// Carries out a collective from one slice to another. A slice that this rank does not use, because it is not the
    /// root, may have any length.
    pub(super) fn between<T: Element>(
        &self,
        collective: Collective<'_>,
        count: usize,
        input: &[T],
        output: &mut [T],
    ) -> Result<()> {
        let (rank, world_size) = (self.rank(), self.world_size());
        let reads = collective.input_len(count, rank, world_size);
        let writes = collective.output_len(count, rank, world_size);
        let has_root = collective.root().is_some();
        let input = if has_root && reads == 0 { &[] } else { input };
        let output = if has_root && writes == 0 { &mut [] } else { output };
        let call = Call {
            collective,
            input: input.as_ptr() as u64,
            output: output.as_mut_ptr() as u64,
            count,
            dtype: T::DTYPE,
        };
        call.check(rank, world_size)?;
        same_length(reads, input.len())?;
        same_length(writes, output.len())?;
        // SAFETY: the slices hold what the collective reads and writes, for the length of the call; an exclusive borrow
        // overlaps with no other.
        unsafe { self.run(call) }
    }

    /// Carries out a collective in place, on the whole of one slice.
    fn in_place<T: Element>(&self, collective: Collective<'_>, data: &mut [T]) -> Result<()> {
        let address = data.as_mut_ptr() as u64;
        let call = Call { collective, input: address, output: address, count: data.len(), dtype: T::DTYPE };
        call.check(self.rank(), self.world_size())?;
        // SAFETY: the slice holds that many elements for the length of the call; in place is input == output.
        unsafe { self.run(call) }
    }

    /// Sends and receives messages as a call of this `kind`.
    ///
    /// # Safety
    ///
    /// As [`Communicator::transfer_raw`].
    unsafe fn exchange(&self, kind: CallKind, transfers: &[Transfer]) -> Result<()> {
        check_transfers(transfers, self.world_size())?;
        // SAFETY: the caller's obligation; the launch has ended when `start_transfers` returns.
        unsafe { self.start_transfers(transfers_id(kind, transfers), transfers, ()) }
    }

    /// Starts a call. Its kernels have ended when it returns.
    ///
    /// # Safety
    ///
    /// As [`Communicator::start`], until it returns.
    pub(super) unsafe fn run(&self, call: Call<'_>) -> Result<()> {
        if let Some(fused) = call.collective.fused() {
            // SAFETY: the caller's obligation.
            unsafe { fused.check_experts(call.count) }?;
        }
        // SAFETY: the caller's obligation.
        unsafe { self.start(call, (), || Ok(0)) }
    }
}
