//! The connection of a rank to the others, and what it has exported to them.

use std::time::Duration;

use super::exported::Exported;
use crate::bootstrap::{all_succeeded, Bootstrap};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::exclusive::{Exclusive, Held};
use crate::fork::ForkCheck;
use crate::liveness::CloseReports;

/// The connection to the other ranks, and what must outlive their mappings of it: kept by the communicator and, after its own
/// mappings, by the endpoint, so that the last of communicator and buffers ends it.
pub(crate) struct Connection<D: Device> {
    // First: ranks that wait for this one in a step hear that it has gone, before its end waits for theirs.
    pub bootstrap: Box<dyn Bootstrap>,
    /// Of its steps.
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

    /// Refuses to speak in the name of the process that this one is a fork of.
    pub fn here(&self) -> Result<()> {
        match self.fork_check.in_fork() {
            true => Err(Error::Forked),
            false => Ok(()),
        }
    }

    /// Begins a set-up step, which lasts until the guard goes: allocating, registering, freeing and whatever else
    /// gathers through the bootstrap. A step is several gathers; those of two threads, mixed in another order on each
    /// rank, would pair one's with the other's. Between whole steps the order is the callers', and what ranks compare
    /// at the beginning of each tells them of another. The wait for it is bounded by the limits of the steps before:
    /// they hold no other lock that this thread could have.
    pub fn step(&self) -> Result<Held<'_, ()>> {
        // First: in a fork nobody gives the lock back that another thread of the parent held.
        self.here()?;
        self.stepping.enter()
    }

    /// Whether this thread is in a step.
    pub fn is_entered_here(&self) -> bool {
        self.stepping.is_mine()
    }

    /// How the ranks tell each other that they have closed their mappings. Before anything is exported.
    pub fn set_close_reports(&self, close_reports: CloseReports) {
        self.exported.set_close_reports(close_reports);
    }

    /// This rank's mappings of its peers' memory are not closed, as its kernels may still run: what they are of stays.
    pub fn keep_mappings(&self) {
        self.exported.keep_mappings();
    }

    /// Whether a step succeeded on all ranks. Collective.
    pub fn all_succeeded<T>(&self, step: Result<T>) -> Result<T> {
        all_succeeded(step, &*self.bootstrap, self.timeout)
    }
}
