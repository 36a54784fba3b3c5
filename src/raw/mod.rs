//! A communicator with a stream of its own, for libraries that carry raw pointers: gathers transfers, and keeps the order of calls.

mod rounds;

use std::sync::{Mutex, MutexGuard, PoisonError};

use self::rounds::rounds;
use crate::any::AnyCommunicator;
use crate::call::{Collective, Direction, Transfer};
use crate::catalogue::DType;
use crate::error::{Error, Result};

/// A rank's communicator with a stream of its own. Calls are put on it, and are complete after [`sync`](Self::sync). On a GPU that is a
/// stream of the communicator's context which does not wait for the default stream; the host's calls are carried out at once.
///
/// Every rank makes the same calls in the same order. Calls of several threads are put on the stream in the order in which they come.
///
/// On the host a collective is complete when it returns. Portable code calls [`sync`](Self::sync) all the same, before it reads a
/// result or uses an input again.
///
/// [`send`](Self::send) and [`recv`](Self::recv) do not wait for the peer. They are gathered, and put on the stream together by the
/// next call that is not one of them: two ranks may both send first, and the order among different peers does not matter. More than
/// 64 go in several launches; there the ranks must gather the same messages for each other.
///
/// Dropping it never panics. Calls that are on the stream are waited for, as long as the communicator's limit allows; transfers that
/// were never put on it are not carried out, and told as an error to `tracing`.
///
/// ```
/// use fast_allreduce::{bootstrap::Threads, Collective, Communicator, DType, Host, ReduceOp, StreamCommunicator};
///
/// # fn main() -> fast_allreduce::Result<()> {
/// fn average(communicator: &StreamCommunicator, gradient: &mut [f32]) -> fast_allreduce::Result<()> {
///     let (address, average) = (gradient.as_mut_ptr() as u64, Collective::AllReduce(ReduceOp::Avg));
///     // SAFETY: the slice outlives the call of sync.
///     unsafe { communicator.collective(average, [address, address], gradient.len(), DType::F32)? };
///     communicator.sync()
/// }
///
/// let ranks = Threads::world(2)?.into_iter().map(|bootstrap| {
///     std::thread::spawn(move || -> fast_allreduce::Result<Vec<f32>> {
///         let communicator = StreamCommunicator::new(Communicator::builder().build(Host::new(), bootstrap)?)?;
///         let mut gradient = vec![2.0 * communicator.communicator().rank() as f32; 1000];
///         average(&communicator, &mut gradient)?;
///         Ok(gradient)
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     assert_eq!(rank.join().unwrap()?, vec![1.0; 1000]);
/// }
/// # Ok(())
/// # }
/// ```
pub struct StreamCommunicator {
    // Before the stream, which its last call may be on.
    communicator: AnyCommunicator,
    stream: u64,
    _owner: Option<Box<dyn Send + Sync>>,
    /// Transfers that are not on the stream yet. Held while calls are put on it, so that they keep their order.
    gathered: Mutex<Vec<Transfer>>,
}

impl StreamCommunicator {
    /// Gives a communicator a stream of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`].
    pub fn new(communicator: impl Into<AnyCommunicator>) -> Result<Self> {
        let communicator = communicator.into();
        let (stream, owner) = communicator.new_stream()?;
        Ok(Self { communicator, stream, _owner: owner, gathered: Mutex::default() })
    }

    /// The communicator: its calls are in no order with those of the stream, unless events order them.
    pub fn communicator(&self) -> &AnyCommunicator {
        &self.communicator
    }

