//! Compiled kernels: the modules of each context, which its communicators share. All kernels are loaded when the
//! first device of a context is created.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute};
use cudarc::driver::CudaContext;

use crate::abi::{self, FaLaunch, FA_SUM};
use crate::catalogue::{DType, KernelFacts, KernelFamily, HOT_WORLDS, KERNELS};
use crate::device::cuda::driver::{api, bind, bind_to_free, context_id, driver, Relaxed};
use crate::error::{Error, Result};

/// Fatbins from build.rs, one for each file of `csrc/cuda`; empty if nvcc was not available. The driver requires
/// alignment.
static FATBINS: [&Aligned<[u8]>; 4] = [
    &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/hot_set.fatbin"))),
    &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/any_world.fatbin"))),
    &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/norms.fatbin"))),
    &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/others.fatbin"))),
];
const HOT_SET: usize = 0;

#[repr(C, align(16))]
pub(crate) struct Aligned<T: ?Sized>(pub T);

const NOT_FOUND: u32 = api::Code::NOT_FOUND.0;

/// Variants of a kernel for one type: the general one, and one for each world size of the hot set.
const VARIANTS: usize = 1 + HOT_WORLDS.len();

/// Explains why the driver does not load the kernels, and what to build instead if that is known.
fn refused(context: &CudaContext, code: api::Code) -> Error {
    let built = env!("FAST_ALLREDUCE_CUDA_BUILD");
    let reason = match code {
        api::Code::NO_BINARY_FOR_GPU => {
            let (major, minor) = context.compute_capability().unwrap_or_default();
            format!(
                "the kernels of this build are not for a GPU of compute capability {major}.{minor} ({built}); \
                 build with FAST_ALLREDUCE_ARCHS=sm_{major}{minor}, or with FAST_ALLREDUCE_ARCHS=all"
            )
        }
        api::Code::UNSUPPORTED_PTX_VERSION => format!(
            "the driver is older than the kernels of this build ({built}), and they contain no code for this GPU; \
             build with FAST_ALLREDUCE_ARCHS naming its architecture, or with an older nvcc"
        ),
        code => return driver("cuModuleLoadData of the embedded kernels")(code),
    };
    Error::Unavailable { what: "the CUDA device".into(), reason }
}

/// Kernel handles by code, type and variant. Variant 0 takes any operation, world size and alignment; the others are
/// the hot set.
type Table = [[[CUfunction; VARIANTS]; DType::ALL.len()]; KERNELS.len()];

/// Modules by context ID. A context handle does not identify a context: a primary context that is reset, or released
/// and retained again, has the same handle but none of its modules. The ID is unique for the life of the program
/// (CUDA Driver API, `cuCtxGetId`).
static LOADED: Mutex<BTreeMap<u64, Arc<Slot>>> = Mutex::new(BTreeMap::new());

/// Modules of a context while they are in use. The slot is locked during loading; `LOADED` is not, because loading
/// may wait for kernels of this context that wait for a rank of another context, which may be loading too.
type Slot = Mutex<Weak<Kernels>>;

/// Loaded modules of a context.
pub(crate) struct Kernels {
    context: Arc<CudaContext>,
    /// ID of the context.
    id: u64,
    /// Modules of [`FATBINS`], in that order; fewer if loading failed.
    modules: Vec<sys::CUmodule>,
    functions: Box<Table>,
    share_probe: CUfunction,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Kernels {}
// SAFETY: as for Send; nothing changes after loading.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Returns the kernels of a context, and loads them if needed. A second communicator loads nothing, so it does
    /// not wait for kernels of the first one.
    pub fn of(context: &Arc<CudaContext>) -> Result<Arc<Self>> {
        bind(context)?;
        let id = context_id()?;
        let slot = {
            let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
            // Remove slots that are neither in use nor being loaded.
            loaded.retain(|_, slot| {
                Arc::get_mut(slot).is_none_or(|slot| {
                    slot.get_mut().unwrap_or_else(PoisonError::into_inner).strong_count() > 0
                })
            });
            Arc::clone(loaded.entry(id).or_default())
        };
        let mut kept = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = kept.upgrade() {
            return Ok(kernels);
        }
        let kernels = Arc::new(Self::load(context, id)?);
        *kept = Arc::downgrade(&kernels);
        Ok(kernels)
    }

