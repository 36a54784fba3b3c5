//! Names of communicators. Operators of compiled graphs take numbers and text, so they refer to a communicator by its
//! name.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use fast_allreduce::AnyCommunicator;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use super::Communicator;
use crate::errors::invalid;

/// Returns a `weakref.WeakValueDictionary` of this process's named communicators.
pub fn communicators(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    static COMMUNICATORS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let communicators = COMMUNICATORS.get_or_try_init(py, || {
        py.import("weakref")?.getattr("WeakValueDictionary")?.call0().map(Bound::unbind)
    });
    communicators.map(|communicators| communicators.bind(py))
}

/// The communicators of this process by name, for calls that ask Python's dictionary for too little to pay for it.
static NAMED: Mutex<Option<HashMap<String, Weak<AnyCommunicator>>>> = Mutex::new(None);

/// Returns the communicator with a name, unless it has been destroyed.
pub fn live(name: &str) -> Option<Arc<AnyCommunicator>> {
    NAMED.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.get(name)?.upgrade()
}

/// Enters a communicator under its name.
fn enter(slf: &Bound<'_, Communicator>, name: &str) -> PyResult<()> {
    let any = slf.get().any.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(Arc::downgrade);
    {
        // Released before Python code runs, which may wait for a thread that waits for the lock.
        let mut named = NAMED.lock().unwrap_or_else(PoisonError::into_inner);
        let named = named.get_or_insert_default();
        named.retain(|_, any| any.strong_count() > 0);
        named.insert(name.to_owned(), any.unwrap_or_default());
    }
    communicators(slf.py())?.set_item(name, slf)
}

/// Returns whether a communicator that has not been destroyed has the name.
fn is_taken(py: Python<'_>, name: &str) -> PyResult<bool> {
    let found = communicators(py)?.call_method1("get", (name,))?;
    Ok(found.cast::<Communicator>().is_ok_and(|other| other.get().is_valid()))
}

#[pymethods]
impl Communicator {
    #[getter]
    fn name(slf: &Bound<'_, Self>) -> PyResult<String> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = &slf.get().name;
        loop {
            if let Some(name) = name.get() {
                return Ok(name.clone());
            }
            // Relaxed: only the number is shared.
            let number = NEXT.fetch_add(1, Ordering::Relaxed).to_string();
            if !is_taken(slf.py(), &number)? {
                // Registered before any caller can read the name. Another thread may have set a name meanwhile.
                enter(slf, &number)?;
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
        enter(slf, &name)
    }
}