    /// Puts the gathered transfers on the stream. What comes next goes there before the guard does.
    fn flush(&self) -> Result<MutexGuard<'_, Vec<Transfer>>> {
        let mut gathered = self.gathered.lock().unwrap_or_else(PoisonError::into_inner);
        let transfers = std::mem::take(&mut *gathered);
        if !transfers.is_empty() {
            for round in rounds(transfers, self.communicator.world_size()) {
                // SAFETY: whoever called send or recv gave their word for the memory until a sync, which has not come since.
                unsafe { self.communicator.transfer(self.stream, &round) }?;
            }
        }
        Ok(gathered)
    }

    /// Puts a collective on the stream. `count` is as the collective counts; in place is twice the same address.
    ///
    /// # Errors
    ///
    /// As [`AnyCommunicator::collective`], and those of transfers that were to be put on the stream before it.
    ///
    /// # Safety
    ///
    /// Until [`sync`](Self::sync) or [`barrier`](Self::barrier) has returned, or what follows an event that was recorded after the call:
    /// the input is valid for reads of [`Collective::input_len`] elements of `dtype` on the device and the output for writes of
    /// [`Collective::output_len`], nothing else writes the one or accesses the other, and what a failed call was given stays valid as
    /// long.
    pub unsafe fn collective(
        &self,
        collective: Collective<'_>,
        addresses: [u64; 2],
        count: usize,
        dtype: DType,
    ) -> Result<()> {
        let _order = self.flush()?;
        // SAFETY: the caller's; the stream is its own.
        unsafe { self.communicator.collective(self.stream, collective, addresses, count, dtype) }
    }

    /// Sends `count` elements to rank `to`, with the transfers around it. Messages of one pair of ranks that are put on the stream
    /// together are matched by their tags, else in order; a receive of another tag or count than the message is an error.
    ///
    /// # Errors
    ///
    /// [`Error::RankOutOfRange`]; what else goes wrong is the error of the call that puts it on the stream.
    ///
    /// # Safety
    ///
    /// `address` is valid for reads of `count` elements of `dtype` on the device, and nothing writes them, until
    /// [`sync`](Self::sync) or [`barrier`](Self::barrier) has returned, or the communicator has been dropped, or what follows an event
    /// that was recorded on its stream after the call.
    pub unsafe fn send(&self, address: u64, count: usize, dtype: DType, to: usize, tag: u32) -> Result<()> {
        self.gather(Transfer { direction: Direction::Send, peer: to, address, count, dtype, tag })
    }

    /// Receives `count` elements from rank `from`, as [`send`](Self::send).
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send).
    ///
    /// # Safety
    ///
    /// As [`send`](Self::send), for writes, and nothing else accesses them.
    pub unsafe fn recv(&self, address: u64, count: usize, dtype: DType, from: usize, tag: u32) -> Result<()> {
        self.gather(Transfer { direction: Direction::Recv, peer: from, address, count, dtype, tag })
    }

    fn gather(&self, transfer: Transfer) -> Result<()> {
        let (rank, world_size) = (transfer.peer, self.communicator.world_size());
        if rank >= world_size {
            return Err(Error::RankOutOfRange { rank, world_size });
        }
        self.gathered.lock().unwrap_or_else(PoisonError::into_inner).push(transfer);
        Ok(())
    }

    /// Waits for all calls before it: outputs hold results, and inputs are free again.
    ///
    /// # Errors
    ///
    /// What went wrong in them, such as a rank that did not come.
    pub fn sync(&self) -> Result<()> {
        // Other threads may go on while this one waits.
        drop(self.flush()?);
        // SAFETY: the stream is its own.
        unsafe { self.communicator.synchronize(self.stream) }
    }

    /// [`sync`](Self::sync), and waits until every rank has come to it.
    ///
    /// # Errors
    ///
    /// As [`sync`](Self::sync), and for a rank that does not come.
    pub fn barrier(&self) -> Result<()> {
        self.sync()?;
        self.communicator.barrier()
    }

    /// Makes a communicator of the ranks that give the same `color`, ordered by `key`, then by rank. Collective; `None` gives none.
    /// Calls before it are waited for.
    ///
    /// # Errors
    ///
    /// As [`sync`](Self::sync), and those of making a communicator.
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        // Ranks of one process must not allocate while another's kernel waits for them.
        self.sync()?;
        self.communicator.split(color, key)?.map(Self::new).transpose()
    }

    /// Records an event of [`AnyCommunicator::create_event`] after what is on the stream.
    ///
    /// # Errors
    ///
    /// As [`AnyCommunicator::record_event`], and those of transfers that are put on the stream first.
    pub fn record(&self, event: u64) -> Result<()> {
        let _order = self.flush()?;
        // SAFETY: the stream is its own.
        unsafe { self.communicator.record_event(event, self.stream) }
    }

    /// Makes what is put on the stream from here on wait for what an event was last recorded after.
    ///
    /// # Errors
    ///
    /// As [`record`](Self::record).
    pub fn wait(&self, event: u64) -> Result<()> {
        let _order = self.flush()?;
        // SAFETY: the stream is its own.
        unsafe { self.communicator.wait_event(self.stream, event) }
    }
}

impl Drop for StreamCommunicator {
    fn drop(&mut self) {
        let gathered = self.gathered.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !gathered.is_empty() {
            // Where an error has unwound the caller, its memory may be gone already.
            let (rank, transfers) = (self.communicator.rank(), gathered.len());
            tracing::error!(rank, transfers, "dropped with transfers that sync would have carried out");
        }
    }
}

impl std::fmt::Debug for StreamCommunicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("StreamCommunicator").field(&self.communicator).finish()
    }
}
