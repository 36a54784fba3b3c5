//! The command line.

mod cases;
mod compare;
mod gpu_check;
mod placement;
mod plans;
mod rows;
mod settings;
mod soak;
mod values;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use fast_allreduce::device::host::{available_memory, Isa};
use fast_allreduce::plan::DeviceKind;
use fast_allreduce::{Algorithm, CallKind, DType, ReduceOp, Settings};

pub use self::cases::Case;
pub use self::compare::{Compare, RivalName};
pub use self::gpu_check::GpuCheck;
#[cfg(feature = "cuda")]
pub use self::gpu_check::{SharingName, Step};
pub use self::placement::Placement;
pub use self::plans::{Plan, Tune};
pub use self::rows::RowsCase;
pub use self::settings::Given;
pub use self::soak::{Faults, Soak, SummaryFormat};
use self::values::Choice;
use crate::failure::Failure;

/// Ranks where nothing says otherwise.
const DEFAULT_RANKS: usize = 4;

/// What the program is asked to do.
pub enum Command {
    /// It has been printed.
    Help(ExitCode),
    Version {
        verbose: bool,
    },
    Bench(Box<Bench>),
    Compare(Box<Compare>),
    Topology(Topology),
    Plan(Plan),
    Tune(Box<Tune>),
    Soak(Soak),
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    GpuCheck(GpuCheck),
    Completions(Shell),
    Man(Man),
}

/// Measures and checks fast-allreduce on this machine.
#[derive(Parser)]
#[command(name = "fast-allreduce", disable_version_flag = true, arg_required_else_help = true)]
struct CommandLine {
    /// Print the version
    #[arg(short = 'V', long)]
    version: bool,
    /// With --version: what was found at build time and what this machine has
    #[arg(long, requires = "version")]
    verbose: bool,
    #[command(subcommand)]
    subcommand: Option<Subcommands>,
}

#[derive(Subcommand)]
enum Subcommands {
    /// Time a collective over a range of sizes and check every element, with the flags and columns of nccl-tests
    #[command(after_help = BENCH_NOTES)]
    Bench(Box<Bench>),
    /// Time and check this crate and other libraries on the same buffers, in turns within one run
    #[command(after_help = compare::NOTES)]
    Compare(Box<Compare>),
    /// Print who reaches whom: GPUs as nvidia-smi topo -m does, with what is done for each number of ranks; CPUs, caches and NUMA
    /// nodes
    Topology(Topology),
    /// Print what is done for each number of ranks and each size
    Plan(Plan),
    /// Measure the algorithms and grids on this machine, and write what is best to a file that the library loads
    #[command(after_help = plans::TUNE_NOTES)]
    Tune(Box<Tune>),
    /// Make random calls for a while, and check everything
    #[command(after_help = soak::SOAK_NOTES)]
    Soak(Soak),
    /// Prove the kernels on a GPU, step by step, and measure them
    #[command(after_help = gpu_check::NOTES)]
    GpuCheck(GpuCheck),
    /// Print completions for a shell: source them, or put them where it looks
    Completions {
        /// Which shell
        #[arg(value_name = "SHELL", value_enum)]
        shell: Shell,
    },
    /// Write the manual, in the format of man
    #[command(hide = true)]
    Man(Man),
}

const BENCH_NOTES: &str = "\
Sizes take the suffixes K, M, G and T, powers of 1024.

Sizes are those of nccl-tests: of the larger of a call's buffers, which for all_gather, reduce_scatter, gather, scatter and
all_to_all hold a share for each rank; count is the elements of a share, and in the uneven collectives (_v) their mean. There, each
share has one element more than the one before: rank r's r more than the first, and in all_to_all_v those that go to the r-th
rank to the right. send_recv sends to the right neighbour and receives from the left one. What cannot be in place is N/A.

