//! Pinned host memory.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{sys, CudaContext};

use crate::device::cuda::driver::{api, bind, bind_to_free, driver, Relaxed};
use crate::error::Result;

/// Pinned host memory that is mapped for kernels too.
#[derive(Debug)]
pub(crate) struct Pinned {
    context: Arc<CudaContext>,
    host: *mut c_void,
    device: u64,
}

// SAFETY: plain memory of this process, valid in any thread until drop; its users access it atomically.
unsafe impl Send for Pinned {}
// SAFETY: as for Send; a shared `Pinned` only returns addresses.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates zeroed memory.
    pub fn allocate(context: &Arc<CudaContext>, bytes: usize) -> Result<Self> {
        bind(context)?;
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        let mut host = std::ptr::null_mut();
        // SAFETY: a context is current; the driver writes one address.
        unsafe { api::cuMemHostAlloc(&mut host, bytes, flags) }.map_err(driver("cuMemHostAlloc"))?;
        let mut pinned = Self { context: Arc::clone(context), host, device: 0 };
        // SAFETY: `bytes` bytes were allocated at `host`; the driver writes the device address of the same memory.
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
        // An error means that the context has been destroyed, and its memory with it.
        let _ = bind_to_free(&self.context);
        // SAFETY: allocated by `allocate`; the owner has waited for the kernels that use it.
        let _ = unsafe { api::cuMemFreeHost(self.host) };
    }
}
