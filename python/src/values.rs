//! Arguments that are not buffers: ids, operations, types, devices, limits.

use std::time::Duration;

use fast_allreduce::{bootstrap, DType, DeviceId, ReduceOp};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::errors::{invalid, OrRaise};

#[pyclass(module = "fast_allreduce", frozen)]
pub struct UniqueId(pub bootstrap::UniqueId);

#[pymethods]
impl UniqueId {
    #[new]
    fn new(py: Python<'_>, of: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(text) = of.cast::<PyString>() {
            return text.to_str()?.parse().map(Self).or_raise(py);
        }
        let bytes: Vec<u8> = of.extract()?;
        let length = bytes.len();
        let bytes =
            bytes.try_into().map_err(|_| invalid(py, format!("an id has 128 bytes, not {length}")))?;
        bootstrap::UniqueId::from_bytes(bytes).map(Self).or_raise(py)
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.as_bytes())
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    /// Leaves out the id: a process that knows it can join.
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
    bootstrap::UniqueId::new().map(UniqueId).or_raise(py)
}

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
        name.to_str()?.parse().map(Self).or_raise(object.py())
    }
}

/// An integer, as Python has them: of any sign and size. Greater ones than an `i128` has are the greatest of these.
#[derive(Clone, Copy)]
pub struct Integer(i128);

impl<'a, 'py> FromPyObject<'a, 'py> for Integer {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        match object.extract() {
            Ok(value) => Ok(Self(value)),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                Ok(Self(if object.lt(0)? { i128::MIN } else { i128::MAX }))
            }
            Err(error) => Err(error),
        }
    }
}

impl Integer {
    pub const ZERO: Self = Self(0);

    /// Returns the value of the argument `name`, or raises `InvalidArgument` if it is outside of the range of `T`.
    pub fn within<T: TryFrom<i128>>(self, py: Python<'_>, name: &str) -> PyResult<T> {
        let Self(value) = self;
        T::try_from(value).map_err(|_| invalid(py, format!("{name} is {value}, which is out of range")))
    }

    /// Returns the values of an argument that is a sequence of counts or ranks.
    pub fn all_within(all: &[Self], py: Python<'_>, name: &str) -> PyResult<Vec<usize>> {
        all.iter().map(|value| value.within(py, name)).collect()
    }
}

/// Parses the name of a device: "cpu", "cuda", "cuda:1".
pub fn device(py: Python<'_>, name: &str) -> PyResult<DeviceId> {
    name.parse().or_raise(py)
}

/// Returns the element type that an object's text names: "f32", "float32", `torch.float32`, `numpy.dtype("f4")`.
pub fn dtype(object: &Bound<'_, PyAny>) -> PyResult<DType> {
    let text = object.str()?;
    let name = text.to_str()?;
    name.strip_prefix("torch.").unwrap_or(name).parse().or_raise(object.py())
}

/// Converts seconds to a limit. 0 is no limit, as in the settings.
pub fn limit(py: Python<'_>, timeout: f64) -> PyResult<Option<Duration>> {
    match Duration::try_from_secs_f64(timeout) {
        Ok(_) if timeout == 0.0 => Ok(None),
        // A time that rounds to zero is still a limit.
        Ok(limit) => Ok(Some(limit.max(Duration::from_nanos(1)))),
        Err(_) => Err(invalid(
            py,
            format!("timeout = {timeout} is not valid: seconds, such as 2.5, or 0 for no limit"),
        )),
    }
}
