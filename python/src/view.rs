//! Python's buffer protocol.

use std::ffi::{c_char, c_int, c_void, CStr};

use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::{ffi, intern};

use crate::buffer::{dtype_of, Operand, Place, Wanted};
use crate::dlpack;
use crate::interface::{from_interface, is_extension};
use crate::user_code::{optional_attribute, parking};

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

    extern "C-unwind" {
        pub fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut PyBuffer, flags: c_int) -> c_int;
        pub fn PyObject_CheckBuffer(object: *mut ffi::PyObject) -> c_int;
        pub fn PyBuffer_Release(view: *mut PyBuffer);
    }
}

/// Whether an object has the protocol.
pub fn is_exporter(object: &Bound<'_, PyAny>) -> bool {
    // SAFETY: any object may be asked.
    unsafe { python::PyObject_CheckBuffer(object.as_ptr()) == 1 }
}

/// A buffer that an object exports, until it is dropped.
pub struct View(Box<PyBuffer>);

// SAFETY: it is released with the interpreter attached, by whichever thread; nothing else is done with it.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl Drop for View {
    fn drop(&mut self) {
        // Without an interpreter, as in a thread that ends after it with a group open, there is nothing to give back to.
        // SAFETY: filled by PyObject_GetBuffer, released once, with the interpreter attached.
        let _ = Python::try_attach(|_| parking(|| unsafe { python::PyBuffer_Release(&mut *self.0) }));
    }
}

impl View {
    pub fn operand(object: &Bound<'_, PyAny>, wanted: Wanted<'_>) -> PyResult<Operand> {
        let py = object.py();
        wanted.check_place(py, Place::Cpu)?;
        let writable = if wanted.written { PYBUF_WRITABLE } else { 0 };
        // SAFETY: all zeros is a value of its fields.
        let mut view: Box<PyBuffer> = Box::new(unsafe { std::mem::zeroed() });
        // SAFETY: the object exports buffers, and the view is written where it fails or not.
        let exported = parking(|| unsafe {
            python::PyObject_GetBuffer(
                object.as_ptr(),
                &mut *view,
                PYBUF_C_CONTIGUOUS | PYBUF_FORMAT | writable,
            )
        });
        if exported != 0 {
            let refusal = PyErr::fetch(py);
            // The protocol has no format for the types of ml_dtypes.
            let interface = optional_attribute(object, intern!(py, "__array_interface__"))?;
            if let Some(interface) = interface.filter(is_extension) {
                return from_interface(object, &interface, wanted, false);
            }
            // Nor do some exporters have one. What they export by DLPack does not say whether it may be written.
            if refusal.is_instance_of::<PyBufferError>(py) && !wanted.written {
                if let Some(export) = optional_attribute(object, intern!(py, "__dlpack__"))? {
                    return dlpack::operand(&export, wanted);
                }
            }
            let problem = match refusal.is_instance_of::<PyValueError>(py) || wanted.written {
                true => format!(
                    "cannot be used: {refusal} (it must be contiguous, and writable where it is written)"
                ),
                false => format!("is not contiguous: {refusal}"),
            };
            return Err(wanted.refused_for(py, problem, refusal));
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
        Ok(Operand::viewed(view, address, count, dtype))
    }
}
