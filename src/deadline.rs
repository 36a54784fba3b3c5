//! Limits on waits for other ranks.
//!
//! A rank that waits asks its deadline again and again, each time before it looks at what it waits for, so that the
//! last look comes after the limit. Between two questions lies at most a turn. Where more time has passed, this
//! process did not run for the rest: it was stopped, its container was paused, or it had no core. The others may have
//! fared alike, so that time does not count.

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::interruption;

/// The longest time between two questions that counts.
const LONGEST_TURN: Duration = Duration::from_millis(100);

const SHORTEST_TURN: Duration = Duration::from_millis(1);

/// Turns that even a short limit has, so that a pause costs a share of it.
const TURNS: u32 = 8;

/// Counts the time for which this process runs, if asked once in each turn.
#[derive(Debug)]
pub(crate) struct Stopwatch {
    turn: Duration,
    elapsed: Cell<Duration>,
    asked: Cell<Instant>,
}

impl Stopwatch {
    pub fn start() -> Self {
        Self::with_turns(LONGEST_TURN)
    }

    fn with_turns(turn: Duration) -> Self {
        Self { turn, elapsed: Cell::default(), asked: Cell::new(Instant::now()) }
    }

    pub fn elapsed(&self) -> Duration {
        let now = Instant::now();
        let since = now.saturating_duration_since(self.asked.replace(now));
        self.elapsed.set(self.elapsed.get().saturating_add(since.min(self.turn)));
        self.elapsed.get()
    }
}

/// A limit on how long something may take.
pub(crate) struct Deadline<'a> {
    limit: Duration,
    watch: Stopwatch,
    /// Whether there is no use in waiting on.
    hopeless: Option<&'a dyn Fn() -> bool>,
}

impl Deadline<'static> {
    pub fn after(limit: Duration) -> Self {
        let turn = (limit / TURNS).clamp(SHORTEST_TURN, LONGEST_TURN);
        Self { limit, watch: Stopwatch::with_turns(turn), hopeless: None }
    }
}

impl<'a> Deadline<'a> {
    /// After the limit, or when `hopeless` says so.
    pub fn unless(limit: Duration, hopeless: &'a dyn Fn() -> bool) -> Self {
        Self { hopeless: Some(hopeless), ..Deadline::after(limit) }
    }

    /// How long to wait at most before the next question: zero once the deadline has passed, or the program ends the wait. No lock is
    /// held that what the program does meanwhile might need.
    pub fn turn(&self) -> Duration {
        let left = self.limit.saturating_sub(self.watch.elapsed()).min(self.watch.turn);
        let is_over = || self.hopeless.is_some_and(|hopeless| hopeless()) || !interruption::goes_on();
        if !left.is_zero() && is_over() {
            return Duration::ZERO;
        }
        left
    }

    pub fn has_passed(&self) -> bool {
        self.turn().is_zero()
    }

    /// Time spent so far, at most the limit.
    pub fn waited(&self) -> Duration {
        self.watch.elapsed().min(self.limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_any_length() {
        assert!(Deadline::after(Duration::ZERO).has_passed());
        assert!(!Deadline::after(Duration::MAX).has_passed());
        let deadline = Deadline::after(Duration::from_millis(20));
        let started = Instant::now();
        while !deadline.has_passed() {
            std::thread::sleep(deadline.turn());
        }
        assert!(started.elapsed() >= Duration::from_millis(20));
        assert_eq!(deadline.waited(), Duration::from_millis(20));
    }

    #[test]
    fn time_in_which_nobody_asks_counts_as_one_turn() {
        let deadline = Deadline::after(Duration::from_millis(80));
        for _ in 0..4 {
            std::thread::sleep(Duration::from_millis(100));
            assert!(!deadline.has_passed());
        }
        assert!(deadline.waited() <= Duration::from_millis(60), "{:?}", deadline.waited());
    }

    #[test]
    fn what_is_hopeless_is_over() {
        let hopeless = Cell::new(false);
        let asked = || hopeless.get();
        let deadline = Deadline::unless(Duration::MAX, &asked);
        assert!(!deadline.has_passed());
        hopeless.set(true);
        assert!(deadline.has_passed());
    }
}
