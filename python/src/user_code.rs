//! Calls of what may be Python code of the program: an attribute or a method of a buffer or a stream.
//!
//! Before Python 3.14 the interpreter ends a daemon thread that runs Python code while it finalizes, by unwinding its stack. Frames
//! of Rust that are unwound so drop Python objects without the interpreter's lock, or abort the process. So the guard here, which
//! is the first frame of Rust that this unwinding meets, parks the thread instead, as PyO3 does where a thread comes back to the
//! interpreter.

use std::mem;
use std::thread;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

mod python {
    use pyo3::ffi::PyObject;

    extern "C-unwind" {
        pub fn PyObject_GetAttr(object: *mut PyObject, name: *mut PyObject) -> *mut PyObject;
        pub fn PyObject_Call(
            callable: *mut PyObject,
            arguments: *mut PyObject,
            keywords: *mut PyObject,
        ) -> *mut PyObject;
        pub fn PyObject_CallMethodObjArgs(object: *mut PyObject, name: *mut PyObject, ...) -> *mut PyObject;
    }
}

/// Parks the thread for ever when it is unwound.
struct Parking;

impl Drop for Parking {
    fn drop(&mut self) {
        loop {
            thread::park();
        }
    }
}

/// Runs `call`, which may be unwound by the interpreter. It must own nothing.
pub fn parking<T>(call: impl FnOnce() -> T) -> T {
    let parking = Parking;
    let done = call();
    mem::forget(parking);
    done
}

/// An attribute of an object.
pub fn attribute<'py>(
    object: &Bound<'py, PyAny>,
    name: &Bound<'py, PyString>,
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: both are live objects.
    let got = parking(|| unsafe { python::PyObject_GetAttr(object.as_ptr(), name.as_ptr()) });
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(object.py(), got) }
}

/// What a call of an object returns.
pub fn call<'py>(
    callable: &Bound<'py, PyAny>,
    arguments: &Bound<'py, PyTuple>,
    keywords: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let keywords: *mut ffi::PyObject = keywords.map_or(std::ptr::null_mut(), |keywords| keywords.as_ptr());
    // SAFETY: live objects; no keywords are null.
    let got = parking(|| unsafe { python::PyObject_Call(callable.as_ptr(), arguments.as_ptr(), keywords) });
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(callable.py(), got) }
}

/// What a method without arguments returns.
pub fn method<'py>(object: &Bound<'py, PyAny>, name: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyAny>> {
    let end: *mut ffi::PyObject = std::ptr::null_mut();
    // SAFETY: live objects; a null ends the arguments.
    let got = parking(|| unsafe { python::PyObject_CallMethodObjArgs(object.as_ptr(), name.as_ptr(), end) });
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(object.py(), got) }
}