Columns: time is that of --iters calls back to back divided by their number, on the slowest rank. p50 and p99 are of
single calls (at most 10000), each after a barrier; a call takes as long as on its slowest rank. algbw is size / time. busbw
is algbw * 2 (ranks - 1) / ranks for all_reduce, algbw for broadcast, reduce and send_recv, else algbw * (ranks - 1) / ranks. memcpy is the time of a copy of the same size, made by every rank at the same time for at
least 10 ms. #wrong counts elements over all ranks: those that
differ in any bit from the reduction in rank order with one rounding, or from what is to be copied. ring and halving-doubling
round at each step: of floats, those are counted that are farther from the reduction in f64 than that explains. Averages of
integers, which these two cannot do, are done by a direct algorithm. What a switch adds up is held to the same. The line of the order
says whether one can, and why not.

With --device cuda, rank r has GPU r modulo their number; ranks that share one take turns, and nothing crosses NVLink. Calls
are timed by events around replays of a graph that holds 20 of them, and p50 and p99 are of replays, divided by 20. With
--eager plain calls are timed instead, including what it takes to start them.

--report writes one HTML page that needs nothing else: charts of latency (p50) and bus bandwidth against size, out of place,
with a line for each algorithm; all numbers; the facts of the machine; the command.

With --collective all_reduce_fused, a row of results is of --rows rows of --hidden elements, and three ways are timed in turns, ten
times a block of calls of each. fused is the call: the sum over ranks is added to a residual, and the rows of that are normalised.
unfused is all_reduce, then an addition and a norm by the same ranks: in Rust that the compiler has vectorised, or on GPUs in one kernel.
all_reduce is that alone. x all_reduce is fused / all_reduce, gain is unfused / fused. #wrong counts elements of the residual and of the
output: of fused those that differ in any bit from the documented arithmetic, of unfused those of the residual, and those of the output
that are farther from the norm in f64 than rounding explains.

Without --iters, calls are repeated for about 20 ms, at least 20 and at most 10000 times.

A row ends in a remark where its calls are not of one population: p99 is more than 4 times p50, or two ranks were found on one core.

The exit status is 0 if all is right, 1 if an element is wrong, 2 if the run could not be made or its results not be
written, 141 if their reader has gone.";

/// Options of `topology`.
#[derive(Args, Debug)]
pub struct Topology {
    /// Read a recorded `nvidia-smi topo -m` instead of asking this machine
    #[arg(long, value_name = "FILE")]
    pub parse: Option<PathBuf>,
}

/// Options of `man`.
#[derive(Args, Debug)]
pub struct Man {
    /// Write a page for each command into this folder, instead of the program's to standard output
    #[arg(value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
}

