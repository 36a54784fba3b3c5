//! The command line.

mod bench;
mod cases;
mod compare;
mod forms;
mod fused;
mod gpu_check;
mod inspect;
mod launch;
mod plans;
mod replay;
mod settings;
mod soak;
mod values;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use fast_allreduce::plan::DeviceKind;

pub use self::bench::{check_memory, Bench, Format};
pub use self::cases::Case;
pub use self::compare::{Compare, RivalName};
pub use self::forms::{Call, Form, EPSILON};
pub use self::fused::FusedCase;
pub use self::gpu_check::GpuCheck;
#[cfg(feature = "cuda")]
pub use self::gpu_check::Step;
pub use self::inspect::Inspect;
pub use self::launch::LaunchOptions;
pub use self::plans::{Plan, Tune};
pub use self::replay::Replay;
pub use self::settings::{CommunicatorOptions, Setting};
pub use self::soak::{Faults, Soak, SummaryFormat};
pub use self::values::size;
use crate::failure::Failure;

/// Default number of ranks.
const DEFAULT_RANKS: usize = 4;

/// A command line that was read.
pub enum Request {
    /// Help that has been printed.
    Help(ExitCode),
    Version {
        verbose: bool,
    },
    Run(Command),
}

/// Measures and checks fast-allreduce on this machine.
#[derive(Parser)]
#[command(name = "fast-allreduce", disable_version_flag = true, arg_required_else_help = true)]
struct CommandLine {
    /// Print the version
    #[arg(short = 'V', long)]
    version: bool,
    /// With --version: print facts of the build and of this machine
    #[arg(long, requires = "version")]
    verbose: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
pub enum Command {
    /// Time a collective over a range of sizes and check every element, with the flags and columns of nccl-tests
    #[command(after_help = bench::NOTES)]
    Bench(Box<Bench>),
    /// Time and check this crate and other libraries on the same buffers, in turns within one run
    #[command(after_help = compare::NOTES)]
    Compare(Box<Compare>),
    /// Print the topology: links between GPUs as nvidia-smi topo -m does, with the plan for each number of ranks;
    /// CPUs, caches and NUMA nodes, and where ranks would run
    Topology(Topology),
    /// Print the plan for each number of ranks and each size
    Plan(Plan),
    /// Measure the algorithms and grids on this machine, and write the best to a file that the library loads
    #[command(after_help = plans::TUNE_NOTES)]
    Tune(Box<Tune>),
    /// Make random calls for a while, and check everything
    #[command(after_help = soak::NOTES)]
    Soak(Soak),
    /// Print what the ranks of running, hanging or dead processes did last
    #[command(after_help = inspect::NOTES)]
    Inspect(Inspect),
    /// Make recorded calls again between CPU ranks, and compare every bit of their results
    #[command(after_help = replay::NOTES)]
    Replay(Replay),
    /// Prove the kernels on a GPU, step by step, and measure them
    #[command(after_help = gpu_check::NOTES)]
    GpuCheck(GpuCheck),
    /// Print completions for a shell: source them, or install them in the shell's folder
    Completions {
        /// The shell
        #[arg(value_name = "SHELL", value_enum)]
        shell: Shell,
    },
    /// Write the manual, in the format of man
    #[command(hide = true)]
    Man(Man),
}

/// Options of `topology`.
#[derive(Args, Debug)]
pub struct Topology {
    /// Read a recorded `nvidia-smi topo -m` instead of asking this machine
    #[arg(long, value_name = "FILE")]
    pub parse: Option<PathBuf>,
    /// Read a copy of `/sys` instead of this machine's, and print only its CPUs
    #[arg(long, value_name = "FOLDER", conflicts_with = "parse")]
    pub sys: Option<PathBuf>,
}

/// Options of `man`.
#[derive(Args, Debug)]
pub struct Man {
    /// Write a page for each command into this folder, instead of the program's page to standard output
    #[arg(value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
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

/// Returns the name of a value on the command line.
pub fn value_name(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Returns the definition of the command line.
pub fn command() -> clap::Command {
    CommandLine::command()
}

/// Reads the command line.
pub fn parse() -> Result<Request, Failure> {
    use clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand as NoSubcommand;

    match CommandLine::try_parse() {
        Ok(CommandLine { version: false, command: Some(command), .. }) => Ok(Request::Run(command)),
        Ok(CommandLine { verbose, .. }) => Ok(Request::Version { verbose }),
        Err(error) if error.use_stderr() && error.kind() != NoSubcommand => {
            Err(Failure::Usage(on_one_line(&error.render().to_string())))
        }
        Err(error) => {
            error.print().and_then(|()| std::io::stdout().flush()).map_err(Failure::Output)?;
            Ok(Request::Help(ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))))
        }
    }
}

/// Returns clap's explanation without its first word, its usage and pointers to help.
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
                Ok(CommandLine { command: Some(Command::Bench(bench)), .. }) if bench.validate().is_ok() => {
                    prop_assert!((1..=fast_allreduce::MAX_RANKS).contains(&bench.ranks()));
                    let sizes = bench.min_bytes()..=bench.max_bytes();
                    prop_assert!(bench.sizes().take(100).all(|size| sizes.contains(&size)));
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
            let _ = (values::dtypes(&other), values::ops(&other));
            let _ = (values::algorithms(&other), values::collectives(&other));
        }
    }
}
