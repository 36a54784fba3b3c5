//! Registered memory: calls pull from it without a copy.

use fast_allreduce::{AnyBuffer, DeviceId};
use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::Operand;
use crate::interpreter::drop_detached;

#[pyclass(module = "fast_allreduce", frozen)]
pub struct RegisteredBuffer {
    /// The registration, dropped before the operand whose memory it covers. `None` only while this is dropped.
    memory: Option<(AnyBuffer, Option<Operand>)>,
    address: u64,
    bytes: usize,
    device: DeviceId,
}

impl RegisteredBuffer {
    /// Wraps memory that the communicator allocated, or that it registered for an operand.
    pub fn new(memory: AnyBuffer, operand: Option<Operand>, device: DeviceId) -> Self {
        let (address, bytes) = (memory.address(), memory.bytes());
        Self { memory: Some((memory, operand)), address, bytes, device }
    }

    /// Returns the dictionary of an array interface, or raises `AttributeError` if the memory is not on a device of its
    /// kind.
    fn interface<'py>(&self, py: Python<'py>, name: &str, on_gpu: bool) -> PyResult<Bound<'py, PyDict>> {
        if on_gpu != (self.device != DeviceId::Cpu) {
            return Err(PyAttributeError::new_err(format!("{name}: the memory is on {}", self.device)));
        }
        let interface = PyDict::new(py);
        interface.set_item("shape", (self.bytes,))?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("data", (self.address, false))?;
        interface.set_item("version", 3)?;
        Ok(interface)
    }
}

impl Drop for RegisteredBuffer {
    fn drop(&mut self) {
        // The drop waits for running calls of the communicator, and on a GPU makes its context current.
        if let Some(memory) = self.memory.take() {
            drop_detached(memory);
        }
    }
}

#[pymethods]
impl RegisteredBuffer {
    #[getter]
    fn address(&self) -> u64 {
        self.address
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.bytes
    }

    #[getter]
    fn device(&self) -> String {
        self.device.to_string()
    }

    #[getter(__array_interface__)]
    fn array_interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.interface(py, "__array_interface__", false)
    }

    #[getter(__cuda_array_interface__)]
    fn cuda_array_interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.interface(py, "__cuda_array_interface__", true)
    }

    fn __len__(&self) -> usize {
        self.bytes
    }

    fn __repr__(&self) -> String {
        format!("RegisteredBuffer({} bytes on {})", self.bytes, self.device)
    }
}
