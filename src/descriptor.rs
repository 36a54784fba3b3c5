//! Opens file descriptors whose numbers are not those of the standard streams.
//!
//! If a process runs with standard input, output or error closed, the next descriptor that it opens gets that number. A
//! socket with such a number would send to a peer what the program prints, and the program would read what a peer has
//! sent. So this module occupies the free numbers while it opens a descriptor. The placeholders can be neither read nor
//! written: to the program the streams look closed.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{fcntl, open, FcntlArg, OFlag};
use nix::sys::stat::{fstat, stat, Mode};

use crate::thread;

/// Lowest number of a descriptor that this crate keeps; those below are the standard streams.
const LEAST: RawFd = libc::STDERR_FILENO + 1;

/// Opens a close-on-exec descriptor by `opener`, with a number above those of the standard streams.
///
/// # Errors
///
/// The error of `opener`, and `EMFILE` if no other number is left.
pub(crate) fn above_streams(opener: impl FnOnce() -> nix::Result<OwnedFd>) -> nix::Result<OwnedFd> {
    let _taken = Taken::now();
    opener().and_then(moved)
}

/// Opens a pidfd of a process, which becomes readable when the process ends. Returns `None` if the kernel refuses.
pub(crate) fn pidfd(process: u32) -> Option<OwnedFd> {
    let opened = above_streams(|| {
        // SAFETY: the arguments are a process id and flags; the result is a descriptor or -1.
        let descriptor = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) })?;
        // SAFETY: the kernel has just opened it, close-on-exec, and nothing else owns it. Every descriptor fits an i32.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor as i32) })
    });
    opened.ok()
}

/// Moves a descriptor to another number, close-on-exec, if its number is that of a standard stream.
///
/// # Errors
///
/// `EMFILE` if no other number is left. The descriptor is then closed.
pub(crate) fn moved(opened: OwnedFd) -> nix::Result<OwnedFd> {
    if opened.as_raw_fd() >= LEAST {
        return Ok(opened);
    }
    let moved = fcntl(&opened, FcntlArg::F_DUPFD_CLOEXEC(LEAST))?;
    // SAFETY: the kernel has just opened it for this call, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(moved) })
}

/// Guard: while one exists, all numbers of the standard streams are in use.
pub(crate) struct Taken(());

/// Number of guards that exist in this process.
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
                    // SAFETY: `take` opened it, and nothing else owns it.
                    drop(unsafe { OwnedFd::from_raw_fd(number) });
                });
            }
        }
    }
}

/// Locks the number of guards. Returns `None` in a fork if another thread of the parent held the lock: the numbers then
/// stay as they are.
fn lock() -> Option<MutexGuard<'static, usize>> {
    // The lock is held for a few system calls; the attempts last far longer than those.
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

/// Returns the status flags of the descriptor with this number, if there is one.
fn flags(number: RawFd) -> Option<OFlag> {
    // SAFETY: borrowed for one call, which only reads flags and fails if nothing has the number.
    let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
    fcntl(descriptor, FcntlArg::F_GETFL).ok().map(OFlag::from_bits_retain)
}

/// Occupies the lowest free number. Returns false if it is not one of a standard stream, or if opening fails.
fn take() -> bool {
    let opened = open("/", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty());
    let opened = opened.ok().filter(|opened| opened.as_raw_fd() < LEAST);
    opened.map(IntoRawFd::into_raw_fd).is_some()
}

/// Returns whether a number still is what `take` opened: the program may have closed and reused it.
fn is_taken(number: RawFd) -> bool {
    // SAFETY: borrowed for one call, which only reads the status and fails if nothing has the number.
    let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
    let identity = |stat: nix::sys::stat::FileStat| (stat.st_dev, stat.st_ino);
    let is_path = flags(number).is_some_and(|flags| flags.contains(OFlag::O_PATH));
    is_path && fstat(descriptor).map(identity).ok() == stat("/").map(identity).ok()
}
