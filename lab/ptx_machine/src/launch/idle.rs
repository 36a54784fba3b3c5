//! Backs off when all threads of a launch wait, so that other threads get the CPU.

use std::time::{Duration, Instant};

/// Counts consecutive turns without progress.
pub(crate) struct Idle {
    end: Instant,
    turns: u32,
}

impl Idle {
    pub fn new(limit: Duration) -> Self {
        Self { end: Instant::now() + limit, turns: 0 }
    }

    /// Backs off after a turn. Returns false when the time limit is over.
    pub fn rest(&mut self, progress: bool) -> bool {
        self.turns = if progress { 0 } else { self.turns + 1 };
        match self.turns {
            0..2 => {}
            2..20 => std::thread::yield_now(),
            // Kernels check their time limits once in a few hundred polls, so sleeping after each poll
            // would take too long.
            turns if turns % 8 != 0 => {}
            turns => std::thread::sleep(Duration::from_micros(u64::from(turns.min(200)))),
        }
        Instant::now() < self.end
    }
}
