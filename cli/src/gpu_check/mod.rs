//! `gpu-check`: what there is to prove and to measure on a GPU, in steps that cannot take each other down.
//!
//! The program starts itself once for each step; a step writes what it finds as it finds it, so that one that hangs has
//! still said what came before.

mod facts;
mod ranks;
mod record;
mod report;
mod rigs;
mod supervise;
mod world;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::ValueEnum;

use self::record::Record;
use self::report::Report;
use crate::arguments::{GpuCheck, Step};
use crate::bench::device::cuda;
use crate::failure::Failure;

impl Step {
    /// In the order of what builds on what.
    const ALL: [Self; 8] = [
        Self::Facts,
        Self::Ipc,
        Self::World,
        Self::Threads,
        Self::Processes,
        Self::Latency,
        Self::Fixed,
        Self::Bandwidth,
    ];

    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// All of them together are less than 8 minutes.
    fn limit(self) -> Duration {
        Duration::from_secs(match self {
            Self::Facts => 15,
            Self::Ipc => 45,
            Self::World => 110,
            Self::Threads => 60,
            Self::Processes => 80,
            Self::Latency => 70,
            Self::Fixed => 40,
            Self::Bandwidth => 40,
        })
    }
}

/// The end of a step's time, short of its limit, so that it can say what it left out.
#[derive(Debug, Clone, Copy)]
pub struct Budget(Instant);

impl Budget {
    fn of(step: Step) -> Self {
        Self::share(step, 1)
    }

    /// The first of several equal parts, from now on.
    pub fn share(step: Step, parts: u32) -> Self {
        Self(Instant::now() + step.limit() * 4 / 5 / parts)
    }

    /// Whether to leave the rest out.
    pub fn is_spent(self) -> bool {
        Instant::now() > self.0
    }
}

/// As the supervisor of all steps, as one step, or as a rank of one.
pub fn run(options: &GpuCheck) -> Result<ExitCode, Failure> {
    if crate::launch::is_rank() {
        return crate::as_rank(|| ranks::rank(options));
    }
    if options.alone {
        return alone(options);
    }
    cuda::require()?;
    let steps = if options.steps.is_empty() { Step::ALL.to_vec() } else { options.steps.clone() };
    let mut report = Report::new(options);
    for step in steps {
        eprintln!("{} ...", step.name());
        let outcome = supervise::run(step, options)?;
        eprintln!("{}", outcome.line());
        report.add(outcome);
    }
    report.write(options)?;
    Ok(ExitCode::from(if report.is_right() { 0 } else { crate::WRONG }))
}

/// One step, in this process.
fn alone(options: &GpuCheck) -> Result<ExitCode, Failure> {
    use nix::sys::{prctl, signal::Signal};
    prctl::set_pdeathsig(Signal::SIGKILL).map_err(|errno| Failure::System("prctl", errno.into()))?;
    for &step in &options.steps {
        let budget = Budget::of(step);
        match step {
            Step::Facts => facts::run(options)?,
            Step::World => world::run(options, budget)?,
            Step::Ipc | Step::Processes => ranks::processes(step, options)?,
            Step::Threads => ranks::threads(options, budget)?,
            Step::Latency => rigs::latency(options, budget)?,
            Step::Fixed => rigs::fixed(options)?,
            Step::Bandwidth => rigs::bandwidth(options)?,
        }
    }
    Record::Done.write()?;
    Ok(ExitCode::from(if record::has_failed() { crate::WRONG } else { 0 }))
}
