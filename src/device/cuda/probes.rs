//! What the program's `gpu-check` measures a GPU with: kernels of `csrc/probes`, in modules that only builds with the feature
//! `probes` have. Public for that program, and no part of the API.

use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::sys::{CUfunction, CUmodule};
use cudarc::driver::CudaContext;

use super::api;
use super::driver::{bind, bind_to_free, driver, require};
use super::kernels::Aligned;
use crate::error::{Error, Result};

static COSTS: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/costs.fatbin")));
static WORLDS: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/worlds.fatbin")));

/// The points of a call that a world's kernels stamp, after its beginning: `Stamp` of `csrc/probes/stamps.cuh`. Word 0 of a block's
/// sums is the number of turns, word 1 + i the cycles from the beginning of each to point i.
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

/// A module.
pub struct Probes {
    context: Arc<CudaContext>,
    module: CUmodule,
}

// SAFETY: a handle of the driver, which may be used from any thread.
unsafe impl Send for Probes {}
// SAFETY: as above.
unsafe impl Sync for Probes {}

impl Probes {
    /// Microbenchmarks, and kernels for probes of hazards.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] without a driver or kernels, [`Error::Driver`].
    pub fn costs(context: &Arc<CudaContext>) -> Result<Self> {
        Self::load(context, &COSTS.0)
    }

    /// The hot set with all ranks in one launch.
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
        // SAFETY: the image is a fatbin made by nvcc, and lives for ever; the driver writes one handle.
        unsafe { api::cuModuleLoadData(&mut module, image.as_ptr().cast()) }
            .map_err(driver("cuModuleLoadData of the kernels that measure"))?;
        Ok(Self { context: Arc::clone(context), module })
    }

    /// A kernel, which is live as long as self.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] where the module does not have it, [`Error::Driver`].
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
        // An error means that the context is gone, and the module with it.
        let _ = bind_to_free(&self.context);
        // SAFETY: loaded by `load`; whoever launched its kernels has waited for them.
        let _ = unsafe { api::cuModuleUnload(self.module) };
    }
}
