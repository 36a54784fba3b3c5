//! What Python's buffer protocol exports.

use std::ffi::{c_char, c_int, c_void, CStr};

use pyo3::ffi;
use pyo3::prelude::*;

use crate::user_code::parking;

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
    /// A contiguous buffer with its format, to be written or not. The error is what the exporter raised.
    pub fn export(object: &Bound<'_, PyAny>, written: bool) -> PyResult<Self> {
        let writable = if written { PYBUF_WRITABLE } else { 0 };
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
        match exported {
            0 => Ok(Self(view)),
            _ => Err(PyErr::fetch(object.py())),
        }
    }

    /// Where it is, and its length in bytes.
    pub fn memory(&self) -> (u64, usize) {
        (self.0.buf as u64, self.0.len as usize)
    }

    /// The format of its elements, as the struct module writes it, and their size.
    pub fn format(&self) -> (&str, usize) {
        let format = match self.0.format.is_null() {
            true => "B",
            // SAFETY: a string that lives as long as the view.
            false => unsafe { CStr::from_ptr(self.0.format) }.to_str().unwrap_or("?"),
        };
        (format, self.0.itemsize.max(1) as usize)
    }
}
