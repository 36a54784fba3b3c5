//! How far the calls that run have come, as opposed to those that are captured: what tells during a capture that nothing runs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use cudarc::driver::CudaStream;

use super::capture::capture_of;
use super::driver::bind;
use super::memory::Memory;
use super::order::{asked_in_capture, is_captured};
use super::{api, Cuda};
use crate::abi::{FA_FIRST_EPOCH_AFTER_WRAP, FA_MAX_BLOCKS};
use crate::device::sealed::Probe;

/// Counts of launches. Relaxed throughout: `launched` and `ran` change while `Cuda::calls` is held, and `ended` says something only
/// where it equals `ran`, which no later launch makes it do.
#[derive(Debug, Default)]
pub(super) struct Progress {
    launched: AtomicU64,
    /// Those that were not captured.
    ran: AtomicU64,
    /// As many of these are known to have ended.
    ended: AtomicU64,
    /// The capture that all captured calls are of; 0: there are none, [`SEVERAL`].
    capture: AtomicU64,
}

/// Captured calls are of several captures, or of one that the driver does not name.
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

    /// What was launched since there were `before` runs.
    pub fn count_runs(&self, before: u64) {
        self.ran.store(self.ran() + self.launched() - before, Ordering::Relaxed);
    }

    /// So many of those that ran have ended.
    pub fn set_ended(&self, ran: u64) {
        self.ended.store(ran, Ordering::Relaxed);
    }

    /// A call was captured, in the capture of this number.
    pub fn count_captured(&self, capture: Option<u64>) {
        let capture = capture.unwrap_or(SEVERAL);
        if ![0, capture].contains(&self.capture.load(Ordering::Relaxed)) {
            return self.capture.store(SEVERAL, Ordering::Relaxed);
        }
        self.capture.store(capture, Ordering::Relaxed);
    }

    /// Whether captured calls may have been replayed, which is not counted here. Those of `current`, the capture that goes on, have
    /// not.
    fn has_replays(&self, current: Option<u64>) -> bool {
        let capture = self.capture.load(Ordering::Relaxed);
        capture != 0 && (capture == SEVERAL || current != Some(capture))
    }

    fn have_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed) == self.ran()
    }
}

impl Cuda {
    /// Launches counted before a call.
    pub(crate) fn launches(&self) -> u64 {
        self.progress.launched()
    }

    /// After a call that is not captured; `before`: launches before it.
    pub(crate) fn count_runs(&self, before: u64) {
        self.progress.count_runs(before);
    }

    /// After a wait: what [`Cuda::runs_on`] had counted has ended.
    pub(crate) fn note_ended(&self, runs: Option<u64>) {
        if let Some(runs) = runs {
            self.progress.set_ended(runs);
        }
    }

    /// After a call that is captured.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of this context, which is current.
    pub(crate) unsafe fn count_captured(&self, stream: CUstream) {
        // SAFETY: the caller's.
        self.progress.count_captured(unsafe { capture_of(stream) }.map(|(capture, _)| capture));
    }

    /// Tells whether the launches so far have ended, also those of replays. The epochs of the region's blocks are in `memory`
    /// at `epochs`, and were `first` before the first launch.
    pub(super) fn progress_probe(&self, memory: Arc<Memory>, epochs: u64, first: u32) -> Probe {
        // Replays advance epochs as well: with them, the expected epoch may be reached before the last call has ended.
        let has_replays = self.progress.has_replays(self.capture_of_last_call());
        if !has_replays && self.progress.have_ended() {
            return Box::new(|| true);
        }
        let (copies, owner) = (Arc::clone(&self.copies), self.owner_of_last_call());
        let expected = epoch_after(first, self.progress.ran());
        Box::new(move || {
            if owner.as_ref().is_some_and(|stream| is_idle(stream)) || copies.is_broken() {
                return true;
            }
            if has_replays {
                return false;
            }
            let _kept = &memory;
            let mut now = [0u32; FA_MAX_BLOCKS as usize];
            // SAFETY: the epochs lie in `memory`. Kernels that write them meanwhile write whole words.
            let read = unsafe { copies.read(epochs, &mut now) };
            // The last kernel writes its epochs after all that it sends. Those stores may be on their way for microseconds still, while
            // the word that this rank has left goes through a socket and a thread, and whoever hears it looks once more. If it
            // overtook them all the same, a peer's call would end with an error though its data comes, never with wrong data.
            read.is_ok() && now.iter().all(|&epoch| epoch == expected)
        })
    }
}

/// The epoch after so many launches, as `begin_launch` counts (`csrc/core/region.cuh`).
fn epoch_after(first: u32, launches: u64) -> u32 {
    let to_wrap = u64::from(u32::MAX - first);
    match launches.checked_sub(to_wrap + 1) {
        None => first + launches as u32,
        Some(after) => {
            let cycle = u64::from(u32::MAX - FA_FIRST_EPOCH_AFTER_WRAP) + 1;
            FA_FIRST_EPOCH_AFTER_WRAP + (after % cycle) as u32
        }
    }
}

/// Whether a stream is not captured and has nothing left to do; `false` where that cannot be told.
fn is_idle(stream: &CudaStream) -> bool {
    let Ok(()) = bind(stream.context()) else { return false };
    // SAFETY: the stream is live, and its context current.
    let is_free = matches!(unsafe { is_captured(stream.cu_stream()) }, Ok(false));
    // SAFETY: as above.
    is_free && asked_in_capture(|| unsafe { api::cuStreamQuery(stream.cu_stream()) }) == Some(Ok(()))
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
        // One launch after the other, around twice.
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
        // A captured one.
        progress.count_launch();
        assert!(progress.have_ended());
        progress.count_launch();
        progress.count_runs(3);
        assert!(!progress.have_ended() && progress.ran() == 3);
    }
}
