//! The caller's current context, which bindings of other languages leave as it was: their programs do not bind a context for each
//! call, as this crate and cudarc do.
//!
//! Hidden from the documentation: it is for the bindings of this repository, and no part of the API.

use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys::CUcontext;

use super::api::{self, Code};

/// Until it is dropped, which makes the context current again that was current when it was made; or none, where none was.
#[derive(Debug)]
pub struct CallersContext(CUcontext);

/// This process has made a [`CallersContext`], hence may have a communicator of GPUs.
///
/// Relaxed: whoever uses such a communicator has been given it by the thread that made it.
static IN_USE: AtomicBool = AtomicBool::new(false);

impl CallersContext {
    /// Before a communicator of GPUs is made: loads the driver. `None` where there is none, or it is at its end.
    pub fn keep() -> Option<Self> {
        IN_USE.store(true, Ordering::Relaxed);
        let mut current = std::ptr::null_mut();
        // SAFETY: writes one handle.
        match unsafe { api::cuCtxGetCurrent(&mut current) } {
            Ok(()) => Some(Self(current)),
            // Nobody has called the driver yet: there is no context.
            Err(Code::NOT_INITIALIZED) => Some(Self(std::ptr::null_mut())),
            Err(_) => None,
        }
    }

    /// Before any other call. `None` in a process that has no communicator of GPUs, whose driver is not touched.
    #[inline]
    pub fn keep_if_used() -> Option<Self> {
        match IN_USE.load(Ordering::Relaxed) {
            true => Self::keep(),
            false => None,
        }
    }
}

impl Drop for CallersContext {
    fn drop(&mut self) {
        let mut current = std::ptr::null_mut();
        // SAFETY: writes one handle.
        let known = unsafe { api::cuCtxGetCurrent(&mut current) };
        if known.is_ok() && current != self.0 {
            // An error means that the caller's context has gone.
            // SAFETY: it was current in this thread when this was made, or is null, which is none.
            let _ = unsafe { api::cuCtxSetCurrent(self.0) };
        }
    }
}
