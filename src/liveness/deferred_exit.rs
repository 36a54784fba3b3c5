//! How a rank leaves: its exit record, and the end of its connection.

use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use nix::sys::socket::{shutdown, Shutdown};

use super::page::own_status;
use super::status_page::ExitRecord;
use crate::device::host::SharedMemory;

/// The word that a rank has closed its communicator, for when its calls have ended. Dropped unsaid, nobody hears of it before the
/// process ends.
pub(crate) struct DeferredExit {
    pages: Arc<SharedMemory>,
    /// Closed, it would tell the others.
    here: ManuallyDrop<OwnedFd>,
}

impl DeferredExit {
    pub(super) fn new(pages: Arc<SharedMemory>, here: OwnedFd) -> Self {
        Self { pages, here: ManuallyDrop::new(here) }
    }

    /// After all that the calls have sent.
    pub fn publish(self) {
        leave(&self.pages, &ManuallyDrop::into_inner(self.here), &ExitRecord::closed());
    }
}

/// Leaves, once.
pub(super) fn leave(pages: &SharedMemory, connection: &OwnedFd, exit_record: &ExitRecord) {
    own_status(pages).leave(exit_record);
    // After the status page: who sees the connection closed finds the exit record. A fork may hold this end as well, so that closing
    // it would not do. It is connected; else nobody is there to be told.
    let _ = shutdown(connection.as_raw_fd(), Shutdown::Both);
}
