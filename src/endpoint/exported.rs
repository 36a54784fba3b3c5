//! Memory of this rank that other processes map. It is freed after all of them have closed their mappings: at the end
//! of its communicator or, if a peer is late, at the end of another communicator. It is never freed while a
//! communicator is created: freeing may wait for kernels, and those may wait for this rank.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, TryLockError};
use std::time::Duration;

use crate::deadline::Deadline;
use crate::device::sealed::Exports;
use crate::fork::ForkCheck;
use crate::liveness::{CloseReport, CloseReports, PeerMappings};
use crate::thread;

/// How long the end of a communicator waits for the peers to close their mappings.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Interval between two checks of the peers' reports.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// Memory that a communicator has exported. Dropped after this rank's mappings of its peers' memory.
pub(super) struct Exported<E: Exports> {
    exports: E,
    /// Set before the first export.
    close_reports: OnceLock<CloseReports>,
    fork_check: ForkCheck,
    /// This rank's mappings stay open, since its kernels may still run.
    keeps_mappings: AtomicBool,
}

impl<E: Exports> Exported<E> {
    pub fn new(exports: E, fork_check: ForkCheck) -> Self {
        Self { exports, close_reports: OnceLock::new(), fork_check, keeps_mappings: AtomicBool::new(false) }
    }

    /// Sets the reports by which ranks announce that they have closed their mappings. Called before anything is
    /// exported.
    pub fn set_close_reports(&self, close_reports: CloseReports) {
        // Called once, when the communicator is created.
        let _ = self.close_reports.set(close_reports);
    }

    /// Notes that this rank does not close its mappings of its peers' memory, since its kernels may still run.
    pub fn keep_mappings(&self) {
        self.keeps_mappings.store(true, Ordering::Relaxed);
    }
}

impl<E: Exports> Drop for Exported<E> {
    fn drop(&mut self) {
        if !self.exports.is_empty() {
            self.end();
        }
        // Even if this communicator has exported nothing, like one of a single rank.
        free_late();
    }
}

impl<E: Exports> Exported<E> {
    /// Frees the exported memory, or leaves it for the end of another communicator.
    fn end(&mut self) {
        let kept = self.exports.take();
        let (false, Some(close_reports)) = (self.fork_check.in_fork(), self.close_reports.take()) else {
            // In a fork, the memory belongs to the parent.
            return std::mem::forget(kept);
        };
        close_reports.publish(match self.keeps_mappings.load(Ordering::Relaxed) {
            true => CloseReport::Kept,
            // On a failed device, dropping the mappings has not closed them.
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
                    tracing::warn!(
                        "other ranks still map memory of this rank: it is freed when they have closed it"
                    );
                    let late = Late { _kept: kept, close_reports, fork_check: self.fork_check };
                    LATE.lock().unwrap_or_else(PoisonError::into_inner).push(late);
                    break;
                }
            }
        }
    }
}

/// Memory that peers still mapped when its communicator ended.
struct Late {
    _kept: Box<dyn Any + Send>,
    close_reports: CloseReports,
    fork_check: ForkCheck,
}

static LATE: Mutex<Vec<Late>> = Mutex::new(Vec::new());

/// Frees the memory in [`LATE`] of which all peers have closed their mappings.
fn free_late() {
    let mut late = match LATE.try_lock() {
        Ok(late) => late,
        Err(TryLockError::Poisoned(late)) => late.into_inner(),
        // Another thread is freeing; in a fork, a thread of the parent was.
        Err(TryLockError::WouldBlock) => return,
    };
    let is_left =
        |late: &Late| late.fork_check.in_fork() || late.close_reports.mappings() != PeerMappings::Closed;
    let (left, closed) = std::mem::take(&mut *late).into_iter().partition(is_left);
    *late = left;
    drop(late);
    // Freeing may wait for kernels.
    drop::<Vec<_>>(closed);
}
