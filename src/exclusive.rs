//! A mutex that knows whether the calling thread holds it. A nested call gets an error instead of a deadlock.
//!
//! Nested calls come from signal handlers, thread pools' callbacks and destructors. The public items of this module are
//! for the bindings in this repository, and not part of the API.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::{interruption, thread};

/// Longest pause between two attempts to take a lock.
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// Returns a number, from 1, that no other thread of this process has or had. It also works in a signal handler and in
/// a thread that is ending.
pub fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // `Cell<u64>` has no destructor, so that it can be read while the thread ends.
    thread_local!(static NUMBER: Cell<u64> = const { Cell::new(0) });
    match NUMBER.get() {
        0 => {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            NUMBER.set(number);
            number
        }
        number => number,
    }
}

/// A mutex that knows its owner. It ignores poisoning: a call that code of the program can end by a panic halfway fails
/// its world itself.
#[derive(Debug, Default)]
pub struct Exclusive<T> {
    /// The number of the thread that holds the lock; 0 if it is free.
    ///
    /// All accesses are relaxed: a thread compares it only with its own number. While the thread holds the lock, the
    /// last store is its own. While it does not, its own last store was 0, so it cannot read its number again.
    owner: AtomicU64,
    value: Mutex<T>,
}

/// Returns the error of a call that is nested in another call of the same communicator.
pub(crate) fn within_another() -> Error {
    Error::Unavailable {
        what: "a call of a communicator from within another".into(),
        reason:
            "this thread is in the other call and would wait for itself: a signal handler, a callback or the \
                 program's thread pool has made the nested call"
                .into(),
    }
}

impl<T> Exclusive<T> {
    /// Returns a mutex that nobody holds.
    pub fn new(value: T) -> Self {
        Self { owner: AtomicU64::new(0), value: Mutex::new(value) }
    }

    /// Returns the value, which nobody else can use.
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether this thread holds the lock.
    #[inline]
    pub fn is_mine(&self) -> bool {
        let owner = self.owner.load(Ordering::Relaxed);
        owner != 0 && owner == this_thread()
    }

    /// Waits for the lock. The calling thread must not hold it.
    #[inline]
    pub fn lock(&self) -> Held<'_, T> {
        self.held(self.value.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits for the lock at the beginning of a call.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if this thread holds the lock, [`Error::Aborted`] if the program has ended the wait.
    #[inline]
    pub fn enter(&self) -> Result<Held<'_, T>> {
        match self.value.try_lock() {
            Ok(guard) => Ok(self.held(guard)),
            Err(TryLockError::Poisoned(poisoned)) => Ok(self.held(poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => self.wait(),
        }
    }

    /// Takes the lock if nobody holds it.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if a thread holds it.
    pub fn try_enter(&self) -> Result<Held<'_, T>> {
        match self.value.try_lock() {
            Ok(guard) => Ok(self.held(guard)),
            Err(TryLockError::Poisoned(poisoned)) => Ok(self.held(poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => Err(Error::Unavailable {
                what: "this step".into(),
                reason: "a call of the communicator is under way in another thread".into(),
            }),
        }
    }

    /// Waits for the lock until the deadline has passed.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if a thread still holds it then, or this thread does.
    pub(crate) fn enter_within(&self, deadline: &Deadline<'_>) -> Result<Held<'_, T>> {
        if self.is_mine() {
            return Err(within_another());
        }
        loop {
            // The deadline is checked first, so that the last attempt comes after the limit.
            let wait = deadline.next_wait();
            match self.try_enter() {
                Err(_) if !wait.is_zero() => thread::pause(LONGEST_PAUSE.min(wait)),
                entered => return entered,
            }
        }
    }

    #[cold]
    fn wait(&self) -> Result<Held<'_, T>> {
        /// First pause between two attempts; it doubles up to the longest.
        const SHORTEST: Duration = Duration::from_micros(20);
        if self.is_mine() {
            return Err(within_another());
        }
        let mut pause = SHORTEST;
        while interruption::has_callback() {
            if !interruption::goes_on() {
                return Err(Error::Aborted);
            }
            match self.value.try_lock() {
                Ok(guard) => return Ok(self.held(guard)),
                Err(TryLockError::Poisoned(poisoned)) => return Ok(self.held(poisoned.into_inner())),
                Err(TryLockError::WouldBlock) => thread::pause(pause),
            }
            pause = LONGEST_PAUSE.min(2 * pause);
        }
        Ok(self.lock())
    }

    #[inline]
    fn held<'a>(&'a self, guard: MutexGuard<'a, T>) -> Held<'a, T> {
        self.owner.store(this_thread(), Ordering::Relaxed);
        Held { owner: &self.owner, guard }
    }
}

/// Guard of an [`Exclusive`]: the calling thread holds the lock.
#[derive(Debug)]
pub struct Held<'a, T> {
    owner: &'a AtomicU64,
    guard: MutexGuard<'a, T>,
}

impl<T> Drop for Held<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // Before the mutex is released, which happens when `guard` is dropped after this.
        self.owner.store(0, Ordering::Relaxed);
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_knows_what_it_holds() {
        let value = Exclusive::<u32>::default();
        assert!(!value.is_mine());
        let mut held = value.lock();
        *held += 1;
        assert!(value.is_mine());
        assert_eq!(value.enter().unwrap_err(), within_another());
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(!value.is_mine()));
        });
        drop(held);
        assert!(!value.is_mine());
        assert_eq!(*value.enter().unwrap(), 1);
        assert!(!value.is_mine());
    }

    #[test]
    fn a_panic_gives_it_back() {
        let value = Exclusive::<()>::default();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _held = value.lock();
            panic!("on purpose");
        }));
        assert!(panicked.is_err() && !value.is_mine());
        drop(value.enter().unwrap());
        drop(value.lock());
    }

    #[test]
    fn the_program_may_end_a_wait_for_it() {
        let value = Exclusive::<()>::default();
        let held = value.lock();
        std::thread::scope(|scope| {
            let waiting = || interruption::while_waiting(&|| false, || value.enter().map(drop));
            assert_eq!(scope.spawn(waiting).join().unwrap(), Err(Error::Aborted));
            let patient = scope.spawn(|| interruption::while_waiting(&|| true, || value.enter().map(drop)));
            drop(held);
            assert_eq!(patient.join().unwrap(), Ok(()));
        });
    }
}
