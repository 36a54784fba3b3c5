//! Calls of what may be Python code of the program: an attribute or a method of a buffer or a stream.
//!
//! Before Python 3.14 the interpreter ends a daemon thread that runs Python code while it finalizes, by unwinding its stack. Frames
//! of Rust that are unwound so drop Python objects without the interpreter's lock, or abort the process. So the guard here, which
//! is the first frame of Rust that this unwinding meets, parks the thread instead, as PyO3 does where a thread comes back to the
//! interpreter.

use std::mem;
use std::thread;

use pyo3::exceptions::PyAttributeError;
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

type GetAttr = unsafe extern "C-unwind" fn(*mut ffi::PyObject, *mut ffi::PyObject) -> *mut ffi::PyObject;
type Call = unsafe extern "C-unwind" fn(
    *mut ffi::PyObject,
    *mut ffi::PyObject,
    *mut ffi::PyObject,
) -> *mut ffi::PyObject;
type CallMethod =
    unsafe extern "C-unwind" fn(*mut ffi::PyObject, *mut ffi::PyObject, ...) -> *mut ffi::PyObject;

/// Parks the thread for ever when it is unwound.
struct Parking;

impl Drop for Parking {
    fn drop(&mut self) {
        loop {
            thread::park();
        }
    }
}

/// A function of this module by a pointer that the compiler cannot see through. PyO3 declares the same symbols as ones that do not
/// unwind, and where both declarations meet in one unit of code generation, calls by name would have no landing pad for the guard.
fn opaque<F>(function: F) -> F {
    std::hint::black_box(function)
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
    let function: GetAttr = opaque(python::PyObject_GetAttr);
    // SAFETY: both are live objects.
    let got = parking(|| unsafe { function(object.as_ptr(), name.as_ptr()) });
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
    let function: Call = opaque(python::PyObject_Call);
    // SAFETY: live objects; no keywords are null.
    let got = parking(|| unsafe { function(callable.as_ptr(), arguments.as_ptr(), keywords) });
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(callable.py(), got) }
}

/// What a method without arguments returns.
pub fn method<'py>(object: &Bound<'py, PyAny>, name: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyAny>> {
    let end: *mut ffi::PyObject = std::ptr::null_mut();
    let function: CallMethod = opaque(python::PyObject_CallMethodObjArgs);
    // SAFETY: live objects; a null ends the arguments.
    let got = parking(|| unsafe { function(object.as_ptr(), name.as_ptr(), end) });
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(object.py(), got) }
}

/// An attribute of an object, if it has it. An exception that the object's code raises is not taken for its absence.
pub fn optional_attribute<'py>(
    object: &Bound<'py, PyAny>,
    name: &Bound<'py, PyString>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    match attribute(object, name) {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.is_instance_of::<PyAttributeError>(object.py()) => Ok(None),
        Err(error) => Err(error),
    }
}