/// Options of `bench`.
#[derive(Args, Debug)]
pub struct Bench {
    /// Smallest message [default: 1K]
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", value_parser = values::size)]
    min_bytes: Option<usize>,
    /// Largest message [default: 16M]
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", value_parser = values::size)]
    max_bytes: Option<usize>,
    /// Multiply the size from row to row [default: 4]
    #[arg(short = 'f', long = "stepfactor", value_name = "FACTOR")]
    step_factor: Option<usize>,
    /// Add to the size from row to row instead
    #[arg(short = 'i', long = "stepbytes", value_name = "SIZE", value_parser = values::size, conflicts_with = "step_factor")]
    step_bytes: Option<usize>,
    /// Timed calls for each row [default: as many as take 20 ms, 20 to 10000]
    #[arg(short = 'n', long = "iters", value_name = "COUNT", value_parser = values::positive)]
    pub iterations: Option<u64>,
    /// Calls before the timed ones
    #[arg(short = 'w', long = "warmup_iters", value_name = "COUNT", default_value_t = 5)]
    pub warmup: u64,
    /// Checked calls for each row, on new inputs each; 0 checks nothing
    #[arg(short = 'c', long = "check", value_name = "COUNT", default_value_t = 1)]
    pub checks: u64,
    /// Element type: f16, bf16, f32, f64, i8, u8, i32, u32, i64, u64, f8e4m3, f8e5m2, a name of nccl-tests (half, float, ...), or all
    /// [default: f32; bf16 of all_reduce_fused]
    #[arg(short = 'd', long = "datatype", value_name = "TYPE", value_parser = values::dtypes)]
    dtypes: Option<Choice<DType>>,
    /// Operation of collectives that reduce: sum, prod, min, max, avg, or all
    #[arg(short = 'o', long = "op", value_name = "OP", default_value = "sum", value_parser = values::ops)]
    pub ops: Choice<ReduceOp>,
    /// Collective: all_reduce, all_gather, all_gather_v, reduce_scatter, reduce_scatter_v, broadcast, reduce, gather, scatter,
    /// all_to_all, all_to_all_v, send_recv, or all of these in turn; or all_reduce_fused
    #[arg(long = "collective", value_name = "NAME", default_value = "all_reduce", value_parser = values::collectives)]
    collectives: Choice<CallKind>,
    /// Elements of a row of all_reduce_fused, one number or several [default: 2048,4096,5120,7168,8192,16384]
    #[arg(long, value_name = "COUNT", value_delimiter = ',')]
    hidden: Vec<usize>,
    /// Rows of all_reduce_fused, one number or several [default: 1,8,64,512]
    #[arg(long, value_name = "COUNT", value_delimiter = ',')]
    rows: Vec<usize>,
    /// Root of broadcast, reduce, gather and scatter [default: 0]
    #[arg(short = 'r', long, value_name = "RANK")]
    root: Option<usize>,
    /// Algorithm of all_reduce: auto, one-shot-pull, two-shot-pull, one-shot-push, two-shot-push, ring, halving-doubling, or all
    /// six in turn [default: auto; the first four for a report of bench]
    #[arg(long = "algo", value_name = "NAME", value_parser = values::algorithms)]
    algorithms: Option<Choice<Option<Algorithm>>>,
    /// Ranks, a process each [default: 4]
    #[arg(long, value_name = "COUNT")]
    ranks: Option<usize>,
    /// Where the ranks' memory lives
    #[arg(long, value_name = "NAME", value_enum, default_value_t = DeviceName::Host)]
    pub device: DeviceName,
    /// With --device cuda: time plain calls instead of graphs of 20
    #[arg(long)]
    pub eager: bool,
    /// Seed of the inputs [default: random]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Keep inputs in registered buffers, which peers read where they are
    #[arg(long)]
    pub registered: bool,
    #[command(flatten)]
    pub placement: Placement,
    #[command(flatten)]
    pub given: Given,
    /// Instruction set of the host kernels [default: the best of this CPU]
    #[arg(long, value_name = "NAME", value_parser = values::isa)]
    pub isa: Option<Isa>,
    /// Format of the results
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,
    /// Write a page with charts there too: HTML, in one file
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceName {
    Host,
    Cuda,
}

impl DeviceName {
    pub fn kind(self) -> DeviceKind {
        match self {
            Self::Host => DeviceKind::Host,
            Self::Cuda => DeviceKind::Cuda,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// As nccl-tests prints it
    Table,
    /// One object
    Json,
    /// A header line, then a line for each row
    Csv,
}

impl Bench {
    /// Ranks to launch.
    pub fn ranks(&self) -> usize {
        self.ranks.unwrap_or(DEFAULT_RANKS)
    }

    /// Settings of the communicators to measure.
    pub fn settings(&self) -> Result<Settings, Failure> {
        self.given.settings(self.device, &self.placement)
    }

    /// The algorithms asked for; `None` is the plan's choice.
    pub fn algorithms(&self) -> Option<&[Option<Algorithm>]> {
        self.algorithms.as_ref().map(|choice| &*choice.0)
    }

    /// The types asked for.
    pub fn dtypes(&self) -> Vec<DType> {
        let usual = if self.is_rms_norm() { DType::Bf16 } else { DType::F32 };
        self.dtypes.as_ref().map_or_else(|| vec![usual], |choice| choice.0.clone())
    }

    fn min_bytes(&self) -> usize {
        self.min_bytes.unwrap_or(1 << 10)
    }

    fn max_bytes(&self) -> usize {
        self.max_bytes.unwrap_or(16 << 20)
    }

    /// The sizes asked for, in bytes.
    pub fn sizes(&self) -> impl Iterator<Item = usize> + '_ {
        let next = |&size: &usize| match self.step_bytes {
            Some(step) => size.checked_add(step),
            None => size.checked_mul(self.step_factor()),
        };
        // One size alone need not grow.
        let grown = move |size: &usize| next(size).filter(|next| next > size);
        std::iter::successors(Some(self.min_bytes()), grown).take_while(|&size| size <= self.max_bytes())
    }

    fn step_factor(&self) -> usize {
        self.step_factor.unwrap_or(4)
    }

    /// Refuses what cannot be, before anything is started.
    pub fn validate(&self) -> Result<(), Failure> {
        let refuse = |reason: String| Err(Failure::Usage(reason));
        match self.device {
            DeviceName::Cuda if self.isa.is_some() => return refuse("--isa is of the device host".into()),
            DeviceName::Host if self.eager => return refuse("--eager is of the device cuda".into()),
            _ => {}
        }
        self.settings()?;
        self.validate_rows()?;
        self.validate_collective()?;
        let (ranks, max) = (self.ranks(), fast_allreduce::MAX_RANKS);
        if !(1..=max).contains(&ranks) {
            return refuse(format!("--ranks {ranks} is not possible: a world has 1 to {max} ranks"));
        }
        let (min, max) = (self.min_bytes(), self.max_bytes());
        if min > max {
            return refuse(format!("--minbytes {min} is more than --maxbytes {max}"));
        }
        let is_one_size = min == max;
        match self.step_bytes {
            Some(0) if !is_one_size => return refuse("--stepbytes 0 never reaches --maxbytes".into()),
            None if self.step_factor() < 2 && !is_one_size => {
                let factor = self.step_factor();
                return refuse(format!("--stepfactor {factor} never reaches --maxbytes"));
            }
            None if min == 0 && !is_one_size => {
                return refuse("--minbytes 0 grows by no factor: give --stepbytes".into());
            }
            _ => {}
        }
        Ok(())
    }

    /// Refuses buffers that do not fit the memory there is, which the kernel would grant and then kill for.
    pub fn check_memory(&self) -> Result<(), Failure> {
        if self.is_rms_norm() {
            // Input, sum, residual and output.
            let bytes = self.rows_cases().map(|case| case.count().saturating_mul(case.dtype.size())).max();
            return check_available("the largest shape", bytes.unwrap_or(0), 4, self.ranks());
        }
        check_memory(self.max_bytes(), self.ranks())
    }

    /// Refuses a world of another size than `--ranks`, where both are given.
    pub fn check_world(&self, world_size: usize) -> Result<(), Failure> {
        match self.ranks {
            Some(ranks) if ranks != world_size => Err(Failure::Usage(format!(
                "--ranks {ranks}, but the environment names a world of {world_size}"
            ))),
            _ => self.check_root(world_size),
        }
    }
}

/// Refuses an input and an output for each rank that do not fit the memory of this machine and this container.
pub fn check_memory(max_bytes: usize, ranks: usize) -> Result<(), Failure> {
    check_available(&format!("--maxbytes {max_bytes}"), max_bytes, 2, ranks)
}

/// Refuses so many buffers of so many bytes for each rank, if that is more than there is.
fn check_available(what: &str, bytes: usize, buffers: usize, ranks: usize) -> Result<(), Failure> {
    let needed = bytes.saturating_mul(buffers).saturating_mul(ranks);
    match available_memory() {
        Some(available) if needed as u64 > available => Err(Failure::Usage(format!(
            "{what} needs {needed} bytes of memory for {ranks} ranks, {available} are available"
        ))),
        _ => Ok(()),
    }
}

/// The command line, for what describes it.
pub fn command() -> clap::Command {
    CommandLine::command()
}

/// Reads the command line.
pub fn parse() -> Result<Command, Failure> {
    use clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand as NoSubcommand;

    let line = match CommandLine::try_parse() {
        Ok(line) => line,
        Err(error) if error.use_stderr() && error.kind() != NoSubcommand => {
            return Err(Failure::Usage(on_one_line(&error.render().to_string())));
        }
        Err(error) => {
            error.print().and_then(|()| std::io::stdout().flush()).map_err(Failure::Output)?;
            return Ok(Command::Help(ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))));
        }
    };
    match line.subcommand {
        Some(Subcommands::Bench(bench)) if !line.version => Ok(Command::Bench(bench)),
        Some(Subcommands::Compare(compare)) if !line.version => Ok(Command::Compare(compare)),
        Some(Subcommands::Topology(topology)) if !line.version => Ok(Command::Topology(topology)),
        Some(Subcommands::Plan(plan)) if !line.version => Ok(Command::Plan(plan)),
        Some(Subcommands::Tune(tune)) if !line.version => Ok(Command::Tune(tune)),
        Some(Subcommands::Soak(soak)) if !line.version => Ok(Command::Soak(soak)),
        Some(Subcommands::GpuCheck(check)) if !line.version => Ok(Command::GpuCheck(check)),
        Some(Subcommands::Completions { shell }) if !line.version => Ok(Command::Completions(shell)),
        Some(Subcommands::Man(man)) if !line.version => Ok(Command::Man(man)),
        _ => Ok(Command::Version { verbose: line.verbose }),
    }
}

