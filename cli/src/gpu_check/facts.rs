//! What the driver and the GPU say of themselves.

use std::path::PathBuf;

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::CudaContext;
use fast_allreduce::device::cuda::api;
use fast_allreduce::topology::Topology;

use super::record::Record;
use crate::arguments::GpuCheck;
use crate::failure::{driver, Failure};
use crate::harness::device::cuda;

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
    (
        "memory as file descriptors",
        Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    ),
    ("memory pools", Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED),
    ("handle types of memory pools", Attribute::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES),
    ("GPUDirect RDMA", Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED),
];

/// Writes them.
pub fn run(options: &GpuCheck) -> Result<(), Failure> {
    let count = cuda::gpus()?;
    let mut version = 0;
    // SAFETY: the driver writes one int.
    unsafe { api::cuDriverGetVersion(&mut version) }.map_err(driver("cuDriverGetVersion"))?;
    Record::fact("CUDA version of the driver", format!("{}.{}", version / 1000, version % 1000 / 10))
        .write()?;
    let kernel_module = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    Record::fact("kernel module", kernel_module.lines().next().unwrap_or("none is visible")).write()?;
    Record::fact("GPUs", count).write()?;

    let context = CudaContext::new(options.gpu).map_err(driver("cuDevicePrimaryCtxRetain"))?;
    Record::fact("GPU", context.name().map_err(driver("cuDeviceGetName"))?).write()?;
    let (major, minor) = context.compute_capability().map_err(driver("cuDeviceGetAttribute"))?;
    Record::fact("compute capability", format!("{major}.{minor}")).write()?;
    let (free, total) = context.mem_get_info().map_err(driver("cuMemGetInfo"))?;
    Record::fact("memory, bytes", format!("{total}, {free} free")).write()?;
    for (name, attribute) in ATTRIBUTES {
        match context.attribute(attribute) {
            Ok(value) => Record::fact(name, value).write()?,
            Err(_) => Record::skipped(name, "the driver does not know it").write()?,
        }
    }
    let container =
        ["/.dockerenv", "/run/.containerenv"].iter().any(|file| std::fs::exists(file).is_ok_and(|is| is));
    Record::fact("in a container", if container { "yes" } else { "no sign of it" }).write()?;
    match Topology::discover() {
        Ok(topology) => Record::fact("links", topology.to_string().trim_end().replace('\n', "; ")).write(),
        Err(error) => Record::skipped("links", error).write(),
    }
}

/// The step `mps`.
pub fn mps() -> Result<(), Failure> {
    let found = find("nvidia-cuda-mps-control", &["/usr/bin", "/usr/local/nvidia/bin"]);
    let answer = found.map_or("no".into(), |path| format!("yes, {}", path.display()));
    Record::answer("Is nvidia-cuda-mps-control present?", answer).write()
}

/// The program of that name, in PATH or in one of the `usual` places.
pub fn find(program: &str, usual: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(usual.iter().map(PathBuf::from));
    folders.map(|folder| folder.join(program)).find(|file| file.is_file())
}
