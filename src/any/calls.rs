//! What is put on streams: collectives and messages, their order, and waits for them.

#[cfg(feature = "cuda")]
use super::kept::Kept;
use super::{AnyCommunicator, Inner};
use crate::call::{Collective, Transfer};
use crate::catalogue::DType;
#[cfg(feature = "cuda")]
use crate::device::cuda::driver::driver;
use crate::error::{Error, Result};

impl AnyCommunicator {
    /// A stream that does not wait for the default stream, nor that for it, and what keeps it. `None` on the host.
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

    /// Whether calls may be put on a stream.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for one on the host; [`Error::InvalidStream`] and [`Error::Driver`] on a GPU.
    ///
    /// # Safety
    ///
    /// On a GPU `stream` is a live stream of any context, or the handle of a default stream.
    pub unsafe fn check_stream(&self, stream: u64) -> Result<()> {
        let _context = self.callers_context();
        match &self.0 {
            Inner::Host(_) => no_stream(stream),
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's.
            Inner::Cuda(communicator) => unsafe { communicator.check_raw_stream(stream as *mut _) },
        }
    }

    /// Waits for the work on a stream, and says whether the calls so far succeeded. On the host they have ended.
    ///
    /// # Errors
    ///
    /// As [`AnyCommunicator::check_stream`] and [`AnyCommunicator::check`]; [`Error::Unavailable`] for a stream that is captured, which
    /// goes on.
    ///
    /// # Safety
    ///
    /// As [`AnyCommunicator::check_stream`].
    pub unsafe fn synchronize(&self, stream: u64) -> Result<()> {
        let _context = self.callers_context();
        match &self.0 {
            Inner::Host(communicator) => no_stream(stream).and_then(|()| communicator.check()),
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's.
            Inner::Cuda(communicator) => unsafe { communicator.synchronize_raw(stream as *mut _) },
        }
    }

    /// Makes what comes on `stream` wait for what is on `earlier` now. On the host every order is there already.
    ///
    /// # Errors
    ///
    /// As [`AnyCommunicator::check_stream`]; [`Error::Unavailable`] where only one of the two is being captured, which goes on.
    ///
    /// # Safety
    ///
    /// As [`AnyCommunicator::check_stream`], of both.
    pub unsafe fn order_streams(&self, earlier: u64, stream: u64) -> Result<()> {
        let _context = self.callers_context();
        match &self.0 {
            Inner::Host(_) => no_stream(earlier).and_then(|()| no_stream(stream)),
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's.
            Inner::Cuda(communicator) => unsafe {
                communicator.order_raw_streams(earlier as *mut _, stream as *mut _)
            },
        }
    }

    /// Any collective, from the input to the output, on a stream. `count` is as the collective counts.
    ///
    /// # Errors
    ///
    /// As [`AnyCommunicator::check_stream`], and `collective_raw` of the device's communicator.
    ///
    /// # Safety
    ///
    /// As [`AnyCommunicator::check_stream`], and the stream lives until after the communicator's next call, or its end. Until the call
    /// has ended, on a GPU until the work on the stream is done: the input is valid for reads of [`Collective::input_len`] and the
    /// output for writes of [`Collective::output_len`] elements of `dtype`, and nobody else writes the one or accesses the other.
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
                // SAFETY: the caller's.
                unsafe { communicator.collective_raw(collective, input, output, count, dtype) }
            }
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's.
            Inner::Cuda(communicator) => unsafe {
                communicator.check_raw_stream(stream as *mut _)?;
                communicator.collective_raw(stream as *mut _, collective, input, output, count, dtype)
            },
        }
    }

    /// Sends and receives all of `transfers` on a stream, side by side: at most 64 messages.
    ///
    /// # Errors
    ///
    /// As [`AnyCommunicator::check_stream`], and `transfer_raw` of the device's communicator.
    ///
    /// # Safety
    ///
    /// As [`AnyCommunicator::collective`]: what is sent is valid for reads, and what is received into for writes.
    pub unsafe fn transfer(&self, stream: u64, transfers: &[Transfer]) -> Result<()> {
        let _context = self.callers_context();
        match &self.0 {
            Inner::Host(communicator) => {
                no_stream(stream)?;
                // SAFETY: the caller's.
                unsafe { communicator.transfer_raw(transfers) }
            }
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's.
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
            expected: "null: the communicator is the host's, whose calls are not ordered by streams",
        }),
    }
}
