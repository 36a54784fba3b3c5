//! A stream of the communicator's own on a GPU, and the driver's events.

use std::sync::Arc;

use cudarc::driver::sys::{CUevent, CUevent_wait_flags, CUstream};
use cudarc::driver::CudaStream;

use super::events::Events;
use super::stream::{Queue, Queued};
use crate::call::{Collective, Transfer};
use crate::catalogue::DType;
use crate::communicator::Communicator;
use crate::device::cuda::driver::{bind, create_event, driver};
use crate::device::cuda::{api, Cuda};
use crate::error::Result;

static EVENTS: Events = Events::new();

/// A stream that does not wait for the default stream, nor that for it.
pub struct OwnStream {
    stream: Arc<CudaStream>,
}

impl OwnStream {
    /// A stream by its number; without one, this.
    fn stream(&self, stream: Option<u64>) -> CUstream {
        stream.map_or(self.stream.cu_stream(), |stream| stream as CUstream)
    }

    fn bind(&self) -> Result<()> {
        bind(self.stream.context())
    }
}

impl Queued for Cuda {
    type Queue = OwnStream;
}

impl Queue<Cuda> for OwnStream {
    fn of(communicator: &Communicator<Cuda>) -> Result<Self> {
        let stream = communicator.device().context().new_stream().map_err(driver("cuStreamCreate"))?;
        Ok(Self { stream })
    }

    unsafe fn collective(
        &self,
        communicator: &Communicator<Cuda>,
        collective: Collective<'_>,
        [input, output]: [u64; 2],
        count: usize,
        dtype: DType,
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe {
            communicator.collective_raw(self.stream.cu_stream(), collective, input, output, count, dtype)
        }
    }

    unsafe fn transfer(&self, communicator: &Communicator<Cuda>, transfers: &[Transfer]) -> Result<()> {
        // SAFETY: as in `collective`.
        unsafe { communicator.transfer_raw(self.stream.cu_stream(), transfers) }
    }

    fn finish(&self, communicator: &Communicator<Cuda>) -> Result<()> {
        communicator.synchronize(&self.stream)
    }

    fn barrier(&self, communicator: &Communicator<Cuda>) -> Result<()> {
        communicator.barrier()
    }

    fn create_event(&self) -> Result<u64> {
        self.bind()?;
        let event = create_event()? as u64;
        EVENTS.add(event);
        Ok(event)
    }

    fn destroy_event(&self, event: u64) -> Result<()> {
        self.bind()?;
        EVENTS.remove(event)?;
        // SAFETY: an event that `create_event` made, and that nobody has destroyed: it was on the list.
        unsafe { api::cuEventDestroy_v2(event as CUevent) }.map_err(driver("cuEventDestroy"))
    }

    unsafe fn record(&self, event: u64, stream: Option<u64>) -> Result<()> {
        self.bind()?;
        EVENTS.with(event, || {
            // SAFETY: the event is live, as it is on the list; the stream is this, or the caller's word.
            unsafe { api::cuEventRecord(event as CUevent, self.stream(stream)) }
                .map_err(driver("cuEventRecord"))
        })
    }

    unsafe fn wait(&self, stream: Option<u64>, event: u64) -> Result<()> {
        self.bind()?;
        let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT as u32;
        EVENTS.with(event, || {
            // SAFETY: as in `record`.
            unsafe { api::cuStreamWaitEvent(self.stream(stream), event as CUevent, flags) }
                .map_err(driver("cuStreamWaitEvent"))
        })
    }
}
