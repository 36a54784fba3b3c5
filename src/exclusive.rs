//! A mutex that knows whether the calling thread holds it: a call from within another one is refused, where it would wait for itself.
//!
//! A signal handler, a thread pool's callback or a destructor may make such a call. What is public of it is for the bindings of this
//! repository, and no part of the API.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::{interruption, thread};

/// A number that no other thread of this process has or had, from 1. It is there in a thread that ends, too, and in a signal handler.
pub fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Without a destructor.
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

/// A value that one thread at a time has. What a panic leaves behind is whole: no change of the values that it is used for can
/// panic midway.
#[derive(Debug, Default)]
pub struct Exclusive<T> {
    /// The number of the thread that holds the lock; 0: none.
    ///
    /// Relaxed throughout: each thread asks for its own number alone. While it holds the lock the last store is its own. When it does
    /// not, the last of its own stores was 0, before which it reads nothing any more.
    owner: AtomicU64,
    value: Mutex<T>,
}

/// The error of a call from within another, of the same communicator.
pub(crate) fn within_another() -> Error {
    Error::Unavailable {
        what: "a call of a communicator from within another".into(),
        reason: "this thread makes the other, and would wait for itself: a signal handler, a callback or the program's thread pool \
                 has made the call"
            .into(),
    }
}

impl<T> Exclusive<T> {
    /// Whether this thread holds it.
    #[inline]
    pub fn is_mine(&self) -> bool {
        let owner = self.owner.load(Ordering::Relaxed);
        owner != 0 && owner == this_thread()
    }

    /// Waits for it. The thread does not hold it.
    #[inline]
    pub fn lock(&self) -> Held<'_, T> {
        self.held(self.value.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// [`Exclusive::lock`] for calls.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] where this thread holds it; [`Error::Aborted`] where the program has ended the wait.
    #[inline]
    pub fn enter(&self) -> Result<Held<'_, T>> {
        match self.value.try_lock() {
            Ok(guard) => Ok(self.held(guard)),
            Err(TryLockError::Poisoned(poisoned)) => Ok(self.held(poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => self.wait(),
        }
    }

    #[cold]
    fn wait(&self) -> Result<Held<'_, T>> {
        /// Between two looks. It grows to the longest.
        const SHORTEST: Duration = Duration::from_micros(20);
        const LONGEST: Duration = Duration::from_millis(1);
        if self.is_mine() {
            return Err(within_another());
        }
        let mut turn = SHORTEST;
        while interruption::is_asked() {
            if !interruption::goes_on() {
                return Err(Error::Aborted);
            }
            match self.value.try_lock() {
                Ok(guard) => return Ok(self.held(guard)),
                Err(TryLockError::Poisoned(poisoned)) => return Ok(self.held(poisoned.into_inner())),
                Err(TryLockError::WouldBlock) => thread::pause(turn),
            }
            turn = LONGEST.min(2 * turn);
        }
        Ok(self.lock())
    }

    #[inline]
    fn held<'a>(&'a self, guard: MutexGuard<'a, T>) -> Held<'a, T> {
        self.owner.store(this_thread(), Ordering::Relaxed);
        Held { owner: &self.owner, guard }
    }
}

/// A value while its thread has it.
#[derive(Debug)]
pub struct Held<'a, T> {
    owner: &'a AtomicU64,
    guard: MutexGuard<'a, T>,
}

impl<T> Drop for Held<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // The guard goes after this.
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
