//! Device addresses of cudarc's slices during stream capture.
//!
//! With event tracking, `device_ptr` makes the given stream wait for the last use of the slice. That use is nearly
//! always outside of the capture, and a captured stream that waits for it invalidates the capture. So `device_ptr`
//! gets a helper stream, which does the waiting. The graph itself runs after the work that precedes its launch on a
//! stream.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUstream;
use cudarc::driver::{CudaContext, CudaStream};

use super::order::join;
use crate::device::cuda::driver::capture::is_captured;
use crate::device::cuda::driver::unless_recorded;
use crate::device::cuda::memory::RawStream;
use crate::error::Result;

/// Streams that wait instead of captured ones: one, and one more for each helper stream that was drawn into a capture
/// which has not ended.
pub(crate) struct HelperStreams {
    context: Arc<CudaContext>,
    streams: Mutex<Vec<RawStream>>,
}

impl HelperStreams {
    pub(crate) fn new(context: &Arc<CudaContext>) -> Self {
        Self { context: Arc::clone(context), streams: Mutex::default() }
    }

    /// Returns the address that `take` gets from a slice with the stream that it is given. `captured` waits for the
    /// last use of the slice only if that use is part of its capture.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`](crate::Error::Driver) if that use is part of another capture, or of a capture that has
    /// ended.
    ///
    /// # Safety
    ///
    /// `captured` is a live stream of this context, which is current, and is being captured.
    pub unsafe fn address_in_capture(
        &self,
        captured: CUstream,
        take: impl FnOnce(&CudaStream) -> u64,
    ) -> Result<u64> {
        let mut helper_streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free = None;
        for helper in &*helper_streams {
            // SAFETY: the stream is live, as self owns it.
            if unsafe { !is_captured(helper.cu_stream())? } {
                free = Some(helper.borrowed());
                break;
            }
        }
        let helper = match free {
            Some(helper) => helper,
            None => {
                let helper = RawStream::new(&self.context)?;
                let borrowed = helper.borrowed();
                helper_streams.push(helper);
                borrowed
            }
        };
        let address = unless_recorded(&self.context, "an event of a slice's use", || take(&helper))?;
        // SAFETY: both streams are live: self owns the one, and the caller's contract covers the other.
        unsafe {
            // Waiting for a captured use has drawn the helper stream into that capture.
            if is_captured(helper.cu_stream())? {
                join(&self.context, helper.cu_stream(), captured)?;
            }
        }
        Ok(address)
    }
}
