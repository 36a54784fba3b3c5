//! Signals during waits.
//!
//! Python runs signal handlers in the main thread, between its own instructions, and a thread that waits in a call executes none. So
//! a wait of the main thread lets handlers run ten times a second. One that raises ends the wait, as KeyboardInterrupt does.

use std::cell::RefCell;
use std::sync::Arc;

use fast_allreduce::interruption::while_waiting;
use fast_allreduce::AnyCommunicator;
use pyo3::prelude::*;

use crate::errors::raised;

pub fn is_main_thread() -> bool {
    thread_local! {
        // SAFETY: both only read.
        static IS_MAIN: bool = unsafe { libc::gettid() == libc::getpid() };
    }
    IS_MAIN.with(|is_main| *is_main)
}

/// Runs what waits, without the interpreter's lock. In the main thread handlers of signals run meanwhile. Where one raises, the call is
/// to end, which `abandon` comes after, and the exception is the result.
fn run<T: Send>(
    py: Python<'_>,
    call: impl FnOnce() -> T + Send,
    abandon: impl FnOnce() + Send,
) -> PyResult<T> {
    if !is_main_thread() {
        return Ok(py.detach(call));
    }
    // What has come before this is Python's.
    py.check_signals()?;
    let result = py.detach(|| {
        let exception = RefCell::new(None);
        // Without an interpreter there are no handlers.
        let goes_on = || match Python::try_attach(|py| py.check_signals()) {
            Some(Err(error)) => {
                exception.replace(Some(error));
                false
            }
            _ => true,
        };
        let result = while_waiting(&goes_on, call);
        match exception.into_inner() {
            None => Ok(result),
            Some(error) => {
                abandon();
                Err(error)
            }
        }
    })?;
    py.check_signals()?;
    Ok(result)
}

/// Runs a step before there is a communicator.
pub fn waiting<T: Send>(py: Python<'_>, step: impl FnOnce() -> T + Send) -> PyResult<T> {
    run(py, step, || ())
}

/// Runs a call of a communicator. It is aborted where a handler raises.
pub fn in_call<T: Send>(
    py: Python<'_>,
    any: Arc<AnyCommunicator>,
    call: impl FnOnce(&AnyCommunicator) -> fast_allreduce::Result<T> + Send,
) -> PyResult<T> {
    let aborted = Arc::clone(&any);
    let abandon = move || aborted.abort();
    // The call has the last one where another thread has destroyed the communicator: it goes without the interpreter's lock.
    let done = run(py, move || call(&any), abandon)?;
    done.map_err(|error| raised(py, error))
}

/// Drops what may wait for other ranks or calls, without the interpreter's lock, which other threads need to come to their end.
pub fn drop_apart(value: impl Send) {
    let mut value = Some(value);
    let mut drop_it = || drop(value.take());
    // Without an interpreter there is no lock.
    if Python::try_attach(|py| py.detach(&mut drop_it)).is_none() {
        drop_it();
    }
}
