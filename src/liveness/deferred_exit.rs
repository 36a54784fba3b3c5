//! How a rank leaves: it writes its exit record, and shuts down its connection.

use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use nix::sys::socket::{shutdown, Shutdown};

use super::page::own_status;
use super::status_page::ExitRecord;
use crate::device::host::SharedMemory;

/// The exit of a rank whose calls may still run, to be published when they have ended. If this is dropped instead,
/// peers notice the exit only when the process ends.
pub(crate) struct DeferredExit {
    pages: Arc<SharedMemory>,
    /// Not closed on drop: closing it would notify the peers.
    own_end: ManuallyDrop<OwnedFd>,
}

impl DeferredExit {
    pub(super) fn new(pages: Arc<SharedMemory>, own_end: OwnedFd) -> Self {
        Self { pages, own_end: ManuallyDrop::new(own_end) }
    }

    /// Publishes the exit. The calls have ended, so that everything they sent comes before it.
    pub fn publish(self) {
        leave(&self.pages, &ManuallyDrop::into_inner(self.own_end), &ExitRecord::closed());
    }
}

/// Writes the exit record and shuts the connection down. Called once.
pub(super) fn leave(pages: &SharedMemory, connection: &OwnedFd, exit_record: &ExitRecord) {
    own_status(pages).leave(exit_record);
    // After the exit record, so that a peer that sees the connection closed finds the record. Closing the descriptor is
    // not enough, since a fork may hold it as well. An error means that no peer holds the other end.
    let _ = shutdown(connection.as_raw_fd(), Shutdown::Both);
}
