//! Whether this process is still the one that made something, or a fork of it.
//!
//! A fork has copies of the communicators of its parent, mappings and sockets included. If it used or closed them as its own, it
//! would speak to the other ranks in its parent's name.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::OnceLock;

use nix::sys::mman::{madvise, mmap_anonymous, munmap, MapFlags, MmapAdvise, ProtFlags};

/// The process that something was made in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Origin(u32);

impl Origin {
    /// This process.
    pub fn here() -> Self {
        Self(current())
    }

    /// Whether this process is a fork of the one that it was made in.
    pub fn is_elsewhere(self) -> bool {
        current() != self.0
    }
}

/// Of the page that a fork finds zeroed.
struct Words {
    id: AtomicU32,
    nonce: AtomicU64,
}

/// A random number of this process alone, once `random` has made it: a fork has another, whatever its process id is in which
/// namespace. `None` where there is no such page.
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

/// The process's id: from a page that the kernel clears in a fork, a load, where it can; else by a system call.
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

/// Words, zero, that are zero again in every fork of this process. `None` before Linux 4.14.
fn cleared_by_forks() -> Option<&'static Words> {
    let length = std::num::NonZeroUsize::new(size_of::<Words>())?;
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new anonymous mapping at an address of the kernel's choice.
    let page = unsafe { mmap_anonymous(None, length, protection, MapFlags::MAP_PRIVATE) }.ok()?;
    // SAFETY: the page was mapped above, and nothing uses it yet.
    if unsafe { madvise(page, length.get(), MmapAdvise::MADV_WIPEONFORK) }.is_err() {
        // SAFETY: as above. An error leaves a page mapped that nobody uses.
        let _ = unsafe { munmap(page, length.get()) };
        return None;
    }
    // SAFETY: the page is zeroed, which are values of atomics, aligned, accessed through this reference only, and never unmapped.
    Some(unsafe { page.cast::<Words>().as_ref() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::wait::{waitpid, WaitStatus};
    use nix::unistd::{fork, ForkResult};

    #[test]
    fn a_fork_is_elsewhere_and_its_own_origin() {
        let origin = Origin::here();
        assert!(!origin.is_elsewhere());
        let of = |random: u64| nonce(|| Ok::<_, ()>(random)).unwrap().unwrap();
        let own = of(71);
        assert_eq!(of(72), own);
        // SAFETY: the child calls only what allocates nothing and takes no lock, and leaves by _exit.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let right = origin.is_elsewhere() && !Origin::here().is_elsewhere() && origin.is_elsewhere();
                let right = right && of(73) == 73;
                // SAFETY: ends the child without the parent's exit handlers.
                unsafe { libc::_exit(i32::from(!right)) }
            }
            ForkResult::Parent { child } => {
                assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0)));
            }
        }
        assert!(!origin.is_elsewhere());
    }
}
