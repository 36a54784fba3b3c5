//! Measures and checks fast-allreduce on this machine.
//!
//! `fast-allreduce bench` launches itself once for each rank; a rank finds the others through its environment. Started by mpirun
//! or srun, it is a rank of theirs.

mod arguments;
mod bench;
mod compare;
mod facts;
mod failure;
#[cfg(feature = "cuda")]
mod gpu_check;
mod launch;
mod mpirun;
mod output;
mod page;
mod plan;
mod soak;
mod stdout;
mod topology;
mod tune;

use std::process::ExitCode;

use arguments::{Command, Soak};
use failure::Failure;

/// What was computed is wrong.
const WRONG: u8 = 1;

fn main() -> ExitCode {
    if let Err(failure) = stdout::check() {
        return failure.end();
    }
    let command = match arguments::parse() {
        Ok(command) => command,
        Err(exit) => return exit,
    };
    let outcome = match command {
        Command::Version { verbose } => facts::print(verbose).map(|()| ExitCode::SUCCESS),
        Command::Bench(options) => options.validate().and_then(|()| measure(&*options)),
        Command::Compare(options) => compare::prepare(&options).and_then(|()| measure(&*options)),
        Command::Topology(options) => topology::print(&options).map(|()| ExitCode::SUCCESS),
        Command::Plan(options) => plan::print(&options).map(|()| ExitCode::SUCCESS),
        Command::Tune(options) => match &options.part {
            None => tune::run(&options).map(|()| ExitCode::SUCCESS),
            Some(part) => as_rank(|| tune::measure(&options, part).map(|()| true)),
        },
        Command::Soak(options) => soak(&options),
        #[cfg(feature = "cuda")]
        Command::GpuCheck(options) => gpu_check::run(&options),
        #[cfg(not(feature = "cuda"))]
        Command::GpuCheck(_) => Err(failure::without_cuda()),
    };
    outcome.unwrap_or_else(Failure::end)
}

/// Runs as a rank where the environment names a world, else launches one.
fn measure(job: &impl bench::Job) -> Result<ExitCode, Failure> {
    let options = job.options();
    if !launch::is_rank() {
        if let Some(started) = mpirun::found() {
            return mpirun::measure(job, started);
        }
        options.check_device()?;
        options.check_root(options.ranks())?;
        options.check_memory()?;
        return launch::launch(options.ranks(), std::env::args_os().skip(1));
    }
    as_rank(|| bench::run(job))
}

/// Runs as a rank where the environment names a world, else launches one.
fn soak(options: &Soak) -> Result<ExitCode, Failure> {
    options.validate()?;
    match launch::is_rank() {
        true => as_rank(|| soak::run(options)),
        false => launch::launch(options.ranks, std::env::args_os().skip(1)),
    }
}

/// Runs as one of a launcher's ranks, which hears what went wrong.
fn as_rank(run: impl FnOnce() -> Result<bool, Failure>) -> Result<ExitCode, Failure> {
    let launcher = launch::Launcher::of_this_process()?;
    let outcome = run().map(|is_right| ExitCode::from(if is_right { 0 } else { WRONG }));
    match (outcome, launcher) {
        (Err(failure), Some(launcher)) => {
            launcher.report(&failure);
            Ok(failure.exit_code())
        }
        (Err(failure), None) => Err(failure.of_rank()),
        (outcome, _) => outcome,
    }
}
