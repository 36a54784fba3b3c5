//! Descriptors that the crate keeps: none has the number of a standard stream.
//!
//! A process that runs with standard input, output or error closed gets their numbers for what it opens next. A socket there would
//! send to a peer whatever the program prints, and lose to the program's reads what a peer has sent. So the numbers are taken while
//! something is opened, by descriptors that can be neither read nor written, as if they were closed.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use nix::fcntl::{fcntl, open, FcntlArg, OFlag};
use nix::sys::stat::{fstat, stat, Mode};

use crate::thread;

/// The numbers of the standard streams are those below.
const LEAST: RawFd = libc::STDERR_FILENO + 1;

/// Opens one that has no number of a standard stream, close-on-exec.
///
/// # Errors
///
/// That of `opener`, and `EMFILE` if there is no other number left.
pub(crate) fn above_streams(opener: impl FnOnce() -> nix::Result<OwnedFd>) -> nix::Result<OwnedFd> {
    let _taken = Taken::now();
    opener().and_then(moved)
}

/// Moves one that has been opened, close-on-exec, to another number if it has that of a standard stream.
///
/// # Errors
///
/// `EMFILE` if there is no other number left. The descriptor is then closed.
pub(crate) fn moved(opened: OwnedFd) -> nix::Result<OwnedFd> {
    if opened.as_raw_fd() >= LEAST {
        return Ok(opened);
    }
    let moved = fcntl(&opened, FcntlArg::F_DUPFD_CLOEXEC(LEAST))?;
    // SAFETY: the kernel has just opened it for this call, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(moved) })
}

/// While one is held, the standard streams' numbers are in use.
pub(crate) struct Taken(());

/// How many are held in this process.
static HOLDERS: Mutex<usize> = Mutex::new(0);

impl Taken {
    pub fn now() -> Self {
        if let Some(mut holders) = lock() {
            *holders += 1;
            while (0..LEAST).any(|number| flags(number).is_none()) && take() {}
        }
        Self(())
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(mut holders) = lock() {
            *holders = holders.saturating_sub(1);
            if *holders == 0 {
                (0..LEAST).filter(|&number| is_taken(number)).for_each(|number| {
                    // SAFETY: `take` opened it and left it to nobody else.
                    drop(unsafe { OwnedFd::from_raw_fd(number) });
                });
            }
        }
    }
}

/// `None` in a fork in which a thread that is not there has it: then the numbers stay as they are.
fn lock() -> Option<MutexGuard<'static, usize>> {
    // It is held for some system calls, so that this is far longer than it takes.
    const ATTEMPTS: usize = 1000;
    for _ in 0..ATTEMPTS {
        match HOLDERS.try_lock() {
            Ok(holders) => return Some(holders),
            Err(TryLockError::Poisoned(poisoned)) => return Some(PoisonError::into_inner(poisoned)),
            Err(TryLockError::WouldBlock) => thread::pause(Duration::from_micros(100)),
        }
    }
    None
}

/// The status flags of what has this number, if anything has.
fn flags(number: RawFd) -> Option<OFlag> {
    // SAFETY: it is borrowed for one call, which asks for the flags of whatever has the number.
    let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
    fcntl(descriptor, FcntlArg::F_GETFL).ok().map(OFlag::from_bits_retain)
}

/// Takes the lowest number that is free. False if that is not a standard stream's, or cannot be.
fn take() -> bool {
    let opened = open("/", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty());
    let opened = opened.ok().filter(|opened| opened.as_raw_fd() < LEAST);
    opened.map(IntoRawFd::into_raw_fd).is_some()
}

/// Whether a number is still what `take` opened: the program may have given it another meaning.
fn is_taken(number: RawFd) -> bool {
    // SAFETY: as in `flags`.
    let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
    let identity = |stat: nix::sys::stat::FileStat| (stat.st_dev, stat.st_ino);
    let is_path = flags(number).is_some_and(|flags| flags.contains(OFlag::O_PATH));
    is_path && fstat(descriptor).map(identity).ok() == stat("/").map(identity).ok()
}
