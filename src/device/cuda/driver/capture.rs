//! Stream captures, and the lifetime of the graphs that they build.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use cudarc::driver::sys::{
    CUgraph, CUstream, CUstreamCaptureStatus, CUuserObject, CUuserObjectRetain_flags_enum,
    CUuserObject_flags_enum,
};

use super::api::{self, Code};
use super::{driver, Relaxed};
use crate::error;

/// Lifetime of a captured graph, its clones and its executables.
#[derive(Debug, Clone, Default)]
pub(crate) struct GraphLife(Arc<AtomicBool>);

impl GraphLife {
    /// Returns whether the graph, its clones and its executables have been destroyed and none of their launches runs.
    pub fn has_ended(&self) -> bool {
        // Acquire pairs with the release store in `end`: everything that the launches did happens before what follows
        // here.
        self.0.load(Ordering::Acquire)
    }

    #[cfg(test)]
    pub fn set_ended(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Watches the graph that a capture is building. If the driver refuses the user object, the graph is assumed to
    /// live forever.
    pub fn of(graph: CUgraph) -> Self {
        let life = Self::default();
        match life.follow(graph) {
            Ok(()) => life,
            Err(code) => {
                tracing::debug!(%code, "the lifetime of a graph cannot be followed");
                Self::default()
            }
        }
    }

    /// Attaches a user object to the graph. Clones and executables of the graph hold it too, as do launches until
    /// they have ended (CUDA Programming Guide, CUDA User Objects).
    fn follow(&self, graph: CUgraph) -> Result<(), Code> {
        let value = Arc::into_raw(Arc::clone(&self.0)).cast_mut().cast();
        let flags = CUuserObject_flags_enum::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
        let mut object: CUuserObject = null_mut();
        // SAFETY: the driver writes one handle, and calls `end` once with the value, when the last reference is
        // released.
        if let Err(code) = unsafe { api::cuUserObjectCreate(&mut object, value, Some(end), 1, flags) } {
            // SAFETY: the value is from `Arc::into_raw`, and the driver has not taken it over.
            drop(unsafe { Arc::from_raw(value.cast::<AtomicBool>()) });
            return Err(code);
        }
        let flags = CUuserObjectRetain_flags_enum::CU_GRAPH_USER_OBJECT_MOVE as u32;
        // SAFETY: the graph is being captured, and the object was created above; its one reference is moved to the
        // graph.
        unsafe { api::cuGraphRetainUserObject(graph, object, 1, flags) }.inspect_err(|_| {
            // SAFETY: the reference still belongs to this function. Its release sets a flag that the caller discards.
            let _ = unsafe { api::cuUserObjectRelease(object, 1) };
        })
    }
}

/// Destructor of the user object. The driver calls it in one of its threads or in the thread that destroys a graph;
/// it must not call the driver.
unsafe extern "C" fn end(value: *mut c_void) {
    // SAFETY: the value is from `Arc::into_raw` in `follow`, and this is called once.
    let life = unsafe { Arc::from_raw(value.cast::<AtomicBool>().cast_const()) };
    life.store(true, Ordering::Release);
}

/// Handle of the legacy default stream, which null stands for as well.
pub(crate) const LEGACY: usize = 1;

/// Returns whether a stream is being captured into a graph.
///
/// # Safety
///
/// `stream` is a live stream of the current context.
pub(crate) unsafe fn is_captured(stream: CUstream) -> error::Result<bool> {
    // The legacy stream is never captured, and the query fails on it while a blocking stream is captured.
    if matches!(stream as usize, 0 | LEGACY) {
        return Ok(false);
    }
    const NONE: u32 = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32;
    let mut status = NONE;
    // SAFETY: the stream is live by the caller's contract; the driver writes one number.
    unsafe { api::cuStreamIsCapturing(stream, &mut status) }.map_err(driver("cuStreamIsCapturing"))?;
    Ok(status != NONE)
}

/// Runs a query that captures forbid to their thread by default. A query is not captured, so relaxed mode is safe.
/// Returns `None` if the mode cannot be changed.
pub(crate) fn query_in_capture(query: impl FnOnce() -> Result<(), Code>) -> Option<Result<(), Code>> {
    let _relaxed = Relaxed::enter()?;
    Some(query())
}

/// Returns the capture that a stream is in: its unique ID and the graph that it builds. Returns `None` if the stream
/// is not captured, or the driver does not say.
///
/// # Safety
///
/// `stream` is a live stream of the current context.
pub(crate) unsafe fn capture_of(stream: CUstream) -> Option<(u64, CUgraph)> {
    let (mut status, mut id, mut graph) = (0, 0, null_mut());
    // SAFETY: the stream is live by the caller's contract; the driver writes a status, a number and a handle.
    // Dependencies are not requested, so there are no edges that the call could fail to describe
    // (CUDA_ERROR_LOSSY_QUERY).
    let queried = unsafe {
        api::cuStreamGetCaptureInfo_v2(stream, &mut status, &mut id, &mut graph, null_mut(), null_mut())
    };
    let is_active = status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32;
    queried.ok().filter(|()| is_active && !graph.is_null()).map(|()| (id, graph))
}
