//! Options of `bench`, which `compare` has as well.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use fast_allreduce::device::host::{available_memory, Isa};
use fast_allreduce::{Algorithm, CallKind, DType, ReduceOp, Settings};

use super::values::{self, Choice};
use super::Form;
use super::{CommunicatorOptions, DeviceName, LaunchOptions, DEFAULT_RANKS};
use crate::failure::Failure;

pub const NOTES: &str = "\
Sizes take the suffixes K, M, G and T, powers of 1024.

Sizes are those of nccl-tests: of the larger of a call's buffers, which for all_gather, reduce_scatter, gather,
scatter and all_to_all hold a share for each rank. count is the elements of a share, and in the uneven collectives
(_v) their mean. There, each share has one element more than the one before: rank r's has r more than the first, and
in all_to_all_v the share that goes to the r-th rank to the right has. send_recv sends to the right neighbour and
receives from the left one. Calls that cannot be in place are N/A.

Columns: time is that of --iters calls back to back divided by their number, on the slowest rank. p50 and p99 are of
single calls (at most 10000), each after a barrier, on the slowest rank. algbw is size / time. busbw is algbw * 2
(ranks - 1) / ranks for all_reduce, algbw for broadcast, reduce and send_recv, else algbw * (ranks - 1) / ranks.
memcpy is the time of a copy of the same size, made by every rank at the same time for at least 10 ms. / memcpy is
time out of place divided by it: how far the call is from the bandwidth of a copy on this machine. #wrong counts
elements over all ranks that differ in any bit from the reduction in rank order with one rounding, or from the data to
be copied. ring and halving-doubling round at each step: their float results are wrong if their distance from the
reduction in f64 is more than that explains. They have no averages of integers, which a direct algorithm computes
instead. In-switch reductions are checked like ring. The line of the order says whether the switch reduces, and if
not, why.

With --device cuda, rank r has GPU r modulo their number. Ranks that share a GPU run in time slices, and nothing
crosses NVLink. Calls are timed by events around replays of a graph of 20 calls, and p50 and p99 are of replays,
divided by 20. With --eager plain calls are timed instead, including their launch.

--report writes one HTML page without references to other files: charts of latency (p50) and bus bandwidth against
size, out of place, with a line for each algorithm; all numbers; the facts of the machine; the command.

--collective all_reduce_fused prints what compare does. A row of results is of --rows rows of --hidden elements.
fast-allreduce is the fused call: the sum over ranks is added to a residual, and the rows of the result are
normalised. unfused is all_reduce, then an addition and a norm by the same ranks: in Rust that the compiler has
vectorised, or on GPUs in one kernel. all_reduce is the allreduce alone. #wrong counts elements of the residual and
of the output: of fast-allreduce those that differ in any bit from the documented arithmetic; of unfused those of
the residual, and those of the output whose distance from the norm in f64 is more than rounding explains.

--form measures other fused calls on the host, in turns with unfused, the separate calls and loops in vectorised Rust
that they replace, and with plain, the collective of unquantised elements alone. The ratio of unfused is the gain. Forms
are those of --collective all_reduce_fused; a format's name stands for an RMSNorm whose rows are quantised, in e4m3 or
4 bits; scatter is reduce_scatter_fused, and gather all_gather_rows against an all_gather of numbers and one of scales
(tiles and columns are not joined), both with as many rows on each rank; sharded is sharded_rms_norm of rows that are
divided among the ranks; experts sums 4 experts' rows for each row. #wrong of fast-allreduce counts elements of the
residual and the rows, numbers and bytes of scales that differ in any bit; unfused is not checked.

Without --iters, calls are repeated for about 20 ms, at least 20 and at most 10000 times.

A row ends in a remark if its calls are not from one population: p99 is more than 4 times p50, or two ranks ran on
one core.

The exit status is 0 if all is right, 1 if an element is wrong, 2 if the run failed or its results could not be
written, 141 if the reader of the results has closed the pipe.";

