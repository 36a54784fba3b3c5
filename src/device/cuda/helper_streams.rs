//! Addresses of cudarc's slices while a stream is captured.
//!
//! With event tracking, asking a slice for its address makes the given stream wait for the slice's last use. That use is
//! outside of the capture nearly always, and a captured stream that waits for it ends its capture with an error. So another
//! stream is given, which does the waiting; a graph runs when it is launched, after what its launcher has put before it.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUstream;
use cudarc::driver::{CudaContext, CudaStream};

use super::capture::is_captured;
use super::copies::RawStream;
use super::driver::unless_recorded;
use super::order::join;
use crate::error::Result;

/// Streams that wait instead of captured ones: one, and one more for each that was drawn into a capture which still goes on.
pub(crate) struct HelperStreams {
    context: Arc<CudaContext>,
    streams: Mutex<Vec<RawStream>>,
}

impl HelperStreams {
    pub(super) fn new(context: &Arc<CudaContext>) -> Self {
        Self { context: Arc::clone(context), streams: Mutex::default() }
    }

    /// The address that `take` asks a slice for with the stream that it is given. `captured` is made to wait for the slice's
    /// last use only if that is a part of its capture.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`](crate::Error::Driver) where that use is a part of another capture, or of one that has ended.
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
            // SAFETY: the stream is our own.
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
        // SAFETY: both streams are live, our own and the caller's.
        unsafe {
            // The use is a part of a capture, which waiting for it has drawn the stream into.
            if is_captured(helper.cu_stream())? {
                join(&self.context, helper.cu_stream(), captured)?;
            }
        }
        Ok(address)
    }
}
