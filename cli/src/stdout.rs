//! Checks that standard output can be written.
//!
//! The standard library opens `/dev/null` if the descriptor is closed when the program starts, and ignores EBADF of
//! one that cannot be written. Results would be lost, and the run a success.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::libc;

use crate::environment;
use crate::failure::Failure;

static IS_WRITABLE: AtomicBool = AtomicBool::new(false);

/// Run by the loader, before the standard library checks its descriptors.
#[used]
#[link_section = ".init_array"]
static CHECK: extern "C" fn() = check_descriptor;

extern "C" fn check_descriptor() {
    // SAFETY: reads the flags of a number that need not be a descriptor.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFL) };
    let is_writable = flags >= 0 && flags & libc::O_ACCMODE != libc::O_RDONLY;
    IS_WRITABLE.store(is_writable, Ordering::Relaxed);
}

/// Refuses a closed or read-only standard output, on the first rank and in processes that are not ranks.
pub fn check() -> Result<(), Failure> {
    match IS_WRITABLE.load(Ordering::Relaxed) || !environment::is_first_rank() {
        true => Ok(()),
        false => Err(Failure::Output(io::Error::other(
            "standard output is closed or read-only (send it to /dev/null if it is not wanted)",
        ))),
    }
}
