//! The library's errors as exceptions of `fast_allreduce.errors`: a class for each variant, with its fields as
//! attributes.

use std::ffi::c_void;

use fast_allreduce::Error;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyModule, PyString, PyTuple, PyType};
use pyo3::{ffi, intern};

static CLASSES: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// Allocates an instance of an exception class without initializing it.
fn allocated<'py>(class: &Bound<'py, PyType>) -> PyResult<Bound<'py, PyAny>> {
    let (py, none) = (class.py(), PyTuple::empty(class.py()));
    // SAFETY: a heap type, as every class defined in Python is.
    let slot = unsafe { ffi::PyType_GetSlot(class.as_type_ptr(), ffi::Py_tp_new) };
    // SAFETY: this slot holds null or a function of this type.
    let Some(new) = (unsafe { std::mem::transmute::<*mut c_void, Option<ffi::newfunc>>(slot) }) else {
        return Err(PyTypeError::new_err("a class of fast_allreduce.errors cannot be instantiated"));
    };
    // SAFETY: the slot is this class's; the arguments are an empty tuple, and keywords may be null.
    let instance = unsafe { new(class.as_type_ptr(), none.as_ptr(), std::ptr::null_mut()) };
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, instance) }
}

/// Makes an exception of a class with these attributes.
///
/// It runs no Python code, not even the class's `__init__`: when the interpreter ends, it ends a daemon thread that
/// runs Python code by unwinding its stack. That would unwind these frames, which aborts the process.
fn exception(py: Python<'_>, class: &str, message: String, attributes: PyResult<Bound<'_, PyDict>>) -> PyErr {
    let make = || -> PyResult<PyErr> {
        let classes =
            CLASSES.get_or_try_init(py, || py.import("fast_allreduce.errors").map(Bound::unbind))?;
        let class = classes.bind(py).getattr(class)?;
        let instance = allocated(class.cast::<PyType>()?)?;
        instance.setattr(intern!(py, "args"), (message,))?;
        for (name, value) in attributes? {
            instance.setattr(name.cast_into::<PyString>()?, value)?;
        }
        Ok(PyErr::from_value(instance))
    };
    make().unwrap_or_else(|error| error)
}

/// Makes an `InvalidArgument`, which is a `ValueError`, about an argument that was not passed to the library.
pub fn invalid(py: Python<'_>, message: impl Into<String>) -> PyErr {
    exception(py, "InvalidArgument", message.into(), Ok(PyDict::new(py)))
}

/// Makes the exception of an error, from a list of variants with the fields that become attributes.
macro_rules! exception_of {
    ($py:expr, $error:expr; $($class:ident { $($field:ident $(= $value:expr)?),* })*) => {
        match &$error {
            $(Error::$class { $($field,)* .. } => {
                let attributes = || {
                    let attributes = PyDict::new($py);
                    $(attributes.set_item(stringify!($field), exception_of!(@value $field $($value)?))?;)*
                    Ok(attributes)
                };
                exception($py, stringify!($class), $error.to_string(), attributes())
            })*
            _ => exception($py, "Error", $error.to_string(), Ok(PyDict::new($py))),
        }
    };
    (@value $field:ident) => { $field };
    (@value $field:ident $value:expr) => { $value };
}

/// Makes the exception of an error of the library.
pub fn raised(py: Python<'_>, error: Error) -> PyErr {
    exception_of! { py, error;
        WorldSize { world_size }
        RankOutOfRange { rank, world_size }
        LengthMismatch { input, output }
        InvalidPointer { which, address, problem, element_size }
        Overlap { input, output, bytes }
        InvalidSetting { name, value, expected }
        Tuning { file, reason }
        Allocation { bytes, reason }
        Timeout { operation, epoch, missing, waited = waited.as_secs_f64(), last_seen }
        PeerLost { rank, reason }
        PeerFailed { rank, reason }
        Forked {}
        Aborted {}
        Rendezvous { reason }
        Refused { reason }
        Malformed { rank, reason }
        Disagreement { what, rank, theirs, own_rank, ours }
        Unavailable { what, reason }
        InvalidStream { stream, device }
        Driver { call, code }
        System { call, errno = *errno as i32 }
    }
}

/// Turns an error of the library into its exception.
pub trait OrRaise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for fast_allreduce::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raised(py, error))
    }
}
