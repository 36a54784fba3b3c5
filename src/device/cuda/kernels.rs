//! The compiled kernels: the modules of each context, which its communicators share, loaded with all of their kernels when the
//! first device is made.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute};
use cudarc::driver::CudaContext;

use super::api;
use super::driver::{bind, bind_to_free, context_id, driver, Relaxed};
use crate::abi::{self, FaLaunch, FA_SUM};
use crate::catalogue::{DType, KernelFacts, KernelFamily, HOT_WORLDS, KERNELS};
use crate::error::{Error, Result};

/// The fatbins that build.rs made, one for each family of kernels, a file of `csrc/cuda`; empty without nvcc. The driver wants
/// them aligned.
static FATBINS: [&Aligned<[u8]>; 4] = [
    &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/hot_set.fatbin"))),
    &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/any_world.fatbin"))),
    &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/norms.fatbin"))),
    &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/others.fatbin"))),
];
const HOT_SET: usize = 0;

#[repr(C, align(16))]
pub(super) struct Aligned<T: ?Sized>(pub T);

const NOT_FOUND: u32 = api::Code::NOT_FOUND.0;

/// Kernels of a reduction for one type: for any world, and for the worlds of the hot set.
const VARIANTS: usize = 1 + HOT_WORLDS.len();
/// Why the driver does not load the kernels, with what to build instead where that is known.
fn refused(context: &CudaContext, code: api::Code) -> Error {
    let built = env!("FAST_ALLREDUCE_CUDA_BUILD");
    let reason = match code {
        api::Code::NO_BINARY_FOR_GPU => {
            let (major, minor) = context.compute_capability().unwrap_or_default();
            format!(
                "the kernels of this build are not for a GPU of compute capability {major}.{minor} ({built}); build with \
                 FAST_ALLREDUCE_ARCHS=sm_{major}{minor}, or with FAST_ALLREDUCE_ARCHS=all"
            )
        }
        api::Code::UNSUPPORTED_PTX_VERSION => format!(
            "the driver is older than the kernels of this build ({built}), and they hold no code for this GPU; build with \
             FAST_ALLREDUCE_ARCHS naming its architecture, or with an older nvcc"
        ),
        code => return driver("cuModuleLoadData of the embedded kernels")(code),
    };
    Error::Unavailable { what: "the CUDA device".into(), reason }
}

/// Handles of all kernels: by code, type, and variant (0: any operation, world and alignment; then those of the hot set).
type Table = [[[CUfunction; VARIANTS]; DType::ALL.len()]; KERNELS.len()];

/// The modules of each context, by the context's number. Handles are no names for contexts: a primary context that is reset, or
/// released and retained again, has its handle again, and none of its modules. Its number is unique as long as the program runs
/// (CUDA Driver API, `cuCtxGetId`), so that modules are found in the very context that they were loaded in.
static LOADED: Mutex<BTreeMap<u64, Arc<Slot>>> = Mutex::new(BTreeMap::new());

/// A context's modules, as long as somebody has them. Locked while they are loaded, when `LOADED` is not: loading may wait for kernels
/// of this context that wait for a rank of another one, which may be loading, too.
type Slot = Mutex<Weak<Kernels>>;

/// The loaded modules.
pub(super) struct Kernels {
    context: Arc<CudaContext>,
    /// Of the context.
    id: u64,
    /// As many of [`FATBINS`] as are loaded.
    modules: Vec<sys::CUmodule>,
    functions: Box<Table>,
}

