//! The host's stream: there is none, since calls have ended when they return. Every order is there already.

use std::sync::atomic::{AtomicU64, Ordering};

use super::events::Events;
use super::stream::{Queue, Queued};
use crate::call::{Collective, Transfer};
use crate::catalogue::DType;
use crate::communicator::Communicator;
use crate::device::Host;
use crate::error::Result;

static EVENTS: Events = Events::new();

/// Calls are carried out at once.
pub struct AtOnce;

impl Queued for Host {
    type Queue = AtOnce;
}

impl Queue<Host> for AtOnce {
    fn of(_communicator: &Communicator<Host>) -> Result<Self> {
        Ok(Self)
    }

    unsafe fn collective(
        &self,
        communicator: &Communicator<Host>,
        collective: Collective<'_>,
        [input, output]: [u64; 2],
        count: usize,
        dtype: DType,
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { communicator.collective_raw(collective, input as *const _, output as *mut _, count, dtype) }
    }

    unsafe fn transfer(&self, communicator: &Communicator<Host>, transfers: &[Transfer]) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { communicator.transfer_raw(transfers) }
    }

    fn finish(&self, _communicator: &Communicator<Host>) -> Result<()> {
        Ok(())
    }

    fn barrier(&self, communicator: &Communicator<Host>) -> Result<()> {
        communicator.barrier()
    }

    fn create_event(&self) -> Result<u64> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let event = NEXT.fetch_add(1, Ordering::Relaxed);
        EVENTS.add(event);
        Ok(event)
    }

    fn destroy_event(&self, event: u64) -> Result<()> {
        EVENTS.remove(event)
    }

    unsafe fn record(&self, event: u64, _stream: Option<u64>) -> Result<()> {
        EVENTS.with(event, || Ok(()))
    }

    unsafe fn wait(&self, _stream: Option<u64>, event: u64) -> Result<()> {
        EVENTS.with(event, || Ok(()))
    }
}
