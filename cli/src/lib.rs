//! Measures and checks fast-allreduce on this machine.
//!
//! `fast-allreduce bench` launches itself once for each rank; a rank finds the others through its environment. Started by mpirun
//! or srun, it is a rank of theirs.

mod arguments;
mod bench;
mod collective;
mod compare;
mod environment;
mod facts;
mod failure;
#[cfg(feature = "cuda")]
mod gpu_check;
mod harness;
mod launch;
mod manual;
mod mpirun;
mod output;
mod page;
mod plan;
mod soak;
mod stdout;
#[cfg(test)]
#[path = "../../src/testing/temporary.rs"]
mod temporary;
mod topology;
mod tune;

use std::process::ExitCode;

use arguments::{Command, Soak};
use failure::Failure;

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    stdout::check().and_then(|()| arguments::parse()).and_then(run).unwrap_or_else(mpirun::end)
}

fn run(command: Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Help(status) => Ok(status),
        Command::Version { verbose } => facts::print(verbose).map(|()| ExitCode::SUCCESS),
        Command::Bench(options) => options.validate().and_then(|()| measure(&*options)),
        Command::Compare(options) => compare::prepare(&options).and_then(|()| measure(&*options)),
        Command::Topology(options) => topology::print(&options).map(|()| ExitCode::SUCCESS),
        Command::Plan(options) => plan::print(&options).map(|()| ExitCode::SUCCESS),
        Command::Tune(options) => match &options.part {
            None => tune::run(&options).map(|()| ExitCode::SUCCESS),
            Some(part) => launch::as_rank(|| tune::measure(&options, part).map(|()| true)),
        },
        Command::Soak(options) => soak(&options),
        #[cfg(feature = "cuda")]
        Command::GpuCheck(options) => gpu_check::run(&options),
        #[cfg(not(feature = "cuda"))]
        Command::GpuCheck(_) => Err(failure::without_cuda()),
        Command::Completions(shell) => manual::completions(shell).map(|()| ExitCode::SUCCESS),
        Command::Man(options) => manual::man(&options).map(|()| ExitCode::SUCCESS),
    }
}

/// Runs as a rank where the environment names a world, else launches one.
fn measure(job: &impl harness::Job) -> Result<ExitCode, Failure> {
    let options = job.options();
    options.placement.announce();
    if !environment::is_rank() {
        if let Some(started) = environment::found() {
            return mpirun::measure(job, started);
        }
        harness::device::check(options.device)?;
        options.check_root(options.ranks())?;
        options.check_memory()?;
        return launch::launch(options.ranks(), std::env::args_os().skip(1));
    }
    launch::as_rank(|| harness::run(job))
}

/// Runs as a rank where the environment names a world, else launches one.
fn soak(options: &Soak) -> Result<ExitCode, Failure> {
    options.validate()?;
    soak::check_memory(options)?;
    match environment::is_rank() {
        true => launch::as_rank(|| soak::run(options)),
        false => launch::launch(options.ranks, std::env::args_os().skip(1)),
    }
}
