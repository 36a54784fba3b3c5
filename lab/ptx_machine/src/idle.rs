//! What a launch does while all of its threads wait: it leaves the CPU to others.

use std::time::{Duration, Instant};

/// Turns in which nothing happened, one after the other.
pub(crate) struct Idle {
    end: Instant,
    turns: u32,
}

impl Idle {
    pub fn new(limit: Duration) -> Self {
        Self { end: Instant::now() + limit, turns: 0 }
    }

    /// After each turn. False: the time is up.
    pub fn rest(&mut self, progress: bool) -> bool {
        self.turns = if progress { 0 } else { self.turns + 1 };
        match self.turns {
            0..2 => {}
            2..20 => std::thread::yield_now(),
            // Kernels look at their limits every few hundred polls: with a sleep after each that would take long.
            turns if turns % 8 != 0 => {}
            turns => std::thread::sleep(Duration::from_micros(u64::from(turns.min(200)))),
        }
        Instant::now() < self.end
    }
}
