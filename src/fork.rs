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

/// Words that are zeroed in every fork of this process.
struct Words {
    number: AtomicU32,
    nonce: AtomicU64,
}

/// Returns a random number that identifies this process; `random` generates it on the first call. A fork gets another
/// number, even if it has the same process id in another namespace.
pub(crate) fn nonce<E>(random: impl FnOnce() -> Result<u64, E>) -> Result<u64, E> {
    let nonce = &words().nonce;
    match nonce.load(Ordering::Relaxed) {
        0 => {
            let fresh = random()?.max(1);
            let set = nonce.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed);
            Ok(set.map_or_else(|other| other, |_| fresh))
        }
        nonce => Ok(nonce),
    }
}

/// Returns a number that no fork of this process and none of its forks has. A process id would not do: the first
/// processes of two PID namespaces have the same, also if one is the other's fork.
fn current() -> u32 {
    /// The highest number that was given. A fork inherits it, and takes a higher one.
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    let number = &words().number;
    match number.load(Ordering::Relaxed) {
        0 => {
            let next = GIVEN.fetch_add(1, Ordering::Relaxed).wrapping_add(1).max(1);
            let set = number.compare_exchange(0, next, Ordering::Relaxed, Ordering::Relaxed);
            set.map_or_else(|other| other, |_| next)
        }
        number => number,
    }
}

fn words() -> &'static Words {
    /// Zeroed by this library, where the kernel does not zero a page.
    static ORDINARY: Words = Words { number: AtomicU32::new(0), nonce: AtomicU64::new(0) };
    static WORDS: OnceLock<&'static Words> = OnceLock::new();
    extern "C" fn forget() {
        ORDINARY.number.store(0, Ordering::Relaxed);
        ORDINARY.nonce.store(0, Ordering::Relaxed);
    }
    WORDS.get_or_init(|| {
        cleared_by_kernel().unwrap_or_else(|| {
            // Not noticed then: forks that the C library does not know of, and all if it has no memory for the handler.
            // SAFETY: the handler only stores to a static, which a fork of any thread may do.
            unsafe { libc::pthread_atfork(None, None, Some(forget)) };
            &ORDINARY
        })
    })
}

/// Maps a zeroed page that the kernel zeroes again in every fork of this process, also if the C library does not know
/// of it. Returns `None` before Linux 4.14, and where a sandbox refuses it.
fn cleared_by_kernel() -> Option<&'static Words> {
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
    use crate::bootstrap::testing::process;
    use crate::thread::tests::forbid;
    use nix::sys::wait::{waitpid, WaitStatus};
    use nix::unistd::{fork, ForkResult};

    #[test]
    fn a_fork_is_noticed() {
        notice_a_fork();
    }

    #[test]
    fn a_fork_is_noticed_if_the_kernel_clears_no_page() {
        let output = process(module_path!(), "process_without_madvise").env(ALONE, "1").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }

    /// Set in the process of the test above.
    const ALONE: &str = "FAST_ALLREDUCE_TEST_ALONE";

    #[test]
    #[ignore = "a process of another test"]
    fn process_without_madvise() {
        if std::env::var_os(ALONE).is_some() {
            forbid(libc::SYS_madvise);
            assert!(cleared_by_kernel().is_none());
            notice_a_fork();
        }
    }

    fn notice_a_fork() {
        let fork_check = ForkCheck::new();
        assert!(!fork_check.in_fork());
        let of = |random: u64| nonce(|| Ok::<_, ()>(random)).unwrap();
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
