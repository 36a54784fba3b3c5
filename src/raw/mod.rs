//! [`StreamCommunicator`]: a communicator with its own stream, for libraries that pass raw pointers. It collects
//! transfers and keeps the order of calls.

mod rounds;

use std::sync::{Mutex, MutexGuard, PoisonError};

use self::rounds::rounds;
use crate::any::AnyCommunicator;
use crate::call::{Collective, Direction, Transfer};
use crate::catalogue::DType;
use crate::error::{Error, Result};

/// A rank's communicator with its own stream.
///
/// Calls are enqueued on the stream, and are complete after [`sync`](Self::sync). On a GPU that is a stream of the
/// communicator's context that is independent of the default stream. On the host a collective is complete when it
/// returns; portable code calls [`sync`](Self::sync) all the same, before it reads a result or reuses an input.
///
/// Every rank makes the same calls in the same order. Calls of several threads are enqueued in the order in which they
/// are made.
///
/// [`send`](Self::send) and [`recv`](Self::recv) do not wait for the peer. They are collected, and the next call of
/// another kind enqueues them together. So two ranks may both send first, and the order among different peers does not
/// matter. More than 64 take several launches; then two ranks must have collected the same messages for each other.
///
/// A drop never panics. It waits for calls on the stream, within the communicator's limit. Transfers that were not
/// enqueued are not carried out; an error is logged through `tracing`.
///
/// ```
#[doc = include_str!("../example_ranks.txt")]
/// # ranks(2, |communicator| {
/// let communicator = StreamCommunicator::new(communicator)?;
/// let rank = communicator.communicator().rank();
/// let mut gradient = vec![2.0 * rank as f32; 1000];
/// let (address, op) = (gradient.as_mut_ptr() as u64, ReduceOp::Avg);
/// let average = Collective::AllReduce(op);
/// // SAFETY: the vector has 1000 elements, lives until after `sync`, and nothing else uses it.
/// unsafe { communicator.collective(average, [address; 2], gradient.len(), DType::F32)? };
/// communicator.sync()?;
/// assert_eq!(gradient, [1.0; 1000]);
///
/// let (mine, mut theirs, peer) = ([rank as u32], [9_u32], 1 - rank);
/// // SAFETY: both have one element, live until after `barrier`, and nothing else uses them.
/// unsafe {
///     // Both ranks send first.
///     communicator.send(mine.as_ptr() as u64, 1, DType::U32, peer, 0)?;
///     communicator.recv(theirs.as_mut_ptr() as u64, 1, DType::U32, peer, 0)?;
/// }
/// communicator.barrier()?; // `sync`, and waits for all ranks.
/// assert_eq!(theirs, [peer as u32]);
///
/// let event = communicator.communicator().create_event()?;
/// communicator.record(event)?; // After the calls so far.
/// communicator.wait(event)?; // Later calls wait for it. Usually it is recorded on another stream.
/// communicator.communicator().destroy_event(event)?;
///
/// let alone = communicator.split(Some(rank as u32), 0)?.expect("a color was given");
/// assert_eq!(alone.communicator().world_size(), 1);
/// # Ok(()) });
/// ```
pub struct StreamCommunicator {
    // Declared before the stream, which its last call may be on, so that it is dropped first.
    communicator: AnyCommunicator,
    stream: u64,
    _owner: Option<Box<dyn Send + Sync>>,
    /// Transfers that are not on the stream yet. Locked while calls are enqueued, so that they keep their order.
    collected: Mutex<Vec<Transfer>>,
}

impl StreamCommunicator {
    /// Creates a stream for a communicator.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`].
    pub fn new(communicator: impl Into<AnyCommunicator>) -> Result<Self> {
        let communicator = communicator.into();
        let (stream, owner) = communicator.new_stream()?;
        Ok(Self { communicator, stream, _owner: owner, collected: Mutex::default() })
    }

    /// Returns the communicator. Its own calls are not ordered with those on the stream, except by events.
    pub fn communicator(&self) -> &AnyCommunicator {
        &self.communicator
    }

