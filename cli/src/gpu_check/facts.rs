//! The step `facts`: what the driver and the GPU report.

use std::sync::Arc;

use cudarc::driver::sys::{CUdevice_attribute as Attribute, CUfunction_attribute};
use cudarc::driver::CudaContext;
use fast_allreduce::device::cuda::api::{self, Code};
use fast_allreduce::device::cuda::probes::Probes;
use fast_allreduce::topology::Topology;

use super::probe::context;
use super::record::{answer, check, fact, skipped};
use crate::arguments::GpuCheck;
use crate::failure::{driver, Failure};
use crate::harness::device::cuda;

#[rustfmt::skip]
const ATTRIBUTES: [(&str, Attribute); 17] = [
    ("multiprocessors", Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
    ("clock, kHz", Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
    ("memory clock, kHz", Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE),
    ("memory bus, bits", Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH),
    ("L2 cache, bytes", Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
    ("compute mode (0: shared by processes)", Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE),
    ("compute preemption", Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED),
    ("kernel run time limit", Attribute::CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT),
    ("concurrent kernels", Attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS),
    ("cooperative launch", Attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH),
    ("unified addressing", Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING),
    ("IPC events", Attribute::CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED),
    ("virtual memory management", Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED),
    ("memory as file descriptors", Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
    ("memory pools", Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED),
    ("handle types of memory pools", Attribute::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES),
    ("GPUDirect RDMA", Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED),
];

pub fn run(options: &GpuCheck) -> Result<(), Failure> {
    let count = cuda::gpus()?;
    let mut version = 0;
    // SAFETY: the driver writes one int.
    unsafe { api::cuDriverGetVersion(&mut version) }.map_err(driver("cuDriverGetVersion"))?;
    fact("CUDA version of the driver", format!("{}.{}", version / 1000, version % 1000 / 10))?;
    let kernel_module = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    fact("kernel module", kernel_module.lines().next().unwrap_or("none is visible"))?;
    fact("GPUs", count)?;

    let context = context(options.gpu)?;
    fact("GPU", context.name().map_err(driver("cuDeviceGetName"))?)?;
    let (major, minor) = context.compute_capability().map_err(driver("cuDeviceGetAttribute"))?;
    fact("compute capability", format!("{major}.{minor}"))?;
    let (free, total) = context.mem_get_info().map_err(driver("cuMemGetInfo"))?;
    fact("memory, bytes", format!("{total}, {free} free"))?;
    for (name, attribute) in ATTRIBUTES {
        match context.attribute(attribute) {
            Ok(value) => fact(name, value)?,
            Err(_) => skipped(name, "the driver does not support this attribute")?,
        }
    }
    let container = ["/.dockerenv", "/run/.containerenv"];
    let is_container = container.iter().any(|file| std::fs::exists(file).is_ok_and(|exists| exists));
    fact("in a container", if is_container { "yes" } else { "no sign of one" })?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/bin".into(), "/usr/local/nvidia/bin".into()]);
    let mps = folders.map(|folder| folder.join("nvidia-cuda-mps-control")).find(|file| file.is_file());
    let mps = mps.map_or("no".into(), |path| format!("yes, {}", path.display()));
    answer("Is nvidia-cuda-mps-control present?", mps)?;
    watchdog(&context)?;
    host_atomics(&context)?;
    loading(&context)?;
    match Topology::discover() {
        Ok(topology) => fact("links", topology.to_string().trim_end().replace('\n', "; ")),
        Err(error) => skipped("links", error),
    }
}

/// Warns of a watchdog.
fn watchdog(context: &CudaContext) -> Result<(), Failure> {
    let has_watchdog =
        context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT).is_ok_and(|is| is != 0);
    answer(
        "Does a watchdog end kernels that run for seconds (a display)?",
        match has_watchdog {
            false => "no",
            true => {
                "YES: kernels of this program wait for at most 1 s, and ranks that wait longer lose their \
                     contexts: use a GPU without a display, or set the communicators' timeout to 1 s"
            }
        },
    )
}

/// Lists what atomics on pinned host memory the GPU has, as the driver tells from CUDA 13 on.
fn host_atomics(context: &CudaContext) -> Result<(), Failure> {
    const NAME: &str = "atomics on host memory";
    /// Operations that kernels use, or might, on status pages: `CUatomicOperation`.
    const OPERATIONS: [(&str, u32); 4] = [("add", 0), ("or", 6), ("exchange", 8), ("compare and swap", 9)];
    const SCALAR_32: u32 = 8;
    let mut capabilities = [0; OPERATIONS.len()];
    let operations = OPERATIONS.map(|(_, operation)| operation);
    // SAFETY: the driver reads as many operations as it writes capabilities.
    let known = unsafe {
        api::cuDeviceGetHostAtomicCapabilities(
            capabilities.as_mut_ptr(),
            operations.as_ptr(),
            operations.len() as u32,
            context.cu_device(),
        )
    };
    match known {
        Ok(()) => {
            let has = |(&(name, _), capability): (&(&str, u32), &u32)| {
                format!("{name}: {}", if capability & SCALAR_32 != 0 { "yes" } else { "no" })
            };
            let all: Vec<_> = OPERATIONS.iter().zip(&capabilities).map(has).collect();
            fact(NAME, all.join(", "))
        }
        Err(Code::NOT_FOUND) => {
            skipped(NAME, "only drivers of CUDA 13 or newer know them: update the driver")
        }
        Err(code) => skipped(NAME, driver("cuDeviceGetHostAtomicCapabilities")(code)),
    }
}

/// Tells when the driver loads a kernel. The library relies on queries of attributes to load it.
fn loading(context: &Arc<CudaContext>) -> Result<(), Failure> {
    const NAME: &str = "loading of kernels";
    let probes = Probes::costs(context)?;
    let function = probes.function("empty")?;
    let is_loaded = || {
        let mut state = 0;
        // SAFETY: the function is valid as long as `probes`; the driver writes one number.
        unsafe { api::cuFuncIsLoaded(&mut state, function) }.map(|()| state != 0)
    };
    let found = is_loaded();
    let (mut registers, attribute) = (0, CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS);
    // SAFETY: as above; the driver writes one int.
    unsafe { api::cuFuncGetAttribute(&mut registers, attribute, function) }
        .map_err(driver("cuFuncGetAttribute"))?;
    match (found, is_loaded()) {
        (Ok(at_once), Ok(true)) => {
            let when = if at_once { "cuModuleGetFunction" } else { "a query of its attributes" };
            fact(NAME, format!("a kernel is loaded by {when}"))?;
            check(NAME, 1, Ok(()))
        }
        (Ok(_), Ok(false)) => check(
            NAME,
            1,
            Err(Failure::Ranks(
                "a query of a kernel's attributes does not load it, so its first launch may wait for a peer's \
                 kernel: set CUDA_MODULE_LOADING=EAGER"
                    .into(),
            )),
        ),
        (Err(code), _) | (_, Err(code)) => match code {
            Code::NOT_FOUND => skipped(NAME, "only drivers of CUDA 12.4 or newer tell: update the driver"),
            code => skipped(NAME, driver("cuFuncIsLoaded")(code)),
        },
    }
}
