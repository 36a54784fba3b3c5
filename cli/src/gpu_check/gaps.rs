//! The gap between two kernels: of a stream, of a graph, and with programmatic dependent launch.

use std::ffi::c_void;

use cudarc::driver::sys::{CUfunction, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchConfig};
use cudarc::driver::CudaStream;
use fast_allreduce::device::cuda::api;

use super::probe::{median_ns, ProbeRunner, Workload};
use super::record::{constant, figure, skipped};
use crate::failure::{driver, Failure};
use crate::harness::device::cuda::capture;

const TABLE: &str = "Nanoseconds from one kernel to the next";

pub fn run(probes: &ProbeRunner) -> Result<(), Failure> {
    let empty = probes.function("empty")?;
    let launch = || probes.launch_on(&probes.stream, empty, (1, 32), Workload::default(), false);
    let (plain, graph) = (period(probes, false, launch)?, period(probes, true, launch)?);
    constant("launch_ns", plain)?;
    constant("node_ns", graph)?;
    figure(TABLE, "empty kernels", "stream", plain)?;
    figure(TABLE, "empty kernels", "graph", graph)?;
    for (name, bytes) in [("parameters_64", 64), ("parameters_576", 576)] {
        let launch = || launch_with_parameters(probes, &probes.stream, name, bytes);
        let row = format!("kernels with {bytes} bytes of parameters");
        figure(TABLE, row, "graph", period(probes, true, launch)?)?;
    }
    let dependent = probes.function("empty_dependent")?;
    for (column, graph) in [("stream", false), ("graph", true)] {
        match period(probes, graph, || launch_dependent(probes, dependent)) {
            Ok(period) => {
                figure(TABLE, "kernels with programmatic dependent launch", column, period)?;
                if graph {
                    constant("dependent_ns", period)?;
                }
            }
            Err(failure) => skipped(format!("programmatic dependent launches, {column}"), failure)?,
        }
    }
    Ok(())
}

/// Returns the nanoseconds of each of many launches back to back.
fn period(
    probes: &ProbeRunner,
    graph: bool,
    launch: impl Fn() -> Result<(), Failure>,
) -> Result<f64, Failure> {
    const ROUNDS: usize = 9;
    const LAUNCHES: u32 = 200;
    let all = || (0..LAUNCHES).try_for_each(|_| launch());
    let ns = match graph {
        true => {
            let graph = capture(&probes.stream, all)?;
            median_ns(&probes.stream, ROUNDS, || graph.launch().map_err(driver("cuGraphLaunch")))?
        }
        false => median_ns(&probes.stream, ROUNDS, all)?,
    };
    Ok(ns / f64::from(LAUNCHES))
}

/// Launches a kernel whose parameters are the address of the results and words, `bytes` together.
pub fn launch_with_parameters(
    probes: &ProbeRunner,
    stream: &CudaStream,
    name: &str,
    bytes: usize,
) -> Result<(), Failure> {
    let mut results = probes.results();
    let mut words = [0_u32; 142];
    debug_assert!(bytes - size_of::<u64>() <= size_of_val(&words));
    let mut parameters: [*mut c_void; 2] = [(&raw mut results).cast(), (&raw mut words).cast()];
    let (function, parameters, none) =
        (probes.function(name)?, parameters.as_mut_ptr(), std::ptr::null_mut());
    // SAFETY: the kernel takes an address and at most 142 words, which the driver copies; it writes three words of
    // results.
    unsafe { api::cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream.cu_stream(), parameters, none) }
        .map_err(driver("cuLaunchKernel"))
}

/// Launches a kernel that may begin before its predecessor on the stream has ended.
fn launch_dependent(probes: &ProbeRunner, function: CUfunction) -> Result<(), Failure> {
    // SAFETY: plain structs of numbers and addresses, for which zero is a value.
    let (mut attribute, mut config): (CUlaunchAttribute, CUlaunchConfig) = unsafe { std::mem::zeroed() };
    attribute.id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    (config.gridDimX, config.gridDimY, config.gridDimZ) = (1, 1, 1);
    (config.blockDimX, config.blockDimY, config.blockDimZ) = (32, 1, 1);
    config.hStream = probes.stream.cu_stream();
    (config.attrs, config.numAttrs) = (&raw mut attribute, 1);
    let mut words = [0_u64; 5];
    let mut parameters = words.each_mut().map(|word| (&raw mut *word).cast::<c_void>());
    // SAFETY: the kernel takes five parameters of at most 8 bytes, and uses none of them.
    unsafe { api::cuLaunchKernelEx(&config, function, parameters.as_mut_ptr(), std::ptr::null_mut()) }
        .map_err(driver("cuLaunchKernelEx"))
}
