//! Whether standard output is there.
//!
//! The standard library puts `/dev/null` in the place of a descriptor that is closed when the program starts, and
//! takes one that cannot be written for one that takes everything. Results would be lost, and the run a success.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::libc;

use crate::environment;
use crate::failure::Failure;

static IS_THERE: AtomicBool = AtomicBool::new(false);

/// Run by the loader, before the standard library looks.
#[used]
#[link_section = ".init_array"]
static LOOK: extern "C" fn() = look;

extern "C" fn look() {
    // SAFETY: asks for the flags of a number that may be no descriptor.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFL) };
    let is_writable = flags >= 0 && flags & libc::O_ACCMODE != libc::O_RDONLY;
    IS_THERE.store(is_writable, Ordering::Relaxed);
}

/// Refuses to begin what would be lost: what the first rank says, or a process that is no rank.
pub fn check() -> Result<(), Failure> {
    match IS_THERE.load(Ordering::Relaxed) || !environment::is_first_rank() {
        true => Ok(()),
        false => Err(Failure::Output(io::Error::other(
            "standard output is closed or read-only (send it to /dev/null if it is not wanted)",
        ))),
    }
}
