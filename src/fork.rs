//! Detects that this process is a fork of the one that created an object.
//!
//! A fork inherits copies of its parent's communicators, with their mappings and sockets. If it used or closed them,
//! the other ranks would take that for an action of the parent.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::OnceLock;

use nix::sys::mman::{madvise, mmap_anonymous, munmap, MapFlags, MmapAdvise, ProtFlags};

/// The process in which an object was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ForkCheck(u32);

impl ForkCheck {
    /// Records the current process as the creator.
    pub fn new() -> Self {
        Self(current())
    }

    /// Returns whether this process is a fork of the creator.
    pub fn in_fork(self) -> bool {
        current() != self.0
    }
}

/// Contents of the page that the kernel clears in forks.
struct Words {
    id: AtomicU32,
    nonce: AtomicU64,
}

/// Returns a random number that identifies this process; `random` generates it on the first call. A fork gets another
/// number, even if it has the same process id in another namespace. Returns `None` if the kernel cannot clear pages in
/// forks.
pub(crate) fn nonce<E>(random: impl FnOnce() -> Result<u64, E>) -> Result<Option<u64>, E> {
    let Some(words) = words() else { return Ok(None) };
    match words.nonce.load(Ordering::Relaxed) {
        0 => {
            let fresh = random()?.max(1);
            let set = words.nonce.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed);
            Ok(Some(set.map_or_else(|other| other, |_| fresh)))
        }
        nonce => Ok(Some(nonce)),
    }
}

/// Returns the process id: by a load from the page that the kernel clears in forks, or by a system call if there is no
/// such page.
fn current() -> u32 {
    let Some(Words { id: word, .. }) = words() else {
        return std::process::id();
    };
    match word.load(Ordering::Relaxed) {
        0 => {
            let id = std::process::id();
            word.store(id, Ordering::Relaxed);
            id
        }
        id => id,
    }
}

fn words() -> Option<&'static Words> {
    static WORDS: OnceLock<Option<&'static Words>> = OnceLock::new();
    *WORDS.get_or_init(cleared_by_forks)
}

/// Maps a zeroed page that is zeroed again in every fork of this process. Returns `None` before Linux 4.14.
fn cleared_by_forks() -> Option<&'static Words> {
    let length = std::num::NonZeroUsize::new(size_of::<Words>())?;
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: creates a new anonymous mapping at an address that the kernel chooses.
    let page = unsafe { mmap_anonymous(None, length, protection, MapFlags::MAP_PRIVATE) }.ok()?;
    // SAFETY: the page was mapped above, and nothing uses it yet.
    if unsafe { madvise(page, length.get(), MmapAdvise::MADV_WIPEONFORK) }.is_err() {
        // SAFETY: the page was mapped above, and nothing uses it. If this fails, an unused page stays mapped.
        let _ = unsafe { munmap(page, length.get()) };
        return None;
    }
    // SAFETY: the page is zeroed, which is a valid value of atomics; it is aligned, is accessed only through this
    // reference, and is never unmapped.
    Some(unsafe { page.cast::<Words>().as_ref() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::wait::{waitpid, WaitStatus};
    use nix::unistd::{fork, ForkResult};

    #[test]
    fn a_fork_is_noticed() {
        let fork_check = ForkCheck::new();
        assert!(!fork_check.in_fork());
        let of = |random: u64| nonce(|| Ok::<_, ()>(random)).unwrap().unwrap();
        let own = of(71);
        assert_eq!(of(72), own);
        // SAFETY: the child allocates nothing, takes no lock, and ends by _exit.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let right = fork_check.in_fork() && !ForkCheck::new().in_fork() && fork_check.in_fork();
                let right = right && of(73) == 73;
                // SAFETY: ends the child without the parent's exit handlers.
                unsafe { libc::_exit(i32::from(!right)) }
            }
            ForkResult::Parent { child } => {
                assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0)));
            }
        }
        assert!(!fork_check.in_fork());
    }
}
