//! Host memory that kernels reach.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{sys, CudaContext};

use super::api;
use super::driver::{bind, bind_to_free, driver, Relaxed};
use crate::error::Result;

/// Pinned host memory that kernels reach too.
#[derive(Debug)]
pub(crate) struct Pinned {
    context: Arc<CudaContext>,
    host: *mut c_void,
    device: u64,
}

// SAFETY: plain memory of this process, valid from any thread until drop; its users access it atomically.
unsafe impl Send for Pinned {}
// SAFETY: as above; a shared Pinned only gives out its addresses.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Zeroed.
    pub fn allocate(context: &Arc<CudaContext>, bytes: usize) -> Result<Self> {
        bind(context)?;
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        let mut host = std::ptr::null_mut();
        // SAFETY: a context is current; the driver writes one address.
        unsafe { api::cuMemHostAlloc(&mut host, bytes, flags) }.map_err(driver("cuMemHostAlloc"))?;
        let mut pinned = Self { context: Arc::clone(context), host, device: 0 };
        // SAFETY: `bytes` bytes were allocated at `host`, and the driver writes the address of the same memory.
        unsafe {
            host.cast::<u8>().write_bytes(0, bytes);
            api::cuMemHostGetDevicePointer_v2(&mut pinned.device, host, 0)
        }
        .map_err(driver("cuMemHostGetDevicePointer"))?;
        Ok(pinned)
    }

    pub fn host_pointer(&self) -> *mut c_void {
        self.host
    }

    pub fn device_address(&self) -> u64 {
        self.device
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _relaxed = Relaxed::enter();
        // An error here means that the context is gone, and its memory with it.
        let _ = bind_to_free(&self.context);
        // SAFETY: allocated by `allocate`; the region's owner has waited for the kernels that use it.
        let _ = unsafe { api::cuMemFreeHost(self.host) };
    }
}
