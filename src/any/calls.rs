//! Calls on streams: collectives and messages, their order, and waits for them.

#[cfg(feature = "cuda")]
use super::kept::Kept;
use super::{AnyCommunicator, Inner};
use crate::call::{Collective, Transfer};
use crate::catalogue::DType;
#[cfg(feature = "cuda")]
use crate::device::cuda::driver::driver;
use crate::error::{Error, Result};

impl AnyCommunicator {
    /// Creates a stream that is independent of the default stream. Returns it with its owner: 0 and `None` on the host.
    pub(crate) fn new_stream(&self) -> Result<(u64, Option<Box<dyn Send + Sync>>)> {
        let _context = self.callers_context();
        match &self.0 {
            Inner::Host(_) => Ok((0, None)),
            #[cfg(feature = "cuda")]
            Inner::Cuda(communicator) => {
                let stream =
                    communicator.device().context().new_stream().map_err(driver("cuStreamCreate"))?;
                Ok((stream.cu_stream() as u64, Some(Box::new(Kept::new(stream)))))
            }
        }
    }

    /// Refuses a stream that calls cannot use.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(1, |communicator| {
    /// let communicator = AnyCommunicator::from(communicator);
    /// // SAFETY: these are no streams: the communicator is the host's.
    /// unsafe {
    ///     communicator.check_stream(0)?;
    ///     assert!(communicator.check_stream(0x7f00).is_err());
    ///     communicator.order_streams(0, 0)?; // On a GPU, the second waits for the first.
    ///     communicator.synchronize(0)?; // On a GPU, waits for the work on the stream.
    /// }
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] on the host, unless the stream is 0; [`Error::InvalidStream`] on a GPU, for a stream
    /// of another context; [`Error::Driver`]; [`Error::Forked`].
    ///
    /// # Safety
    ///
    /// On a GPU `stream` is a live stream of any context, or the handle of a default stream.
    pub unsafe fn check_stream(&self, stream: u64) -> Result<()> {
        let _context = self.callers_context();
        match &self.0 {
            Inner::Host(_) => no_stream(stream),
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's obligation.
            Inner::Cuda(communicator) => unsafe { communicator.check_raw_stream(stream as *mut _) },
        }
    }

    /// Waits for the work on a stream, and returns `Ok` if no call has failed. On the host calls have already ended.
    ///
    /// # Errors
    ///
    /// Those of [`AnyCommunicator::check_stream`]; [`Error::Unavailable`] for a stream that is being captured (the
    /// capture goes on); [errors of every call](crate::Communicator#errors-of-every-call).
    ///
    /// # Safety
    ///
    /// On a GPU `stream` is a live stream of any context, or the handle of a default stream.
    pub unsafe fn synchronize(&self, stream: u64) -> Result<()> {
        let _context = self.callers_context();
        match &self.0 {
            Inner::Host(communicator) => no_stream(stream).and_then(|()| communicator.check()),
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's obligation.
            Inner::Cuda(communicator) => unsafe { communicator.synchronize_raw(stream as *mut _) },
        }
    }

    /// Makes later work on `stream` wait for the work that is on `earlier` now. On the host there is nothing to order.
    ///
    /// # Errors
    ///
    /// Those of [`AnyCommunicator::check_stream`]; [`Error::Unavailable`], if only one of the two is being captured
    /// (the capture goes on).
    ///
    /// # Safety
    ///
    /// On a GPU both are live streams of any context, or handles of default streams.
    pub unsafe fn order_streams(&self, earlier: u64, stream: u64) -> Result<()> {
        let _context = self.callers_context();
        match &self.0 {
            Inner::Host(_) => no_stream(earlier).and_then(|()| no_stream(stream)),
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's obligation.
            Inner::Cuda(communicator) => unsafe {
                communicator.order_raw_streams(earlier as *mut _, stream as *mut _)
            },
        }
    }

    /// Runs any collective, on memory by address: `[input, output]`. On a GPU it is in the order of `stream`.
    ///
    /// [`Collective`] says for each collective what `count` counts. [`AnyCommunicator`] has an example.
    ///
    /// # Errors
    ///
    /// Those of [`AnyCommunicator::check_stream`]; [`Error::InvalidPointer`] for addresses that are null, misaligned,
    /// or not of the device; [`Error::Overlap`] unless the buffers are disjoint or placed as in the collective's
    /// in-place form; [`Error::InvalidSetting`] and [`Error::RankOutOfRange`] for arguments that the collective does
    /// not take; [`Error::Unavailable`] for an order that a capture does not permit; [errors of every
    /// call](crate::Communicator#errors-of-every-call).
    ///
    /// # Safety
    ///
    /// On a GPU `stream` is a live stream, or the handle of a default stream. It lives until after the communicator's
    /// next call, or until the communicator is dropped. Until the call has ended (on a GPU: until the work on the
    /// stream is done), the input is valid for reads of [`Collective::input_len`] and the output for writes of
    /// [`Collective::output_len`] elements of `dtype`. Nothing else writes the input or accesses the output.
    pub unsafe fn collective(
        &self,
        stream: u64,
        collective: Collective<'_>,
        [input, output]: [u64; 2],
        count: usize,
        dtype: DType,
    ) -> Result<()> {
        let _context = self.callers_context();
        match &self.0 {
            Inner::Host(communicator) => {
                no_stream(stream)?;
                let (input, output) = (input as *const _, output as *mut _);
                // SAFETY: the caller's obligation.
                unsafe { communicator.collective_raw(collective, input, output, count, dtype) }
            }
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's obligation.
            Inner::Cuda(communicator) => unsafe {
                communicator.check_raw_stream(stream as *mut _)?;
                communicator.collective_raw(stream as *mut _, collective, input, output, count, dtype)
            },
        }
    }

    /// Sends and receives `transfers` concurrently, at most 64 messages. On a GPU it is in the order of `stream`.
    ///
    /// Messages are matched as by [`Communicator::group`](crate::Communicator::group).
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// let communicator = AnyCommunicator::from(communicator);
    /// let (mine, mut theirs, peer) = ([1.0_f32; 4], [0.0_f32; 4], 1 - communicator.rank());
    /// let (direction, address) = (Direction::Send, mine.as_ptr() as u64);
    /// let send = Transfer { direction, peer, address, count: 4, dtype: DType::F32, tag: 0 };
    /// let (direction, address) = (Direction::Recv, theirs.as_mut_ptr() as u64);
    /// let recv = Transfer { direction, address, ..send };
    /// // SAFETY: both arrays have 4 elements, and only this thread has them.
    /// unsafe { communicator.transfer(0, &[send, recv])? };
    /// assert_eq!(theirs, [1.0; 4]);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`AnyCommunicator::check_stream`]; [`Error::InvalidSetting`] for more than 64 messages;
    /// [`Error::RankOutOfRange`]; [`Error::InvalidPointer`] for addresses that are null, misaligned, or not of the
    /// device; [`Error::Overlap`] where a message is received into the memory of another message;
    /// [`Error::Disagreement`] (on a GPU later), if a message that arrives has another tag or length;
    /// [`Error::Unavailable`] for an order that a capture does not permit; [errors of every
    /// call](crate::Communicator#errors-of-every-call).
    ///
    /// # Safety
    ///
    /// On a GPU `stream` is a live stream, or the handle of a default stream. It lives until after the communicator's
    /// next call, or until the communicator is dropped. Until the call has ended (on a GPU: until the work on the
    /// stream is done), memory that is sent is valid for reads, and memory that is received into for writes. Nothing
    /// else writes the former or accesses the latter.
    pub unsafe fn transfer(&self, stream: u64, transfers: &[Transfer]) -> Result<()> {
        let _context = self.callers_context();
        match &self.0 {
            Inner::Host(communicator) => {
                no_stream(stream)?;
                // SAFETY: the caller's obligation.
                unsafe { communicator.transfer_raw(transfers) }
            }
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's obligation.
            Inner::Cuda(communicator) => unsafe {
                communicator.check_raw_stream(stream as *mut _)?;
                communicator.transfer_raw(stream as *mut _, transfers)
            },
        }
    }
}

/// Refuses a stream on the host.
fn no_stream(stream: u64) -> Result<()> {
    match stream {
        0 => Ok(()),
        _ => Err(Error::InvalidSetting {
            name: "stream",
            value: format!("{stream:#x}"),
            expected: "null: the communicator is on the host, where calls use no streams",
        }),
    }
}
