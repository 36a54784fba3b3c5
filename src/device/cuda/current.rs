//! The caller's current context, which an `AnyCommunicator` leaves as it was: programs in other languages do not bind a context for
//! each call, as this crate and cudarc do.

use cudarc::driver::sys::CUcontext;

use super::api::{self, Code};

/// Until it is dropped, which makes the context current again that was current when it was made; or none, where none was.
#[derive(Debug)]
pub struct CallersContext(CUcontext);

impl CallersContext {
    /// Before a communicator of GPUs is made: loads the driver. `None` where there is none, and in a thread without a context, which has
    /// the GPU's afterwards, as after the first call of CUDA's runtime.
    pub fn keep_if_any() -> Option<Self> {
        // Before the driver was initialised there is none.
        current().ok().filter(|context| !context.is_null()).map(Self)
    }

    /// Before a call of a communicator of GPUs, and before its end.
    #[inline]
    pub fn keep() -> Option<Self> {
        current().ok().map(Self)
    }
}

fn current() -> Result<CUcontext, Code> {
    let mut current = std::ptr::null_mut();
    // SAFETY: writes one handle.
    unsafe { api::cuCtxGetCurrent(&mut current) }.map(|()| current)
}

impl Drop for CallersContext {
    fn drop(&mut self) {
        if current().is_ok_and(|current| current != self.0) {
            // An error means that the caller's context has gone.
            // SAFETY: it was current in this thread when this was made, or is null, which is none.
            let _ = unsafe { api::cuCtxSetCurrent(self.0) };
        }
    }
}
