//! The MPI library of this process: who starts and ends it, and whose turn it is to call it.

use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use ::mpi::environment::{
    initialize_with_threading, is_finalized, is_initialized, threading_support, Universe,
};
use ::mpi::{ffi, Threading};

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::thread;

/// Below `MPI_THREAD_MULTIPLE`, MPI allows one call at a time in a process.
static TURN: Mutex<()> = Mutex::new(());

/// What this crate has to end, with the process that started it.
static STARTED: Mutex<Option<(Universe, u32)>> = Mutex::new(None);

/// Set where MPI must not be finalised: communication is under way that never ends, or the process is being aborted.
static UNFINISHED: AtomicBool = AtomicBool::new(false);

/// Shows that this thread may call MPI now, and that no other thread does through this crate.
///
/// A guard cannot be sent to another thread, so it is in the thread that was checked.
pub(super) struct Turn(#[allow(dead_code)] MutexGuard<'static, ()>);

/// Waits until no other thread calls MPI through this crate.
///
/// # Errors
///
/// [`Error::Unavailable`] if MPI is not running, or was initialised without permission for this thread to call it.
pub(super) fn turn() -> Result<Turn> {
    let turn = Turn(TURN.lock().unwrap_or_else(PoisonError::into_inner));
    check_thread().map(|()| turn)
}

fn check_thread() -> Result<()> {
    if !is_initialized() {
        return Err(unavailable(
            "it is not initialised: call Mpi::init, or mpi::initialize_with_threading first",
        ));
    }
    if is_finalized() {
        return Err(unavailable("it has been finalised, and a process can use MPI only once"));
    }
    let level = threading_support();
    if level >= Threading::Serialized {
        return Ok(());
    }
    let mut is_main: c_int = 0;
    // SAFETY: MPI is initialised and not finalised; the flag is written during the call.
    check("MPI_Is_thread_main", unsafe { ffi::MPI_Is_thread_main(&mut is_main) })?;
    if is_main != 0 {
        return Ok(());
    }
    Err(unavailable(&format!(
        "it was initialised for calls from the main thread alone (Threading::{level:?}), and this is another; \
         initialise it with Threading::Serialized"
    )))
}

/// Initialises MPI if nobody has. What this crate has initialised is finalised when the process exits.
pub(super) fn start() -> Result<()> {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    if is_finalized() {
        return Err(unavailable("it has been finalised, and a process can use MPI only once"));
    }
    let Some((universe, _)) = initialize_with_threading(Threading::Serialized) else {
        return Ok(());
    };
    *STARTED.lock().unwrap_or_else(PoisonError::into_inner) = Some((universe, std::process::id()));
    // SAFETY: the handler is a function of this program, and takes and returns nothing. If there is no room for it, MPI says
    // itself that it was not finalised.
    unsafe { libc::atexit(finalize) };
    Ok(())
}

/// At the exit of a process that has initialised MPI through this crate.
///
/// It comes from `exit`, maybe in another thread than the one that uses MPI, or from within a call that MPI ends the process
/// in. So it waits only for a moment for its turn.
extern "C" fn finalize() {
    const PATIENCE: Duration = Duration::from_secs(1);
    let deadline = Deadline::after(PATIENCE);
    let _turn = loop {
        match TURN.try_lock() {
            Ok(turn) => break turn,
            Err(TryLockError::Poisoned(poisoned)) => break poisoned.into_inner(),
            Err(TryLockError::WouldBlock) if deadline.has_passed() => return,
            Err(TryLockError::WouldBlock) => thread::pause(Duration::from_millis(1)),
        }
    };
    if UNFINISHED.load(Ordering::Relaxed) || check_thread().is_err() {
        return;
    }
    let Some((universe, process)) = STARTED.lock().unwrap_or_else(PoisonError::into_inner).take() else {
        return;
    };
    if process == std::process::id() {
        drop(universe);
    } else {
        // After a fork MPI is the parent's.
        std::mem::forget(universe);
    }
}

/// Leaves MPI as it is when the process exits.
pub(super) fn never_finalize() {
    UNFINISHED.store(true, Ordering::Relaxed);
}

/// Ends all processes of `MPI_COMM_WORLD`.
pub(super) fn abort(status: i32) -> ! {
    never_finalize();
    // Not `turn`: another thread may be in a call that never ends.
    if is_initialized() && !is_finalized() {
        // SAFETY: MPI runs, and its world lives for as long.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, status) };
    }
    std::process::exit(status)
}

/// Turns a return code into a result.
pub(super) fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0 as c_char; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut length: c_int = 0;
    // SAFETY: the array has the length that MPI asks for.
    let described = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &mut length) };
    let length =
        if described == ffi::MPI_SUCCESS as c_int { usize::try_from(length).unwrap_or(0) } else { 0 };
    let bytes: Vec<u8> = text.iter().take(length).map(|&byte| byte as u8).collect();
    let message = match length {
        0 => format!("error {code}"),
        _ => String::from_utf8_lossy(&bytes).split_whitespace().collect::<Vec<_>>().join(" "),
    };
    Err(Error::Mpi { call, message })
}

fn unavailable(reason: &str) -> Error {
    Error::Unavailable { what: "MPI".into(), reason: reason.into() }
}
