//! Kernels of `csrc/probes`, by which the program's `gpu-check` measures a GPU. The modules exist only in builds with
//! the feature `probes`. Public for that program; not part of the API.

use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::sys::{CUfunction, CUmodule};
use cudarc::driver::CudaContext;

use super::driver::{api, bind, bind_to_free, driver, require};
use super::launch::kernels::Aligned;
use crate::error::{Error, Result};

static COSTS: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/costs.fatbin")));
static WORLDS: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/worlds.fatbin")));

/// Points of a call at which the kernels take time stamps: `Stamp` of `csrc/probes/stamps.cuh`. Word 0 of a block's
/// sums is the number of repetitions. Word 1 + i is the sum of cycles from the beginning of a repetition to point i.
pub const STAMPS: [&str; 11] = [
    "epoch read",
    "staged",
    "reduced",
    "gathered",
    "signalled",
    "second signal",
    "all have come",
    "all have come again",
    "packets sent",
    "packets reduced",
    "end",
];

/// A loaded module of `csrc/probes`.
pub struct Probes {
    context: Arc<CudaContext>,
    module: CUmodule,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Probes {}
// SAFETY: as for Send.
unsafe impl Sync for Probes {}

impl Probes {
    /// Loads the microbenchmarks and the kernels that check for possible deadlocks.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] without a driver or without kernels in this build; [`Error::Driver`].
    pub fn costs(context: &Arc<CudaContext>) -> Result<Self> {
        Self::load(context, &COSTS.0)
    }

    /// Loads the hot set with all ranks in one launch.
    ///
    /// # Errors
    ///
    /// As [`Probes::costs`].
    pub fn worlds(context: &Arc<CudaContext>) -> Result<Self> {
        Self::load(context, &WORLDS.0)
    }

    fn load(context: &Arc<CudaContext>, image: &'static [u8]) -> Result<Self> {
        require()?;
        if image.is_empty() {
            return Err(Error::Unavailable {
                what: "the kernels that measure".into(),
                reason: format!("this build has none: {}", env!("FAST_ALLREDUCE_CUDA_BUILD")),
            });
        }
        bind(context)?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is a static fatbin from nvcc; the driver writes one handle.
        unsafe { api::cuModuleLoadData(&mut module, image.as_ptr().cast()) }
            .map_err(driver("cuModuleLoadData of the kernels that measure"))?;
        Ok(Self { context: Arc::clone(context), module })
    }

    /// Returns a kernel, which is valid as long as self.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if the module does not contain it; [`Error::Driver`].
    pub fn function(&self, name: &str) -> Result<CUfunction> {
        let missing = || Error::Unavailable {
            what: format!("the kernel {name}"),
            reason: "the driver does not find it in the module".into(),
        };
        let symbol = CString::new(name).map_err(|_| missing())?;
        bind(&self.context)?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded; the driver reads the name and writes one handle.
        match unsafe { api::cuModuleGetFunction(&mut function, self.module, symbol.as_ptr()) } {
            Err(api::Code::NOT_FOUND) => Err(missing()),
            found => found.map(|()| function).map_err(driver("cuModuleGetFunction")),
        }
    }
}

impl Drop for Probes {
    fn drop(&mut self) {
        // An error means that the context has been destroyed, and the module with it.
        let _ = bind_to_free(&self.context);
        // SAFETY: loaded by `load`; the callers that launched its kernels have waited for them.
        let _ = unsafe { api::cuModuleUnload(self.module) };
    }
}
