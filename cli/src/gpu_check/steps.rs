//! The steps: which function each one runs, and how long it may take.

use std::time::Duration;

use super::budget::Budget;
use super::{costs, facts, hazards, phases, ranks, several, timings, world};
use crate::arguments::{value_name, GpuCheck, Step};
use crate::failure::Failure;

type Run = fn(Step, &GpuCheck, Budget) -> Result<(), Failure>;

/// Returns the limit of a step in seconds, and its function.
pub fn definition(step: Step) -> (u64, Run) {
    match step {
        Step::Facts => (15, |_, options, _| facts::run(options)),
        Step::IpcHandles | Step::IpcDescriptors => (25, |step, options, _| ranks::processes(step, options)),
        Step::Peers => (60, |step, options, _| several::run(step, options)),
        Step::Nvls => (30, |step, options, _| several::run(step, options)),
        Step::Gpus => (90, |step, options, _| several::run(step, options)),
        Step::Cooperative => (30, |_, options, budget| world::cooperative(options, budget)),
        Step::Hot => (40, |_, options, budget| world::hot(options, budget)),
        Step::Phases => (40, |_, options, budget| phases::run(options, budget, &phases::GPU)),
        Step::Costs => (30, |_, options, budget| costs::run(options, budget)),
        Step::Link => (25, |_, options, budget| phases::run(options, budget, &phases::LINK)),
        Step::BesideAKernel => (30, |_, options, _| hazards::beside_a_kernel(options)),
        Step::RunAhead => (15, |_, options, _| hazards::run_ahead(options)),
        Step::Threads => (40, |_, options, budget| ranks::threads(options, budget)),
        Step::Latency => (50, |_, options, budget| timings::latency(options, budget)),
        Step::TimeSlices => (20, |step, options, _| ranks::processes(step, options)),
        Step::World => (60, |_, options, budget| world::run(options, budget)),
        Step::Processes => (40, |step, options, _| ranks::processes(step, options)),
        Step::Fixed => (20, |_, options, _| timings::fixed(options)),
        Step::Bandwidth => (20, |_, options, budget| timings::bandwidth(options, budget)),
    }
}

impl Step {
    pub fn name(self) -> String {
        value_name(self)
    }

    fn limit(self) -> Duration {
        Duration::from_secs(definition(self).0)
    }
}

/// Returns the limit of the first of `steps` when `left` remains for all of them. If their limits add up to more, all
/// shrink by the same factor.
pub fn limit(steps: &[Step], left: Duration) -> Duration {
    let Some(first) = steps.first() else { return Duration::ZERO };
    let all: Duration = steps.iter().map(|step| step.limit()).sum();
    first.limit().min(first.limit().mul_f64(left.as_secs_f64() / all.as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn limits_keep_to_the_budget() {
        let all = Step::value_variants();
        let run = |budget: u64, share: f64| {
            let mut left = Duration::from_secs(budget);
            for index in 0..all.len() {
                let limit = limit(&all[index..], left);
                assert!(limit <= all[index].limit());
                left = left.checked_sub(limit.mul_f64(share)).expect("within the budget");
            }
            left
        };
        // Every step uses all of its time.
        for budget in [0, 1, 100, 400] {
            assert!(run(budget, 0.999_999).as_secs_f64() < 0.1, "{budget}: all of it is used");
        }
        // Time that one step leaves is available to the others.
        let fast = Duration::from_secs(300);
        let sum: Duration = all[5..].iter().map(|step| step.limit()).sum();
        let share = all[5].limit().as_secs_f64() * fast.as_secs_f64() / sum.as_secs_f64();
        assert_eq!(limit(&all[5..], fast).as_secs(), share as u64);
        assert_eq!(limit(&[Step::World], fast), Step::World.limit());
        assert_eq!(limit(&[], fast), Duration::ZERO);
    }
}
