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
mod supervise;
mod timings;
mod turns;
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
    /// What tells most comes first.
    const ALL: [Self; 24] = [
        Self::Facts,
        Self::Mps,
        Self::IpcHandles,
        Self::IpcDescriptors,
        Self::Cooperative,
        Self::Hot,
        Self::Turns,
        Self::Costs,
        Self::Link,
        Self::BesideAKernel,
        Self::RunAhead,
        Self::LocalMemory,
        Self::Threads,
        Self::Latency,
        Self::TimeSlices,
        Self::World,
        Self::Processes,
        Self::Fixed,
        Self::Bandwidth,
        Self::HostBench,
        Self::HostTune,
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
            Self::Cooperative => 30,
            Self::Hot => 40,
            Self::Turns => 40,
            Self::Costs => 30,
            Self::Link => 25,
            Self::BesideAKernel | Self::RunAhead => 15,
            Self::LocalMemory => 10,
            Self::TimeSlices => 20,
            Self::World => 60,
            Self::Threads => 40,
            Self::Processes => 40,
            Self::HostBench => 40,
            Self::HostTune => 60,
            Self::Latency => 50,
            Self::Fixed | Self::Bandwidth => 20,
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
        let all: Duration = Step::ALL[6..].iter().map(|step| step.limit()).sum();
        let share = Step::Turns.limit().as_secs_f64() * fast.as_secs_f64() / all.as_secs_f64();
        assert_eq!(limit(&Step::ALL[6..], fast).as_secs(), share as u64);
        assert_eq!(limit(&[Step::World], fast), Step::World.limit());
        assert_eq!(limit(&[], fast), Duration::ZERO);
    }
}
