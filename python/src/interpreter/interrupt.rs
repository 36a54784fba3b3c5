//! Signals during waits.
//!
//! Python runs signal handlers in the main thread, between its own instructions. A thread that waits in a call executes
//! none, so a wait of the main thread lets handlers run ten times a second. A handler that raises, as for
//! KeyboardInterrupt, ends the wait.

use std::cell::RefCell;
use std::sync::Arc;

use fast_allreduce::interruption::while_waiting;
use fast_allreduce::AnyCommunicator;
use pyo3::prelude::*;

use crate::errors::OrRaise;

pub fn is_main_thread() -> bool {
    thread_local! {
        // SAFETY: both calls only return an id.
        static IS_MAIN: bool = unsafe { libc::gettid() == libc::getpid() };
    }
    IS_MAIN.with(|is_main| *is_main)
}

/// Runs a blocking call without the GIL. In the main thread signal handlers run meanwhile. If one raises, the call
/// ends, `abandon` runs, and the exception is the result.
fn run<T: Send>(
    py: Python<'_>,
    call: impl FnOnce() -> T + Send,
    abandon: impl FnOnce() + Send,
) -> PyResult<T> {
    if !is_main_thread() {
        return Ok(py.detach(move || {
            let _abandon = abandon;
            call()
        }));
    }
    // Signals that arrived earlier do not concern the call.
    if let Err(error) = py.check_signals() {
        drop_detached((call, abandon));
        return Err(error);
    }
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

/// Runs a blocking step that has no communicator yet.
pub fn waiting<T: Send>(
    py: Python<'_>,
    step: impl FnOnce() -> fast_allreduce::Result<T> + Send,
) -> PyResult<T> {
    run(py, step, || ())?.or_raise(py)
}

/// Runs a call of a communicator, which is aborted if a signal handler raises.
pub fn in_call<T: Send>(
    py: Python<'_>,
    any: Arc<AnyCommunicator>,
    call: impl FnOnce(&AnyCommunicator) -> fast_allreduce::Result<T> + Send,
) -> PyResult<T> {
    let aborted = Arc::clone(&any);
    let abandon = move || aborted.abort();
    // The call and `abandon` own `any`: if another thread destroys the communicator meanwhile, the last reference is
    // dropped without the GIL.
    run(py, move || call(&any), abandon)?.or_raise(py)
}

/// Drops a value without the GIL. Its drop may wait for other ranks or calls, whose threads need the GIL to finish.
pub fn drop_detached(value: impl Send) {
    let mut value = Some(value);
    let mut drop_it = || drop(value.take());
    // Without an interpreter there is no GIL.
    if Python::try_attach(|py| py.detach(&mut drop_it)).is_none() {
        drop_it();
    }
}
