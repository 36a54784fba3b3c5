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

/// The live events of this process. A call with any other number returns an error and is not undefined behaviour.
type Events = Mutex<BTreeSet<u64>>;

static HOST_EVENTS: Events = Mutex::new(BTreeSet::new());
#[cfg(feature = "cuda")]
static GPU_EVENTS: Events = Mutex::new(BTreeSet::new());

/// Events order a communicator's streams and other streams, so that communication and computation overlap, and no
/// thread waits.
///
/// An example of use: record an event on the stream of the computation when a gradient is ready, make the
/// communicator's stream wait for it, reduce, record another event there, and make the first stream wait for that where
/// the result is used.
///
/// On the host a call is complete when it returns. There an event is only a number, streams are ignored, and nothing
/// has to be ordered.
///
/// An event may be used with every communicator of its device and context, not only with the one that created it.
impl AnyCommunicator {
    /// Locks the events of this kind of device. No event is destroyed while the guard lives.
    fn events(&self) -> MutexGuard<'static, BTreeSet<u64>> {
        let events = match &self.0 {
            Inner::Host(_) => &HOST_EVENTS,
            #[cfg(feature = "cuda")]
            Inner::Cuda(_) => &GPU_EVENTS,
        };
        events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the events and refuses a number that is not one of them.
    fn events_with(&self, event: u64) -> Result<MutexGuard<'static, BTreeSet<u64>>> {
        let events = self.events();
        match events.contains(&event) {
            true => Ok(events),
            false => Err(Error::InvalidSetting {
                name: "event",
                value: format!("{event:#x}"),
                expected: "one that create_event made and that has not been destroyed",
            }),
        }
    }

    /// Calls the driver with the device's context current. Returns `None` on the host.
    #[cfg(feature = "cuda")]
    fn on_gpu<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        let _context = self.callers_context();
        let Inner::Cuda(communicator) = &self.0 else { return Ok(None) };
        communicator.device().bind()?;
        call().map(Some)
    }

    /// Creates an event, which lives until it is destroyed.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(1, |communicator| {
    /// let communicator = AnyCommunicator::from(communicator);
    /// let (computation, stream) = (0, 0); // On a GPU: two streams.
    /// let event = communicator.create_event()?;
    /// // SAFETY: both streams are live; on the host there are none.
    /// unsafe {
    ///     communicator.record_event(event, computation)?;
    ///     communicator.wait_event(stream, event)?; // Later work on `stream` waits.
    /// }
    /// communicator.destroy_event(event)?;
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Driver`].
    pub fn create_event(&self) -> Result<u64> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // Relaxed: nothing but the number is shared.
        let event = NEXT.fetch_add(1, Ordering::Relaxed);
        #[cfg(feature = "cuda")]
        let event = self.on_gpu(driver::create_event)?.map_or(event, |event| event as u64);
        self.events().insert(event);
        Ok(event)
    }

    /// Destroys an event. Streams that wait for it continue to do so.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for a number that is not an event, or an event that has been destroyed;
    /// [`Error::Driver`].
    pub fn destroy_event(&self, event: u64) -> Result<()> {
        self.events_with(event)?.remove(&event);
        #[cfg(feature = "cuda")]
        self.on_gpu(|| {
            // SAFETY: `create_event` made it, and no other call destroys it: this one has removed it from the set.
            unsafe { api::cuEventDestroy_v2(event as CUevent) }.map_err(driver::driver("cuEventDestroy"))
        })?;
        Ok(())
    }

    /// Records an event after the work that is on `stream` now. [`AnyCommunicator::create_event`] has an example.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for a number that is not an event, or an event that has been destroyed;
    /// [`Error::Driver`].
    ///
    /// # Safety
    ///
    /// On a GPU `stream` is a live stream of the communicator's context.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub unsafe fn record_event(&self, event: u64, stream: u64) -> Result<()> {
        let _events = self.events_with(event)?;
        #[cfg(feature = "cuda")]
        self.on_gpu(|| {
            // SAFETY: the event is live, because the set has it; the stream is live by the caller's obligation.
            unsafe { api::cuEventRecord(event as CUevent, stream as CUstream) }
                .map_err(driver::driver("cuEventRecord"))
        })?;
        Ok(())
    }

    /// Makes later work on `stream` wait for the work after which the event was last recorded.
    ///
    /// [`AnyCommunicator::create_event`] has an example.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for a number that is not an event, or an event that has been destroyed;
    /// [`Error::Driver`].
    ///
    /// # Safety
    ///
    /// On a GPU `stream` is a live stream of the communicator's context.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub unsafe fn wait_event(&self, stream: u64, event: u64) -> Result<()> {
        let _events = self.events_with(event)?;
        #[cfg(feature = "cuda")]
        self.on_gpu(|| {
            let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT as u32;
            // SAFETY: as in `record_event`.
            unsafe { api::cuStreamWaitEvent(stream as CUstream, event as CUevent, flags) }
                .map_err(driver::driver("cuStreamWaitEvent"))
        })?;
        Ok(())
    }
}
