//! Memory of this rank that other processes have open: freed when all of them have closed it, at the end of its
//! communicator or, where a rank is late, of another one. Not when one is made: freeing waits for kernels, which may
//! wait for the rank that makes it.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, TryLockError};
use std::time::Duration;

use crate::deadline::Deadline;
use crate::device::sealed::Exports;
use crate::fork::ForkCheck;
use crate::liveness::{CloseReport, CloseReports, PeerMappings};
use crate::thread;

/// How long the end of a communicator waits for the others' ends. A longer wait could be a hang.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Between two looks at what they say.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// What a communicator has exported. Dropped after this rank's mappings of its peers' memory.
pub(super) struct Exported<E: Exports> {
    exports: E,
    /// There is none before the first export.
    close_reports: OnceLock<CloseReports>,
    fork_check: ForkCheck,
    /// This rank's kernels may still run, in mappings that it keeps.
    keeps_mappings: AtomicBool,
}

impl<E: Exports> Exported<E> {
    pub fn new(exports: E, fork_check: ForkCheck) -> Self {
        Self { exports, close_reports: OnceLock::new(), fork_check, keeps_mappings: AtomicBool::new(false) }
    }

    /// How the ranks tell each other that they have closed their mappings. Before anything is exported.
    pub fn set_close_reports(&self, close_reports: CloseReports) {
        // Said once, when the communicator is made.
        let _ = self.close_reports.set(close_reports);
    }

    /// This rank's mappings of its peers' memory are not closed, as its kernels may still run.
    pub fn keep_mappings(&self) {
        self.keeps_mappings.store(true, Ordering::Relaxed);
    }
}

impl<E: Exports> Drop for Exported<E> {
    fn drop(&mut self) {
        if !self.exports.is_empty() {
            self.end();
        }
        // Also where this communicator has exported nothing, as one of a single rank.
        free_remains();
    }
}

impl<E: Exports> Exported<E> {
    /// Frees what was exported, or leaves it for the end of another communicator.
    fn end(&mut self) {
        let kept = self.exports.take();
        let (false, Some(close_reports)) = (self.fork_check.in_fork(), self.close_reports.take()) else {
            // In a fork all of it is the parent's.
            return std::mem::forget(kept);
        };
        close_reports.publish(match self.keeps_mappings.load(Ordering::Relaxed) {
            true => CloseReport::Kept,
            // Whatever has dropped them: on such a device none has been closed.
            false if self.exports.is_lost() => CloseReport::Lost,
            false => CloseReport::Closed,
        });
        let deadline = Deadline::after(CLOSE_TIMEOUT);
        loop {
            let wait = deadline.next_wait();
            match close_reports.mappings() {
                PeerMappings::Open if !wait.is_zero() => thread::pause(LOOK_INTERVAL),
                PeerMappings::Closed => break,
                _ => {
                    tracing::warn!("other ranks still have memory of this one open: it is freed when they have closed it");
                    let remains = Remains { _kept: kept, close_reports, fork_check: self.fork_check };
                    REMAINS.lock().unwrap_or_else(PoisonError::into_inner).push(remains);
                    break;
                }
            }
        }
    }
}

/// What was left when its communicator ended.
struct Remains {
    _kept: Box<dyn Any + Send>,
    close_reports: CloseReports,
    fork_check: ForkCheck,
}

static REMAINS: Mutex<Vec<Remains>> = Mutex::new(Vec::new());

/// Frees what everybody has closed by now.
fn free_remains() {
    let mut remains = match REMAINS.try_lock() {
        Ok(remains) => remains,
        Err(TryLockError::Poisoned(remains)) => remains.into_inner(),
        // Another thread is at it; in a fork, a thread of the parent was.
        Err(TryLockError::WouldBlock) => return,
    };
    let is_left = |remains: &Remains| {
        remains.fork_check.in_fork() || remains.close_reports.mappings() != PeerMappings::Closed
    };
    let (left, closed) = std::mem::take(&mut *remains).into_iter().partition(is_left);
    *remains = left;
    drop(remains);
    // Freeing may wait for kernels.
    drop::<Vec<_>>(closed);
}