/// clap's explanation without its first word, its usage and pointers to help.
fn on_one_line(explanation: &str) -> String {
    let facts = explanation
        .trim_start_matches("error: ")
        .lines()
        .take_while(|line| !line.starts_with("Usage:"))
        .map(str::trim);
    let facts = facts.filter(|line| !line.is_empty() && !line.starts_with("For more information"));
    facts.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Words of the command line, and others.
    fn word() -> impl Strategy<Value = String> {
        let command = CommandLine::command();
        let flags = command
            .get_subcommands()
            .flat_map(|command| command.get_arguments().cloned().collect::<Vec<_>>());
        let mut words: Vec<String> =
            flags.filter_map(|flag| Some(format!("--{}", flag.get_long()?))).collect();
        words.extend(command.get_subcommands().map(|command| command.get_name().to_owned()));
        let values = [
            "-b", "-e", "-V", "0", "1", "4K", "16T", "all", "f32", "nan", "-1", "1e999", "host", "json", "=",
            "--",
        ];
        words.extend(values.map(str::to_owned));
        let word = prop::sample::select(words);
        prop_oneof![
            4 => word.clone(),
            1 => (word.clone(), word).prop_map(|(flag, value)| format!("{flag}={value}")),
            1 => "[0-9]{0,20}[KMGTkmgt]?",
            1 => ".{0,12}",
        ]
    }

    proptest! {
        #[test]
        fn any_line_is_refused_or_understood(words in prop::collection::vec(word(), 0..8)) {
            let line = ["fast-allreduce".to_owned()].into_iter().chain(words);
            match CommandLine::try_parse_from(line) {
                Ok(CommandLine { subcommand: Some(Subcommands::Bench(bench)), .. }) if bench.validate().is_ok() => {
                    prop_assert!((1..=fast_allreduce::MAX_RANKS).contains(&bench.ranks()));
                    prop_assert!(bench.sizes().take(100).all(|size| (bench.min_bytes()..=bench.max_bytes()).contains(&size)));
                }
                Ok(_) => {}
                Err(error) => drop(on_one_line(&error.render().to_string())),
            }
        }

        #[test]
        fn sizes_are_read_exactly(number in 0..1_usize << 20, shift in 0..5_usize, other in ".{0,8}") {
            let text = format!("{number}{}", ["", "K", "M", "G", "T"][shift]);
            prop_assert_eq!(values::size(&text), Ok(number << (10 * shift)));
            let _ = (values::size(&other), values::positive(&other), values::seconds(&other), values::isa(&other));
            let _ = (values::dtypes(&other), values::ops(&other), values::algorithms(&other), values::collectives(&other));
        }
    }
}
