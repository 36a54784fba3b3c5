//! Events, which order streams without a thread that waits.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

#[cfg(feature = "cuda")]
use cudarc::driver::sys::{CUevent, CUevent_wait_flags, CUstream};

use super::{AnyCommunicator, Inner};
#[cfg(feature = "cuda")]
use crate::device::cuda::{api, driver};
use crate::error::{Error, Result};

/// Events that are live in this process, so that a number that is none is an error and not undefined behaviour.
type Events = Mutex<BTreeSet<u64>>;

static OF_HOST: Events = Mutex::new(BTreeSet::new());
#[cfg(feature = "cuda")]
static OF_GPUS: Events = Mutex::new(BTreeSet::new());

fn known(is_known: bool, event: u64) -> Result<()> {
    match is_known {
        true => Ok(()),
        false => Err(Error::InvalidSetting {
            name: "event",
            value: format!("{event:#x}"),
            expected: "one that create_event made and that has not been destroyed",
        }),
    }
}

/// Events order a communicator's streams with others, so that communication overlaps with computation, and no thread waits.
///
/// As in: record an event on the stream of the computation when a gradient is ready, make the communicator's stream wait for it,
/// reduce, record another there, and make the first stream wait for that where the result is used.
///
/// On the host calls are complete when they return: an event is a number, streams are not looked at, and every order is there already.
///
/// An event may be used with every communicator of its device and context, not only with the one that made it.
impl AnyCommunicator {
    /// Those of its kind of device. Nobody destroys one while the guard lives.
    fn events(&self) -> MutexGuard<'static, BTreeSet<u64>> {
        let events = match &self.0 {
            Inner::Host(_) => &OF_HOST,
            #[cfg(feature = "cuda")]
            Inner::Cuda(_) => &OF_GPUS,
        };
        events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes an event, which lives until it is destroyed.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`].
    pub fn create_event(&self) -> Result<u64> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let _context = self.callers_context();
        let event = match &self.0 {
            // Relaxed: nothing but the number is shared.
            Inner::Host(_) => NEXT.fetch_add(1, Ordering::Relaxed),
            #[cfg(feature = "cuda")]
            Inner::Cuda(communicator) => {
                communicator.device().bind()?;
                driver::create_event()? as u64
            }
        };
        self.events().insert(event);
        Ok(event)
    }

    /// Destroys an event. Streams that wait for it go on doing so.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for what is no event, or is one no more; [`Error::Driver`].
    pub fn destroy_event(&self, event: u64) -> Result<()> {
        let _context = self.callers_context();
        known(self.events().remove(&event), event)?;
        match &self.0 {
            Inner::Host(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Inner::Cuda(communicator) => {
                communicator.device().bind()?;
                // SAFETY: an event that `create_event` made, and that nobody has destroyed: it was on the list.
                unsafe { api::cuEventDestroy_v2(event as CUevent) }.map_err(driver::driver("cuEventDestroy"))
            }
        }
    }

    /// Records an event after what is on a stream.
    ///
    /// # Errors
    ///
    /// As [`AnyCommunicator::destroy_event`].
    ///
    /// # Safety
    ///
    /// On a GPU `stream` is a live stream of the communicator's context.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub unsafe fn record_event(&self, event: u64, stream: u64) -> Result<()> {
        let (_context, events) = (self.callers_context(), self.events());
        known(events.contains(&event), event)?;
        match &self.0 {
            Inner::Host(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Inner::Cuda(communicator) => {
                communicator.device().bind()?;
                // SAFETY: the event is live, as it is on the list; the stream is by the caller's word.
                unsafe { api::cuEventRecord(event as CUevent, stream as CUstream) }
                    .map_err(driver::driver("cuEventRecord"))
            }
        }
    }

    /// Makes what is put on a stream from here on wait for what an event was last recorded after.
    ///
    /// # Errors
    ///
    /// As [`AnyCommunicator::destroy_event`].
    ///
    /// # Safety
    ///
    /// As [`AnyCommunicator::record_event`].
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub unsafe fn wait_event(&self, stream: u64, event: u64) -> Result<()> {
        let (_context, events) = (self.callers_context(), self.events());
        known(events.contains(&event), event)?;
        match &self.0 {
            Inner::Host(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Inner::Cuda(communicator) => {
                communicator.device().bind()?;
                let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT as u32;
                // SAFETY: as in `record_event`.
                unsafe { api::cuStreamWaitEvent(stream as CUstream, event as CUevent, flags) }
                    .map_err(driver::driver("cuStreamWaitEvent"))
            }
        }
    }
}
