//! Communicators as trait objects, for libraries that carry raw pointers and find out at run time what they run on.

#[cfg(feature = "cuda")]
mod cuda;
mod events;
mod host;
mod rounds;
mod stream;

pub use stream::StreamCommunicator;

use crate::call::Collective;
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;
use crate::error::Result;

/// A rank's communicator whose device, type and operation are known at run time only: addresses are numbers, calls are put on the
/// communicator's own stream, and are complete after [`sync`](Self::sync). [`StreamCommunicator`] is it for each device of this crate.
///
/// Every rank makes the same calls in the same order. Calls of several threads are put on the stream in the order in which they come.
///
/// On the host a collective is complete when it returns. Portable code calls [`sync`](Self::sync) all the same, before it reads a
/// result or uses an input again.
///
/// [`send`](Self::send) and [`recv`](Self::recv) do not wait for the peer. They are gathered, and put on the stream together by the
/// next call that is not one of them (a collective, `sync`, `barrier`, `split`, or one of [`StreamSync`] that names the communicator's
/// stream): so two ranks may both send first, and the order among different peers does not matter. More than 64 go in several
/// launches; there the ranks must gather the same messages for each other.
///
/// Dropping it never panics. Calls that are on the stream are waited for, as long as the communicator's limit allows; transfers that
/// were never put on it are not carried out, and told as an error to `tracing`.
///
/// ```
/// use fast_allreduce::{bootstrap::Threads, Communicator, DType, Host, RawCommunicator, ReduceOp, StreamCommunicator};
///
/// # fn main() -> fast_allreduce::Result<()> {
/// fn average(communicator: &dyn RawCommunicator, gradient: &mut [f32]) -> fast_allreduce::Result<()> {
///     let address = gradient.as_mut_ptr() as u64;
///     // SAFETY: the slice outlives the call of sync.
///     unsafe { communicator.all_reduce(address, gradient.len(), DType::F32, ReduceOp::Avg)? };
///     communicator.sync()
/// }
///
/// let ranks = Threads::world(2)?.into_iter().map(|bootstrap| {
///     std::thread::spawn(move || -> fast_allreduce::Result<Vec<f32>> {
///         let communicator = Communicator::builder().build(Host::new(), bootstrap)?;
///         let communicator: Box<dyn RawCommunicator> = Box::new(StreamCommunicator::new(communicator)?);
///         let mut gradient = vec![2.0 * communicator.rank() as f32; 1000];
///         average(&*communicator, &mut gradient)?;
///         Ok(gradient)
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     assert_eq!(rank.join().unwrap()?, vec![1.0; 1000]);
/// }
/// # Ok(())
/// # }
/// ```
pub trait RawCommunicator: Send + Sync {
    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// This rank, in `0..world_size`.
    fn rank(&self) -> usize;

    /// Puts a collective on the stream. `count` is as the collective counts; in place is `input == output`.
    ///
    /// # Errors
    ///
    /// As the communicator's own `collective_raw`, and those of transfers that were to be put on the stream before it.
    ///
    /// # Safety
    ///
    /// Until [`sync`](Self::sync) or [`barrier`](Self::barrier) has returned, or what follows an event that was recorded after the call:
    /// `input` is valid for reads of [`Collective::input_len`] elements of `dtype` on the device and `output` for writes of
    /// [`Collective::output_len`], nothing else writes the one or accesses the other, and what a failed call was given stays valid as
    /// long.
    unsafe fn collective(
        &self,
        collective: Collective<'_>,
        input: u64,
        output: u64,
        count: usize,
        dtype: DType,
    ) -> Result<()>;

