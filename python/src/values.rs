//! What calls take besides buffers: ids, operations, types, streams.

use std::time::Duration;

use fast_allreduce::{bootstrap, DType, DeviceId, ReduceOp};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::errors::{invalid, raised};

#[pyclass(module = "fast_allreduce", frozen)]
pub struct UniqueId(pub bootstrap::UniqueId);

#[pymethods]
impl UniqueId {
    #[new]
    fn new(py: Python<'_>, of: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(text) = of.cast::<PyString>() {
            return text.to_str()?.parse().map(Self).map_err(|error| raised(py, error));
        }
        let bytes: Vec<u8> = of.extract()?;
        let length = bytes.len();
        let bytes =
            bytes.try_into().map_err(|_| invalid(py, format!("an id has 128 bytes, not {length}")))?;
        bootstrap::UniqueId::from_bytes(bytes).map(Self).map_err(|error| raised(py, error))
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.as_bytes())
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    /// Without what it is: whoever knows an id can join.
    fn __repr__(&self) -> &'static str {
        "UniqueId(..)"
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.0.as_bytes() == other.0.as_bytes()
    }

    fn __hash__(&self) -> u64 {
        let bytes = self.0.as_bytes();
        bytes.iter().fold(0, |hash, &byte| hash.rotate_left(5) ^ u64::from(byte))
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyAny>, (Bound<'py, PyBytes>,)) {
        (slf.get_type().into_any(), (slf.get().__bytes__(slf.py()),))
    }
}

#[pyfunction]
pub fn get_unique_id(py: Python<'_>) -> PyResult<UniqueId> {
    bootstrap::UniqueId::new().map(UniqueId).map_err(|error| raised(py, error))
}

/// What this build was made with, by name.
#[pyfunction]
pub fn build_facts() -> Vec<(&'static str, String)> {
    fast_allreduce::build_facts().into()
}

/// An operation: a name, or a member of `ReduceOp`, whose value is the name.
pub struct Op(pub ReduceOp);

impl<'a, 'py> FromPyObject<'a, 'py> for Op {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let name = object.cast::<PyString>().map_err(|_| {
            PyTypeError::new_err(format!("op is a ReduceOp or its name, not {:?}", object.get_type()))
        })?;
        let found = name.to_str()?.parse();
        found.map(Self).map_err(|error| raised(object.py(), error))
    }
}

/// A device by its name: "cpu", "cuda", "cuda:1".
pub fn place(py: Python<'_>, name: &str) -> PyResult<DeviceId> {
    name.parse().map_err(|error| raised(py, error))
}

/// A type of elements by its name: "f32", "float32", ...
pub fn dtype(py: Python<'_>, name: &str) -> PyResult<DType> {
    let name = name.strip_prefix("torch.").unwrap_or(name);
    name.parse().map_err(|error| raised(py, error))
}

/// Seconds, as a limit.
pub fn seconds(py: Python<'_>, timeout: f64) -> PyResult<Duration> {
    let limit = Duration::try_from_secs_f64(timeout).ok().filter(|limit| !limit.is_zero());
    limit.ok_or_else(|| invalid(py, format!("timeout = {timeout} is not valid: seconds, more than 0")))
}
