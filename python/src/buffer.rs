//! A buffer of a call, and what the call wants of it.
//!
//! Each protocol tells an address, a number of elements, their type and the device, and keeps the memory where it is until it is
//! dropped. What is not contiguous, or read-only where it is to be written, is refused.

use std::fmt;

use fast_allreduce::{DType, DeviceId};
use pyo3::prelude::*;

use crate::errors::invalid;
use crate::streams::Streams;
use crate::view::View;

/// A buffer of a call.
pub struct Operand {
    pub address: u64,
    pub count: usize,
    pub dtype: DType,
    /// Keeps the memory where it is.
    _held: Held,
}

enum Held {
    Object { _object: Py<PyAny> },
    View { _view: View },
}

/// What a call wants of a buffer.
#[derive(Clone, Copy)]
pub struct Wanted<'a> {
    /// Its name in errors.
    pub name: &'static str,
    pub place: DeviceId,
    pub written: bool,
    /// Those of the call. `None`: the memory is neither read nor written.
    pub streams: Option<&'a Streams>,
}

impl Wanted<'_> {
    pub fn refused(&self, py: Python<'_>, problem: impl fmt::Display) -> PyErr {
        invalid(py, format!("{} {problem}", self.name))
    }

    /// [`Wanted::refused`] for what an exception tells, which it has as its cause.
    pub fn refused_for(&self, py: Python<'_>, problem: impl fmt::Display, cause: PyErr) -> PyErr {
        let refused = self.refused(py, problem);
        refused.set_cause(py, Some(cause));
        refused
    }

    pub fn check_place(&self, py: Python<'_>, place: DeviceId) -> PyResult<()> {
        match place == self.place {
            true => Ok(()),
            false => Err(self.refused(
                py,
                format_args!("is on {place}, the communicator's buffers are on {}", self.place),
            )),
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
    /// Memory that stays as long as the object does.
    pub fn held_by(object: &Bound<'_, PyAny>, address: u64, count: usize, dtype: DType) -> Self {
        Self { address, count, dtype, _held: Held::Object { _object: object.clone().unbind() } }
    }

    /// Memory that an object exports.
    pub fn viewed(view: View, address: u64, count: usize, dtype: DType) -> Self {
        Self { address, count, dtype, _held: Held::View { _view: view } }
    }
}

/// A type from a format character of the struct module, or a letter of the array interface, and its size.
pub fn dtype_of(code: char, size: usize) -> Option<DType> {
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
