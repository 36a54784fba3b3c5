//! The MPI library of this process: initialisation, finalisation, and the lock under which this crate calls it.

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
static MPI_LOCK: Mutex<()> = Mutex::new(());

/// MPI's environment, if this crate initialised it, and the process that did.
static STARTED: Mutex<Option<(Universe, u32)>> = Mutex::new(None);

/// MPI must not be finalised: operations are pending that never complete, or the process is being aborted.
static UNFINISHED: AtomicBool = AtomicBool::new(false);

/// Proof that this thread may call MPI, and that no other thread does so through this crate.
///
/// A mutex guard cannot be sent to another thread, so that this stays in the thread that was checked.
pub(super) struct MpiLock(#[allow(dead_code)] MutexGuard<'static, ()>);

/// Waits until no other thread calls MPI through this crate.
///
/// # Errors
///
/// [`Error::Unavailable`] if MPI is not running, or if its thread level does not allow this thread to call it.
pub(super) fn lock() -> Result<MpiLock> {
    let lock = MpiLock(MPI_LOCK.lock().unwrap_or_else(PoisonError::into_inner));
    check_thread().map(|()| lock)
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
    // SAFETY: MPI is initialised and not finalised; the flag outlives the call.
    check("MPI_Is_thread_main", unsafe { ffi::MPI_Is_thread_main(&mut is_main) })?;
    if is_main != 0 {
        return Ok(());
    }
    Err(unavailable(&format!(
        "it was initialised for calls from the main thread only (Threading::{level:?}), and this is another thread; \
         initialise it with Threading::Serialized"
    )))
}

/// Initialises MPI if it is not initialised. In that case, it is finalised when the process exits.
pub(super) fn start() -> Result<()> {
    let _lock = MPI_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    if is_finalized() {
        return Err(unavailable("it has been finalised, and a process can use MPI only once"));
    }
    let Some((universe, _)) = initialize_with_threading(Threading::Serialized) else {
        return Ok(());
    };
    *STARTED.lock().unwrap_or_else(PoisonError::into_inner) = Some((universe, std::process::id()));
    // SAFETY: the handler is a function of this program without arguments and result. If registering it fails, MPI
    // itself reports that it was not finalised.
    unsafe { libc::atexit(finalize) };
    Ok(())
}

/// Finalises MPI at the exit of a process that initialised it through this crate.
///
/// `exit` calls this, maybe in another thread than the one that uses MPI, or from within an MPI call that ends the
/// process. So it waits for the lock only for a short time.
extern "C" fn finalize() {
    const LOCK_TIMEOUT: Duration = Duration::from_secs(1);
    let deadline = Deadline::after(LOCK_TIMEOUT);
    let _lock = loop {
        match MPI_LOCK.try_lock() {
            Ok(lock) => break lock,
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
        // In a fork, MPI belongs to the parent.
        std::mem::forget(universe);
    }
}

/// Prevents the finalisation of MPI at the exit of the process.
pub(super) fn never_finalize() {
    UNFINISHED.store(true, Ordering::Relaxed);
}

/// Ends all processes of `MPI_COMM_WORLD`.
pub(super) fn abort(status: i32) -> ! {
    never_finalize();
    // Without the lock: another thread may hold it in a call that never ends.
    if is_initialized() && !is_finalized() {
        // SAFETY: MPI runs, and MPI_COMM_WORLD is valid while it does.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, status) };
    }
    std::process::exit(status)
}

/// Converts a return code to a result.
pub(super) fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0 as c_char; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut length: c_int = 0;
    // SAFETY: the array has the length that MPI requires.
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
