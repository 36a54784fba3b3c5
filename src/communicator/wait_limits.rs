//! Limits on the waits of calls. A call that waits for a rank for the first time has a separate limit.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::call::{nanoseconds, NO_LIMIT};

/// The limits on waits of a communicator's calls, and the ranks that calls have waited for. `None` means no limit.
///
/// All accesses are relaxed. `waited_for` and `latest` are written under the endpoint's lock; what is read without
/// the lock is only used for the text of errors. [`WaitLimits::set`] applies to calls that begin later; a call that
/// begins at the same time may have the old limit or the new one.
#[derive(Debug)]
pub(super) struct WaitLimits {
    /// The limit of all other calls. All limits are in nanoseconds.
    steady: AtomicU64,
    /// The limit of a call that waits for a rank which no call has waited for before.
    first: AtomicU64,
    /// The limit of the latest call.
    latest: AtomicU64,
    /// Bit r: a call has waited for rank r.
    waited_for: AtomicU32,
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
        Self {
            steady: steady.into(),
            first: first.into(),
            latest: steady.into(),
            waited_for: AtomicU32::new(0),
        }
    }

    /// Sets the limit of all later calls, first ones included.
    pub fn set(&self, limit: Option<Duration>) {
        self.steady.store(stored(limit), Ordering::Relaxed);
        self.first.store(stored(limit), Ordering::Relaxed);
    }

    /// Notes that ranks are new: no call has waited for them. The endpoint's lock is held.
    pub fn forget(&self, ranks: u32) {
        self.waited_for.store(self.waited_for.load(Ordering::Relaxed) & !ranks, Ordering::Relaxed);
    }

    /// Returns the limit of the next call. Both arguments have a bit for each rank: `maybe` has the ranks that it may
    /// wait for, `surely` the ranks without whose signal it cannot end.
    #[inline]
    pub fn next(&self, maybe: u32, surely: u32) -> Option<Duration> {
        let waited_for = self.waited_for.load(Ordering::Relaxed);
        self.waited_for.store(waited_for | surely, Ordering::Relaxed);
        let limit = if maybe & !waited_for != 0 { &self.first } else { &self.steady };
        self.latest.store(limit.load(Ordering::Relaxed), Ordering::Relaxed);
        self.latest()
    }

    /// Returns the limit of the latest call.
    pub fn latest(&self) -> Option<Duration> {
        loaded(&self.latest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_the_first_limit_until_it_was_waited_for() {
        let (steady, first) = (Some(Duration::from_secs(1)), None);
        let limits = WaitLimits::new(steady, first);
        assert_eq!(limits.next(0, 0), steady, "a call that waits for nobody");
        assert_eq!(limits.next(0b0110, 0b0100), first);
        assert_eq!(limits.next(0b0100, 0), steady);
        assert_eq!(limits.next(0b0010, 0), first, "rank 1 was not waited for");
        assert_eq!(limits.latest(), first);
        assert_eq!(limits.next(0b1110, 0b1110), first);
        assert_eq!(limits.next(0b1110, 0b1110), steady);
        assert_eq!(limits.latest(), steady);
    }

    #[test]
    fn set_applies_to_all_later_calls() {
        let limits = WaitLimits::new(Some(Duration::from_secs(30)), None);
        assert_eq!(limits.next(0b10, 0b10), None);
        let limit = Some(Duration::from_millis(1500));
        limits.set(limit);
        assert_eq!(limits.latest(), None, "a call that has begun keeps its limit");
        assert_eq!(limits.next(0b10, 0b10), limit);
        assert_eq!(limits.next(0b100, 0), limit, "for a rank that was never waited for");
        limits.set(None);
        assert_eq!(limits.next(0b10, 0b10), None);
    }
}