    /// Reduces `count` elements at `address` over all ranks, in place.
    ///
    /// # Errors
    ///
    /// As [`collective`](Self::collective).
    ///
    /// # Safety
    ///
    /// As [`collective`](Self::collective), for `count` elements that are read and written.
    unsafe fn all_reduce(&self, address: u64, count: usize, dtype: DType, op: ReduceOp) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.collective(Collective::AllReduce(op), address, address, count, dtype) }
    }

    /// Copies `count` elements at `address` of the rank `root` to all ranks.
    ///
    /// # Errors
    ///
    /// As [`collective`](Self::collective).
    ///
    /// # Safety
    ///
    /// As [`collective`](Self::collective), for `count` elements that are read and written.
    unsafe fn broadcast(&self, address: u64, count: usize, dtype: DType, root: usize) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.collective(Collective::Broadcast { root }, address, address, count, dtype) }
    }

    /// Gathers `count` elements of each rank into `count x world_size` on all, in rank order.
    ///
    /// # Errors
    ///
    /// As [`collective`](Self::collective).
    ///
    /// # Safety
    ///
    /// As [`collective`](Self::collective).
    unsafe fn all_gather(&self, input: u64, output: u64, count: usize, dtype: DType) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.collective(Collective::AllGather, input, output, count, dtype) }
    }

    /// Reduces `count x world_size` elements over all ranks, of which rank r gets `count`, from r x `count` on.
    ///
    /// # Errors
    ///
    /// As [`collective`](Self::collective).
    ///
    /// # Safety
    ///
    /// As [`collective`](Self::collective).
    unsafe fn reduce_scatter(
        &self,
        input: u64,
        output: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.collective(Collective::ReduceScatter(op), input, output, count, dtype) }
    }

    /// Sends `count` elements to rank `to`, with the transfers around it. Messages of one pair of ranks that are put on the stream
    /// together are matched by their tags, else in order; a receive of another tag or count than the message is an error.
    ///
    /// # Errors
    ///
    /// [`Error::RankOutOfRange`](crate::Error::RankOutOfRange); what else goes wrong is the error of the call that puts it on the stream.
    ///
    /// # Safety
    ///
    /// `address` is valid for reads of `count` elements of `dtype` on the device, and nothing writes them, until
    /// [`sync`](Self::sync) or [`barrier`](Self::barrier) has returned, or the communicator has been dropped, or what follows an event
    /// that was recorded on its stream after the call.
    unsafe fn send(&self, address: u64, count: usize, dtype: DType, to: usize, tag: u32) -> Result<()>;

    /// Receives `count` elements from rank `from`, as [`send`](Self::send).
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send).
    ///
    /// # Safety
    ///
    /// As [`send`](Self::send), for writes, and nothing else accesses them.
    unsafe fn recv(&self, address: u64, count: usize, dtype: DType, from: usize, tag: u32) -> Result<()>;

    /// Waits for all calls before it: outputs hold results, and inputs are free again.
    ///
    /// # Errors
    ///
    /// What went wrong in them, such as a rank that did not come.
    fn sync(&self) -> Result<()>;

    /// [`sync`](Self::sync), and waits until every rank has come to it.
    ///
    /// # Errors
    ///
    /// As [`sync`](Self::sync), and for a rank that does not come.
    fn barrier(&self) -> Result<()>;

    /// Makes a communicator of the ranks that give the same `color`, ordered by `key`, then by rank. Collective; `None` gives none.
    /// Calls before it are waited for.
    ///
    /// # Errors
    ///
    /// As [`sync`](Self::sync), and those of making a communicator.
    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Box<dyn RawCommunicator>>>;

    /// Its stream, to order it with other streams.
    fn stream_sync(&self) -> &dyn StreamSync;
}

/// Orders a communicator's stream with the caller's, so that communication overlaps with computation, and no thread waits.
///
/// As in: record an event on the caller's stream when a gradient is ready, make the communicator's stream wait for it, reduce, record
/// another there, and make the caller's stream wait for that where the result is used.
///
/// On the host calls are complete when they return: an event is a number, and every order is there already.
///
/// An event may be used with every communicator of its device and context, not only with the one that made it.
pub trait StreamSync: Send + Sync {
    /// Makes an event, which lives until it is destroyed.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`](crate::Error::Driver).
    fn create_event(&self) -> Result<u64>;

    /// Destroys an event. Streams that wait for it go on doing so.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`](crate::Error::InvalidSetting) for what is no event, or is one no more.
    fn destroy_event(&self, event: u64) -> Result<()>;

    /// Records an event after what is on the communicator's stream.
    ///
    /// # Errors
    ///
    /// As [`destroy_event`](Self::destroy_event), those of transfers that are put on the stream first, and of the driver.
    fn record(&self, event: u64) -> Result<()>;

    /// Records an event after what is on a stream of the caller's: on a GPU a `CUstream`, on the host anything.
    ///
    /// # Errors
    ///
    /// As [`destroy_event`](Self::destroy_event), and those of the driver.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of the communicator's context.
    unsafe fn record_on(&self, event: u64, stream: u64) -> Result<()>;

    /// Makes what is put on the communicator's stream from here on wait for what an event was last recorded after.
    ///
    /// # Errors
    ///
    /// As [`record`](Self::record).
    fn wait(&self, event: u64) -> Result<()>;

    /// Makes what is put on a stream of the caller's from here on wait for what an event was last recorded after.
    ///
    /// # Errors
    ///
    /// As [`record_on`](Self::record_on).
    ///
    /// # Safety
    ///
    /// As [`record_on`](Self::record_on).
    unsafe fn make_wait(&self, stream: u64, event: u64) -> Result<()>;

    /// Waits for what is on the communicator's stream, as [`RawCommunicator::sync`].
    ///
    /// # Errors
    ///
    /// As [`RawCommunicator::sync`].
    fn sync_stream(&self) -> Result<()>;
}
