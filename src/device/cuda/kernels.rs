//! The compiled kernels, loaded all at once when the device is made.

use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute};
use cudarc::driver::{result, CudaContext};

use super::driver::driver;
use crate::abi::{FaLaunch, FA_SUM};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::Algorithm;

/// The fatbin that build.rs made; empty without nvcc. The driver wants it aligned.
static FATBIN: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/cuda.fatbin")));

#[repr(C, align(16))]
struct Aligned<T: ?Sized>(T);

/// Worlds that the hot set has kernels of their own for.
const HOT_WORLDS: std::ops::RangeInclusive<usize> = 2..=8;
const VARIANTS: usize = 1 + 7;

/// Handles of all kernels: by algorithm, type, and variant (0: any operation and world; w - 1: a sum over w ranks).
type Table = [[[CUfunction; VARIANTS]; DType::ALL.len()]; Algorithm::ALL.len()];

/// The loaded module.
pub(super) struct Kernels {
    context: Arc<CudaContext>,
    module: sys::CUmodule,
    functions: Box<Table>,
    worlds: [[CUfunction; DType::ALL.len()]; Algorithm::ALL.len()],
}

// SAFETY: handles of the driver, which may be used from any thread.
unsafe impl Send for Kernels {}
// SAFETY: as above; nothing in it changes after loading.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Loads every kernel, now: a kernel that the driver loaded at its first launch could wait for a peer's kernel that spins
    /// in the same process.
    pub fn load(context: &Arc<CudaContext>) -> Result<Self> {
        if FATBIN.0.is_empty() {
            return Err(Error::Unavailable {
                what: "the CUDA device".into(),
                reason: format!("this build has no kernels for it: {}", env!("FAST_ALLREDUCE_CUDA_BUILD")),
            });
        }
        context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))?;
        // SAFETY: the image is a fatbin made by nvcc, and lives for ever.
        let module = unsafe { result::module::load_data(FATBIN.0.as_ptr().cast()) }
            .map_err(driver("cuModuleLoadData of the embedded kernels"))?;
        let null = std::ptr::null_mut();
        let mut kernels = Self {
            context: Arc::clone(context),
            module,
            functions: Box::new([[[null; VARIANTS]; DType::ALL.len()]; Algorithm::ALL.len()]),
            worlds: [[null; DType::ALL.len()]; Algorithm::ALL.len()],
        };
        for algorithm in Algorithm::ALL {
            let stem = algorithm.name().replace('-', "_");
            for dtype in DType::ALL {
                let (a, d) = (algorithm as usize, dtype as usize);
                let any = kernels.function(format!("{stem}_{dtype}"))?;
                kernels.functions[a][d] = [any; VARIANTS];
                kernels.worlds[a][d] = kernels.function(format!("world_{stem}_{dtype}"))?;
                if matches!(dtype, DType::F16 | DType::Bf16 | DType::F32) {
                    for world in HOT_WORLDS {
                        let hot = kernels.function(format!("{stem}_{dtype}_sum_w{world}"))?;
                        kernels.functions[a][d][world - 1] = hot;
                    }
                }
            }
        }
        Ok(kernels)
    }

    fn function(&self, name: String) -> Result<CUfunction> {
        // The names are letters, digits and underscores.
        let name = CString::new(name).map_err(|_| Error::Unavailable {
            what: "a kernel".into(),
            reason: "its name holds a zero byte".into(),
        })?;
        // SAFETY: the module is loaded.
        let function = unsafe { result::module::get_function(self.module, name) }
            .map_err(driver("cuModuleGetFunction"))?;
        // Asking for an attribute is what loads a kernel under lazy loading.
        let registers = CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
        // SAFETY: the function was just returned by the driver.
        unsafe { result::function::get_function_attribute(function, registers) }
            .map_err(driver("cuFuncGetAttribute"))?;
        Ok(function)
    }

    /// The kernel for a launch, most special first.
    pub fn for_launch(&self, launch: &FaLaunch) -> CUfunction {
        let variants = &self.functions[launch.algorithm as usize][launch.dtype as usize];
        let world = launch.world as usize;
        variants[if launch.op == FA_SUM && HOT_WORLDS.contains(&world) { world - 1 } else { 0 }]
    }

    /// The kernel that runs all ranks in one cooperative launch.
    pub fn for_world(&self, algorithm: Algorithm, dtype: DType) -> CUfunction {
        self.worlds[algorithm as usize][dtype as usize]
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // An error means that the context is gone, and the module with it.
        let _ = self.context.bind_to_thread();
        // SAFETY: loaded by `load`; whoever launched its kernels has waited for them.
        let _ = unsafe { result::module::unload(self.module) };
    }
}
