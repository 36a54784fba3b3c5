//! A rank's connection to the other ranks, and the memory that it has exported to them.

use std::time::Duration;

use super::exported::Exported;
use crate::bootstrap::{all_succeeded, Bootstrap};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::exclusive::{Exclusive, Held};
use crate::fork::ForkCheck;
use crate::liveness::CloseReports;

/// The connection to the other ranks, and the exported memory, which must outlive the peers' mappings of it.
///
/// The communicator holds it, and so does the endpoint, which drops it after its own mappings. The last of the
/// communicator and its buffers to be dropped ends the connection.
pub(crate) struct Connection<D: Device> {
    // Dropped first: ranks that wait for this one in a step notice that it has gone before this rank waits for them to
    // close their mappings.
    pub bootstrap: Box<dyn Bootstrap>,
    /// Time limit of each collective step.
    pub timeout: Duration,
    fork_check: ForkCheck,
    /// See [`Connection::step`].
    stepping: Exclusive<()>,
    exported: Exported<D::Exports>,
}

impl<D: Device> Connection<D> {
    pub fn new(exports: D::Exports, bootstrap: Box<dyn Bootstrap>, timeout: Duration) -> Self {
        let fork_check = ForkCheck::new();
        Self {
            bootstrap,
            timeout,
            fork_check,
            stepping: Exclusive::default(),
            exported: Exported::new(exports, fork_check),
        }
    }

    /// Returns [`Error::Forked`] in a fork of the rank's process.
    pub fn check_fork(&self) -> Result<()> {
        match self.fork_check.in_fork() {
            true => Err(Error::Forked),
            false => Ok(()),
        }
    }

    /// Begins a set-up step, which lasts until the guard is dropped: allocating, registering, freeing, and everything
    /// else that uses the bootstrap.
    ///
    /// A step consists of several gathers. If two threads ran steps at the same time, their gathers could be in
    /// different orders on different ranks, and be mixed up. The callers order whole steps; ranks compare what they are
    /// about to do at the beginning of each step, which detects different orders. The wait for the lock is bounded by
    /// the time limits of the steps before it: they hold no other lock that this thread could hold.
    pub fn step(&self) -> Result<Held<'_, ()>> {
        // First: in a fork, nobody releases the lock if another thread of the parent held it.
        self.check_fork()?;
        self.stepping.enter()
    }

    /// Returns whether this thread is in a step.
    pub fn is_in_step(&self) -> bool {
        self.stepping.is_mine()
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
