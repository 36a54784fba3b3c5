//! Where memory is: on the CPU, or on a GPU.

use fast_allreduce::AnyCommunicator;
pub use fast_allreduce::Place;
use pyo3::prelude::*;

use crate::errors::raised;

/// Where a communicator's buffers are.
pub fn place_of(any: &AnyCommunicator) -> Place {
    any.gpu().map_or(Place::Cpu, Place::Cuda)
}

/// A device by its name: "cpu", "cuda", "cuda:1".
pub fn place(py: Python<'_>, name: &str) -> PyResult<Place> {
    name.parse().map_err(|error| raised(py, error))
}
