//! The streams of a call on a GPU, from its arguments.
//!
//! A call is enqueued on the stream that the caller passes. Without one it uses torch's current stream if a buffer is a
//! torch tensor, else the stream that an array interface names. Before the call that stream waits for the other streams
//! that interfaces name. If the caller passed none, those wait for it after the call.

use fast_allreduce::DeviceId;
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyTuple};

use crate::buffers::{stream_of, Torch};
use crate::errors::invalid;
use crate::interpreter::{call, optional_attribute};
use crate::streams::{is_same, Streams};
use crate::values;

/// Returns the streams of a call. Buffers that the call writes come last: their streams take precedence.
pub fn of_buffers(
    py: Python<'_>,
    device: DeviceId,
    stream: Option<&Bound<PyAny>>,
    buffers: &[Option<&Bound<PyAny>>],
) -> PyResult<Streams> {
    let mut streams = Streams { device, of_call: None, others: Vec::new(), is_given: stream.is_some() };
    if device == DeviceId::Cpu {
        return match stream {
            None => Ok(streams),
            Some(_) => Err(invalid(
                py,
                "a stream is given, and the communicator's buffers are on cpu, where calls have ended when they return",
            )),
        };
    }
    let (mut current, mut named) = (None, Vec::new());
    for buffer in buffers.iter().copied().flatten() {
        match stream_use(buffer)? {
            Some(Use::Current(stream)) => current = Some(stream),
            Some(Use::Named(stream)) => named.push(stream),
            None => {}
        }
    }
    streams.of_call = match stream {
        Some(stream) => Some(handle(stream, device)?),
        None => current.or(named.last().copied()),
    };
    named.sort_unstable();
    named.dedup();
    named.retain(|&named| streams.of_call.is_some_and(|of_call| !is_same(of_call, named)));
    streams.others = named;
    Ok(streams)
}

/// The stream on which a buffer is in use.
enum Use {
    /// torch's current stream.
    Current(u64),
    /// A stream that an array interface names.
    Named(u64),
}

fn stream_use(buffer: &Bound<PyAny>) -> PyResult<Option<Use>> {
    if let Some(torch) = Torch::of(buffer)? {
        return Ok(torch.current_stream(buffer)?.map(Use::Current));
    }
    let interface = optional_attribute(buffer, intern!(buffer.py(), "__cuda_array_interface__"))?;
    let stream = interface.map(|interface| stream_of(&interface)).transpose()?;
    Ok(stream.flatten().map(Use::Named))
}

/// Returns the handle of a CUDA stream: a number, or an object of torch, CuPy or cuda.core that has one.
fn handle(stream: &Bound<PyAny>, on: DeviceId) -> PyResult<u64> {
    let py = stream.py();
    let kind = stream.get_type();
    let refused =
        || PyTypeError::new_err(format!("a stream is a handle or has __cuda_stream__; {kind:?} is neither"));
    if stream.is_instance_of::<PyBool>() {
        return Err(refused());
    }
    if let Ok(handle) = stream.extract() {
        return Ok(handle);
    }
    if let Some(handle) = optional_attribute(stream, intern!(py, "cuda_stream"))? {
        // A default stream has the same handle on every GPU, so the device is compared.
        let device = optional_attribute(stream, intern!(py, "device"))?.filter(|device| !device.is_none());
        if let Some(device) = device {
            let device = device.str()?;
            if values::device(py, device.to_str()?).is_ok_and(|device| device != on) {
                return Err(invalid(
                    py,
                    format!("the stream is on {device}, the communicator's buffers are on {on}"),
                ));
            }
        }
        return handle.extract();
    }
    if let Some(protocol) = optional_attribute(stream, intern!(py, "__cuda_stream__"))? {
        return Ok(call(&protocol, &PyTuple::empty(py), None)?.extract::<(u32, u64)>()?.1);
    }
    Err(refused())
}