/// Options of `bench`.
#[derive(Args, Debug)]
pub struct Bench {
    /// Smallest message [default: 1K]
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", value_parser = values::size)]
    pub(super) min_bytes: Option<usize>,
    /// Largest message [default: 16M]
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", value_parser = values::size)]
    pub(super) max_bytes: Option<usize>,
    /// Multiply the size from row to row [default: 4]
    #[arg(short = 'f', long = "stepfactor", value_name = "FACTOR")]
    pub(super) step_factor: Option<usize>,
    /// Add to the size from row to row instead
    #[arg(
        short = 'i',
        long = "stepbytes",
        value_name = "SIZE",
        value_parser = values::size,
        conflicts_with = "step_factor"
    )]
    pub(super) step_bytes: Option<usize>,
    /// Timed calls for each row [default: as many as take 20 ms, 20 to 10000]
    #[arg(short = 'n', long = "iters", value_name = "COUNT", value_parser = values::positive)]
    pub iterations: Option<u64>,
    /// Calls before the timed ones
    #[arg(short = 'w', long = "warmup_iters", value_name = "COUNT", default_value_t = 5)]
    pub warmup: u64,
    /// Checked calls for each row, each on new inputs; 0 checks nothing
    #[arg(short = 'c', long = "check", value_name = "COUNT", default_value_t = 1)]
    pub checks: u64,
    /// Element type: f16, bf16, f32, f64, i8, u8, i32, u32, i64, u64, f8e4m3, f8e5m2, a name of nccl-tests (half,
    /// float, ...), or all [default: f32; bf16 of all_reduce_fused]
    #[arg(short = 'd', long = "datatype", value_name = "TYPE", value_parser = values::dtypes)]
    dtypes: Option<Choice<DType>>,
    /// Operation of collectives that reduce: sum, prod, min, max, avg, or all
    #[arg(short = 'o', long = "op", value_name = "OP", default_value = "sum", value_parser = values::ops)]
    pub ops: Choice<ReduceOp>,
    /// Collective: all_reduce, all_gather, all_gather_v, reduce_scatter, reduce_scatter_v, broadcast, reduce,
    /// gather, scatter, all_to_all, all_to_all_v, send_recv, or all of these in turn; or all_reduce_fused
    #[arg(
        long = "collective",
        value_name = "NAME",
        default_value = "all_reduce",
        value_parser = values::collectives
    )]
    pub(super) collectives: Choice<CallKind>,
    /// Elements of a row of all_reduce_fused, one number or several [default: 2048,4096,5120,7168,8192,16384]
    #[arg(long, value_name = "COUNT", value_delimiter = ',')]
    pub(super) hidden: Vec<usize>,
    /// Rows of all_reduce_fused, one number or several [default: 1,8,64,512]
    #[arg(long, value_name = "COUNT", value_delimiter = ',')]
    pub(super) rows: Vec<usize>,
    /// Forms of fused calls in place of all_reduce_fused with an RMSNorm, one or several, or all: rms, layer (each also
    /// with _offset), a format of quantised rows, experts, scatter, scatter_FORMAT, gather_FORMAT, sharded
    #[arg(long = "form", value_name = "NAME", value_delimiter = ',', value_parser = values::forms)]
    pub(super) forms: Vec<Choice<&'static Form>>,
    /// Root of broadcast, reduce, gather and scatter [default: 0]
    #[arg(short = 'r', long, value_name = "RANK")]
    pub(super) root: Option<usize>,
    /// Algorithm of all_reduce: auto, one-shot-pull, two-shot-pull, one-shot-push, two-shot-push, ring,
    /// halving-doubling, or all six in turn [default: auto; the first four for a report of bench]
    #[arg(long = "algo", value_name = "NAME", value_parser = values::algorithms)]
    pub(super) algorithms: Option<Choice<Option<Algorithm>>>,
    /// Ranks, a process each [default: 4]
    #[arg(long, value_name = "COUNT", value_parser = values::ranks)]
    ranks: Option<usize>,
    /// Nodes on which mpirun has started the ranks, as many on each: of several, all_reduce is hierarchical, by MPI
    /// between nodes
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = values::ranks)]
    pub nodes: usize,
    /// Device of the ranks' memory
    #[arg(long, value_name = "NAME", value_enum, default_value_t = DeviceName::Host)]
    pub device: DeviceName,
    /// With --device cuda: time plain calls instead of graphs of 20
    #[arg(long)]
    pub eager: bool,
    /// Seed of the inputs [default: random]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Keep inputs in registered buffers, which peers read without a copy
    #[arg(long)]
    pub registered: bool,
    /// In the end suspend the communicator and resume it, and show the bytes given back and the times
    #[arg(long)]
    pub suspend: bool,
    #[command(flatten)]
    pub launch: LaunchOptions,
    #[command(flatten)]
    pub communicator: CommunicatorOptions,
    /// Instruction set of the host kernels [default: the best of this CPU]
    #[arg(long, value_name = "NAME", value_parser = values::isa)]
    pub isa: Option<Isa>,
    /// Format of the results
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,
    /// Also write a page with charts to this file: HTML, without references to other files
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// The table of nccl-tests
    Table,
    /// One object
    Json,
    /// A header line, then a line for each row
    Csv,
}

impl Bench {
    /// Returns the number of ranks to launch.
    pub fn ranks(&self) -> usize {
        self.ranks.unwrap_or(DEFAULT_RANKS)
    }

    /// Returns the settings of the communicators to measure.
    pub fn settings(&self) -> Result<Settings, Failure> {
        self.communicator.settings(self.device, &self.launch)
    }

    /// Returns the requested algorithms; `None` is the plan's choice.
    pub fn algorithms(&self) -> Option<&[Option<Algorithm>]> {
        self.algorithms.as_ref().map(|choice| &*choice.0)
    }

