//! `gpu-check`: what there is to prove and to measure on a GPU, in steps that cannot take each other down.
//!
//! The program starts itself once for each step; a step writes what it finds as it finds it, so that one that hangs has
//! still said what came before.

mod collectives;
mod facts;
mod programs;
mod ranks;
mod record;
mod report;
mod supervise;
mod timings;
mod world;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::ValueEnum;

use self::record::Record;
use self::report::Report;
use crate::arguments::{GpuCheck, Step};
use crate::failure::Failure;
use crate::harness::device::cuda;

impl Step {
    /// In the order of what builds on what.
    const ALL: [Self; 15] = [
        Self::Facts,
        Self::Mps,
        Self::IpcHandles,
        Self::IpcDescriptors,
        Self::Cooperative,
        Self::TimeSlices,
        Self::World,
        Self::Threads,
        Self::Processes,
        Self::Latency,
        Self::Fixed,
        Self::Bandwidth,
        Self::Memcheck,
        Self::Synccheck,
        Self::Tests,
    ];

    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// The most that it may take.
    fn limit(self) -> Duration {
        Duration::from_secs(match self {
            Self::Facts => 15,
            Self::Mps => 5,
            Self::IpcHandles | Self::IpcDescriptors => 25,
            Self::Cooperative => 40,
            Self::TimeSlices => 30,
            Self::World => 100,
            Self::Threads => 50,
            Self::Processes => 60,
            Self::Latency => 60,
            Self::Fixed => 30,
            Self::Bandwidth => 30,
            Self::Memcheck | Self::Synccheck => 40,
            Self::Tests => 90,
        })
    }
}

/// How long the first of `steps` may take when so much is left for all of them: each gives up an equal part of its own limit.
fn limit(steps: &[Step], left: Duration) -> Duration {
    let Some(first) = steps.first() else { return Duration::ZERO };
    let all: Duration = steps.iter().map(|step| step.limit()).sum();
    first.limit().min(first.limit().mul_f64(left.as_secs_f64() / all.as_secs_f64()))
}

/// The end of a step's time, short of its limit, so that it can say what it left out.
#[derive(Debug, Clone, Copy)]
pub struct Budget(Instant);

impl Budget {
    fn of(options: &GpuCheck) -> Self {
        Self::share(options, 1)
    }

    /// The first of several equal parts, from now on.
    pub fn share(options: &GpuCheck, parts: u32) -> Self {
        Self(Instant::now() + Duration::from_millis(options.limit) * 4 / 5 / parts)
    }

    /// Whether to leave the rest out.
    pub fn is_spent(self) -> bool {
        Instant::now() > self.0
    }
}

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
    for (index, &step) in steps.iter().enumerate() {
        eprintln!("{} ...", step.name());
        let left = end.saturating_duration_since(Instant::now());
        let outcome = supervise::run(step, options, limit(&steps[index..], left))?;
        eprintln!("{}", outcome.line());
        report.add(outcome);
        // Whatever ends this program, what was found so far is there.
        report.write_files(options)?;
    }
    report.write_summary(options)?;
    Ok(ExitCode::from(if report.is_right() { 0 } else { crate::failure::WRONG }))
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
            Step::World => world::run(options, budget)?,
            Step::IpcHandles | Step::IpcDescriptors | Step::Processes | Step::TimeSlices => {
                ranks::processes(step, options)?;
            }
            Step::Threads => ranks::threads(options, budget)?,
            Step::Latency => timings::latency(options, budget)?,
            Step::Fixed => timings::fixed(options)?,
            Step::Bandwidth => timings::bandwidth(options, budget)?,
            Step::Memcheck | Step::Synccheck | Step::Tests => {
                return Err(Failure::Usage("this step is another program".into()));
            }
        }
    }
    Record::Done.write()?;
    Ok(ExitCode::from(if record::has_failed() { crate::failure::WRONG } else { 0 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_keep_to_the_budget() {
        let run = |budget: u64, share: f64| {
            let mut left = Duration::from_secs(budget);
            for index in 0..Step::ALL.len() {
                let limit = limit(&Step::ALL[index..], left);
                assert!(limit <= Step::ALL[index].limit());
                left = left.checked_sub(limit.mul_f64(share)).expect("within the budget");
            }
            left
        };
        // Every step takes all that it may.
        for budget in [0, 1, 100, 480] {
            assert!(run(budget, 0.999_999).as_secs_f64() < 0.1, "{budget}: all of it is used");
        }
        // What one leaves, the others have.
        let fast = Duration::from_secs(470);
        assert_eq!(limit(&Step::ALL[6..], fast.min(Duration::from_secs(600))).as_secs(), 94);
        assert_eq!(limit(&[Step::World], fast), Step::World.limit());
        assert_eq!(limit(&[], fast), Duration::ZERO);
    }
}
