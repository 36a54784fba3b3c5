//! Progress of the uncaptured calls: during a capture, this is how a rank knows that none of its kernels runs.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::FA_FIRST_EPOCH_AFTER_WRAP;

/// Launch counts. All accesses are relaxed: `launched` and `ran` change while `Calls::enter` is held. `ended` is
/// meaningful only where it equals `ran`, and no later launch makes it do so.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    launched: AtomicU64,
    /// Launches that were not captured.
    ran: AtomicU64,
    /// Number of launches in `ran` that are known to have ended.
    ended: AtomicU64,
    /// ID of the capture of all captured calls; 0 if there are none; or [`SEVERAL`].
    capture: AtomicU64,
}

/// Captured calls belong to several captures, or to one whose ID is unknown.
const SEVERAL: u64 = u64::MAX;

impl Progress {
    pub fn launched(&self) -> u64 {
        self.launched.load(Ordering::Relaxed)
    }

    pub fn ran(&self) -> u64 {
        self.ran.load(Ordering::Relaxed)
    }

    #[inline]
    pub fn count_launch(&self) {
        self.launched.store(self.launched() + 1, Ordering::Relaxed);
    }

    /// Counts the launches after the first `before` as not captured.
    pub fn count_runs(&self, before: u64) {
        self.ran.store(self.ran() + self.launched() - before, Ordering::Relaxed);
    }

    /// Notes that the first `ran` uncaptured launches have ended.
    pub fn set_ended(&self, ran: u64) {
        self.ended.store(ran, Ordering::Relaxed);
    }

    /// Counts a captured call, by the ID of its capture.
    pub fn count_captured(&self, capture: Option<u64>) {
        let capture = capture.unwrap_or(SEVERAL);
        if ![0, capture].contains(&self.capture.load(Ordering::Relaxed)) {
            return self.capture.store(SEVERAL, Ordering::Relaxed);
        }
        self.capture.store(capture, Ordering::Relaxed);
    }

    /// Returns whether captured calls may have been replayed; replays are not counted here. Calls of `current`, the
    /// capture that is still active, have not been replayed.
    pub(super) fn has_replays(&self, current: Option<u64>) -> bool {
        let capture = self.capture.load(Ordering::Relaxed);
        capture != 0 && (capture == SEVERAL || current != Some(capture))
    }

    pub(super) fn have_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed) == self.ran()
    }
}

/// Returns the epoch after this number of launches, as `begin_launch` counts them (`csrc/core/region.cuh`).
pub(super) fn epoch_after(first: u32, launches: u64) -> u32 {
    let to_wrap = u64::from(u32::MAX - first);
    match launches.checked_sub(to_wrap + 1) {
        None => first + launches as u32,
        Some(after) => {
            let cycle = u64::from(u32::MAX - FA_FIRST_EPOCH_AFTER_WRAP) + 1;
            FA_FIRST_EPOCH_AFTER_WRAP + (after % cycle) as u32
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_go_on_after_the_wrap() {
        assert_eq!(epoch_after(0, 0), 0);
        assert_eq!(epoch_after(7, 5), 12);
        assert_eq!(epoch_after(u32::MAX - 1, 1), u32::MAX);
        assert_eq!(epoch_after(u32::MAX - 1, 2), FA_FIRST_EPOCH_AFTER_WRAP);
        assert_eq!(epoch_after(u32::MAX, 3), FA_FIRST_EPOCH_AFTER_WRAP + 2);
        // One launch after the other, around the wrap twice.
        let whole = u64::from(u32::MAX - FA_FIRST_EPOCH_AFTER_WRAP) + 1;
        assert_eq!(epoch_after(u32::MAX, 1 + whole), FA_FIRST_EPOCH_AFTER_WRAP);
        assert_eq!(epoch_after(u32::MAX, whole), u32::MAX);
    }

    #[test]
    fn what_is_still_being_captured_is_not_replayed() {
        let progress = Progress::default();
        assert!(!progress.has_replays(None) && !progress.has_replays(Some(7)));
        progress.count_captured(Some(7));
        progress.count_captured(Some(7));
        assert!(!progress.has_replays(Some(7)));
        assert!(progress.has_replays(None) && progress.has_replays(Some(8)));
        progress.count_captured(Some(8));
        assert!(progress.has_replays(Some(7)) && progress.has_replays(Some(8)));
        let unnamed = Progress::default();
        unnamed.count_captured(None);
        assert!(unnamed.has_replays(None));
    }

    #[test]
    fn only_what_ran_has_to_end() {
        let progress = Progress::default();
        assert!(progress.have_ended());
        progress.count_launch();
        progress.count_launch();
        progress.count_runs(0);
        assert!(!progress.have_ended());
        let ran = progress.ran();
        progress.set_ended(ran);
        assert!(progress.have_ended());
        // A captured launch does not count.
        progress.count_launch();
        assert!(progress.have_ended());
        progress.count_launch();
        progress.count_runs(3);
        assert!(!progress.have_ended() && progress.ran() == 3);
    }
}
