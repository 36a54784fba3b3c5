//! Threads of the crate's own.

use std::io;
use std::thread::{Builder, JoinHandle};

/// Stack of a thread that calls nothing deep.
pub(crate) const SMALL_STACK: usize = 128 << 10;

/// Starts a thread with so much stack. Where memory is short that is an error, as the standard library ends the process if a
/// thread that it has started finds no room for its stack of signals.
pub(crate) fn spawn(
    name: String,
    stack_bytes: usize,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    // What a thread takes at its start beside its stack, for several that start at once.
    const ROOM: usize = 4 << 20;
    let (protection, flags) =
        (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: a mapping of its own, which nothing refers to and which goes at once.
    unsafe {
        let room = libc::mmap(std::ptr::null_mut(), stack_bytes + ROOM, protection, flags, -1, 0);
        if room == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        libc::munmap(room, stack_bytes + ROOM);
    }
    Builder::new().name(name).stack_size(stack_bytes).spawn(body)
}
