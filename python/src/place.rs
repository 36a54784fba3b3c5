//! Where memory is: on the CPU, or on a GPU.

use std::fmt;

use fast_allreduce::AnyCommunicator;
use pyo3::prelude::*;

use crate::errors::invalid;

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Cpu,
    Cuda(usize),
}

impl Place {
    /// Where a communicator's buffers are.
    pub fn of(any: &AnyCommunicator) -> Self {
        any.gpu().map_or(Self::Cpu, Self::Cuda)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// A device by its name: "cpu", "cuda", "cuda:1".
pub fn place(py: Python<'_>, name: &str) -> PyResult<Place> {
    let known = match name.split_once(':') {
        None if name == "cpu" => Some(Place::Cpu),
        None if name == "cuda" => Some(Place::Cuda(0)),
        Some(("cuda", ordinal)) => ordinal.parse().ok().map(Place::Cuda),
        _ => None,
    };
    known.ok_or_else(|| invalid(py, format!("device = {name:?} is not valid: cpu, cuda or cuda:N are")))
}