    /// Returns the ID of the context.
    pub fn context_id(&self) -> u64 {
        self.id
    }

    /// Loads all kernels eagerly. Under lazy loading, the default since CUDA 12.2, the driver would load a kernel at
    /// its first launch, and that may wait for work that runs in the context (CUDA Programming Guide, Lazy Loading,
    /// Concurrent Execution): for example for a peer's kernel in the same process that spins until the kernel being
    /// loaded runs. The hot set alone is not enough, because the kernel that a rank takes depends on each call's
    /// alignment.
    fn load(context: &Arc<CudaContext>, id: u64) -> Result<Self> {
        if FATBINS[0].0.is_empty() {
            return Err(Error::Unavailable {
                what: "the CUDA device".into(),
                reason: format!("this build has no kernels for it: {}", env!("FAST_ALLREDUCE_CUDA_BUILD")),
            });
        }
        let null = std::ptr::null_mut();
        let mut kernels = Self {
            context: Arc::clone(context),
            id,
            modules: Vec::new(),
            functions: Box::new([[[null; VARIANTS]; DType::ALL.len()]; KERNELS.len()]),
            share_probe: null,
        };
        for fatbin in FATBINS {
            let mut module = std::ptr::null_mut();
            // SAFETY: the image is a static fatbin from nvcc; the driver writes one handle.
            unsafe { api::cuModuleLoadData(&mut module, fatbin.0.as_ptr().cast()) }
                .map_err(|code| refused(context, code))?;
            kernels.modules.push(module);
        }
        kernels.share_probe = kernels.function(module_of(KernelFamily::Other), "share_probe".into())?;
        for (code, kernel) in KERNELS.iter().enumerate() {
            for dtype in DType::ALL {
                let Some(name) = name(kernel, dtype) else { continue };
                let d = dtype as usize;
                kernels.functions[code][d] = match kernels.function(module_of(kernel.family), name.clone()) {
                    Ok(function) => [function; VARIANTS],
                    // Older GPUs lack the instructions: see `has_nvls`.
                    Err(Error::Driver { code: NOT_FOUND, .. }) if kernel.family == KernelFamily::Nvls => {
                        continue
                    }
                    Err(error) => return Err(error),
                };
                if kernel.is_hot && dtype.is_hot() {
                    for (variant, world) in HOT_WORLDS.iter().enumerate() {
                        kernels.functions[code][d][1 + variant] =
                            kernels.function(HOT_SET, format!("{name}_sum_w{world}"))?;
                    }
                }
            }
        }
        Ok(kernels)
    }

    fn function(&self, module: usize, name: String) -> Result<CUfunction> {
        // Kernel names consist of letters, digits and underscores, so this does not fail.
        let name = CString::new(name).map_err(|_| Error::Unavailable {
            what: "a kernel".into(),
            reason: "its name holds a zero byte".into(),
        })?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded; the driver reads the name and writes one handle.
        unsafe { api::cuModuleGetFunction(&mut function, self.modules[module], name.as_ptr()) }
            .map_err(driver("cuModuleGetFunction"))?;
        // Under lazy loading, the attribute query loads the kernel.
        let (attribute, mut registers) = (CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS, 0);
        // SAFETY: the function was just returned by the driver, which writes one int.
        unsafe { api::cuFuncGetAttribute(&mut registers, attribute, function) }
            .map_err(driver("cuFuncGetAttribute"))?;
        Ok(function)
    }

    /// Returns the kernel for a launch. The hot set covers unchecked launches on whole packs at aligned addresses; in
    /// a two-shot, every rank has the same number of packs. Inputs that peers read directly are aligned as well
    /// (`Device::SOURCE_ALIGNMENT`).
    pub fn for_launch(&self, launch: &FaLaunch) -> CUfunction {
        let variants = &self.functions[launch.algorithm as usize][launch.dtype as usize];
        variants[hot_world(launch).map_or(0, |position| 1 + position)]
    }

