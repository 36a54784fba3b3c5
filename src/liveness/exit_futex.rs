//! A word of shared memory that the kernel marks when a thread ends: what is left to tell that a process was killed
//! where there are no pidfds and a fork holds all its descriptors.
//!
//! It is a robust futex, which nobody waits for. The thread registers it with the kernel; a fork does not inherit
//! that. See `Documentation/locking/robust-futex-ABI.rst` of Linux.

use std::ffi::c_long;
use std::sync::atomic::{AtomicU32, Ordering};

/// As it lies in shared memory: 0 if nobody holds it, else the thread's id, or what the kernel has made of that.
#[derive(Debug)]
#[repr(transparent)]
pub(super) struct ExitFutex(AtomicU32);

/// The kernel's `robust_list`.
#[repr(C)]
struct Link {
    next: *const Link,
}

/// The kernel's `robust_list_head`.
#[repr(C)]
struct Head {
    list: Link,
    /// From a link to its word.
    futex_offset: c_long,
    pending: *const Link,
}

/// One word. At an address that does not change, since both parts have pointers to the other.
#[repr(C)]
struct List {
    head: Head,
    only: Link,
}

/// For as long as it lives, the end of this thread marks the word. Its pointers keep it in the thread.
pub(super) struct Held<'a> {
    exit_futex: &'a ExitFutex,
    list: *mut List,
    /// What the thread had registered before, and its size.
    before: (*const Head, usize),
}

impl ExitFutex {
    /// `None` where the kernel refuses it.
    ///
    /// # Safety
    ///
    /// This thread uses no robust mutexes until what is returned is dropped, and it drops that before it unmaps the
    /// word.
    pub unsafe fn hold(&self) -> Option<Held<'_>> {
        let mut before = (std::ptr::null(), 0);
        // SAFETY: asks for this thread's own list; both are written during the call.
        let asked = unsafe { libc::syscall(libc::SYS_get_robust_list, 0, &mut before.0, &mut before.1) };
        // SAFETY: takes and returns nothing.
        let thread = unsafe { libc::syscall(libc::SYS_gettid) };
        let thread = u32::try_from(thread).ok().filter(|_| asked == 0)?;
        let nowhere = std::ptr::null();
        let head = Head { list: Link { next: nowhere }, futex_offset: 0, pending: nowhere };
        let list = Box::into_raw(Box::new(List { head, only: Link { next: nowhere } }));
        // SAFETY: the list was made above, and the kernel does not know it yet.
        unsafe {
            (*list).head.list.next = &raw const (*list).only;
            // A list ends where it began.
            (*list).only.next = &raw const (*list).head.list;
            (*list).head.futex_offset =
                (self.0.as_ptr() as c_long).wrapping_sub(&raw const (*list).only as c_long);
        }
        // The kernel marks only a word that has the thread's id.
        self.0.store(thread, Ordering::Relaxed);
        // SAFETY: the list and the word live until `Held::drop` registers what was there before.
        if unsafe { libc::syscall(libc::SYS_set_robust_list, list, size_of::<Head>()) } != 0 {
            self.0.store(0, Ordering::Relaxed);
            // SAFETY: from `Box::into_raw`, and the kernel does not know it.
            drop(unsafe { Box::from_raw(list) });
            return None;
        }
        Some(Held { exit_futex: self, list, before })
    }

    /// Whether a thread holds it, so that its end will show.
    pub fn is_held(&self) -> bool {
        let word = self.0.load(Ordering::Acquire);
        word != 0 && word & libc::FUTEX_OWNER_DIED == 0
    }

    /// Of the word, in this process's mapping of it.
    pub fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    /// Whether the thread that held it has ended, or let go. A peer may write anything here.
    pub fn has_ended(&self) -> bool {
        // Acquire: what the process had written before it ended is seen.
        self.0.load(Ordering::Acquire) & libc::FUTEX_OWNER_DIED != 0
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // SAFETY: what the thread's library had registered when it began, or nothing.
        unsafe { libc::syscall(libc::SYS_set_robust_list, self.before.0, size_of::<Head>()) };
        // As the kernel would: nobody need look at it any more. Release pairs with `ExitFutex::has_ended`.
        self.exit_futex.0.store(libc::FUTEX_OWNER_DIED, Ordering::Release);
        // SAFETY: from `Box::into_raw`, and the kernel does not know it any more.
        drop(unsafe { Box::from_raw(self.list) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn free() -> Arc<ExitFutex> {
        Arc::new(ExitFutex(AtomicU32::new(0)))
    }

    #[test]
    fn it_is_held_until_a_thread_lets_go() {
        let exit_futex = free();
        let held = Arc::clone(&exit_futex);
        let holding = std::thread::spawn(move || {
            // SAFETY: no robust mutexes, and the word outlives the thread.
            let _held = unsafe { held.hold() }.unwrap();
            assert_ne!(held.0.load(Ordering::Relaxed), 0);
            assert!(held.is_held() && !held.has_ended());
            assert!(!free().is_held() && !free().has_ended());
        });
        holding.join().unwrap();
        assert_eq!(exit_futex.0.load(Ordering::Relaxed), libc::FUTEX_OWNER_DIED);
        assert!(exit_futex.has_ended() && !exit_futex.is_held());
    }

    #[test]
    fn a_thread_that_ends_is_marked() {
        let exit_futex = free();
        let held = Arc::clone(&exit_futex);
        // SAFETY: as above; the list stays for ever.
        let holding = std::thread::spawn(move || std::mem::forget(unsafe { held.hold() }.unwrap()));
        holding.join().unwrap();
        // The kernel marks it before it says that the thread has ended.
        assert!(exit_futex.has_ended());
    }
}
