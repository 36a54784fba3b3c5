//! How long calls wait for other ranks: longer as long as one of them has not been waited for yet.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// The limits of a communicator's calls, and which ranks they have waited for. `None`: no limit.
///
/// Relaxed throughout: what is written is written under the endpoint's lock, and who reads without it makes a message of it.
#[derive(Debug)]
pub(super) struct Patience {
    steady: Option<Duration>,
    /// For a rank that no call has waited for before.
    first: Option<Duration>,
    /// Bit r: a call has waited for rank r.
    heard: AtomicU32,
    /// The latest call has the first limit.
    is_first: AtomicBool,
}

impl Patience {
    pub fn new(steady: Option<Duration>, first: Option<Duration>) -> Self {
        Self { steady, first, heard: AtomicU32::new(0), is_first: AtomicBool::new(false) }
    }

    /// The limit of the next call, which may wait for some ranks, a bit for each, and does not end without having heard from
    /// `surely`, of these.
    #[inline]
    pub fn next(&self, maybe: u32, surely: u32) -> Option<Duration> {
        let heard = self.heard.load(Ordering::Relaxed);
        let is_first = maybe & !heard != 0;
        self.is_first.store(is_first, Ordering::Relaxed);
        self.heard.store(heard | surely, Ordering::Relaxed);
        self.latest()
    }

    /// The limit of the latest call.
    pub fn latest(&self) -> Option<Duration> {
        match self.is_first.load(Ordering::Relaxed) {
            true => self.first,
            false => self.steady,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_the_first_limit_until_it_was_heard() {
        let (steady, first) = (Some(Duration::from_secs(1)), None);
        let patience = Patience::new(steady, first);
        assert_eq!(patience.next(0, 0), steady, "a call that waits for nobody");
        assert_eq!(patience.next(0b0110, 0b0100), first);
        assert_eq!(patience.next(0b0100, 0), steady);
        assert_eq!(patience.next(0b0010, 0), first, "it was not waited for");
        assert_eq!(patience.latest(), first);
        assert_eq!(patience.next(0b1110, 0b1110), first);
        assert_eq!(patience.next(0b1110, 0b1110), steady);
        assert_eq!(patience.latest(), steady);
    }
}
