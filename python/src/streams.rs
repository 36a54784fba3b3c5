//! The streams of a call: the one that it is put on, and those that its buffers are in use on. `stream_sources.rs` finds them.

use fast_allreduce::{AnyCommunicator, DeviceId};
use pyo3::prelude::*;

use crate::errors::invalid;

/// Handles of the legacy default stream.
const LEGACY: [u64; 2] = [0, 1];

#[derive(Debug)]
pub struct Streams {
    pub place: DeviceId,
    /// The one that the call is put on. `None` if nothing tells, and on the host.
    pub of_call: Option<u64>,
    /// Of interfaces that name another.
    pub others: Vec<u64>,
    pub is_given: bool,
}

impl Streams {
    /// The one that the call is put on.
    pub fn of_call(&self, py: Python<'_>) -> PyResult<u64> {
        match (self.place, self.of_call) {
            (DeviceId::Cpu, _) => Ok(0),
            (_, Some(stream)) => Ok(stream),
            (place, None) => Err(invalid(
                py,
                format!(
                    "a call on {place} needs stream=, and no buffer names one: the stream that its buffers are in use on (torch \
                     tensors have torch's current stream, and array interfaces of version 3 may name theirs)"
                ),
            )),
        }
    }

    /// As DLPack numbers the call's.
    pub fn of_dlpack(&self, py: Python<'_>) -> PyResult<i64> {
        match self.of_call(py)? {
            stream if LEGACY.contains(&stream) => Ok(1),
            stream => {
                i64::try_from(stream).map_err(|_| invalid(py, format!("stream = {stream:#x} is no stream")))
            }
        }
    }

    /// Has the call's stream wait for the others.
    pub fn before(&self, any: &AnyCommunicator) -> fast_allreduce::Result<()> {
        self.of_call.map_or(Ok(()), |stream| {
            // SAFETY: the caller and the buffers' owners say of all that they are streams.
            self.others.iter().try_for_each(|&other| unsafe { any.order_streams(other, stream) })
        })
    }

    /// Has the others wait for the call's, unless the caller has named it and so knows where to wait.
    pub fn after(&self, any: &AnyCommunicator) -> fast_allreduce::Result<()> {
        self.of_call.filter(|_| !self.is_given).map_or(Ok(()), |stream| {
            // SAFETY: as above.
            self.others.iter().try_for_each(|&other| unsafe { any.order_streams(stream, other) })
        })
    }
}

pub fn is_same(one: u64, other: u64) -> bool {
    one == other || (LEGACY.contains(&one) && LEGACY.contains(&other))
}
