//! What a thread does now and then while it waits for other ranks: a language binding runs the program's signal handlers there.
//!
//! Hidden from the documentation: it is for the bindings of this repository, and no part of the API.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// A wait asks again when this much time has passed.
const INTERVAL: Duration = Duration::from_millis(100);

/// What this thread asks while it waits.
struct Question<'a> {
    goes_on: &'a dyn Fn() -> bool,
    /// When it was asked, or could have been for the first time.
    asked: Cell<Option<Instant>>,
    /// The answer was no. It stays so for all waits of the call.
    ended: Cell<bool>,
}

thread_local! {
    /// Null, or a question on this thread's stack. It needs no destructor, and so is there in a thread that ends, too.
    static QUESTION: Cell<*const Question<'static>> = const { Cell::new(std::ptr::null()) };
}

/// Puts back the question that was there before.
struct Restore(*const Question<'static>);

impl Drop for Restore {
    fn drop(&mut self) {
        QUESTION.set(self.0);
    }
}

/// Runs `call`. While this thread waits in it for other ranks, `goes_on` is asked ten times a second, the first time after a tenth. A
/// `false` ends the wait: calls fail with [`Error::Aborted`](crate::Error::Aborted), and steps of setting up with an error of theirs.
///
/// `goes_on` may take as long as it likes, which does not count against the other ranks. It may call communicators: those that this
/// thread is in a call of refuse that. It does not unwind.
pub fn while_waiting<T>(goes_on: &dyn Fn() -> bool, call: impl FnOnce() -> T) -> T {
    let question = Question { goes_on, asked: Cell::new(None), ended: Cell::new(false) };
    let _restore = Restore(QUESTION.replace(std::ptr::from_ref(&question).cast()));
    call()
}

/// Runs `call`, the waits of which end as well when `is_hopeless` says so, which is asked ten times a second.
pub(crate) fn unless<T>(is_hopeless: &dyn Fn() -> bool, call: impl FnOnce() -> T) -> T {
    let outer = QUESTION.get();
    let goes_on = || {
        let _restore = Restore(QUESTION.replace(outer));
        !is_hopeless() && goes_on()
    };
    while_waiting(&goes_on, call)
}

/// Whether this thread has something to ask while it waits.
pub(crate) fn is_asked() -> bool {
    !QUESTION.get().is_null()
}

/// Whether a wait of this thread goes on. To be asked with no lock held that what the program does might need.
pub(crate) fn goes_on() -> bool {
    // SAFETY: null, or on the stack of a `while_waiting` of this thread, which has not returned: it puts the one before back first.
    let Some(question) = (unsafe { QUESTION.get().as_ref() }) else { return true };
    if question.ended.get() {
        return false;
    }
    let now = Instant::now();
    match question.asked.get() {
        None => question.asked.set(Some(now)),
        Some(asked) if now - asked >= INTERVAL => return ask(question),
        Some(_) => {}
    }
    true
}

#[cold]
fn ask(question: &Question<'_>) -> bool {
    // What the program does meanwhile is no part of this call.
    let goes_on = {
        let _restore = Restore(QUESTION.replace(std::ptr::null()));
        (question.goes_on)()
    };
    question.asked.set(Some(Instant::now()));
    question.ended.set(!goes_on);
    goes_on
}

/// [`goes_on`] for kernels of the host: 0 if the wait does.
extern "C" fn has_ended() -> u32 {
    u32::from(!goes_on())
}

/// What kernels of the host that this thread runs call while they wait: the address of a function that takes nothing and returns a
/// 32-bit number, other than 0 if the wait is to end; 0: nothing.
pub(crate) fn for_kernels() -> u64 {
    if is_asked() {
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
    fn a_wait_asks_now_and_then_until_it_is_to_end() {
        assert!(goes_on() && !is_asked() && for_kernels() == 0);
        let asked = Cell::new(0);
        let question = || {
            asked.set(asked.get() + 1);
            assert!(!is_asked() && goes_on(), "it is no wait itself");
            // Another call within has its own.
            while_waiting(&|| false, || assert!(is_asked() && goes_on() && goes_on(), "too early"));
            asked.get() < 2
        };
        while_waiting(&question, || {
            assert!(is_asked() && for_kernels() != 0);
            assert!(goes_on() && asked.get() == 0, "too early");
            sleep(INTERVAL);
            assert!(goes_on() && asked.get() == 1);
            assert!(goes_on() && asked.get() == 1, "too early again");
            sleep(INTERVAL);
            assert!(!goes_on() && asked.get() == 2);
            assert!(!goes_on() && has_ended() == 1 && asked.get() == 2, "the answer stays");
        });
        assert!(goes_on() && !is_asked());
    }
}
