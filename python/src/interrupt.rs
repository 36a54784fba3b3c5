//! Ctrl-C ends a wait.
//!
//! A call of the main thread waits in code that knows nothing of Python. So a handler in front of Python's notes that SIGINT
//! has come, and a thread that looks ten times a second aborts the call that has waited since before. A call that ends
//! within that time ends as usual, and Python then raises KeyboardInterrupt as after any call.

use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use fast_allreduce::bootstrap::Bootstrap;
use pyo3::prelude::*;

use crate::any::{on_any, Any};

const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// What a wait of the main thread can be ended by.
#[derive(Clone)]
pub enum Wait {
    Call(Arc<Any>),
    SetUp(Arc<dyn Bootstrap>),
}

impl Wait {
    fn end(&self) {
        match self {
            Self::Call(any) => on_any!(&**any, communicator => communicator.abort()),
            Self::SetUp(bootstrap) => bootstrap.interrupt(),
        }
    }
}

/// What the main thread waits in, and how many times it has waited.
#[derive(Default)]
struct Waits {
    current: Option<Wait>,
    number: u64,
}

/// Of this process: null before the first wait, and again in a fork, which has no such thread.
static WAITS: AtomicPtr<Mutex<Waits>> = AtomicPtr::new(std::ptr::null_mut());

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// The handler that was there before this.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn forget() {
    // The fork has a copy of a lock that another thread may have held.
    WAITS.store(std::ptr::null_mut(), Ordering::Relaxed);
}

extern "C" fn note(signal: libc::c_int, information: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // Nothing but what may be done in a signal handler: two atomics and a call.
    INTERRUPTED.store(true, Ordering::Relaxed);
    // SAFETY: null, or an action that was leaked.
    let Some(previous) = (unsafe { PREVIOUS.load(Ordering::Acquire).as_ref() }) else {
        return;
    };
    let handler = previous.sa_sigaction;
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        return;
    }
    if previous.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: that is what an action with this flag holds.
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(handler) };
        handler(signal, information, context);
    } else {
        // SAFETY: that is what an action without the flag holds, if neither of the two above.
        let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(handler) };
        handler(signal);
    }
}

/// Puts `note` in front of the handler of SIGINT, if there is one and it is not there yet: programs change theirs.
fn stand_in_front() {
    let ours = note as *const () as usize;
    // SAFETY: all zeros is an action; only the current one is read.
    let mut current: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    if unsafe { libc::sigaction(libc::SIGINT, std::ptr::null(), &mut current) } != 0 {
        return;
    }
    // Where SIGINT ends the process, or is ignored, it may go on doing so.
    if [ours, libc::SIG_DFL, libc::SIG_IGN].contains(&current.sa_sigaction) {
        return;
    }
    PREVIOUS.store(Box::leak(Box::new(current)), Ordering::Release);
    let mut action = current;
    action.sa_sigaction = ours;
    action.sa_flags |= libc::SA_SIGINFO;
    // SAFETY: the handler does only what one may do.
    unsafe { libc::sigaction(libc::SIGINT, &action, std::ptr::null_mut()) };
}

/// The waits of this process; starts the thread that looks at them.
fn waits() -> &'static Mutex<Waits> {
    // SAFETY: null, or leaked.
    if let Some(waits) = unsafe { WAITS.load(Ordering::Acquire).as_ref() } {
        return waits;
    }
    static AT_FORK: std::sync::Once = std::sync::Once::new();
    // SAFETY: the function stores one atomic.
    AT_FORK.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(forget));
    });
    // Only the main thread comes here.
    let waits: &'static Mutex<Waits> = Box::leak(Box::default());
    stand_in_front();
    // Without the thread a wait goes on to its timeout.
    let _ = thread::Builder::new().name("fast-allreduce-interrupt".into()).spawn(move || look(waits));
    WAITS.store(std::ptr::from_ref(waits).cast_mut(), Ordering::Release);
    waits
}

fn locked(waits: &Mutex<Waits>) -> MutexGuard<'_, Waits> {
    waits.lock().unwrap_or_else(PoisonError::into_inner)
}

fn look(waits: &Mutex<Waits>) {
    let mut seen = 0;
    loop {
        thread::sleep(LOOK_INTERVAL);
        let wait = {
            let waits = locked(waits);
            let since_before = waits.number == std::mem::replace(&mut seen, waits.number);
            waits.current.clone().filter(|_| since_before)
        };
        if let Some(wait) = wait {
            stand_in_front();
            if INTERRUPTED.swap(false, Ordering::Relaxed) {
                wait.end();
            }
        }
    }
}

pub fn is_main_thread() -> bool {
    thread_local! {
        // SAFETY: both only read.
        static IS_MAIN: bool = unsafe { libc::gettid() == libc::getpid() };
    }
    IS_MAIN.with(|is_main| *is_main)
}

/// Runs what waits, without the interpreter; Ctrl-C in the main thread ends it.
pub fn waiting<T: Send>(
    py: Python<'_>,
    wait: impl FnOnce() -> Wait,
    call: impl FnOnce() -> T + Send,
) -> PyResult<T> {
    if !is_main_thread() {
        return Ok(py.detach(call));
    }
    // What has come before this is Python's.
    py.check_signals()?;
    let waits = waits();
    INTERRUPTED.store(false, Ordering::Relaxed);
    {
        let mut waits = locked(waits);
        waits.number += 1;
        waits.current = Some(wait());
    }
    let result = py.detach(call);
    let ended = locked(waits).current.take();
    drop(ended);
    py.check_signals()?;
    Ok(result)
}

/// Runs what cannot be ended, in another thread, until it ends or Ctrl-C does: then nobody waits for it any more.
pub fn elsewhere<T: Send + 'static>(
    py: Python<'_>,
    call: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    if !is_main_thread() {
        return Ok(py.detach(call));
    }
    let (give, take) = std::sync::mpsc::channel();
    let thread = thread::Builder::new().name("fast-allreduce-rendezvous".into());
    thread.spawn(move || give.send(call()))?;
    let mut take = take;
    loop {
        let taken;
        // The receiver goes into the closure and comes back: it is no thread's but this one's.
        (taken, take) = py.detach(move || (take.recv_timeout(LOOK_INTERVAL), take));
        if let Ok(result) = taken {
            return Ok(result);
        }
        py.check_signals()?;
    }
}
