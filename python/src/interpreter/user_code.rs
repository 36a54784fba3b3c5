//! Calls that may run Python code of the program: attributes and methods of buffers and streams.
//!
//! Before Python 3.14 the interpreter, while it finalizes, ends a daemon thread that runs Python code by unwinding its
//! stack. Rust frames that are unwound this way drop Python objects without the GIL, or abort the process. So each such
//! call is made under a guard. It is the first Rust frame that the unwinding reaches, and it parks the thread forever.
//! PyO3 does the same where a thread returns to the interpreter.

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

/// Parks the thread forever when it is dropped by unwinding.
struct Parking;

impl Drop for Parking {
    fn drop(&mut self) {
        loop {
            thread::park();
        }
    }
}

/// Returns a function of this module as a pointer that the compiler cannot see through. PyO3 declares the same symbols
/// as functions that do not unwind. If both declarations meet in one codegen unit, calls by name have no landing pad
/// for the guard.
fn opaque<F>(function: F) -> F {
    std::hint::black_box(function)
}

/// Runs `call`, which the interpreter may unwind. `call` must own nothing.
pub fn parking<T>(call: impl FnOnce() -> T) -> T {
    let parking = Parking;
    let result = call();
    mem::forget(parking);
    result
}

/// Returns an attribute of an object.
pub fn attribute<'py>(
    object: &Bound<'py, PyAny>,
    name: &Bound<'py, PyString>,
) -> PyResult<Bound<'py, PyAny>> {
    let function: GetAttr = opaque(python::PyObject_GetAttr);
    // SAFETY: both are live objects.
    let found = parking(|| unsafe { function(object.as_ptr(), name.as_ptr()) });
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(object.py(), found) }
}

/// Calls an object.
pub fn call<'py>(
    callable: &Bound<'py, PyAny>,
    arguments: &Bound<'py, PyTuple>,
    keywords: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let keywords: *mut ffi::PyObject = keywords.map_or(std::ptr::null_mut(), |keywords| keywords.as_ptr());
    let function: Call = opaque(python::PyObject_Call);
    // SAFETY: live objects; null means no keywords.
    let result = parking(|| unsafe { function(callable.as_ptr(), arguments.as_ptr(), keywords) });
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(callable.py(), result) }
}

/// Calls a method without arguments.
pub fn method<'py>(object: &Bound<'py, PyAny>, name: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyAny>> {
    let end: *mut ffi::PyObject = std::ptr::null_mut();
    let function: CallMethod = opaque(python::PyObject_CallMethodObjArgs);
    // SAFETY: live objects; a null ends the arguments.
    let result = parking(|| unsafe { function(object.as_ptr(), name.as_ptr(), end) });
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(object.py(), result) }
}

/// Returns an attribute of an object, or `None` if it raises `AttributeError`. Other exceptions are passed on.
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