// SAFETY: handles of the driver, which may be used from any thread.
unsafe impl Send for Kernels {}
// SAFETY: as above; nothing in it changes after loading.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// The kernels in this context, loaded unless they are. A second communicator loads nothing, and so waits for no kernel of
    /// the first one.
    pub fn of(context: &Arc<CudaContext>) -> Result<Arc<Self>> {
        bind(context)?;
        let id = context_id()?;
        let slot = {
            let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
            // What nobody holds or loads.
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

    /// The number of their context.
    pub fn context_id(&self) -> u64 {
        self.id
    }

    /// Loads every kernel, now. Under lazy loading, the default since CUDA 12.2, the driver would load a kernel at its first
    /// launch, which may wait for what runs in the context (CUDA Programming Guide, Lazy Loading, Concurrent Execution): for a
    /// peer's kernel in the same process, say, that spins for the one that is being loaded. All are loaded and not the hot set
    /// alone, as which ones a rank takes depends on each call's alignment.
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
        };
        for fatbin in FATBINS {
            let mut module = std::ptr::null_mut();
            // SAFETY: the image is a fatbin made by nvcc, and lives for ever; the driver writes one handle.
            unsafe { api::cuModuleLoadData(&mut module, fatbin.0.as_ptr().cast()) }
                .map_err(|code| refused(context, code))?;
            kernels.modules.push(module);
        }
        for (code, kernel) in KERNELS.iter().enumerate() {
            for dtype in DType::ALL {
                let Some(name) = name(kernel, dtype) else { continue };
                let d = dtype as usize;
                kernels.functions[code][d] = match kernels.function(module_of(kernel.family), name.clone()) {
                    Ok(function) => [function; VARIANTS],
                    // Only newer GPUs have the instructions: `has_nvls`.
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
        // The names are letters, digits and underscores.
        let name = CString::new(name).map_err(|_| Error::Unavailable {
            what: "a kernel".into(),
            reason: "its name holds a zero byte".into(),
        })?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded; the driver reads the name and writes one handle.
        unsafe { api::cuModuleGetFunction(&mut function, self.modules[module], name.as_ptr()) }
            .map_err(driver("cuModuleGetFunction"))?;
        // Asking for an attribute is what loads a kernel under lazy loading.
        let (attribute, mut registers) = (CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS, 0);
        // SAFETY: the function was just returned by the driver, which writes one int.
        unsafe { api::cuFuncGetAttribute(&mut registers, attribute, function) }
            .map_err(driver("cuFuncGetAttribute"))?;
        Ok(function)
    }

    /// The kernel for a launch. The hot set has no code for calls that are compared, nor for parts of packs: its messages are
    /// whole packs at aligned addresses, in a two-shot as many for each rank. What peers read directly is aligned as well
    /// (`Device::SOURCE_ALIGNMENT`).
    pub fn for_launch(&self, launch: &FaLaunch) -> CUfunction {
        let variants = &self.functions[launch.algorithm as usize][launch.dtype as usize];
        variants[hot_world(launch).map_or(0, |position| 1 + position)]
    }

    /// Whether the kernels of NVLS are there.
    pub fn has_nvls(&self) -> bool {
        !self.functions[abi::FA_TWO_SHOT_NVLS as usize][DType::F32 as usize][0].is_null()
    }

    /// The virtual architecture that they were compiled for, as the driver counts: 90 is compute_90.
    pub fn virtual_architecture(&self) -> Result<i32> {
        let (attribute, mut version) = (CUfunction_attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION, 0);
        let barrier = self.functions[abi::FA_BARRIER as usize][0][0];
        // SAFETY: the function is of a loaded module, as all are of one architecture; the driver writes one int.
        unsafe { api::cuFuncGetAttribute(&mut version, attribute, barrier) }
            .map_err(driver("cuFuncGetAttribute"))?;
        Ok(version)
    }

    /// The kernel that can run all ranks in one cooperative launch.
    pub fn for_world(&self, launch: &FaLaunch) -> CUfunction {
        self.functions[launch.algorithm as usize][launch.dtype as usize][0]
    }
}

/// Which of the hot set's worlds a launch is of, if the hot set has a kernel for it.
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

/// What csrc/probes/worlds.cu calls the kernel for a call of all ranks in one launch.
#[cfg(feature = "probes")]
pub(super) fn name_in_turns(launch: &FaLaunch) -> Option<String> {
    let (kernel, dtype) = (&KERNELS[launch.algorithm as usize], DType::ALL[launch.dtype as usize]);
    let hot = kernel.is_hot && dtype.is_hot() && hot_world(launch).is_some();
    hot.then(|| format!("world_{}_{dtype}_sum_w{}", kernel.name, launch.world))
}

/// Which of [`FATBINS`] has the kernels for any world.
fn module_of(family: KernelFamily) -> usize {
    match family {
        KernelFamily::Reducing => 1,
        KernelFamily::Norming => 2,
        KernelFamily::Moving | KernelFamily::Other | KernelFamily::Nvls => 3,
    }
}

/// `None` for a type that the kernel is not made for, and is never asked to do.
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
        // An error means that the context is gone, and the modules with it.
        let _ = bind_to_free(&self.context);
        // So does another number: the context was reset. Asked twice, as nobody asks again.
        if context_id().or_else(|_| context_id()) == Ok(self.id) {
            for module in self.modules.drain(..) {
                // SAFETY: loaded by `load` in this context; whoever launched its kernels has waited for them.
                let _ = unsafe { api::cuModuleUnload(module) };
            }
        }
    }
}
