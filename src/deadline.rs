//! Time limits on waits for other ranks.
//!
//! A waiting rank checks its deadline repeatedly, each time *before* it checks what it waits for: so the last check
//! comes after the limit. Two checks are at most one interval apart. If more time has passed, this process did not run
//! for the rest of it: it was stopped, its container was paused, or it was not scheduled. The other ranks may have been
//! stopped as well, so that time does not count.

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::interruption;

/// Maximum time between two checks that counts towards a limit.
const LONGEST_INTERVAL: Duration = Duration::from_millis(100);

const SHORTEST_INTERVAL: Duration = Duration::from_millis(1);

/// Number of intervals in a short limit: if the process is stopped, only one of them counts.
const INTERVALS: u32 = 8;

/// Measures the time during which this process runs. It must be read at least once in each interval.
#[derive(Debug)]
pub(crate) struct Stopwatch {
    interval: Duration,
    elapsed: Cell<Duration>,
    last_read: Cell<Instant>,
}

impl Stopwatch {
    pub fn start() -> Self {
        Self::with_interval(LONGEST_INTERVAL)
    }

    fn with_interval(interval: Duration) -> Self {
        Self { interval, elapsed: Cell::default(), last_read: Cell::new(Instant::now()) }
    }

    pub fn elapsed(&self) -> Duration {
        let now = Instant::now();
        let since = now.saturating_duration_since(self.last_read.replace(now));
        self.elapsed.set(self.elapsed.get().saturating_add(since.min(self.interval)));
        self.elapsed.get()
    }
}

/// A time limit on one operation.
pub(crate) struct Deadline<'a> {
    limit: Duration,
    watch: Stopwatch,
    /// Returns whether it is useless to wait any longer.
    is_hopeless: Option<&'a dyn Fn() -> bool>,
}

impl Deadline<'static> {
    pub fn after(limit: Duration) -> Self {
        let interval = (limit / INTERVALS).clamp(SHORTEST_INTERVAL, LONGEST_INTERVAL);
        Self { limit, watch: Stopwatch::with_interval(interval), is_hopeless: None }
    }
}

impl<'a> Deadline<'a> {
    /// Creates a deadline that passes after `limit`, or as soon as `is_hopeless` returns true.
    pub fn unless(limit: Duration, is_hopeless: &'a dyn Fn() -> bool) -> Self {
        Self { is_hopeless: Some(is_hopeless), ..Deadline::after(limit) }
    }

    /// Returns how long to wait at most before the next check: zero once the deadline has passed or the program has
    /// ended the wait.
    ///
    /// This may call the program (see [`interruption`]): the caller must hold no lock that the program may need.
    pub fn next_wait(&self) -> Duration {
        let left = self.limit.saturating_sub(self.watch.elapsed()).min(self.watch.interval);
        let is_over =
            || self.is_hopeless.is_some_and(|is_hopeless| is_hopeless()) || !interruption::goes_on();
        if !left.is_zero() && is_over() {
            return Duration::ZERO;
        }
        left
    }

    pub fn has_passed(&self) -> bool {
        self.next_wait().is_zero()
    }

    /// Returns the time spent so far, at most the limit.
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
            std::thread::sleep(deadline.next_wait());
        }
        assert!(started.elapsed() >= Duration::from_millis(20));
        assert_eq!(deadline.waited(), Duration::from_millis(20));
    }

    #[test]
    fn time_without_checks_counts_as_one_interval() {
        let deadline = Deadline::after(Duration::from_millis(80));
        for _ in 0..4 {
            std::thread::sleep(Duration::from_millis(100));
            assert!(!deadline.has_passed());
        }
        assert!(deadline.waited() <= Duration::from_millis(60), "{:?}", deadline.waited());
    }

    #[test]
    fn a_hopeless_wait_is_over() {
        let hopeless = Cell::new(false);
        let asked = || hopeless.get();
        let deadline = Deadline::unless(Duration::MAX, &asked);
        assert!(!deadline.has_passed());
        hopeless.set(true);
        assert!(deadline.has_passed());
    }
}
