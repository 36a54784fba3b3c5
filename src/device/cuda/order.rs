//! Calls of one communicator on several streams, kept in their order.

use std::sync::{Arc, MutexGuard, PoisonError};

use cudarc::driver::sys::{self, CUevent_flags, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus};
use cudarc::driver::{result, CudaStream};

use super::driver::driver;
use super::Cuda;
use crate::error::{Error, Result};

/// The stream of the last call.
#[derive(Default)]
pub(super) struct LastStream(Option<(Stream, Option<Arc<CudaStream>>)>);

#[derive(Clone, Copy, PartialEq)]
struct Stream(CUstream);

// SAFETY: a handle of the driver, which may be used from any thread.
unsafe impl Send for Stream {}

impl Cuda {
    /// Orders a call on `stream` after the last call: where that was on another stream, through an event. `owner` keeps the
    /// stream alive until the next call.
    ///
    /// # Safety
    ///
    /// `stream` is a stream of this context. Without an `owner`, it lives until the next call of the communicator, or its end.
    pub(crate) unsafe fn order(&self, stream: CUstream, owner: Option<&Arc<CudaStream>>) -> Result<()> {
        let mut last = self.last_stream.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((Stream(previous), _)) = &last.0 {
            if *previous == stream {
                return Ok(());
            }
            // SAFETY: both streams are live: the caller's, for this one and, then, for the previous.
            unsafe { wait_for(*previous, stream) }?;
        }
        last.0 = Some((Stream(stream), owner.cloned()));
        Ok(())
    }

    /// Waits until the kernels of the last call have ended, and with it those of all calls before; not for those of other ranks
    /// on the same GPU, which may wait for this rank.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] while the last call's stream is captured: what ran on it before the capture may still run, and
    /// the driver lets nobody wait for it. (Another stream's calls have ended: [`wait_for`] lets a captured call follow no
    /// others.)
    pub(super) fn wait_for_last_call(&self) -> Result<()> {
        let last = self.last_stream.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((Stream(stream), _)) = &last.0 else {
            return Ok(());
        };
        self.bind()?;
        // SAFETY: the stream is live until the next call, or the end of the communicator, by the contract of `order`.
        unsafe {
            if is_captured(*stream)? {
                return Err(Error::Unavailable {
                    what: "the memory that calls use".into(),
                    reason: "the last call's stream is being captured, and what ran before on it may still run; end the \
                             capture first"
                        .into(),
                });
            }
            result::stream::synchronize(*stream).map_err(driver("cuStreamSynchronize"))
        }
    }

    /// Whether work on the stream is being captured into a graph.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of this context.
    pub(crate) unsafe fn capturing(&self, stream: CUstream) -> Result<bool> {
        // SAFETY: the caller's.
        unsafe { is_captured(stream) }
    }

    /// Held for the whole of a call, so that no other thread's gets between its ordering and its launch.
    pub(crate) fn calls(&self) -> MutexGuard<'_, ()> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// # Safety
///
/// `stream` is a live stream of the current context.
pub(super) unsafe fn is_captured(stream: CUstream) -> Result<bool> {
    // SAFETY: the caller's.
    let status = unsafe { result::stream::is_capturing(stream) }.map_err(driver("cuStreamIsCapturing"))?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Whether all work on a stream is done, asked while another is captured. `false` if that cannot be told.
///
/// # Safety
///
/// `stream` is a live stream of the current context, and not captured.
unsafe fn has_ended(stream: CUstream) -> bool {
    // The legacy stream cannot be asked: it would wait for the capture.
    if stream.is_null() || stream as usize == 1 {
        return false;
    }
    // The question is one of those that a capture forbids to its thread, as their answers are not captured.
    let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: sets this thread's mode, and back.
    unsafe {
        if sys::cuThreadExchangeStreamCaptureMode(&mut mode).result().is_err() {
            return false;
        }
        let ended = sys::cuStreamQuery(stream).result().is_ok();
        sys::cuThreadExchangeStreamCaptureMode(&mut mode).result().is_ok() && ended
    }
}

/// Orders `next` after what is on `previous` now.
///
/// # Safety
///
/// Both are live streams of the current context.
unsafe fn wait_for(previous: CUstream, next: CUstream) -> Result<()> {
    // SAFETY: the caller's.
    if unsafe { is_captured(next)? || is_captured(previous)? } {
        // SAFETY: the caller's.
        if unsafe { is_captured(next)? && has_ended(previous) } {
            return Ok(());
        }
        return Err(Error::Unavailable {
            what: "a call on another stream than the last".into(),
            reason: "one of the two is being captured, and a graph cannot wait for what is outside it; \
                     synchronise the last call's stream first, and capture the communicator's calls on one stream"
                .into(),
        });
    }
    // SAFETY: the caller's.
    unsafe { join(previous, next) }
}

/// Makes `next` wait for what is on `previous` now. Both are captured, into one graph, or neither is.
///
/// # Safety
///
/// Both are live streams of the current context.
pub(super) unsafe fn join(previous: CUstream, next: CUstream) -> Result<()> {
    let event =
        result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(driver("cuEventCreate"))?;
    // SAFETY: the event was just made, the streams are the caller's. An event that is destroyed while a stream waits for
    // it is kept by the driver until then.
    unsafe {
        let recorded = result::event::record(event, previous).map_err(driver("cuEventRecord"));
        let waiting = recorded.and_then(|()| {
            let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            result::stream::wait_event(next, event, flags).map_err(driver("cuStreamWaitEvent"))
        });
        result::event::destroy(event).map_err(driver("cuEventDestroy"))?;
        waiting
    }
}
