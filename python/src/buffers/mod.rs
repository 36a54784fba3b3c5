//! Buffers of a call, by whichever protocol an object has.
//!
//! Each protocol gives an address, a number of elements, their type and the device, and keeps the memory in place until
//! it is dropped. Memory that is not contiguous, or that is read-only and would be written, is refused.

mod dlpack;
mod exporter;
mod interface;
mod object;
mod registered;
mod torch;
mod view;

use std::fmt;

use fast_allreduce::{DType, DeviceId};
use pyo3::prelude::*;

pub use self::interface::stream_of;
pub use self::object::RawBuffer;
pub use self::registered::RegisteredBuffer;
pub use self::torch::Torch;
pub use self::view::View;
use crate::errors::invalid;
use crate::streams::Streams;

/// A buffer of a call.
pub struct Operand {
    pub address: u64,
    pub count: usize,
    pub dtype: DType,
    /// Keeps the memory in place.
    _held: Held,
}

enum Held {
    Object { _object: Py<PyAny> },
    View { _view: View },
}

/// What a call requires of a buffer.
#[derive(Clone, Copy)]
pub struct Required<'a> {
    /// The argument's name in errors.
    pub name: &'static str,
    pub device: DeviceId,
    pub is_written: bool,
    /// The call's streams. `None` if the memory is neither read nor written.
    pub streams: Option<&'a Streams>,
}

impl Required<'_> {
    /// Makes the error of a buffer that cannot be used.
    pub fn refused(&self, py: Python<'_>, problem: impl fmt::Display) -> PyErr {
        invalid(py, format!("{} {problem}", self.name))
    }

    /// Makes the error of [`Required::refused`] with an exception as its cause.
    pub fn refused_for(&self, py: Python<'_>, problem: impl fmt::Display, cause: PyErr) -> PyErr {
        let refused = self.refused(py, problem);
        refused.set_cause(py, Some(cause));
        refused
    }

    pub fn read_only(&self, py: Python<'_>) -> PyErr {
        self.refused(py, "is read-only, and would be written")
    }

    pub fn on_other_device(&self, py: Python<'_>, device: impl fmt::Display) -> PyErr {
        self.refused(py, format_args!("is on {device}, the communicator's buffers are on {}", self.device))
    }

    pub fn check_device(&self, py: Python<'_>, device: DeviceId) -> PyResult<()> {
        match device == self.device {
            true => Ok(()),
            false => Err(self.on_other_device(py, device)),
        }
    }

    pub fn impossible(&self, py: Python<'_>, shape: &[i64]) -> PyErr {
        self.refused(py, format_args!("has the shape {shape:?}, which no memory can have"))
    }

    pub fn unsupported(&self, py: Python<'_>, dtype: impl fmt::Display) -> PyErr {
        let names = DType::ALL.map(DType::name).join(", ");
        self.refused(py, format_args!("has elements of type {dtype}, which is not supported: {names} are"))
    }
}

impl Operand {
    /// Makes the operand of memory that an object owns. Holds the object.
    pub fn held_by(object: &Bound<'_, PyAny>, address: u64, count: usize, dtype: DType) -> Self {
        Self { address, count, dtype, _held: Held::Object { _object: object.clone().unbind() } }
    }

    /// Makes the operand of an exported buffer. Holds the view.
    fn viewed(view: View, address: u64, count: usize, dtype: DType) -> Self {
        Self { address, count, dtype, _held: Held::View { _view: view } }
    }
}

/// Returns the type of a format character of the struct module, or of a letter of the array interface, with its size.
fn dtype_of(code: char, size: usize) -> Option<DType> {
    Some(match (code, size) {
        ('e' | 'f', 2) => DType::F16,
        ('f', 4) => DType::F32,
        ('d' | 'f', 8) => DType::F64,
        ('b' | 'i', 1) => DType::I8,
        ('B' | 'u', 1) => DType::U8,
        ('i' | 'l', 4) => DType::I32,
        ('I' | 'L' | 'u', 4) => DType::U32,
        ('i' | 'l' | 'q', 8) => DType::I64,
        ('I' | 'L' | 'Q' | 'u', 8) => DType::U64,
        _ => return None,
    })
}
