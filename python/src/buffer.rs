//! Buffers of any library: torch's tensors, the buffer protocol, the array interfaces, DLPack, and raw addresses.
//!
//! Each way tells an address, a number of elements, their type and the device, and keeps the memory where it is until it is
//! dropped. What is not contiguous, or read-only where it is to be written, is refused.

use std::fmt;

use fast_allreduce::DType;
pub use fast_allreduce::Place;
use pyo3::intern;
use pyo3::prelude::*;

use crate::dlpack;
use crate::errors::{invalid, raised};
use crate::interface::{from_interface, is_ordered};
use crate::streams::Streams;
use crate::torch::Torch;
use crate::user_code::optional_attribute;
use crate::values;
use crate::view::{is_exporter, View};

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
    pub place: Place,
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

    pub fn check_place(&self, py: Python<'_>, place: Place) -> PyResult<()> {
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

/// Memory by its address, for what has none of the protocols.
#[pyclass(module = "fast_allreduce", frozen)]
pub struct RawBuffer {
    address: u64,
    count: usize,
    dtype: DType,
    place: Place,
    readonly: bool,
}

#[pymethods]
impl RawBuffer {
    #[new]
    #[pyo3(signature = (address, count, dtype, *, device = "cpu", readonly = false))]
    fn new(
        py: Python<'_>,
        address: u64,
        count: usize,
        dtype: &Bound<'_, PyAny>,
        device: &str,
        readonly: bool,
    ) -> PyResult<Self> {
        let dtype = values::dtype(py, dtype.str()?.to_str()?)?;
        Ok(Self { address, count, dtype, place: place(py, device)?, readonly })
    }

    fn __repr__(&self) -> String {
        let Self { address, count, dtype, place, .. } = self;
        format!("RawBuffer({address:#x}, {count}, '{dtype}', device='{place}')")
    }
}

/// A device by its name: "cpu", "cuda", "cuda:1".
pub fn place(py: Python<'_>, name: &str) -> PyResult<Place> {
    name.parse().map_err(|error| raised(py, error))
}

impl Operand {
    /// The buffer of whatever kind of object.
    pub fn of(object: &Bound<'_, PyAny>, wanted: Wanted<'_>) -> PyResult<Self> {
        let py = object.py();
        // First, since it takes least to ask; tensors do not have it.
        if is_exporter(object) {
            return View::operand(object, wanted);
        }
        if let Some(torch) = Torch::of(object)? {
            return torch.operand(object, wanted);
        }
        if let Ok(raw) = object.cast::<RawBuffer>() {
            let raw = raw.get();
            wanted.check_place(py, raw.place)?;
            if raw.readonly && wanted.written {
                return Err(wanted.refused(py, "is read-only, and would be written"));
            }
            return Ok(Self::held_by(object, raw.address, raw.count, raw.dtype));
        }
        let interface = optional_attribute(object, intern!(py, "__cuda_array_interface__"))?;
        // One of an old version says nothing of streams, which DLPack does.
        if let Some(interface) = interface.as_ref().filter(|interface| is_ordered(interface)) {
            return from_interface(object, interface, wanted, true);
        }
        if let Some(export) = optional_attribute(object, intern!(py, "__dlpack__"))? {
            return dlpack::operand(&export, wanted);
        }
        if let Some(interface) = interface {
            return from_interface(object, &interface, wanted, true);
        }
        if let Some(interface) = optional_attribute(object, intern!(py, "__array_interface__"))? {
            return from_interface(object, &interface, wanted, false);
        }
        let kind = object.get_type().name()?;
        Err(wanted.refused(
            py,
            format_args!(
                "is a {kind}, which has none of: the buffer protocol, DLPack, __array_interface__, \
                 __cuda_array_interface__; give a RawBuffer"
            ),
        ))
    }

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