    /// Returns the requested types.
    pub fn dtypes(&self) -> Vec<DType> {
        let default = if self.is_fused() { DType::Bf16 } else { DType::F32 };
        self.dtypes.as_ref().map_or_else(|| vec![default], |choice| choice.0.clone())
    }

    pub(super) fn min_bytes(&self) -> usize {
        self.min_bytes.unwrap_or(1 << 10)
    }

    pub(super) fn max_bytes(&self) -> usize {
        self.max_bytes.unwrap_or(16 << 20)
    }

    /// Returns the requested sizes in bytes.
    pub fn sizes(&self) -> impl Iterator<Item = usize> + '_ {
        let next = |&size: &usize| match self.step_bytes {
            Some(step) => size.checked_add(step),
            None => size.checked_mul(self.step_factor()),
        };
        // A single size need not grow.
        let grown = move |size: &usize| next(size).filter(|next| next > size);
        std::iter::successors(Some(self.min_bytes()), grown).take_while(|&size| size <= self.max_bytes())
    }

    fn step_factor(&self) -> usize {
        self.step_factor.unwrap_or(4)
    }

    /// Refuses impossible options before anything is started.
    pub fn validate(&self) -> Result<(), Failure> {
        let refuse = |reason: String| Err(Failure::Usage(reason));
        match self.device {
            DeviceName::Cuda if self.isa.is_some() => {
                return refuse("--isa is an option of --device host".into());
            }
            DeviceName::Host if self.eager => return refuse("--eager is an option of --device cuda".into()),
            _ => {}
        }
        self.settings()?;
        self.validate_nodes()?;
        self.validate_fused()?;
        self.validate_collective()?;
        let (min, max, factor) = (self.min_bytes(), self.max_bytes(), self.step_factor());
        match self.step_bytes {
            _ if min > max => refuse(format!("--minbytes {min} is more than --maxbytes {max}")),
            _ if min == max => Ok(()),
            Some(0) => refuse("--stepbytes 0 never reaches --maxbytes".into()),
            None if factor < 2 => refuse(format!("--stepfactor {factor} never reaches --maxbytes")),
            None if min == 0 => refuse("--minbytes 0 grows by no factor: give --stepbytes".into()),
            _ => Ok(()),
        }
    }

    /// Refuses what ranks on several nodes lack.
    fn validate_nodes(&self) -> Result<(), Failure> {
        let lacks = match self.device {
            _ if self.nodes == 1 => return Ok(()),
            DeviceName::Cuda => "--device cuda",
            _ if !self.is_all_reduce() => "collectives other than all_reduce",
            _ if self.algorithms.is_some() => "--algo",
            _ if self.registered => "--registered",
            _ if self.suspend => "--suspend",
            _ => return Ok(()),
        };
        Err(Failure::Usage(format!("--nodes {} has no {lacks}", self.nodes)))
    }

    /// Refuses to start ranks on several nodes.
    pub fn check_launch(&self) -> Result<(), Failure> {
        if self.nodes == 1 {
            return Ok(());
        }
        let build = if cfg!(feature = "mpi") { "" } else { ", with a build that has the feature `mpi`" };
        Err(Failure::Usage(format!(
            "--nodes {0}: start the ranks by mpirun{build}, as in `mpirun --host node0:2,node1:2 fast-allreduce \
             compare --nodes {0}`",
            self.nodes
        )))
    }

    /// Refuses buffers larger than the available memory, which the kernel would grant and then kill the process for.
    pub fn check_memory(&self) -> Result<(), Failure> {
        if self.is_fused() {
            // Input, sum, residual and output.
            let bytes = self.fused_cases().map(|case| case.count().saturating_mul(case.dtype.size())).max();
            return check_available("the largest shape", bytes.unwrap_or(0), 4, self.ranks());
        }
        check_memory(self.max_bytes(), self.ranks())
    }

    /// Refuses a world of another size than `--ranks`.
    pub fn check_world(&self, world_size: usize) -> Result<(), Failure> {
        match self.ranks {
            Some(ranks) if ranks != world_size => Err(Failure::Usage(format!(
                "--ranks {ranks}, but the environment names a world of {world_size}"
            ))),
            _ => self.check_forms(world_size).and_then(|()| self.check_root(world_size)),
        }
    }
}

/// Refuses an input and an output for each rank that do not fit the available memory.
pub fn check_memory(max_bytes: usize, ranks: usize) -> Result<(), Failure> {
    check_available(&format!("--maxbytes {max_bytes}"), max_bytes, 2, ranks)
}

/// Refuses buffers of each rank that do not fit the memory of this machine and this container.
fn check_available(what: &str, bytes: usize, buffers: usize, ranks: usize) -> Result<(), Failure> {
    let needed = bytes.saturating_mul(buffers).saturating_mul(ranks);
    match available_memory() {
        Some(available) if needed as u64 > available => Err(Failure::Usage(format!(
            "{what} needs {needed} bytes of memory for {ranks} ranks, {available} are available"
        ))),
        _ => Ok(()),
    }
}
