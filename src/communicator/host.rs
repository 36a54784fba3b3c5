//! The collectives of the host device: on slices, run to their end within the call.

use std::ffi::c_void;

use super::typed::typed_collectives;
use super::Communicator;
use crate::call::{
    check_transfers, same_length, transfers_id, Call, CallKind, Collective, Group, QuantizedTransport,
    Transfer, Transport,
};
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;
use crate::device::Host;
use crate::element::Element;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;

typed_collectives!(Host, [T], [T]);

impl Communicator<Host> {
    /// Reduces the ranks' `input`s element by element into every rank's `output`.
    ///
    /// Nothing is allocated. An input that lies in a [`Buffer`](crate::Buffer) is read by the peers where it is, any other is
    /// copied once.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`]; [`Error::InvalidSetting`] for an operation that the type does not have; [`Error::Timeout`] naming
    /// ranks that did not come; see [`Communicator`] on what follows.
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
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`].
    pub fn all_reduce_in_place<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        op.check(T::DTYPE)?;
        let (address, collective) = (data.as_mut_ptr() as u64, Collective::AllReduce(op));
        let call = Call { collective, input: address, output: address, count: data.len(), dtype: T::DTYPE };
        // SAFETY: the slice holds that many elements for the length of the call; in place is input == output.
        unsafe { self.run(call) }
    }

    /// Sends `data` to another rank, which receives it with the same tag. It returns when `data` may be changed: the receiver may
    /// not have it yet. It may wait for the receiver, so ranks that send to each other use [`Communicator::send_recv`] or
    /// [`Communicator::group`]. Messages between two ranks come in the order in which they are sent.
    ///
    /// # Errors
    ///
    /// [`Error::RankOutOfRange`]; [`Error::Disagreement`] for a message to this rank itself, which needs
    /// [`Communicator::group`]; [`Error::Timeout`] if it is not received.
    pub fn send<T: Element>(&self, data: &[T], to: usize, tag: u32) -> Result<()> {
        // SAFETY: the slice is borrowed for the call.
        unsafe { self.exchange(CallKind::Send, &[Transfer::send(data, to, tag)]) }
    }

    /// Receives as many elements as `data` has from another rank.
    ///
    /// # Errors
    ///
    /// As [`Communicator::send`]; [`Error::Disagreement`] if the message that comes has another tag or length.
    pub fn recv<T: Element>(&self, data: &mut [T], from: usize, tag: u32) -> Result<()> {
        // SAFETY: the slice is borrowed for the call.
        unsafe { self.exchange(CallKind::Recv, &[Transfer::recv(data, from, tag)]) }
    }

    /// Sends to one rank and receives from another, or the same, at once.
    ///
    /// # Errors
    ///
    /// As [`Communicator::recv`].
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

    /// Sends and receives all that `add` puts into the group, side by side in one launch: at most 64 messages. Ranks need not name
    /// theirs in the same order: to each peer, messages go in the order of their tags, and of one tag in the order of the group. A
    /// message to this rank itself needs its receive in the same group.
    ///
    /// ```
    /// use fast_allreduce::{bootstrap::Threads, Communicator, Host};
    ///
    /// # fn main() -> fast_allreduce::Result<()> {
    /// let ranks = Threads::world(3)?.into_iter().map(|bootstrap| {
    ///     std::thread::spawn(move || -> fast_allreduce::Result<[i32; 2]> {
    ///         let communicator = Communicator::builder().build(Host::new(), bootstrap)?;
    ///         let rank = communicator.rank();
    ///         let (right, left) = ((rank + 1) % 3, (rank + 2) % 3);
    ///         let (mine, mut from_left, mut from_right) = ([rank as i32], [0], [0]);
    ///         communicator.group(|group| {
    ///             group.send(&mine, right, 0).send(&mine, left, 0);
    ///             group.recv(&mut from_right, right, 0).recv(&mut from_left, left, 0);
    ///             Ok(())
    ///         })?;
    ///         Ok([from_left[0], from_right[0]])
    ///     })
    /// });
    /// let ranks: Vec<_> = ranks.collect();
    /// for (rank, thread) in ranks.into_iter().enumerate() {
    ///     assert_eq!(thread.join().unwrap()?, [(rank as i32 + 2) % 3, (rank as i32 + 1) % 3]);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Communicator::recv`], [`Error::InvalidSetting`] for more than 64 messages, and what `add` returns.
    pub fn group<'a, R>(&self, add: impl FnOnce(&mut Group<'a>) -> Result<R>) -> Result<R> {
        let mut group = Group::default();
        let result = add(&mut group)?;
        // SAFETY: the group borrows what it sends and receives into.
        unsafe { self.exchange(CallKind::Group, group.transfers()) }?;
        Ok(result)
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] naming ranks that did not come; see [`Communicator`] on what follows.
    pub fn barrier(&self) -> Result<()> {
        self.between::<u8>(Collective::Barrier, 0, &[], &mut [])
    }

    /// Any collective on raw pointers, for callers that know the type only at run time. A pointer to no elements is not looked at.
    ///
    /// # Errors
    ///
    /// As the collective's method, [`Error::InvalidPointer`] for null or misaligned pointers, and [`Error::Overlap`] unless the
    /// buffers are disjoint or placed as the collective's in-place form is: the same for allreduce, broadcast and reduce; this rank's
    /// own share for the gathers, the scatters and the reduce-scatters; never for the all-to-alls.
    ///
    /// # Safety
    ///
    /// `input` is valid for reads of [`Collective::input_len`], and `output` for writes of [`Collective::output_len`] elements of
    /// `dtype`, and no other thread writes the one or accesses the other during the call.
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
        // SAFETY: the caller's; the pointers have been checked for alignment and overlap.
        unsafe { self.run(call) }
    }

    /// [`Communicator::collective_raw`] of an allreduce.
    ///
    /// # Errors
    ///
    /// As [`Communicator::collective_raw`].
    ///
    /// # Safety
    ///
    /// `input` is valid for reads, and `output` for writes, of `count` elements of `dtype`, and no other thread writes the
    /// one or accesses the other during the call.
    pub unsafe fn all_reduce_raw(
        &self,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.collective_raw(Collective::AllReduce(op), input, output, count, dtype) }
    }

    /// [`Communicator::group`] on raw pointers.
    ///
    /// # Errors
    ///
    /// As [`Communicator::group`], [`Error::InvalidPointer`], and [`Error::Overlap`] where a message is received into another's
    /// memory.
    ///
    /// # Safety
    ///
    /// What is sent is valid for reads, and what is received into for writes, and no other thread writes the one or accesses the
    /// other during the call.
    pub unsafe fn transfer_raw(&self, transfers: &[Transfer]) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.exchange(CallKind::Group, transfers) }
    }

    /// A collective from one slice to another. Where it has a root, what this rank does not use may have any length.
    fn between<T: Element>(
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

    /// A collective in place, in all of one slice.
    fn in_place<T: Element>(&self, collective: Collective<'_>, data: &mut [T]) -> Result<()> {
        let address = data.as_mut_ptr() as u64;
        let call = Call { collective, input: address, output: address, count: data.len(), dtype: T::DTYPE };
        call.check(self.rank(), self.world_size())?;
        // SAFETY: the slice holds that many elements for the length of the call; in place is input == output.
        unsafe { self.run(call) }
    }

    /// # Safety
    ///
    /// As [`Communicator::transfer_raw`].
    unsafe fn exchange(&self, kind: CallKind, transfers: &[Transfer]) -> Result<()> {
        check_transfers(transfers, self.world_size())?;
        // SAFETY: the caller's; the host runs the launch to its end.
        unsafe { self.start_transfers(transfers_id(kind, transfers), transfers, ()) }?;
        self.healthy()
    }

    /// # Safety
    ///
    /// As [`Communicator::start`]; kernels of the host have ended when it returns.
    pub(super) unsafe fn run(&self, call: Call<'_>) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.start(call, (), || Ok(0)) }?;
        self.healthy()
    }
}
