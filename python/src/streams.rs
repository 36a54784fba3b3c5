//! The streams of a call: the one it is enqueued on, and those on which its buffers are in use.

use fast_allreduce::{AnyCommunicator, DeviceId};
use pyo3::prelude::*;

use crate::errors::invalid;

/// Handles of the legacy default stream.
const LEGACY: [u64; 2] = [0, 1];

/// The streams of a call. `calls/streams.rs` finds them.
#[derive(Debug)]
pub struct Streams {
    pub device: DeviceId,
    /// The stream that the call is enqueued on. `None` on the host, and where neither the caller nor a buffer names
    /// one.
    pub of_call: Option<u64>,
    /// Other streams, named by array interfaces.
    pub others: Vec<u64>,
    /// Whether the caller passed the stream.
    pub is_given: bool,
}

impl Streams {
    /// Returns the stream that the call is enqueued on, 0 on the host.
    pub fn of_call(&self, py: Python<'_>) -> PyResult<u64> {
        match (self.device, self.of_call) {
            (DeviceId::Cpu, _) => Ok(0),
            (_, Some(stream)) => Ok(stream),
            (device, None) => Err(invalid(
                py,
                format!(
                    "a call on {device} needs stream=, and no buffer names one: pass the stream on which its buffers \
                     are in use (torch tensors use torch's current stream, and array interfaces of version 3 may \
                     name theirs)"
                ),
            )),
        }
    }

    /// Returns the call's stream as DLPack numbers it.
    pub fn of_dlpack(&self, py: Python<'_>) -> PyResult<i64> {
        match self.of_call(py)? {
            stream if LEGACY.contains(&stream) => Ok(1),
            stream => {
                i64::try_from(stream).map_err(|_| invalid(py, format!("stream = {stream:#x} is no stream")))
            }
        }
    }

    /// Makes the call's stream wait for the others.
    pub fn before(&self, any: &AnyCommunicator) -> fast_allreduce::Result<()> {
        self.of_call.map_or(Ok(()), |stream| {
            // SAFETY: the caller and the owners of the buffers state that these are streams.
            self.others.iter().try_for_each(|&other| unsafe { any.order_streams(other, stream) })
        })
    }

    /// Makes the others wait for the call's stream. A caller that passed the stream orders later work itself.
    pub fn after(&self, any: &AnyCommunicator) -> fast_allreduce::Result<()> {
        self.of_call.filter(|_| !self.is_given).map_or(Ok(()), |stream| {
            // SAFETY: as in `before`.
            self.others.iter().try_for_each(|&other| unsafe { any.order_streams(stream, other) })
        })
    }
}

/// Returns whether two handles mean one stream.
pub fn is_same(one: u64, other: u64) -> bool {
    one == other || (LEGACY.contains(&one) && LEGACY.contains(&other))
}
