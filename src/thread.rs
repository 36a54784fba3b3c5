//! Threads of the crate's own.

use std::io;
use std::thread::{Builder, JoinHandle};

use nix::sys::signal::{SigSet, SigmaskHow, Signal};

/// Stack of a thread that calls nothing deep.
pub(crate) const SMALL_STACK: usize = 128 << 10;

/// Stack of a thread that calls a library, as much as the standard library gives.
#[cfg(feature = "nccl")]
pub(crate) const DEEP_STACK: usize = 2 << 20;

/// What a thread does to itself. Blocked, each would end the process at once, past the handler that the process or its
/// sanitizer has for it.
const OWN_FAULTS: [Signal; 6] =
    [Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGFPE, Signal::SIGILL, Signal::SIGTRAP, Signal::SIGSYS];

/// Starts a thread with so much stack. It takes none of the signals that are sent to the process: their handlers run
/// in the process's own threads, with the stacks and the locks that they were written for. Where memory is short that
/// is an error, as the standard library ends the process if a thread that it has started finds no room for its stack
/// of signals.
pub(crate) fn spawn(
    name: String,
    stack_bytes: usize,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    // What a thread takes at its start beside its stack, for several that start at once.
    const ROOM: usize = 4 << 20;
    // Writable, as only that counts as data (RLIMIT_DATA).
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a mapping of its own, which nothing refers to and which goes at once.
    unsafe {
        let room = libc::mmap(std::ptr::null_mut(), stack_bytes + ROOM, protection, flags, -1, 0);
        if room == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        libc::munmap(room, stack_bytes + ROOM);
    }
    let faults = SigSet::from_iter(OWN_FAULTS);
    let mut others = SigSet::all();
    OWN_FAULTS.into_iter().for_each(|fault| others.remove(fault));
    // A thread inherits the mask, so there is no moment in which it could take one. What comes meanwhile waits for
    // this thread.
    let mask = others.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let spawned = Builder::new().name(name).stack_size(stack_bytes).spawn(move || {
        // The thread that started this one may block them. It cannot fail: the set is one of signals.
        let unblocked = faults.thread_unblock();
        debug_assert_eq!(unblocked, Ok(()));
        body()
    });
    mask.thread_set_mask()?;
    spawned
}
