//! The library's errors as exceptions of `fast_allreduce.errors`: a class for each variant, with its fields as attributes.

use std::ffi::c_void;

use fast_allreduce::Error;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyModule, PyString, PyTuple, PyType};
use pyo3::{ffi, intern};

static CLASSES: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// An instance of a class of exceptions that has not been initialized.
fn allocated<'py>(class: &Bound<'py, PyType>) -> PyResult<Bound<'py, PyAny>> {
    let (py, none) = (class.py(), PyTuple::empty(class.py()));
    // SAFETY: a class of the heap, as all that Python code defines are.
    let slot = unsafe { ffi::PyType_GetSlot(class.as_type_ptr(), ffi::Py_tp_new) };
    // SAFETY: null, or a function of this type, as the slot of that number holds.
    let Some(new) = (unsafe { std::mem::transmute::<*mut c_void, Option<ffi::newfunc>>(slot) }) else {
        return Err(PyTypeError::new_err("a class of fast_allreduce.errors cannot be instantiated"));
    };
    // SAFETY: the class whose slot it is, and a tuple of no arguments; keywords may be null.
    let made = unsafe { new(class.as_type_ptr(), none.as_ptr(), std::ptr::null_mut()) };
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, made) }
}

/// Makes an exception of that class, whose fields `fill` sets.
///
/// No Python code runs here, so not the class's `__init__`: a daemon thread that runs some when the interpreter ends is ended
/// there, and that unwinds into these frames, which aborts the process.
fn exception(
    py: Python<'_>,
    class: &str,
    message: String,
    fill: impl FnOnce(&Bound<'_, PyDict>) -> PyResult<()>,
) -> PyErr {
    let made = || -> PyResult<PyErr> {
        let classes =
            CLASSES.get_or_try_init(py, || py.import("fast_allreduce.errors").map(Bound::unbind))?;
        let fields = PyDict::new(py);
        fill(&fields)?;
        let class = classes.bind(py).getattr(class)?;
        let made = allocated(class.cast::<PyType>()?)?;
        made.setattr(intern!(py, "args"), (message,))?;
        for (name, value) in fields {
            made.setattr(name.cast_into::<PyString>()?, value)?;
        }
        Ok(PyErr::from_value(made))
    };
    made().unwrap_or_else(|error| error)
}

/// A `ValueError` about an argument that never came to the library.
pub fn invalid(py: Python<'_>, message: impl Into<String>) -> PyErr {
    exception(py, "InvalidArgument", message.into(), |_| Ok(()))
}

/// The exception of an error of the library.
pub fn raised(py: Python<'_>, error: Error) -> PyErr {
    let message = error.to_string();
    let with = |class, fill: &dyn Fn(&Bound<'_, PyDict>) -> PyResult<()>| {
        exception(py, class, message.clone(), fill)
    };
    match &error {
        Error::WorldSize { world_size } => with("WorldSize", &|f| f.set_item("world_size", world_size)),
        Error::RankOutOfRange { rank, world_size } => with("RankOutOfRange", &|f| {
            f.set_item("rank", rank)?;
            f.set_item("world_size", world_size)
        }),
        Error::LengthMismatch { input, output } => with("LengthMismatch", &|f| {
            f.set_item("input", input)?;
            f.set_item("output", output)
        }),
        Error::InvalidPointer { which, address, problem, element_size } => with("InvalidPointer", &|f| {
            f.set_item("which", which)?;
            f.set_item("address", address)?;
            f.set_item("problem", problem)?;
            f.set_item("element_size", element_size)
        }),
        Error::Overlap { input, output, bytes } => with("Overlap", &|f| {
            f.set_item("input", input)?;
            f.set_item("output", output)?;
            f.set_item("bytes", bytes)
        }),
        Error::InvalidSetting { name, value, expected } => with("InvalidSetting", &|f| {
            f.set_item("name", name)?;
            f.set_item("value", value)?;
            f.set_item("expected", expected)
        }),
        Error::Tuning { file, reason } => with("Tuning", &|f| {
            f.set_item("file", file)?;
            f.set_item("reason", reason)
        }),
        Error::Allocation { bytes, reason } => with("Allocation", &|f| {
            f.set_item("bytes", bytes)?;
            f.set_item("reason", reason)
        }),
        Error::Timeout { operation, epoch, missing, waited, last_seen } => with("Timeout", &|f| {
            f.set_item("operation", operation)?;
            f.set_item("epoch", epoch)?;
            f.set_item("missing", missing)?;
            f.set_item("waited", waited.as_secs_f64())?;
            f.set_item("last_seen", last_seen)
        }),
        Error::PeerLost { rank, reason } => with("PeerLost", &|f| {
            f.set_item("rank", rank)?;
            f.set_item("reason", reason)
        }),
        Error::PeerFailed { rank, reason } => with("PeerFailed", &|f| {
            f.set_item("rank", rank)?;
            f.set_item("reason", reason)
        }),
        Error::Forked => with("Forked", &|_| Ok(())),
        Error::Aborted => with("Aborted", &|_| Ok(())),
        Error::Rendezvous { reason } => with("Rendezvous", &|f| f.set_item("reason", reason)),
        Error::Refused { reason } => with("Refused", &|f| f.set_item("reason", reason)),
        Error::Malformed { rank, reason } => with("Malformed", &|f| {
            f.set_item("rank", rank)?;
            f.set_item("reason", reason)
        }),
        Error::Disagreement { what, rank, theirs, own_rank, ours } => with("Disagreement", &|f| {
            f.set_item("what", what)?;
            f.set_item("rank", rank)?;
            f.set_item("theirs", theirs)?;
            f.set_item("own_rank", own_rank)?;
            f.set_item("ours", ours)
        }),
        Error::Unavailable { what, reason } => with("Unavailable", &|f| {
            f.set_item("what", what)?;
            f.set_item("reason", reason)
        }),
        Error::InvalidStream { stream, device } => with("InvalidStream", &|f| {
            f.set_item("stream", stream)?;
            f.set_item("device", device)
        }),
        Error::Driver { call, code, .. } => with("Driver", &|f| {
            f.set_item("call", call)?;
            f.set_item("code", code)
        }),
        Error::System { call, errno } => with("System", &|f| {
            f.set_item("call", call)?;
            f.set_item("errno", *errno as i32)
        }),
        _ => with("Error", &|_| Ok(())),
    }
}
