//! The events that are live in this process, so that a number that is none is an error and not undefined behaviour.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};

/// Those of one kind of device.
pub(super) struct Events(Mutex<BTreeSet<u64>>);

impl Events {
    pub const fn new() -> Self {
        Self(Mutex::new(BTreeSet::new()))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn add(&self, event: u64) {
        self.lock().insert(event);
    }

    /// Does something with an event, which nobody destroys meanwhile.
    pub fn with<R>(&self, event: u64, use_it: impl FnOnce() -> Result<R>) -> Result<R> {
        let events = self.lock();
        match events.contains(&event) {
            true => use_it(),
            false => Err(unknown(event)),
        }
    }

    /// Takes an event off the list: it is the caller's to destroy.
    pub fn remove(&self, event: u64) -> Result<()> {
        match self.lock().remove(&event) {
            true => Ok(()),
            false => Err(unknown(event)),
        }
    }
}

fn unknown(event: u64) -> Error {
    let value = format!("{event:#x}");
    Error::InvalidSetting {
        name: "event",
        value,
        expected: "one that create_event made and that has not been destroyed",
    }
}
