//! How long calls wait for other ranks: longer as long as one of them has not been waited for yet.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::call::{nanoseconds, NO_LIMIT};

/// The limits of a communicator's calls, and which ranks they have waited for. `None`: no limit.
///
/// Relaxed throughout: `heard` and `latest` are written under the endpoint's lock, and who reads without it makes a message of it.
/// A limit that is set applies to calls that begin later, and a call that begins at the same time may have either.
#[derive(Debug)]
pub(super) struct WaitLimits {
    /// Nanoseconds, as are the others.
    steady: AtomicU64,
    /// For a rank that no call has waited for before.
    first: AtomicU64,
    /// Of the latest call.
    latest: AtomicU64,
    /// Bit r: a call has waited for rank r.
    heard: AtomicU32,
}

fn stored(limit: Option<Duration>) -> u64 {
    limit.map_or(NO_LIMIT, nanoseconds)
}

fn loaded(limit: &AtomicU64) -> Option<Duration> {
    match limit.load(Ordering::Relaxed) {
        NO_LIMIT => None,
        limit => Some(Duration::from_nanos(limit)),
    }
}

impl WaitLimits {
    pub fn new(steady: Option<Duration>, first: Option<Duration>) -> Self {
        let [steady, first] = [steady, first].map(stored);
        Self { steady: steady.into(), first: first.into(), latest: steady.into(), heard: AtomicU32::new(0) }
    }

    /// Limits all later calls so, the first ones too.
    pub fn set(&self, limit: Option<Duration>) {
        self.steady.store(stored(limit), Ordering::Relaxed);
        self.first.store(stored(limit), Ordering::Relaxed);
    }

    /// The limit of the next call, which may wait for some ranks, a bit for each, and does not end without having heard from
    /// `surely`, of these.
    #[inline]
    pub fn next(&self, maybe: u32, surely: u32) -> Option<Duration> {
        let heard = self.heard.load(Ordering::Relaxed);
        self.heard.store(heard | surely, Ordering::Relaxed);
        let limit = if maybe & !heard != 0 { &self.first } else { &self.steady };
        self.latest.store(limit.load(Ordering::Relaxed), Ordering::Relaxed);
        self.latest()
    }

    /// The limit of the latest call.
    pub fn latest(&self) -> Option<Duration> {
        loaded(&self.latest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_the_first_limit_until_it_was_heard() {
        let (steady, first) = (Some(Duration::from_secs(1)), None);
        let wait_limits = WaitLimits::new(steady, first);
        assert_eq!(wait_limits.next(0, 0), steady, "a call that waits for nobody");
        assert_eq!(wait_limits.next(0b0110, 0b0100), first);
        assert_eq!(wait_limits.next(0b0100, 0), steady);
        assert_eq!(wait_limits.next(0b0010, 0), first, "it was not waited for");
        assert_eq!(wait_limits.latest(), first);
        assert_eq!(wait_limits.next(0b1110, 0b1110), first);
        assert_eq!(wait_limits.next(0b1110, 0b1110), steady);
        assert_eq!(wait_limits.latest(), steady);
    }

    #[test]
    fn a_limit_that_is_set_is_that_of_all_later_calls() {
        let wait_limits = WaitLimits::new(Some(Duration::from_secs(30)), None);
        assert_eq!(wait_limits.next(0b10, 0b10), None);
        let limit = Some(Duration::from_millis(1500));
        wait_limits.set(limit);
        assert_eq!(wait_limits.latest(), None, "a call that has begun keeps its own");
        assert_eq!(wait_limits.next(0b10, 0b10), limit);
        assert_eq!(wait_limits.next(0b100, 0), limit, "of a rank that was never waited for");
        wait_limits.set(None);
        assert_eq!(wait_limits.next(0b10, 0b10), None);
    }
}
