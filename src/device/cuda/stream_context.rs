//! Checks that a caller's stream belongs to the device's context.

use std::ptr::null_mut;

use cudarc::driver::sys::CUstream;
use cudarc::driver::CudaContext;

use super::driver::{
    api::{self, Code},
    driver,
};
use super::Cuda;
use crate::error::{Error, Result};

/// Checks that a stream belongs to a context, which must be current.
///
/// # Errors
///
/// [`Error::InvalidStream`], [`Error::Driver`].
///
/// # Safety
///
/// As [`Cuda::check_context_of`].
pub(super) unsafe fn check_context(expected: &CudaContext, stream: CUstream) -> Result<()> {
    let mut context = null_mut();
    // SAFETY: the stream is live; the driver writes the context on success.
    unsafe { api::cuStreamGetCtx(stream, &mut context) }.map_err(driver("cuStreamGetCtx"))?;
    if context == expected.cu_ctx() {
        return Ok(());
    }
    let mut device = -1;
    // SAFETY: the context is live as its stream is; it is popped after it was pushed.
    unsafe {
        if api::cuCtxPushCurrent_v2(context).is_ok() {
            let _ = api::cuCtxGetDevice(&mut device);
            let _ = api::cuCtxPopCurrent_v2(&mut context);
        }
    }
    let stream = usize::try_from(device).unwrap_or(usize::MAX);
    Err(Error::InvalidStream { stream, device: expected.ordinal() })
}

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
