//! Measures and checks fast-allreduce on this machine.
//!
//! `fast-allreduce bench` launches itself once for each rank, and a rank finds the others through its environment.
//! A process that mpirun or srun started is one of their ranks.

mod arguments;
mod bench;
mod cells;
mod compare;
mod environment;
mod facts;
mod failure;
#[cfg(feature = "cuda")]
mod gpu_check;
mod harness;
mod input;
mod inspect;
mod launch;
#[cfg(test)]
#[path = "../../src/testing/machines.rs"]
mod machines;
mod manual;
mod mpirun;
mod output;
mod page;
mod plan;
mod replay;
mod results;
mod soak;
mod stdout;
#[cfg(test)]
#[path = "../../src/testing/temporary.rs"]
mod temporary;
mod topology;
mod tune;

use std::process::ExitCode;

use arguments::{Command, Compare, Request, Soak};
use failure::Failure;

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    stdout::check().and_then(|()| arguments::parse()).and_then(run).unwrap_or_else(mpirun::end)
}

fn run(request: Request) -> Result<ExitCode, Failure> {
    let success = |()| ExitCode::SUCCESS;
    let command = match request {
        Request::Help(status) => return Ok(status),
        Request::Version { verbose } => return facts::print(verbose).map(success),
        Request::Run(command) => command,
    };
    match command {
        Command::Bench(options) if options.is_fused() => compare(&Compare::of_fused(*options)),
        Command::Bench(options) => options.validate().and_then(|()| measure(&*options)),
        Command::Compare(options) => compare(&options),
        Command::Topology(options) => topology::print(&options).map(success),
        Command::Plan(options) => plan::print(&options).map(success),
        Command::Tune(options) => match &options.part {
            None => tune::run(&options).map(success),
            Some(part) => launch::as_rank(|| tune::measure(&options, part).map(|()| true)),
        },
        Command::Soak(options) => soak(&options),
        Command::Inspect(options) => inspect::run(&options),
        Command::Replay(options) => replay::run(&options),
        #[cfg(feature = "cuda")]
        Command::GpuCheck(options) => gpu_check::run(&options),
        #[cfg(not(feature = "cuda"))]
        Command::GpuCheck(_) => Err(failure::without_cuda()),
        Command::Completions { shell } => manual::completions(shell).map(success),
        Command::Man(options) => manual::man(&options).map(success),
    }
}

fn compare(options: &Compare) -> Result<ExitCode, Failure> {
    compare::prepare(options)?;
    measure(options)
}

/// Runs as a rank if the environment names a world, else launches the ranks of one.
fn measure(job: &impl harness::Job) -> Result<ExitCode, Failure> {
    let options = job.options();
    options.launch.export();
    if !environment::is_rank() {
        if let Some(started) = environment::mpi_launch() {
            return mpirun::measure(job, started);
        }
        options.check_launch()?;
        harness::device::check(options.device)?;
        options.check_root(options.ranks())?;
        options.check_memory()?;
        return launch::launch(options.ranks(), std::env::args_os().skip(1));
    }
    launch::as_rank(|| options.check_launch().and_then(|()| harness::run(job)))
}

/// Runs as a rank if the environment names a world, else launches the ranks of one.
fn soak(options: &Soak) -> Result<ExitCode, Failure> {
    options.validate()?;
    soak::check_memory(options)?;
    match environment::is_rank() {
        true => launch::as_rank(|| soak::run(options)),
        false => launch::launch(options.ranks, std::env::args_os().skip(1)),
    }
}
