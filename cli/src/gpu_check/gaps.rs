//! What comes between two kernels: of a stream, of a graph, and where the second one is let in before the first has ended.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUevent_flags, CUfunction, CUgraphInstantiate_flags, CUlaunchAttribute, CUlaunchAttributeID,
    CUlaunchConfig, CUstreamCaptureMode,
};
use cudarc::driver::CudaStream;
use fast_allreduce::device::cuda::api;

use super::probe::{median, Bench, Work};
use super::record::{constant, Record};
use crate::failure::{driver, Failure};

const TABLE: &str = "Nanoseconds from one kernel to the next";
/// Of a round.
const LAUNCHES: u32 = 200;

pub fn run(bench: &Bench) -> Result<(), Failure> {
    let empty = bench.function("empty")?;
    let launch = || bench.launch_on(&bench.stream, empty, (1, 32), Work::default(), false);
    let (plain, graph) = (period(bench, false, launch)?, period(bench, true, launch)?);
    constant("launch_ns", plain)?;
    constant("node_ns", graph)?;
    Record::figure(TABLE, "empty kernels", "stream", plain).write()?;
    Record::figure(TABLE, "empty kernels", "graph", graph).write()?;
    for (name, bytes) in [("parameters_64", 64), ("parameters_576", 576)] {
        let launch = || launch_with_parameters(bench, &bench.stream, name, bytes);
        let row = format!("kernels with {bytes} bytes of parameters");
        Record::figure(TABLE, row, "graph", period(bench, true, launch)?).write()?;
    }
    let dependent = bench.function("empty_dependent")?;
    let launch = || launch_dependent(bench, dependent);
    for (column, graph) in [("stream", false), ("graph", true)] {
        match period(bench, graph, launch) {
            Ok(period) => {
                Record::figure(TABLE, "kernels that depend programmatically", column, period).write()?;
                if graph {
                    constant("dependent_ns", period)?;
                }
            }
            Err(failure) => {
                Record::skipped(format!("programmatic dependent launches, {column}"), failure).write()?;
            }
        }
    }
    Ok(())
}

/// Nanoseconds of each launch, of many that follow each other: the median of some rounds.
fn period(bench: &Bench, graph: bool, launch: impl Fn() -> Result<(), Failure>) -> Result<f64, Failure> {
    const ROUNDS: usize = 9;
    let stream = &bench.stream;
    let event = || {
        let event = bench.context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        event.map_err(driver("cuEventCreate"))
    };
    let (start, end) = (event()?, event()?);
    let all = || (0..LAUNCHES).try_for_each(|_| launch());
    let graph = match graph {
        true => Some(capture(stream, all)?),
        false => None,
    };
    let mut times = Vec::new();
    for round in 0..=ROUNDS {
        start.record(stream).map_err(driver("cuEventRecord"))?;
        match &graph {
            Some(graph) => graph.launch().map_err(driver("cuGraphLaunch"))?,
            None => all()?,
        }
        end.record(stream).map_err(driver("cuEventRecord"))?;
        let milliseconds = start.elapsed_ms(&end).map_err(driver("cuEventElapsedTime"))?;
        // The first warms up.
        if round > 0 {
            times.push(f64::from(milliseconds) * 1e6 / f64::from(LAUNCHES));
        }
    }
    Ok(median(times))
}

fn capture(
    stream: &Arc<CudaStream>,
    all: impl FnOnce() -> Result<(), Failure>,
) -> Result<cudarc::driver::CudaGraph, Failure> {
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream.begin_capture(mode).map_err(driver("cuStreamBeginCapture"))?;
    let captured = all();
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).map_err(driver("cuStreamEndCapture"));
    captured?;
    graph?.ok_or_else(|| Failure::Ranks("a capture of launches has no graph".into()))
}

/// One of the kernels whose parameters are the results and so many bytes with them.
pub fn launch_with_parameters(
    bench: &Bench,
    stream: &CudaStream,
    name: &str,
    bytes: usize,
) -> Result<(), Failure> {
    let mut results = bench.results();
    let mut words = [0_u32; 142];
    debug_assert!(bytes - size_of::<u64>() <= size_of_val(&words));
    let mut parameters: [*mut c_void; 2] = [(&raw mut results).cast(), (&raw mut words).cast()];
    let (function, parameters, none) = (bench.function(name)?, parameters.as_mut_ptr(), std::ptr::null_mut());
    // SAFETY: the kernel takes an address and at most so many words, which the driver copies; it writes three words of results.
    unsafe { api::cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream.cu_stream(), parameters, none) }
        .map_err(driver("cuLaunchKernel"))
}

/// A kernel that may begin before the one in front of it has ended.
fn launch_dependent(bench: &Bench, function: CUfunction) -> Result<(), Failure> {
    // SAFETY: plain structs of numbers and addresses, for which zero is a value.
    let (mut attribute, mut config): (CUlaunchAttribute, CUlaunchConfig) = unsafe { std::mem::zeroed() };
    attribute.id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    (config.gridDimX, config.gridDimY, config.gridDimZ) = (1, 1, 1);
    (config.blockDimX, config.blockDimY, config.blockDimZ) = (32, 1, 1);
    config.hStream = bench.stream.cu_stream();
    (config.attrs, config.numAttrs) = (&raw mut attribute, 1);
    let mut words = [0_u64; 5];
    let mut parameters = words.each_mut().map(|word| (&raw mut *word).cast::<c_void>());
    // SAFETY: the kernel takes five parameters of at most 8 bytes, and uses none of them.
    unsafe { api::cuLaunchKernelEx(&config, function, parameters.as_mut_ptr(), std::ptr::null_mut()) }
        .map_err(driver("cuLaunchKernelEx"))
}
