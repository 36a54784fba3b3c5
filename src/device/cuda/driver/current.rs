//! Preserves the caller's current context. Programs in other languages, which use `AnyCommunicator`, do not bind a
//! context before each call as this crate and cudarc do.

use cudarc::driver::sys::CUcontext;

use super::api::{self, Code};

/// Guard that restores the current context on drop: the context that was current when the guard was created, or none.
#[derive(Debug)]
pub struct CallersContext(CUcontext);

impl CallersContext {
    /// Keeps the context before a GPU communicator is built; loads the driver. Returns `None` without a driver, and
    /// in a thread without a context: that thread then keeps the GPU's context, as after its first call of the CUDA
    /// runtime.
    pub fn keep_if_any() -> Option<Self> {
        // Before the driver is initialised, the query fails: there is no context.
        current().ok().filter(|context| !context.is_null()).map(Self)
    }

    /// Keeps the context before a call of a GPU communicator, or before it is dropped.
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
            // An error means that the caller's context has been destroyed.
            // SAFETY: the handle was current in this thread when the guard was created, or is null, which stands for
            // no context.
            let _ = unsafe { api::cuCtxSetCurrent(self.0) };
        }
    }
}
