//! Views that Python's buffer protocol exports.

use std::ffi::{c_char, c_int, c_void, CStr};

use pyo3::ffi;
use pyo3::prelude::*;

use crate::interpreter::parking;

/// Python's `Py_buffer`: part of the stable ABI from 3.11 on, with the same layout in 3.10.
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

/// Returns whether an object has the buffer protocol.
pub fn is_exporter(object: &Bound<'_, PyAny>) -> bool {
    // SAFETY: any live object may be passed.
    unsafe { python::PyObject_CheckBuffer(object.as_ptr()) == 1 }
}

/// A buffer that an object exports, released when it is dropped.
pub struct View(Box<PyBuffer>);

// SAFETY: the only use is the release, which any thread may do with the interpreter attached.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl Drop for View {
    fn drop(&mut self) {
        // Without an interpreter (a thread that outlives it with a group open) there is nothing to release.
        // SAFETY: filled by PyObject_GetBuffer, released once, with the interpreter attached.
        let _ = Python::try_attach(|_| parking(|| unsafe { python::PyBuffer_Release(&mut *self.0) }));
    }
}

impl View {
    /// Exports a contiguous buffer with its format.
    ///
    /// # Errors
    ///
    /// The exception that the exporter raised.
    pub fn export(object: &Bound<'_, PyAny>, is_written: bool) -> PyResult<Self> {
        let writable = if is_written { PYBUF_WRITABLE } else { 0 };
        // SAFETY: zero is a valid value of every field.
        let mut view: Box<PyBuffer> = Box::new(unsafe { std::mem::zeroed() });
        // SAFETY: the object exports buffers; the view may be written whether this succeeds or fails.
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

    /// Returns the address, and the length in bytes.
    pub fn memory(&self) -> (u64, usize) {
        (self.0.buf as u64, self.0.len as usize)
    }

    /// Returns the format of the elements, as the struct module writes it, and their size in bytes.
    pub fn format(&self) -> (&str, usize) {
        let format = match self.0.format.is_null() {
            true => "B",
            // SAFETY: a C string that lives as long as the view.
            false => unsafe { CStr::from_ptr(self.0.format) }.to_str().unwrap_or("?"),
        };
        (format, self.0.itemsize.max(1) as usize)
    }
}
