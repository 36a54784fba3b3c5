//! The connection of a rank to the others, and the agreement by which it ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::bootstrap::{all_succeeded, Bootstrap};
use crate::device::sealed::Exports as _;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::exclusive::{Exclusive, Held};
use crate::fork::Origin;

/// The connection to the other ranks, and what must outlive their mappings of it: kept by the communicator and, after its own
/// mappings, by the endpoint, so that the last of communicator and buffers ends it.
pub(crate) struct Connection<D: Device> {
    exports: D::Exports,
    pub bootstrap: Box<dyn Bootstrap>,
    /// Of its steps.
    pub timeout: Duration,
    origin: Origin,
    /// See [`Connection::step`].
    stepping: Exclusive<()>,
    /// This rank has left open what it has of its peers.
    open: AtomicBool,
}

impl<D: Device> Connection<D> {
    pub fn new(exports: D::Exports, bootstrap: Box<dyn Bootstrap>, timeout: Duration) -> Self {
        let (stepping, open) = Default::default();
        Self { exports, bootstrap, timeout, origin: Origin::here(), stepping, open }
    }

    /// Refuses to speak in the name of the process that this one is a fork of.
    pub fn here(&self) -> Result<()> {
        match self.origin.is_elsewhere() {
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

    /// Kernels may still run in what this rank has of its peers' memory: no rank frees what it has exported.
    pub fn leave_open(&self) {
        self.open.store(true, Ordering::Relaxed);
    }

    /// Whether a step succeeded on all ranks. Collective.
    pub fn all_succeeded<T>(&self, step: Result<T>) -> Result<T> {
        all_succeeded(step, &*self.bootstrap, self.timeout)
    }
}

impl<D: Device> Drop for Connection<D> {
    fn drop(&mut self) {
        const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
        // Neither is what a rank says in another step: one that is at that has closed nothing yet, and fails with this as the
        // reason.
        const CLOSED: &[u8] = b"it closed its communicator";
        const OPEN: &[u8] = b"it closed its communicator while its calls may still run";
        if self.exports.is_empty() {
            return;
        }
        // All ranks have closed what this one frees next. A rank that does not come may still use it, and a longer wait
        // could be a hang: then it stays until the process ends. In a fork it is the parent's.
        let all_closed = || {
            let own = if self.open.load(Ordering::Relaxed) { OPEN } else { CLOSED };
            let deadline = Instant::now() + CLOSE_TIMEOUT;
            loop {
                let left = deadline.saturating_duration_since(Instant::now());
                let Ok(all) = self.bootstrap.all_gather(own, left) else { return false };
                // All ranks see the same, and end this together or go on together.
                if all.iter().all(|said| said == CLOSED) {
                    return true;
                }
                if all.iter().any(|said| said == OPEN) || left.is_zero() {
                    return false;
                }
            }
        };
        if self.origin.is_elsewhere() || !all_closed() {
            self.exports.leave();
        }
    }
}
