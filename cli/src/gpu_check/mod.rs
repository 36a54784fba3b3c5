//! `gpu-check`: proves and measures the kernels on a GPU, in steps that cannot take each other down.
//!
//! The program starts itself once for each step. A step writes each finding at once, so that a step that hangs has
//! already reported its earlier ones.

mod budget;
mod calls;
mod collectives;
mod costs;
mod facts;
mod gaps;
mod hazards;
mod phases;
mod probe;
mod ranks;
mod record;
mod report;
mod several;
mod steps;
mod supervise;
mod timings;
mod world;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::ValueEnum as _;
use fast_allreduce::Settings;

use self::budget::Budget;
use self::record::Outcome;
use self::report::{Files, Report};
use self::steps::limit;
use crate::arguments::{GpuCheck, Step};
use crate::failure::{Failure, EXIT_WRONG};
use crate::harness::device::cuda;

/// Runs as the supervisor of all steps, as one step, or as a rank of a step.
pub fn run(options: &GpuCheck) -> Result<ExitCode, Failure> {
    if crate::environment::is_rank() {
        return crate::launch::as_rank(|| ranks::rank(options, several::rank));
    }
    if options.export {
        hazards::exporter::run(options.gpu)?;
        return Ok(ExitCode::SUCCESS);
    }
    options.settings(cuda::MEGABYTE)?;
    if options.alone {
        return alone(options);
    }
    cuda::require()?;
    let end = Instant::now() + Duration::from_secs(options.seconds);
    let steps = if options.steps.is_empty() { Step::value_variants() } else { &options.steps };
    let files = Files::check(options)?;
    let mut report = Report::new(options);
    if options.resume {
        report.steps = report::earlier(options)?;
        report.steps.retain(|outcome| steps.iter().any(|step| step.name() == outcome.step));
    }
    let is_done = |step: &Step| report.steps.iter().any(|outcome| outcome.step == step.name());
    let left: Vec<Step> = steps.iter().copied().filter(|step| !is_done(step)).collect();
    for (index, &step) in left.iter().enumerate() {
        eprintln!("{} ...", step.name());
        let outcome =
            run_step(step, options, limit(&left[index..], end.saturating_duration_since(Instant::now())))?;
        let Outcome { step, seconds, .. } = &outcome;
        eprintln!("{step:15} {seconds:6.1} s  {} cases  {}", outcome.cases(), outcome.verdict());
        report.steps.push(outcome);
        // Whatever ends this program later, the findings so far are in the files.
        report.write_files(&files)?;
    }
    report.write_summary(options)?;
    Ok(ExitCode::from(if report.is_right() { 0 } else { EXIT_WRONG }))
}

/// Runs a step in its own process, to its end or its limit.
fn run_step(step: Step, options: &GpuCheck, limit: Duration) -> Result<Outcome, Failure> {
    const LEAST: Duration = Duration::from_secs(1);
    if limit < LEAST {
        let error = Some("not run: the time for all steps is over".into());
        return Ok(Outcome { step: step.name(), error, seconds: 0.0, records: Vec::new() });
    }
    supervise::run(step, options, limit)
}

/// Runs the steps in this process.
fn alone(options: &GpuCheck) -> Result<ExitCode, Failure> {
    use nix::sys::{prctl, signal::Signal};
    prctl::set_pdeathsig(Signal::SIGKILL).map_err(|errno| Failure::System("prctl", errno.into()))?;
    for &step in &options.steps {
        let (_, run) = steps::definition(step);
        run(step, options, Budget::of(options))?;
    }
    record::done()?;
    Ok(ExitCode::from(if record::has_failed() { EXIT_WRONG } else { 0 }))
}

impl GpuCheck {
    /// Returns the settings of the communicators: the steps' own, then those of `--set`.
    pub fn settings(&self, launch_bytes: usize) -> Result<Settings, Failure> {
        let mut settings = Settings::new();
        let launch_bytes = launch_bytes.to_string();
        for (name, value) in [("device", "cuda"), ("timeout", "20"), ("max_bytes", &launch_bytes)] {
            settings.set(name, value)?;
        }
        if self.small {
            settings.set("max_blocks", "8")?;
        }
        for (name, value) in &self.set {
            settings.set(name, value)?;
        }
        settings.check()?;
        Ok(settings)
    }

    /// Returns the command line of a process that runs one step alone.
    pub fn step_arguments(&self, step: Step, limit: Duration) -> Vec<OsString> {
        let (gpu, limit) = (self.gpu.to_string(), limit.as_millis().to_string());
        let step = step.name();
        let mut arguments: Vec<OsString> =
            ["gpu-check", "--alone", "--step", &step, "--gpu", &gpu, "--limit", &limit]
                .map(Into::into)
                .into();
        if self.small {
            arguments.push("--small".into());
        }
        for (name, value) in &self.set {
            arguments.extend(["--set".into(), format!("{name}={value}").into()]);
        }
        arguments
    }
}
