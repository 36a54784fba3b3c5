//! The steps in their order, and how long each may take.

use std::time::{Duration, Instant};

use clap::ValueEnum;

use crate::arguments::{GpuCheck, Step};

impl Step {
    /// What tells most comes first.
    pub const ALL: [Self; 24] = [
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

    pub fn name(self) -> String {
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
pub fn limit(steps: &[Step], left: Duration) -> Duration {
    let Some(first) = steps.first() else { return Duration::ZERO };
    let all: Duration = steps.iter().map(|step| step.limit()).sum();
    first.limit().min(first.limit().mul_f64(left.as_secs_f64() / all.as_secs_f64()))
}

/// The end of a step's time, short of its limit, so that it can say what it left out.
#[derive(Debug, Clone, Copy)]
pub struct Budget(Instant);

impl Budget {
    pub fn of(options: &GpuCheck) -> Self {
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
