//! The step `facts`: what the driver and the GPU report.

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use fast_allreduce::device::cuda::api;
use fast_allreduce::topology::Topology;

use super::probe::context;
use super::record::{answer, fact, skipped};
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
    match Topology::discover() {
        Ok(topology) => fact("links", topology.to_string().trim_end().replace('\n', "; ")),
        Err(error) => skipped("links", error),
    }
}
