//! Limits on waits for other ranks.
//!
//! A rank that waits asks its deadline again and again, each time before it looks at what it waits for, so that the
//! last look comes after the limit. Between two questions lies at most a turn. Where more time has passed, this
//! process did not run for the rest: it was stopped, its container was paused, or it had no core. The others may have
//! fared alike, so that time does not count.

use std::cell::Cell;
use std::ffi::OsStr;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
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

/// The limit that a variable of the environment names, if it has a value: seconds; `Some(None)` for 0, which is none.
pub(crate) fn limit_named(name: &'static str, value: Option<&OsStr>) -> Result<Option<Option<Duration>>> {
    let Some(value) = value.filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    let value = value.to_string_lossy();
    let seconds: Option<f64> = value.parse().ok();
    match seconds.map(|seconds| (seconds, Duration::try_from_secs_f64(seconds))) {
        Some((0.0, _)) => Ok(Some(None)),
        // The shortest limit is no unlimited one.
        Some((_, Ok(limit))) => Ok(Some(Some(limit.max(Duration::from_nanos(1))))),
        _ => Err(Error::InvalidSetting {
            name,
            value: value.into_owned(),
            expected: "seconds, such as 2.5, or 0 for no limit",
        }),
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
    fn a_variable_may_name_a_limit() {
        let named = |value: &str| limit_named("A_VARIABLE", Some(OsStr::new(value)));
        assert_eq!(limit_named("A_VARIABLE", None), Ok(None));
        assert_eq!(named(""), Ok(None));
        assert_eq!(named("0"), Ok(Some(None)));
        assert_eq!(named("2.5"), Ok(Some(Some(Duration::from_millis(2500)))));
        assert_eq!(named("1e-20"), Ok(Some(Some(Duration::from_nanos(1)))));
        for value in ["-1", "soon", "nan", "inf", "1e300", "5 s"] {
            let error = named(value).unwrap_err();
            assert!(matches!(error, Error::InvalidSetting { name: "A_VARIABLE", .. }), "{error}");
        }
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
