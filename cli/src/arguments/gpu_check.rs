//! Options of `gpu-check`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::settings::{gpu_check_setting, Setting};

pub const NOTES: &str = "\
First, the answers that later steps depend on: facts (of the driver and the GPU), ipc-handles and ipc-descriptors
(whether two processes on one GPU open each other's memory, by CUDA IPC handles and by file descriptors). With two
GPUs or more: peers (every pair of GPUs, by every way of sharing), nvls (in-switch reduction), gpus (every collective
between GPUs, then times beside NCCL). On one GPU: cooperative (whether worlds of 2 to 16 ranks pass in one
cooperative launch), hot (the specialised kernels).

Then measurements: phases (the time of a call within a launch, by phase), costs (microbenchmarks, and the constants
of the GPU model), link (as phases, with the ranks' regions in host memory). Then how the driver treats ranks that
wait: beside-a-kernel, run-ahead.

Then threads (ranks are threads with a stream each), latency, time-slices (the cost of a barrier between two
processes that the GPU runs in time slices), world (all ranks in one cooperative launch: every algorithm, type and
operation), processes (two processes that share the GPU), fixed (the cost of a barrier), and bandwidth.

Each step is a process with its own time limit. A step that fails is reported, and the others run. If less than the
sum of the limits is left of --seconds, all limits shrink alike. Only peers, nvls and gpus use more than one GPU.

--set applies to the communicators of ranks that are threads or processes. The worlds of one cooperative launch have
none.

The exit status is 0 if all is right, 1 if a check failed, 2 if there is nothing to check.";

/// Options of `gpu-check`.
#[derive(Args, Debug, Clone)]
pub struct GpuCheck {
    /// Write all findings to this file, as one JSON object
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the summary to this file instead of standard output
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Run only this step; may be given several times [default: all]
    #[arg(long = "step", value_name = "NAME", value_enum)]
    pub steps: Vec<Step>,
    /// Fewer worlds, types and sizes: for tools that slow everything down
    #[arg(long)]
    pub small: bool,
    /// The GPU of all steps except peers, nvls and gpus
    #[arg(long, value_name = "ORDINAL", default_value_t = 0)]
    pub gpu: usize,
    /// Seconds for all steps together
    #[arg(long, value_name = "SECONDS", default_value_t = 540)]
    pub seconds: u64,
    /// Keep the steps that passed in the run that wrote the file of --json, and run the others
    #[arg(long)]
    pub resume: bool,
    /// A setting of the communicators, such as max_blocks=16; may be given several times. docs/tuning.md lists all
    /// settings
    #[arg(long, value_name = "NAME=VALUE", value_parser = gpu_check_setting)]
    pub set: Vec<Setting>,
    /// Time of a step, in milliseconds
    #[arg(long, hide = true, default_value_t = 60_000)]
    pub limit: u64,
    /// Run the steps in this process, and write their records as lines of JSON
    #[arg(long, hide = true)]
    pub alone: bool,
    /// Share memory by CUDA IPC until standard input is closed
    #[arg(long, hide = true)]
    pub export: bool,
    /// The GPUs of a step's ranks [default: all]
    #[arg(long, hide = true, value_delimiter = ',')]
    pub gpus: Vec<usize>,
    /// How the ranks share memory
    #[arg(long, hide = true)]
    pub sharing: Option<String>,
}

/// A step of `gpu-check`. Steps run in this order: the most informative ones first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Step {
    Facts,
    IpcHandles,
    IpcDescriptors,
    Peers,
    Nvls,
    Gpus,
    Cooperative,
    Hot,
    Phases,
    Costs,
    Link,
    BesideAKernel,
    RunAhead,
    Threads,
    Latency,
    TimeSlices,
    World,
    Processes,
    Fixed,
    Bandwidth,
}
