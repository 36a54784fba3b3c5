//! `gpu-check`: what there is to prove and to measure on a GPU, in steps that cannot take each other down.
//!
//! The program starts itself once for each step; a step writes what it finds as it finds it, so that one that hangs has
//! still said what came before.

mod collectives;
mod costs;
mod facts;
mod gaps;
mod hazards;
mod host;
mod probe;
mod programs;
mod ranks;
mod record;
mod report;
mod steps;
mod supervise;
mod timings;
mod turns;
mod world;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use self::record::{Outcome, Record};
use self::report::Report;
use self::steps::{limit, Budget};
use crate::arguments::{GpuCheck, Step};
use crate::failure::Failure;
use crate::harness::device::cuda;

/// As the supervisor of all steps, as one step, or as a rank of one.
pub fn run(options: &GpuCheck) -> Result<ExitCode, Failure> {
    if crate::environment::is_rank() {
        return crate::launch::as_rank(|| ranks::rank(options));
    }
    if options.alone {
        return alone(options);
    }
    cuda::require()?;
    let end = Instant::now() + Duration::from_secs(options.budget);
    let steps = if options.steps.is_empty() { Step::ALL.to_vec() } else { options.steps.clone() };
    let mut report = Report::new(options);
    let earlier = if options.resume { report::earlier(options)? } else { Vec::new() };
    let (done, steps): (Vec<_>, Vec<_>) =
        steps.into_iter().partition(|step| earlier.iter().any(|outcome| outcome.step == step.name()));
    for step in done {
        earlier
            .iter()
            .filter(|outcome| outcome.step == step.name())
            .for_each(|outcome| report.add(outcome.clone()));
    }
    for (index, &step) in steps.iter().enumerate() {
        eprintln!("{} ...", step.name());
        let left = end.saturating_duration_since(Instant::now());
        let outcome = run_step(step, options, limit(&steps[index..], left))?;
        eprintln!("{}", outcome.line());
        report.add(outcome);
        // Whatever ends this program, what was found so far is there.
        report.write_files(options)?;
    }
    report.write_summary(options)?;
    Ok(ExitCode::from(if report.is_right() { 0 } else { crate::failure::WRONG }))
}

/// Runs a step to its end or its limit.
fn run_step(step: Step, options: &GpuCheck, limit: Duration) -> Result<Outcome, Failure> {
    const LEAST: Duration = Duration::from_secs(1);
    if limit < LEAST {
        let error = Some("not run: the time for all steps is over".into());
        return Ok(Outcome { step: step.name(), error, seconds: 0.0, records: Vec::new() });
    }
    match step {
        Step::Memcheck | Step::Synccheck | Step::Tests => programs::run(step, options, limit),
        Step::HostBench | Step::HostTune => host::run(step, options, limit),
        _ => supervise::run(step, options, limit),
    }
}

/// One step, in this process.
fn alone(options: &GpuCheck) -> Result<ExitCode, Failure> {
    use nix::sys::{prctl, signal::Signal};
    prctl::set_pdeathsig(Signal::SIGKILL).map_err(|errno| Failure::System("prctl", errno.into()))?;
    for &step in &options.steps {
        let budget = Budget::of(options);
        match step {
            Step::Facts => facts::run(options)?,
            Step::Mps => facts::mps()?,
            Step::Cooperative => world::cooperative(options, budget)?,
            Step::Hot => world::hot(options, budget)?,
            Step::Turns => turns::turns(options, budget)?,
            Step::Link => turns::link(options, budget)?,
            Step::Costs => costs::run(options, budget)?,
            Step::BesideAKernel => hazards::beside_a_kernel(options)?,
            Step::RunAhead => hazards::run_ahead(options)?,
            Step::LocalMemory => hazards::local_memory(options)?,
            Step::World => world::run(options, budget)?,
            Step::IpcHandles | Step::IpcDescriptors | Step::Processes | Step::TimeSlices => {
                ranks::processes(step, options)?;
            }
            Step::Threads => ranks::threads(options, budget)?,
            Step::Latency => timings::latency(options, budget)?,
            Step::Fixed => timings::fixed(options)?,
            Step::Bandwidth => timings::bandwidth(options, budget)?,
            Step::Memcheck | Step::Synccheck | Step::Tests | Step::HostBench | Step::HostTune => {
                return Err(Failure::Usage("this step is another program".into()));
            }
        }
    }
    Record::Done.write()?;
    Ok(ExitCode::from(if record::has_failed() { crate::failure::WRONG } else { 0 }))
}
