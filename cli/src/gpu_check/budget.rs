//! The time of a step.

use std::time::{Duration, Instant};

use crate::arguments::GpuCheck;

/// The end of a step's time: before its limit, so that the step can report what it skipped.
#[derive(Debug, Clone, Copy)]
pub struct Budget(Instant);

impl Budget {
    pub fn of(options: &GpuCheck) -> Self {
        Self::share(options, 1)
    }

    /// Returns the first of `parts` equal parts of the step's time, starting now.
    pub fn share(options: &GpuCheck, parts: u32) -> Self {
        Self(Instant::now() + Duration::from_millis(options.limit) * 4 / 5 / parts)
    }

    /// Returns what is left of the time.
    pub fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    pub fn is_spent(self) -> bool {
        Instant::now() >= self.0
    }
}
