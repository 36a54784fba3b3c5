//! Buffers of any library: torch's tensors, the buffer protocol, the array interfaces, DLPack, and raw addresses.
//!
//! Each way tells an address, a number of elements, their type and the device, and keeps the memory where it is until it is
//! dropped. What is not contiguous, or read-only where it is to be written, is refused.

use std::ffi::{c_char, c_int, c_void, CStr};
use std::fmt;

use fast_allreduce::DType;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};
use pyo3::{ffi, intern};

use crate::dlpack;
use crate::errors::invalid;
use crate::interface::from_interface;
use crate::values;

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Cpu,
    Cuda(usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

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
pub struct Wanted {
    /// Its name in errors.
    pub name: &'static str,
    pub place: Place,
    pub written: bool,
}

impl Wanted {
    pub fn refused(&self, py: Python<'_>, problem: impl fmt::Display) -> PyErr {
        invalid(py, format!("{} {problem}", self.name))
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
    let known = match name.split_once(':') {
        None if name == "cpu" => Some(Place::Cpu),
        None if name == "cuda" => Some(Place::Cuda(0)),
        Some(("cuda", ordinal)) => ordinal.parse().ok().map(Place::Cuda),
        _ => None,
    };
    known.ok_or_else(|| invalid(py, format!("device = {name:?} is not valid: cpu, cuda or cuda:N are")))
}

impl Operand {
    /// The buffer of whatever kind of object.
    pub fn of(object: &Bound<'_, PyAny>, wanted: Wanted) -> PyResult<Self> {
        let py = object.py();
        // First, since it takes least to ask; tensors do not have it.
        // SAFETY: any object may be asked.
        if unsafe { python::PyObject_CheckBuffer(object.as_ptr()) } == 1 {
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
        if let Ok(interface) = object.getattr(intern!(py, "__cuda_array_interface__")) {
            return from_interface(object, &interface, wanted, true);
        }
        if object.hasattr(intern!(py, "__dlpack__"))? {
            return dlpack::operand(object, wanted);
        }
        if let Ok(interface) = object.getattr(intern!(py, "__array_interface__")) {
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
}

/// torch's names, once torch has been imported by somebody else.
struct Torch {
    tensor: Py<PyType>,
    dtypes: Vec<(Py<PyAny>, DType)>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

impl Torch {
    /// If the object is a tensor.
    fn of(object: &Bound<'_, PyAny>) -> PyResult<Option<&'static Self>> {
        let py = object.py();
        let torch = match TORCH.get(py) {
            Some(torch) => torch,
            None => {
                // Whoever has a tensor has imported torch.
                let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
                let Some(torch) = modules.cast::<PyDict>()?.get_item("torch")? else {
                    return Ok(None);
                };
                // It may be in the middle of being imported.
                let Ok(tensor) = torch.getattr("Tensor") else {
                    return Ok(None);
                };
                let tensor = tensor.cast_into::<PyType>()?.unbind();
                // Old versions of torch have no unsigned types, nor floats of 8 bits.
                let dtypes = DType::ALL
                    .into_iter()
                    .filter_map(|dtype| Some((torch.getattr(dtype.torch_name()).ok()?.unbind(), dtype)));
                TORCH.get_or_init(py, || Self { tensor, dtypes: dtypes.collect() })
            }
        };
        let kind = object.get_type();
        let is_tensor = kind.is(&torch.tensor) || kind.is_subclass(torch.tensor.bind(py))?;
        Ok(is_tensor.then_some(torch))
    }

    fn operand(&self, tensor: &Bound<'_, PyAny>, wanted: Wanted) -> PyResult<Operand> {
        let py = tensor.py();
        let on_cpu = tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()?;
        if !on_cpu || wanted.place != Place::Cpu {
            let device = tensor.getattr(intern!(py, "device"))?.str()?;
            let place = place(py, device.to_str()?).map_err(|_| {
                wanted.refused(
                    py,
                    format_args!("is on {device}, the communicator's buffers are on {}", wanted.place),
                )
            })?;
            wanted.check_place(py, place)?;
        }
        let dtype = tensor.getattr(intern!(py, "dtype"))?;
        let Some((_, known)) = self.dtypes.iter().find(|(known, _)| known.is(&dtype)) else {
            return Err(wanted.unsupported(py, dtype));
        };
        let contiguous = tensor.call_method0(intern!(py, "is_contiguous"));
        // Sparse tensors have no such method.
        let contiguous =
            contiguous.map_err(|refusal| wanted.refused(py, format_args!("cannot be used: {refusal}")))?;
        if !contiguous.is_truthy()? {
            return Err(wanted.refused(py, "is not contiguous"));
        }
        if tensor.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
            return Err(wanted.refused(py, "has a negation that is pending: call its resolve_neg() first"));
        }
        let address = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let count = tensor.call_method0(intern!(py, "numel"))?.extract()?;
        Ok(Operand::held_by(tensor, address, count, *known))
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

/// Python's `Py_buffer`: a part of the stable ABI from 3.11 on, and the same in 3.10.
#[repr(C)]
struct PyBuffer {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

const PYBUF_WRITABLE: c_int = 1;
const PYBUF_FORMAT: c_int = 4;
const PYBUF_C_CONTIGUOUS: c_int = 0x20 | 0x10 | 8;

mod python {
    use super::{c_int, ffi, PyBuffer};

    extern "C" {
        pub fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut PyBuffer, flags: c_int) -> c_int;
        pub fn PyObject_CheckBuffer(object: *mut ffi::PyObject) -> c_int;
        pub fn PyBuffer_Release(view: *mut PyBuffer);
    }
}

/// A buffer that an object exports, until it is dropped.
struct View(Box<PyBuffer>);

// SAFETY: it is released with the interpreter attached, by whichever thread; nothing else is done with it.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl Drop for View {
    fn drop(&mut self) {
        // Without an interpreter, as in a thread that ends after it with a group open, there is nothing to give back to.
        // SAFETY: filled by PyObject_GetBuffer, released once, with the interpreter attached.
        let _ = Python::try_attach(|_| unsafe { python::PyBuffer_Release(&mut *self.0) });
    }
}

impl View {
    fn operand(object: &Bound<'_, PyAny>, wanted: Wanted) -> PyResult<Operand> {
        let py = object.py();
        wanted.check_place(py, Place::Cpu)?;
        let writable = if wanted.written { PYBUF_WRITABLE } else { 0 };
        // SAFETY: all zeros is a value of its fields.
        let mut view: Box<PyBuffer> = Box::new(unsafe { std::mem::zeroed() });
        // SAFETY: the object exports buffers, and the view is written where it fails or not.
        if unsafe {
            python::PyObject_GetBuffer(
                object.as_ptr(),
                &mut *view,
                PYBUF_C_CONTIGUOUS | PYBUF_FORMAT | writable,
            )
        } != 0
        {
            let refusal = PyErr::fetch(py);
            let problem = match refusal.is_instance_of::<PyValueError>(py) || wanted.written {
                true => format!(
                    "cannot be used: {refusal} (it must be contiguous, and writable where it is written)"
                ),
                false => format!("is not contiguous: {refusal}"),
            };
            return Err(wanted.refused(py, problem));
        }
        let view = View(view);
        let size = view.0.itemsize.max(1) as usize;
        let format = match view.0.format.is_null() {
            true => "B",
            // SAFETY: a string that lives as long as the view.
            false => unsafe { CStr::from_ptr(view.0.format) }.to_str().unwrap_or("?"),
        };
        let dtype = match format.trim_start_matches([
            '@',
            '=',
            if cfg!(target_endian = "little") { '<' } else { '>' },
        ]) {
            code if code.len() == 1 => code.chars().next().and_then(|code| dtype_of(code, size)),
            _ => None,
        };
        let dtype =
            dtype.ok_or_else(|| wanted.unsupported(py, format_args!("{format:?} of {size} bytes")))?;
        let (address, count) = (view.0.buf as u64, view.0.len as usize / size);
        Ok(Operand { address, count, dtype, _held: Held::View { _view: view } })
    }
}
