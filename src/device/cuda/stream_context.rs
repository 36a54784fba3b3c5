//! The context that a caller's stream is of.

use std::ptr::null_mut;

use cudarc::driver::sys::CUstream;

use super::api::{self, Code};
use super::driver::driver;
use super::Cuda;
use crate::error::{Error, Result};

impl Cuda {
    /// Refuses a stream of another context than this device's, which is current.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidStream`], [`Error::Driver`].
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of any context, or the handle of a default stream, which is one of the current context's.
    pub(crate) unsafe fn check_context_of(&self, stream: CUstream) -> Result<()> {
        let mut context = null_mut();
        // SAFETY: the stream is live, and the context is written on success.
        unsafe { api::cuStreamGetCtx(stream, &mut context) }.map_err(driver("cuStreamGetCtx"))?;
        if context == self.context.cu_ctx() {
            return Ok(());
        }
        let mut device = -1;
        // SAFETY: the context is live as its stream is; what is pushed is popped again.
        unsafe {
            if api::cuCtxPushCurrent_v2(context).is_ok() {
                let _ = api::cuCtxGetDevice(&mut device);
                let _ = api::cuCtxPopCurrent_v2(&mut context);
            }
        }
        let stream = usize::try_from(device).unwrap_or(usize::MAX);
        Err(Error::InvalidStream { stream, device: self.context.ordinal() })
    }

    /// Why a launch was refused: by its stream, or as the driver says.
    ///
    /// # Safety
    ///
    /// As [`Cuda::check_context_of`].
    #[cold]
    pub(super) unsafe fn refusal(&self, call: &'static str, stream: CUstream, code: Code) -> Error {
        if [Code::INVALID_HANDLE, Code::INVALID_CONTEXT].contains(&code) {
            // SAFETY: the caller's.
            if let Err(error @ Error::InvalidStream { .. }) = unsafe { self.check_context_of(stream) } {
                return error;
            }
        }
        driver(call)(code)
    }
}
