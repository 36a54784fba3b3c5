//! Options of `gpu-check`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

pub const NOTES: &str = "\
First the answers that all else depends on: facts (of the driver and the GPU), mps (is its control program there),
ipc-handles and ipc-descriptors (do two processes on one GPU open each other's memory, by CUDA IPC handles and by file
descriptors), cooperative (do worlds of 2 to 16 ranks pass in one cooperative launch), hot (do the specialised kernels).

Then what is measured: turns (what a call takes within a launch, and where its time goes), costs (microbenchmarks, and the
constants of the model of GPUs), link (as turns, with the ranks' memory behind the link to the host). What the driver does to
ranks that wait: beside-a-kernel, run-ahead, local-memory.

Then threads (ranks are threads with a stream each), latency, time-slices (what a barrier between two processes that take turns
costs), world (all ranks in one cooperative launch: every algorithm, type and operation), processes (two processes that take
turns), fixed (what a launch and a barrier cost), bandwidth, host-bench and host-tune (bench and tune on the CPUs), memcheck and
synccheck (compute-sanitizer over a small part of world, where it is found) and tests (the programs that --test names).

Each is a process with a time limit of its own; what fails is reported while the others go on. Limits shrink with what is left
of --seconds. Everything is on one GPU: nothing here is a measurement of NVLink.

The exit status is 0 if all is right, 1 if a check failed, 2 if there is nothing to check.";

/// Options of `gpu-check`.
#[derive(Args, Debug)]
pub struct GpuCheck {
    /// Write everything there to, as one JSON object
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the summary there instead of to standard output
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Only this step; may be given several times [default: all]
    #[arg(long = "step", value_name = "NAME", value_enum)]
    pub steps: Vec<Step>,
    /// Fewer worlds, types and sizes: for tools that slow everything down
    #[arg(long)]
    pub small: bool,
    /// The GPU
    #[arg(long, value_name = "ORDINAL", default_value_t = 0)]
    pub gpu: usize,
    /// Seconds for all steps together
    #[arg(long = "seconds", visible_alias = "budget", value_name = "SECONDS", default_value_t = 540)]
    pub budget: u64,
    /// Keep what passed in the run that wrote the file of --json, and do the other steps
    #[arg(long)]
    pub resume: bool,
    /// A test of the CUDA device to run in the step tests, as cargo test --no-run makes it; may be given several times
    #[arg(long = "test", value_name = "FILE")]
    pub tests: Vec<PathBuf>,
    /// Keep what other programs print in this folder
    #[arg(long, value_name = "FOLDER")]
    pub logs: Option<PathBuf>,
    /// Milliseconds that a step has
    #[arg(long, hide = true, default_value_t = 60_000)]
    pub limit: u64,
    /// Do the steps in this process, and write their records as lines of JSON
    #[arg(long, hide = true)]
    pub alone: bool,
    /// How two processes share memory
    #[arg(long, hide = true, value_enum)]
    pub sharing: Option<SharingName>,
}

/// A part of `gpu-check`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Step {
    Facts,
    Mps,
    IpcHandles,
    IpcDescriptors,
    Cooperative,
    Hot,
    Turns,
    Costs,
    Link,
    BesideAKernel,
    RunAhead,
    LocalMemory,
    Threads,
    Latency,
    TimeSlices,
    World,
    Processes,
    Fixed,
    Bandwidth,
    HostBench,
    HostTune,
    Memcheck,
    Synccheck,
    Tests,
}

/// How two processes share memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SharingName {
    Descriptor,
    Ipc,
}