    /// Enqueues the collected transfers. The caller enqueues its own call while it holds the guard.
    fn flush(&self) -> Result<MutexGuard<'_, Vec<Transfer>>> {
        let mut collected = self.collected.lock().unwrap_or_else(PoisonError::into_inner);
        let transfers = std::mem::take(&mut *collected);
        if !transfers.is_empty() {
            for round in rounds(transfers, self.communicator.world_size()) {
                // SAFETY: the callers of send and recv keep the memory valid until a sync, and there was none since.
                unsafe { self.communicator.transfer(self.stream, &round) }?;
            }
        }
        Ok(collected)
    }

    /// Enqueues a collective on `[input, output]`, which are the same address in place.
    ///
    /// [`Collective`] says for each collective what `count` counts.
    ///
    /// # Errors
    ///
    /// Those of [`AnyCommunicator::collective`], and of [`AnyCommunicator::transfer`] for collected transfers.
    ///
    /// # Safety
    ///
    /// On the device, the input is valid for reads of [`Collective::input_len`] and the output for writes of
    /// [`Collective::output_len`] elements of `dtype`. Nothing else writes the input or accesses the output. Both hold,
    /// also for a call that failed, until [`sync`](Self::sync) or [`barrier`](Self::barrier) has returned. Work on a
    /// stream that waits for an event recorded after the call is exempt.
    pub unsafe fn collective(
        &self,
        collective: Collective<'_>,
        addresses: [u64; 2],
        count: usize,
        dtype: DType,
    ) -> Result<()> {
        let _order = self.flush()?;
        // SAFETY: the caller's obligation; this communicator keeps its stream alive.
        unsafe { self.communicator.collective(self.stream, collective, addresses, count, dtype) }
    }

    /// Collects a send of `count` elements to rank `to`. The next call of another kind enqueues it.
    ///
    /// Messages of two ranks that are enqueued together are matched by tag, others in order. A receive whose tag or
    /// count differs from the message is an error.
    ///
    /// # Errors
    ///
    /// [`Error::RankOutOfRange`]. The call that enqueues it returns any other error.
    ///
    /// # Safety
    ///
    /// `address` is valid for reads of `count` elements of `dtype` on the device, and nothing writes them, until
    /// [`sync`](Self::sync) or [`barrier`](Self::barrier) has returned, or the communicator has been dropped. Work on a
    /// stream that waits for an event recorded after the call that enqueues the message is exempt.
    pub unsafe fn send(&self, address: u64, count: usize, dtype: DType, to: usize, tag: u32) -> Result<()> {
        self.collect(Transfer { direction: Direction::Send, peer: to, address, count, dtype, tag })
    }

    /// Collects a receive of `count` elements from rank `from`. The next call of another kind enqueues it.
    ///
    /// # Errors
    ///
    /// [`Error::RankOutOfRange`]. The call that enqueues it returns any other error.
    ///
    /// # Safety
    ///
    /// As [`send`](Self::send), but `address` is valid for writes, and nothing else accesses the elements.
    pub unsafe fn recv(&self, address: u64, count: usize, dtype: DType, from: usize, tag: u32) -> Result<()> {
        self.collect(Transfer { direction: Direction::Recv, peer: from, address, count, dtype, tag })
    }

    fn collect(&self, transfer: Transfer) -> Result<()> {
        let (rank, world_size) = (transfer.peer, self.communicator.world_size());
        if rank >= world_size {
            return Err(Error::RankOutOfRange { rank, world_size });
        }
        self.collected.lock().unwrap_or_else(PoisonError::into_inner).push(transfer);
        Ok(())
    }

    /// Waits for all earlier calls. Then outputs hold results, and inputs may be reused.
    ///
    /// # Errors
    ///
    /// [Errors of every call](crate::Communicator#errors-of-every-call), and those of [`AnyCommunicator::transfer`] for
    /// collected transfers.
    pub fn sync(&self) -> Result<()> {
        // Without the guard, so that other threads can enqueue calls while this one waits.
        drop(self.flush()?);
        // SAFETY: this communicator keeps its stream alive.
        unsafe { self.communicator.synchronize(self.stream) }
    }

    /// Waits for all earlier calls, then until every rank has called it.
    ///
    /// # Errors
    ///
    /// Those of [`sync`](Self::sync) and [`AnyCommunicator::barrier`].
    pub fn barrier(&self) -> Result<()> {
        self.sync()?;
        self.communicator.barrier()
    }

    /// Waits for all earlier calls, then makes a communicator of the ranks that give the same `color`. Collective.
    ///
    /// New ranks are ordered by `key`, then by the old rank. A rank that gives no color gets `None`.
    ///
    /// # Errors
    ///
    /// Those of [`sync`](Self::sync), [`AnyCommunicator::split`] and [`StreamCommunicator::new`].
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        // A rank must not allocate while the kernel of another rank in its process waits for it.
        self.sync()?;
        self.communicator.split(color, key)?.map(Self::new).transpose()
    }

    /// Records an event after all earlier calls. [`AnyCommunicator::create_event`] creates one.
    ///
    /// # Errors
    ///
    /// Those of [`AnyCommunicator::record_event`], and of [`AnyCommunicator::transfer`] for collected transfers.
    pub fn record(&self, event: u64) -> Result<()> {
        let _order = self.flush()?;
        // SAFETY: this communicator keeps its stream alive.
        unsafe { self.communicator.record_event(event, self.stream) }
    }

    /// Makes later calls wait for the work after which the event was last recorded.
    ///
    /// # Errors
    ///
    /// Those of [`AnyCommunicator::wait_event`], and of [`AnyCommunicator::transfer`] for collected transfers.
    pub fn wait(&self, event: u64) -> Result<()> {
        let _order = self.flush()?;
        // SAFETY: this communicator keeps its stream alive.
        unsafe { self.communicator.wait_event(self.stream, event) }
    }
}

impl Drop for StreamCommunicator {
    fn drop(&mut self) {
        let collected = self.collected.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !collected.is_empty() {
            // They are not carried out now: after an error or a panic in the caller, its memory may be gone already.
            let (rank, transfers) = (self.communicator.rank(), collected.len());
            tracing::error!(rank, transfers, "dropped with transfers that sync would have carried out");
        }
    }
}

impl std::fmt::Debug for StreamCommunicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("StreamCommunicator").field(&self.communicator).finish()
    }
}
