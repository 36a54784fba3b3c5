//! Calls back while a thread waits for other ranks: a language binding runs the program's signal handlers there.
//!
//! Hidden from the documentation: this module is for the bindings in this repository, and not part of the API.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Time between two calls of the callback.
const INTERVAL: Duration = Duration::from_millis(100);

/// The callback of this thread's waits, and its state.
struct Callback<'a> {
    goes_on: &'a dyn Fn() -> bool,
    /// When it was last called; at first, when a wait could have called it for the first time.
    called: Cell<Option<Instant>>,
    /// It has returned false. That holds for all later waits of the call.
    ended: Cell<bool>,
}

thread_local! {
    /// Null, or a callback on this thread's stack. Without a destructor, so that it can be read while the thread ends.
    static CALLBACK: Cell<*const Callback<'static>> = const { Cell::new(std::ptr::null()) };
}

/// Restores the previous callback when it is dropped.
struct Restore(*const Callback<'static>);

impl Drop for Restore {
    fn drop(&mut self) {
        CALLBACK.set(self.0);
    }
}

/// Runs `call`. While this thread waits for other ranks in it, `goes_on` is called ten times a second, first after a
/// tenth of a second. If it returns `false`, the wait ends: calls fail with [`Error::Aborted`](crate::Error::Aborted),
/// and steps of the set-up with their own errors.
///
/// `goes_on` may take any time; that time does not count against the other ranks. It may call communicators, except
/// those in whose calls this thread is: they return an error. It must not unwind.
///
/// ```
/// use fast_allreduce::interruption::while_waiting;
/// use fast_allreduce::{Communicator, Error, Host};
/// use fast_allreduce::bootstrap::Threads;
///
/// let mut ranks = Threads::world(2)?;
/// // Rank 1 never comes, and the program ends the wait of rank 0.
/// let built = while_waiting(&|| false, || Communicator::builder().build(Host::new(), ranks.remove(0)));
/// assert!(built.is_err());
/// # Ok::<(), Error>(())
/// ```
pub fn while_waiting<T>(goes_on: &dyn Fn() -> bool, call: impl FnOnce() -> T) -> T {
    let callback = Callback { goes_on, called: Cell::new(None), ended: Cell::new(false) };
    let _restore = Restore(CALLBACK.replace(std::ptr::from_ref(&callback).cast()));
    call()
}

/// Runs `call`. Its waits also end when `is_hopeless`, called ten times a second, returns true.
pub(crate) fn unless<T>(is_hopeless: &dyn Fn() -> bool, call: impl FnOnce() -> T) -> T {
    let outer = CALLBACK.get();
    let goes_on = || {
        let _restore = Restore(CALLBACK.replace(outer));
        !is_hopeless() && goes_on()
    };
    while_waiting(&goes_on, call)
}

/// Returns whether this thread has a callback.
pub(crate) fn has_callback() -> bool {
    !CALLBACK.get().is_null()
}

/// Returns whether a wait of this thread goes on; calls the callback when it is due. The caller must hold no lock that
/// the program may need.
pub(crate) fn goes_on() -> bool {
    // SAFETY: null, or on the stack of a `while_waiting` of this thread that has not returned: before it returns, it
    // restores the previous pointer.
    let Some(callback) = (unsafe { CALLBACK.get().as_ref() }) else { return true };
    if callback.ended.get() {
        return false;
    }
    let now = Instant::now();
    match callback.called.get() {
        None => callback.called.set(Some(now)),
        Some(called) if now - called >= INTERVAL => return call_back(callback),
        Some(_) => {}
    }
    true
}

#[cold]
fn call_back(callback: &Callback<'_>) -> bool {
    // Calls that the program makes in its callback are not part of this one.
    let goes_on = {
        let _restore = Restore(CALLBACK.replace(std::ptr::null()));
        (callback.goes_on)()
    };
    callback.called.set(Some(Instant::now()));
    callback.ended.set(!goes_on);
    goes_on
}

/// Calls [`goes_on`] for host kernels: returns 0 if the wait goes on.
extern "C" fn has_ended() -> u32 {
    u32::from(!goes_on())
}

/// Returns the address of the function that this thread's host kernels call while they wait, or 0 if there is none. The
/// function takes no arguments and returns 32 bits: 0 if the wait goes on.
pub(crate) fn for_kernels() -> u64 {
    if has_callback() {
        has_ended as *const () as u64
    } else {
        0
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use super::*;

    #[test]
    fn a_wait_calls_back_until_it_is_to_end() {
        assert!(goes_on() && !has_callback() && for_kernels() == 0);
        let calls = Cell::new(0);
        let callback = || {
            calls.set(calls.get() + 1);
            assert!(!has_callback() && goes_on(), "the callback is not a wait itself");
            // A nested call has its own callback.
            while_waiting(&|| false, || assert!(has_callback() && goes_on() && goes_on(), "too early"));
            calls.get() < 2
        };
        while_waiting(&callback, || {
            assert!(has_callback() && for_kernels() != 0);
            assert!(goes_on() && calls.get() == 0, "too early");
            sleep(INTERVAL);
            assert!(goes_on() && calls.get() == 1);
            assert!(goes_on() && calls.get() == 1, "too early again");
            sleep(INTERVAL);
            assert!(!goes_on() && calls.get() == 2);
            assert!(!goes_on() && has_ended() == 1 && calls.get() == 2, "the answer stays");
        });
        assert!(goes_on() && !has_callback());
    }
}