    /// Returns the kernel that checks shared memory, `csrc/cuda/share_probe.cuh`.
    pub fn share_probe(&self) -> CUfunction {
        self.share_probe
    }

    /// Returns whether the NVLS kernels are loaded.
    pub fn has_nvls(&self) -> bool {
        !self.functions[abi::FA_TWO_SHOT_NVLS as usize][DType::F32 as usize][0].is_null()
    }

    /// Returns the virtual architecture that the kernels were compiled for, in the driver's notation: 90 is
    /// compute_90.
    pub fn virtual_architecture(&self) -> Result<i32> {
        let (attribute, mut version) = (CUfunction_attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION, 0);
        let barrier = self.functions[abi::FA_BARRIER as usize][0][0];
        // SAFETY: the function belongs to a loaded module; the driver writes one int. All modules have the same
        // architecture.
        unsafe { api::cuFuncGetAttribute(&mut version, attribute, barrier) }
            .map_err(driver("cuFuncGetAttribute"))?;
        Ok(version)
    }

    /// Returns the kernel that can run all ranks in one cooperative launch.
    pub fn for_world(&self, launch: &FaLaunch) -> CUfunction {
        self.functions[launch.algorithm as usize][launch.dtype as usize][0]
    }
}

/// Returns the index in `HOT_WORLDS` of the kernel for a launch, if the hot set has one.
fn hot_world(launch: &FaLaunch) -> Option<usize> {
    let bytes = launch.count.wrapping_mul(DType::ALL[launch.dtype as usize].size() as u64);
    let pack = u64::from(abi::FA_CUDA_PACK_BYTES);
    let slices = match launch.algorithm {
        abi::FA_TWO_SHOT_PULL | abi::FA_TWO_SHOT_PUSH => u64::from(launch.world),
        _ => 1,
    };
    let whole = (launch.input | launch.output) % pack == 0 && bytes % (pack * slices) == 0;
    let hot = launch.op == FA_SUM && launch.checked == 0 && whole;
    HOT_WORLDS.iter().position(|&world| hot && world == launch.world as usize)
}

/// Returns the name of the kernel in `csrc/probes/worlds.cu` that runs all ranks of a launch repeatedly.
#[cfg(feature = "probes")]
pub(crate) fn repeated_kernel_name(launch: &FaLaunch) -> Option<String> {
    let (kernel, dtype) = (&KERNELS[launch.algorithm as usize], DType::ALL[launch.dtype as usize]);
    let hot = kernel.is_hot && dtype.is_hot() && hot_world(launch).is_some();
    hot.then(|| format!("world_{}_{dtype}_sum_w{}", kernel.name, launch.world))
}

/// Returns the index in [`FATBINS`] of the general kernels of a family.
fn module_of(family: KernelFamily) -> usize {
    match family {
        KernelFamily::Reducing => 1,
        KernelFamily::Norming => 2,
        KernelFamily::Moving | KernelFamily::Other | KernelFamily::Nvls => 3,
    }
}

/// Returns a kernel's symbol; `None` for a type that the kernel does not support, which plans never choose.
fn name(kernel: &KernelFacts, dtype: DType) -> Option<String> {
    match kernel.family {
        KernelFamily::Reducing => Some(format!("{}_{}", kernel.name, dtype.kernels())),
        KernelFamily::Moving | KernelFamily::Other => Some(kernel.name.to_owned()),
        KernelFamily::Norming | KernelFamily::Nvls => {
            dtype.is_hot().then(|| format!("{}_{dtype}", kernel.name))
        }
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let _relaxed = Relaxed::enter();
        // An error means that the context has been destroyed, and the modules with it.
        let _ = bind_to_free(&self.context);
        // If the ID differs, the context was reset, and the modules are gone as well. Queried twice, because an unload
        // is never retried.
        if context_id().or_else(|_| context_id()) == Ok(self.id) {
            for module in self.modules.drain(..) {
                // SAFETY: loaded by `load` in this context; the devices that launched its kernels have waited for
                // them.
                let _ = unsafe { api::cuModuleUnload(module) };
            }
        }
    }
}
