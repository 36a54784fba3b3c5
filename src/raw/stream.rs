//! A communicator with a stream of its own: gathers transfers, and keeps the order of calls.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::rounds::rounds;
use super::{RawCommunicator, StreamSync};
use crate::call::{Collective, Direction, Transfer};
use crate::catalogue::DType;
use crate::communicator::Communicator;
use crate::device::Device;
use crate::error::{Error, Result};

/// A device with something to put calls on.
pub trait Queued: Device + Sized {
    type Queue: Queue<Self>;
}

/// What calls of one communicator are put on, one after the other.
pub trait Queue<D: Device>: Sized + Send + Sync {
    fn of(communicator: &Communicator<D>) -> Result<Self>;

    /// # Safety
    ///
    /// As [`RawCommunicator::collective`], for input and output.
    unsafe fn collective(
        &self,
        communicator: &Communicator<D>,
        collective: Collective<'_>,
        addresses: [u64; 2],
        count: usize,
        dtype: DType,
    ) -> Result<()>;

    /// # Safety
    ///
    /// As [`RawCommunicator::send`] and [`RawCommunicator::recv`].
    unsafe fn transfer(&self, communicator: &Communicator<D>, transfers: &[Transfer]) -> Result<()>;

    /// Waits for all calls.
    fn finish(&self, communicator: &Communicator<D>) -> Result<()>;

    /// Of all ranks, after [`Queue::finish`].
    fn barrier(&self, communicator: &Communicator<D>) -> Result<()>;

    fn create_event(&self) -> Result<u64>;

    fn destroy_event(&self, event: u64) -> Result<()>;

    /// On a stream of the caller's, or on this.
    ///
    /// # Safety
    ///
    /// As [`StreamSync::record_on`].
    unsafe fn record(&self, event: u64, stream: Option<u64>) -> Result<()>;

    /// # Safety
    ///
    /// As [`StreamSync::make_wait`].
    unsafe fn wait(&self, stream: Option<u64>, event: u64) -> Result<()>;
}

/// A communicator with a stream of its own, as a [`RawCommunicator`]. On a GPU that is a stream of the communicator's context which
/// does not wait for the default stream; the host's calls are carried out at once.
pub struct StreamCommunicator<D: Queued> {
    // Before the stream, which its last call may be on.
    communicator: Communicator<D>,
    queue: D::Queue,
    /// Transfers that are not on the stream yet. Held while calls are put on it, so that they keep their order.
    gathered: Mutex<Vec<Transfer>>,
}

impl<D: Queued> StreamCommunicator<D> {
    /// Gives a communicator a stream of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`].
    pub fn new(communicator: Communicator<D>) -> Result<Self> {
        let queue = D::Queue::of(&communicator)?;
        Ok(Self { communicator, queue, gathered: Mutex::default() })
    }

    /// The communicator: its calls are in no order with those of the stream but what the caller gives them.
    pub fn communicator(&self) -> &Communicator<D> {
        &self.communicator
    }

    /// Puts the gathered transfers on the stream. What comes next goes there before the guard does.
    fn flush(&self) -> Result<MutexGuard<'_, Vec<Transfer>>> {
        let mut gathered = self.gathered.lock().unwrap_or_else(PoisonError::into_inner);
        let transfers = std::mem::take(&mut *gathered);
        if !transfers.is_empty() {
            for round in rounds(transfers, self.world_size()) {
                // SAFETY: whoever called send or recv gave their word for the memory until a sync, which has not come since.
                unsafe { self.queue.transfer(&self.communicator, &round) }?;
            }
        }
        Ok(gathered)
    }

    fn gather(&self, transfer: Transfer) -> Result<()> {
        let (rank, world_size) = (transfer.peer, self.communicator.world_size());
        if rank >= world_size {
            return Err(Error::RankOutOfRange { rank, world_size });
        }
        self.gathered.lock().unwrap_or_else(PoisonError::into_inner).push(transfer);
        Ok(())
    }
}

impl<D: Queued> RawCommunicator for StreamCommunicator<D> {
    fn world_size(&self) -> usize {
        self.communicator.world_size()
    }

    fn rank(&self) -> usize {
        self.communicator.rank()
    }

    unsafe fn collective(
        &self,
        collective: Collective<'_>,
        input: u64,
        output: u64,
        count: usize,
        dtype: DType,
    ) -> Result<()> {
        let _order = self.flush()?;
        // SAFETY: the caller's.
        unsafe { self.queue.collective(&self.communicator, collective, [input, output], count, dtype) }
    }

    unsafe fn send(&self, address: u64, count: usize, dtype: DType, to: usize, tag: u32) -> Result<()> {
        self.gather(Transfer { direction: Direction::Send, peer: to, address, count, dtype, tag })
    }

    unsafe fn recv(&self, address: u64, count: usize, dtype: DType, from: usize, tag: u32) -> Result<()> {
        self.gather(Transfer { direction: Direction::Recv, peer: from, address, count, dtype, tag })
    }

    fn sync(&self) -> Result<()> {
        let order = self.flush()?;
        // Other threads may go on while this one waits.
        drop(order);
        self.queue.finish(&self.communicator)
    }

    fn barrier(&self) -> Result<()> {
        self.sync()?;
        self.queue.barrier(&self.communicator)
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Box<dyn RawCommunicator>>> {
        // Ranks of one process must not allocate while another's kernel waits for them.
        self.sync()?;
        let Some(part) = self.communicator.split(color, key)? else {
            return Ok(None);
        };
        Ok(Some(Box::new(Self::new(part)?)))
    }

    fn stream_sync(&self) -> &dyn StreamSync {
        self
    }
}

impl<D: Queued> StreamSync for StreamCommunicator<D> {
    fn create_event(&self) -> Result<u64> {
        self.queue.create_event()
    }

    fn destroy_event(&self, event: u64) -> Result<()> {
        self.queue.destroy_event(event)
    }

    fn record(&self, event: u64) -> Result<()> {
        let _order = self.flush()?;
        // SAFETY: on the own stream.
        unsafe { self.queue.record(event, None) }
    }

    unsafe fn record_on(&self, event: u64, stream: u64) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.queue.record(event, Some(stream)) }
    }

    fn wait(&self, event: u64) -> Result<()> {
        let _order = self.flush()?;
        // SAFETY: on the own stream.
        unsafe { self.queue.wait(None, event) }
    }

    unsafe fn make_wait(&self, stream: u64, event: u64) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.queue.wait(Some(stream), event) }
    }

    fn sync_stream(&self) -> Result<()> {
        self.sync()
    }
}

impl<D: Queued> Drop for StreamCommunicator<D> {
    fn drop(&mut self) {
        let gathered = self.gathered.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !gathered.is_empty() {
            // Where an error has unwound the caller, its memory may be gone already.
            let (rank, transfers) = (self.communicator.rank(), gathered.len());
            tracing::error!(rank, transfers, "dropped with transfers that sync would have carried out");
        }
    }
}

impl<D: Queued> std::fmt::Debug for StreamCommunicator<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("StreamCommunicator").field(&self.communicator).finish()
    }
}
