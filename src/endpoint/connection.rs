//! A rank's connection to the other ranks, and the memory that it has exported to them.

use std::time::Duration;

use super::exported::Exported;
use crate::bootstrap::{all_succeeded, Bootstrap};
use crate::device::Device;
use crate::error::Result;
use crate::fork::ForkCheck;
use crate::liveness::CloseReports;

/// The connection to the other ranks, and the exported memory, which must outlive the peers' mappings of it.
///
/// It is dropped after the endpoint's own mappings. The last of the communicator and its buffers to be dropped ends
/// the connection.
pub(crate) struct Connection<D: Device> {
    // Dropped first: ranks that wait for this one in a step notice that it has gone before this rank waits for them to
    // close their mappings.
    pub bootstrap: Box<dyn Bootstrap>,
    /// Time limit of each collective step.
    pub timeout: Duration,
    exported: Exported<D::Exports>,
}

impl<D: Device> Connection<D> {
    pub fn new(exports: D::Exports, bootstrap: Box<dyn Bootstrap>, timeout: Duration) -> Self {
        Self { bootstrap, timeout, exported: Exported::new(exports, ForkCheck::new()) }
    }

    /// Sets the reports by which ranks announce that they have closed their mappings. Called before anything is
    /// exported.
    pub fn set_close_reports(&self, close_reports: CloseReports) {
        self.exported.set_close_reports(close_reports);
    }

    /// Notes that this rank does not close its mappings of its peers' memory, since its kernels may still run.
    pub fn keep_mappings(&self) {
        self.exported.keep_mappings();
    }

    /// Returns the result of a step if it succeeded on all ranks, else an error. Collective.
    pub fn all_succeeded<T>(&self, step: Result<T>) -> Result<T> {
        all_succeeded(step, &*self.bootstrap, self.timeout)
    }
}
