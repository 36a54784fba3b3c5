//! Captures, and when all that came of one has gone.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use cudarc::driver::sys::{
    CUgraph, CUstream, CUstreamCaptureStatus, CUuserObject, CUuserObjectRetain_flags_enum,
    CUuserObject_flags_enum,
};

use super::api::{self, Code};
use super::driver::{driver, Relaxed};
use crate::error;

/// A graph and what was made of it.
#[derive(Debug, Clone, Default)]
pub(super) struct GraphLife(Arc<AtomicBool>);

impl GraphLife {
    /// Whether the graph, its clones and its executables have been destroyed, and no launch of them runs.
    pub fn has_ended(&self) -> bool {
        // Acquire pairs with the store in `end`: what the launches did comes before what is done now.
        self.0.load(Ordering::Acquire)
    }

    #[cfg(test)]
    pub fn set_ended(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Of the graph that a capture is building. Where the driver refuses what it takes, the graph is taken to live for ever.
    pub fn of(graph: CUgraph) -> Self {
        let life = Self::default();
        match life.follow(graph) {
            Ok(()) => life,
            Err(code) => {
                tracing::debug!(%code, "the end of a graph cannot be told");
                Self::default()
            }
        }
    }

    /// Hands the graph a user object. Clones and executables of the graph hold it as well, and so do launches until they have ended
    /// (CUDA Programming Guide, CUDA User Objects).
    fn follow(&self, graph: CUgraph) -> Result<(), Code> {
        let value = Arc::into_raw(Arc::clone(&self.0)).cast_mut().cast();
        let flags = CUuserObject_flags_enum::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
        let mut object: CUuserObject = null_mut();
        // SAFETY: the driver writes one handle, and calls `end` once with the value, when the last reference goes.
        if let Err(code) = unsafe { api::cuUserObjectCreate(&mut object, value, Some(end), 1, flags) } {
            // SAFETY: from `Arc::into_raw`, and the driver has not taken it.
            drop(unsafe { Arc::from_raw(value.cast::<AtomicBool>()) });
            return Err(code);
        }
        let flags = CUuserObjectRetain_flags_enum::CU_GRAPH_USER_OBJECT_MOVE as u32;
        // SAFETY: the graph is being captured, and the object was made above; its one reference becomes the graph's.
        unsafe { api::cuGraphRetainUserObject(graph, object, 1, flags) }.inspect_err(|_| {
            // SAFETY: the reference is still this function's. What ends with it is no graph's: the caller gives it up.
            let _ = unsafe { api::cuUserObjectRelease(object, 1) };
        })
    }
}

/// Called by the driver, in a thread of its own or of whoever destroys a graph, where no function of the driver may be called.
unsafe extern "C" fn end(value: *mut c_void) {
    // SAFETY: from `Arc::into_raw` in `follow`, and called once.
    let life = unsafe { Arc::from_raw(value.cast::<AtomicBool>().cast_const()) };
    life.store(true, Ordering::Release);
}

/// The handle of the legacy default stream, besides null.
pub(super) const LEGACY: usize = 1;

/// Whether work on a stream is being captured into a graph.
///
/// # Safety
///
/// `stream` is a live stream of the current context.
pub(crate) unsafe fn is_captured(stream: CUstream) -> error::Result<bool> {
    // The legacy stream never is, and asking it fails while a blocking stream is captured.
    if matches!(stream as usize, 0 | LEGACY) {
        return Ok(false);
    }
    const NONE: u32 = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32;
    let mut status = NONE;
    // SAFETY: the stream is the caller's; the driver writes one number.
    unsafe { api::cuStreamIsCapturing(stream, &mut status) }.map_err(driver("cuStreamIsCapturing"))?;
    Ok(status != NONE)
}

/// The answer to a question that a capture forbids to its thread, as answers are not captured. `None` if it cannot be asked.
pub(super) fn asked_in_capture(query: impl FnOnce() -> Result<(), Code>) -> Option<Result<(), Code>> {
    let _relaxed = Relaxed::enter()?;
    Some(query())
}

/// The capture that a stream is in: a number that no other has, and the graph that it builds. `None` where the stream is in none, or
/// the driver does not say.
///
/// # Safety
///
/// `stream` is a live stream of the current context.
pub(super) unsafe fn capture_of(stream: CUstream) -> Option<(u64, CUgraph)> {
    let (mut status, mut id, mut graph) = (0, 0, null_mut());
    // SAFETY: the stream is the caller's; the driver writes a status, a number and a handle. Without the dependencies, none of which
    // is asked for, there is no edge that it could not describe (CUDA_ERROR_LOSSY_QUERY).
    let asked = unsafe {
        api::cuStreamGetCaptureInfo_v2(stream, &mut status, &mut id, &mut graph, null_mut(), null_mut())
    };
    let is_active = status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32;
    asked.ok().filter(|()| is_active && !graph.is_null()).map(|()| (id, graph))
}
