//! A word of shared memory that the kernel marks when a thread ends. It shows that a process was killed if there are no
//! pidfds and a fork holds all descriptors of the process.
//!
//! The word is a robust futex on which nobody waits. The thread registers it with the kernel; a fork does not inherit
//! the registration. See `Documentation/locking/robust-futex-ABI.rst` of Linux.

use std::ffi::c_long;
use std::sync::atomic::{AtomicU32, Ordering};

/// The word in shared memory: at first 0, then the id of the thread that holds it, and `FUTEX_OWNER_DIED` after the end
/// of that thread.
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
    /// Offset of the word from its link.
    futex_offset: c_long,
    pending: *const Link,
}

/// A robust list with one word. It must not move, since its parts point to each other.
#[repr(C)]
struct List {
    head: Head,
    only: Link,
}

/// Guard: while it exists, the end of this thread marks the word. It is not `Send`, because of its pointers.
pub(super) struct Held<'a> {
    exit_futex: &'a ExitFutex,
    list: *mut List,
    /// The list that was registered before, and its size.
    before: (*const Head, usize),
}

impl ExitFutex {
    /// Registers the word for this thread. Returns `None` if the kernel refuses.
    ///
    /// # Safety
    ///
    /// Until the guard is dropped, this thread must not use robust mutexes, and the word must stay mapped.
    pub unsafe fn hold(&self) -> Option<Held<'_>> {
        let mut before = (std::ptr::null(), 0);
        // SAFETY: reads this thread's own list; both outputs outlive the call.
        let asked = unsafe { libc::syscall(libc::SYS_get_robust_list, 0, &mut before.0, &mut before.1) };
        // SAFETY: takes no arguments, and returns a number.
        let thread = unsafe { libc::syscall(libc::SYS_gettid) };
        let thread = u32::try_from(thread).ok().filter(|_| asked == 0)?;
        let nowhere = std::ptr::null();
        let head = Head { list: Link { next: nowhere }, futex_offset: 0, pending: nowhere };
        let list = Box::into_raw(Box::new(List { head, only: Link { next: nowhere } }));
        // SAFETY: the list was allocated above, and the kernel does not know it yet.
        unsafe {
            (*list).head.list.next = &raw const (*list).only;
            // The list is circular.
            (*list).only.next = &raw const (*list).head.list;
            (*list).head.futex_offset =
                (self.0.as_ptr() as c_long).wrapping_sub(&raw const (*list).only as c_long);
        }
        // The kernel marks a word only if it contains the thread's id.
        self.0.store(thread, Ordering::Relaxed);
        // SAFETY: the list and the word are valid until `Held::drop` registers the previous list.
        if unsafe { libc::syscall(libc::SYS_set_robust_list, list, size_of::<Head>()) } != 0 {
            self.0.store(0, Ordering::Relaxed);
            // SAFETY: from `Box::into_raw`, and the kernel does not know it.
            drop(unsafe { Box::from_raw(list) });
            return None;
        }
        Some(Held { exit_futex: self, list, before })
    }

    /// Returns whether a thread holds the word, so that its end will mark it.
    pub fn is_held(&self) -> bool {
        let word = self.0.load(Ordering::Acquire);
        word != 0 && word & libc::FUTEX_OWNER_DIED == 0
    }

    /// Returns the address of the word in this process's mapping.
    pub fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    /// Returns whether the thread that held the word has ended or released it. A faulty peer may write anything here.
    pub fn has_ended(&self) -> bool {
        // Acquire: everything that the process wrote before it ended is visible.
        self.0.load(Ordering::Acquire) & libc::FUTEX_OWNER_DIED != 0
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // SAFETY: registers the list that the C library had registered, or none.
        unsafe { libc::syscall(libc::SYS_set_robust_list, self.before.0, size_of::<Head>()) };
        // The same mark as the kernel's. Release pairs with `ExitFutex::has_ended`.
        self.exit_futex.0.store(libc::FUTEX_OWNER_DIED, Ordering::Release);
        // SAFETY: from `Box::into_raw`, and no longer registered with the kernel.
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
            // SAFETY: the thread uses no robust mutexes, and the word outlives the thread.
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
        // SAFETY: the thread uses no robust mutexes, and the word outlives it; the list is leaked.
        let holding = std::thread::spawn(move || std::mem::forget(unsafe { held.hold() }.unwrap()));
        holding.join().unwrap();
        // The kernel marks the word before `join` can return.
        assert!(exit_futex.has_ended());
    }
}
