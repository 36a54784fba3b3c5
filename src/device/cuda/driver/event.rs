//! Events without timing, which order streams and mark their progress.

use std::sync::Arc;

use cudarc::driver::{sys, CudaContext};

use super::api::{self, Code};
use super::{bind_to_free, driver};
use crate::error::Result;

/// Creates an event without timing in the current context.
pub(crate) fn create_event() -> Result<sys::CUevent> {
    let mut event = std::ptr::null_mut();
    let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
    // SAFETY: writes one handle.
    unsafe { api::cuEventCreate(&mut event, flags) }.map_err(driver("cuEventCreate"))?;
    Ok(event)
}

/// Event without timing, destroyed on drop.
#[derive(Debug)]
pub(crate) struct Event {
    context: Arc<CudaContext>,
    event: sys::CUevent,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as for Send.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event. The context must be current.
    pub fn new(context: &Arc<CudaContext>) -> Result<Self> {
        Ok(Self { context: Arc::clone(context), event: create_event()? })
    }

    /// Records the event after the work that is on `stream` now.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of the event's context, which is current.
    pub unsafe fn record(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: the event is live, and so is the stream by the caller's contract.
        unsafe { api::cuEventRecord(self.event, stream) }.map_err(driver("cuEventRecord"))
    }

    /// Makes a stream wait for the work that the event was last recorded after.
    ///
    /// # Safety
    ///
    /// As [`Event::record`].
    pub unsafe fn hold(&self, stream: sys::CUstream) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT as u32;
        // SAFETY: as in `record`.
        unsafe { api::cuStreamWaitEvent(stream, self.event, flags) }.map_err(driver("cuStreamWaitEvent"))
    }

    /// Returns success if the recorded work has ended, else `NOT_READY`. The context must be current.
    pub fn query(&self) -> Result<(), Code> {
        // SAFETY: the event is live.
        unsafe { api::cuEventQuery(self.event) }
    }

    /// Waits until the recorded work has ended. The context must be current.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event is live.
        unsafe { api::cuEventSynchronize(self.event) }.map_err(driver("cuEventSynchronize"))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // An error means that the context has been destroyed, and the event with it. Streams that wait for the event
        // continue to do so.
        let _ = bind_to_free(&self.context);
        // SAFETY: the event was created by `new` and is destroyed once.
        let _ = unsafe { api::cuEventDestroy_v2(self.event) };
    }
}
