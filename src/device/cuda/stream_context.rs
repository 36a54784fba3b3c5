//! Checks that a caller's stream belongs to the device's context.

use cudarc::driver::sys::CUstream;

use super::driver::{api::Code, check_context, driver};
use super::Cuda;
use crate::error::{Error, Result};

impl Cuda {
    /// Checks that a stream belongs to this device's context, which must be current.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidStream`], [`Error::Driver`].
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of any context, or the handle of a default stream, which stands for the current
    /// context's.
    pub(crate) unsafe fn check_context_of(&self, stream: CUstream) -> Result<()> {
        // SAFETY: the caller guarantees the same.
        unsafe { check_context(&self.context, stream) }
    }

    /// Returns the error of a failed launch: [`Error::InvalidStream`] if the stream is the cause, else the driver's
    /// error.
    ///
    /// # Safety
    ///
    /// As [`Cuda::check_context_of`].
    #[cold]
    pub(super) unsafe fn refusal(&self, call: &'static str, stream: CUstream, code: Code) -> Error {
        if [Code::INVALID_HANDLE, Code::INVALID_CONTEXT].contains(&code) {
            // SAFETY: by the caller's contract, the stream is live.
            if let Err(error @ Error::InvalidStream { .. }) = unsafe { self.check_context_of(stream) } {
                return error;
            }
        }
        driver(call)(code)
    }
}
