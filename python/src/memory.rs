//! Memory that all ranks allocated together: calls pull from it without a copy.

use fast_allreduce::{AnyBuffer, DeviceId};
use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::buffer::Operand;
use crate::interrupt::drop_apart;

#[pyclass(module = "fast_allreduce", frozen)]
pub struct RegisteredBuffer {
    /// Until it goes: the registration, which ends before the memory of an operand may go.
    memory: Option<(AnyBuffer, Option<Operand>)>,
    address: u64,
    bytes: usize,
    place: DeviceId,
}

impl RegisteredBuffer {
    /// What the communicator allocated, or an operand that it registered.
    pub fn new(memory: AnyBuffer, operand: Option<Operand>, place: DeviceId) -> Self {
        let (address, bytes) = (memory.address(), memory.bytes());
        Self { memory: Some((memory, operand)), address, bytes, place }
    }

    /// What both array interfaces say.
    fn interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
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
        // It waits for calls of its communicator that are under way, and on a GPU makes that current.
        if let Some(memory) = self.memory.take() {
            drop_apart(memory);
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
        self.place.to_string()
    }

    #[getter(__array_interface__)]
    fn array_interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        match self.place {
            DeviceId::Cpu => self.interface(py),
            DeviceId::Cuda(_) => {
                Err(PyAttributeError::new_err("__array_interface__: the memory is on a GPU"))
            }
        }
    }

    #[getter(__cuda_array_interface__)]
    fn cuda_array_interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        match self.place {
            DeviceId::Cuda(_) => self.interface(py),
            DeviceId::Cpu => {
                Err(PyAttributeError::new_err("__cuda_array_interface__: the memory is the host's"))
            }
        }
    }

    fn __len__(&self) -> usize {
        self.bytes
    }

    fn __repr__(&self) -> String {
        format!("RegisteredBuffer({} bytes on {})", self.bytes, self.place)
    }
}
