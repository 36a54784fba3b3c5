//! Names of communicators. Operators of compiled graphs take numbers and text, so a name says which communicator they mean.

use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::communicator::Communicator;
use crate::errors::invalid;

/// A `weakref.WeakValueDictionary` of the communicators of this process that have a name.
pub fn communicators(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    static COMMUNICATORS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let made = COMMUNICATORS.get_or_try_init(py, || {
        py.import("weakref")?.getattr("WeakValueDictionary")?.call0().map(Bound::unbind)
    });
    made.map(|made| made.bind(py))
}

/// Whether a communicator that has not been destroyed has the name.
fn is_taken(py: Python<'_>, name: &str) -> PyResult<bool> {
    let found = communicators(py)?.call_method1("get", (name,))?;
    Ok(found.cast::<Communicator>().is_ok_and(|other| other.get().is_valid()))
}

#[pymethods]
impl Communicator {
    /// A number of this process, unless it was given a name before.
    #[getter]
    fn name(slf: &Bound<'_, Self>) -> PyResult<String> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = &slf.get().name;
        loop {
            if let Some(name) = name.get() {
                return Ok(name.clone());
            }
            // Relaxed: nothing but the number is shared.
            let number = NEXT.fetch_add(1, Ordering::Relaxed).to_string();
            if !is_taken(slf.py(), &number)? {
                // Known by the name before anybody has the name; another thread may have given it one meanwhile.
                communicators(slf.py())?.set_item(&number, slf)?;
                let _ = name.set(number);
            }
        }
    }

    #[setter]
    fn set_name(slf: &Bound<'_, Self>, name: String) -> PyResult<()> {
        let py = slf.py();
        if is_taken(py, &name)? {
            return Err(invalid(py, format!("another communicator of this process is named {name:?}")));
        }
        if slf.get().name.set(name.clone()).is_err() {
            return Err(invalid(py, format!("{name:?} comes too late: the communicator has a name")));
        }
        communicators(py)?.set_item(name, slf)
    }
}
