//! Where the streams of a call come from.
//!
//! A call of a GPU is put on the stream that it is given. Without one it is torch's current stream where a buffer is a torch tensor,
//! or else the one that an array interface names. Before the call that stream waits for the others that interfaces name, and where the
//! call was given none, they wait for it afterwards.

use fast_allreduce::DeviceId;
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyTuple};

use crate::errors::invalid;
use crate::interface;
use crate::streams::{is_same, Streams};
use crate::torch::Torch;
use crate::user_code::{call, optional_attribute};
use crate::values::place;
use crate::view::is_exporter;

impl Streams {
    /// Of a call that was `given` one, or none, with these buffers, of which the last are written.
    pub fn of(
        py: Python<'_>,
        place: DeviceId,
        given: Option<&Bound<'_, PyAny>>,
        buffers: &[Option<&Bound<'_, PyAny>>],
    ) -> PyResult<Self> {
        let mut streams = Self { place, of_call: None, others: Vec::new(), is_given: given.is_some() };
        if place == DeviceId::Cpu {
            return match given {
                None => Ok(streams),
                Some(_) => Err(invalid(
                    py,
                    "a stream is given, and the communicator's buffers are on cpu, where calls have ended when they return",
                )),
            };
        }
        let (mut current, mut named) = (None, Vec::new());
        for buffer in buffers.iter().copied().flatten() {
            match uses(buffer)? {
                Some(Use::Current(stream)) => current = Some(stream),
                Some(Use::Named(stream)) => named.push(stream),
                None => {}
            }
        }
        streams.of_call = match given {
            Some(given) => Some(handle(given, place)?),
            None => current.or(named.last().copied()),
        };
        named.sort_unstable();
        named.dedup();
        streams.others = named
            .into_iter()
            .filter(|&named| streams.of_call.is_some_and(|of| !is_same(of, named)))
            .collect();
        Ok(streams)
    }
}

/// What a buffer tells of the stream that it is in use on.
enum Use {
    /// Torch's current stream.
    Current(u64),
    Named(u64),
}

fn uses(buffer: &Bound<'_, PyAny>) -> PyResult<Option<Use>> {
    if is_exporter(buffer) {
        return Ok(None);
    }
    if let Some(torch) = Torch::of(buffer)? {
        return Ok(torch.current_stream(buffer)?.map(Use::Current));
    }
    let told = optional_attribute(buffer, intern!(buffer.py(), "__cuda_array_interface__"))?;
    let stream = told.map(|told| interface::stream_of(&told)).transpose()?;
    Ok(stream.flatten().map(Use::Named))
}

/// A CUDA stream: its handle, or an object of torch, CuPy or cuda.core that has one.
pub fn handle(stream: &Bound<'_, PyAny>, on: DeviceId) -> PyResult<u64> {
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
        // A default stream has the same handle on all GPUs.
        let device = optional_attribute(stream, intern!(py, "device"))?.filter(|device| !device.is_none());
        if let Some(device) = device {
            let device = device.str()?;
            if place(py, device.to_str()?).is_ok_and(|place| place != on) {
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
