//! Bootstrap of ranks that are threads of one process. They share a state behind a mutex.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::world_state::{Event, WorldState};
use super::Bootstrap;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::fork::ForkCheck;

/// A rank of a world whose ranks are threads of one process.
///
/// Dropping a rank ends the world: the current and all later calls of the other ranks return [`Error::PeerLost`]. A
/// rank makes one call at a time; a second thread that calls the same rank waits for the first.
///
/// ```
/// use std::time::Duration;
/// use fast_allreduce::bootstrap::{Bootstrap, Threads};
///
/// let limit = Duration::from_secs(10);
/// let ranks = Threads::world(2)?;
/// std::thread::scope(|scope| {
///     for rank in &ranks {
///         scope.spawn(move || {
///             let all = rank.all_gather(&[rank.rank() as u8], limit).unwrap();
///             assert_eq!(all, [[0], [1]]);
///         });
///     }
/// });
/// # Ok::<(), fast_allreduce::Error>(())
/// ```
#[derive(Debug)]
pub struct Threads {
    rank: usize,
    world_size: usize,
    meeting: Arc<Meeting>,
    /// The error with which this rank failed. Locked during a call, which serialises the calls of one rank.
    failure: Mutex<Option<Error>>,
    /// In a fork, the other ranks do not run, and one of them may have held the lock.
    fork_check: ForkCheck,
}

#[derive(Debug)]
struct Meeting {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    world: WorldState,
    /// Contributions of the latest gather. A rank reads them under the lock before it contributes to the next gather,
    /// so that the next gather cannot replace them too early.
    gathered: Arc<Vec<Vec<u8>>>,
}

impl Threads {
    /// Creates a world and returns its ranks in order: one for each thread.
    ///
    /// # Errors
    ///
    /// [`Error::WorldSize`] if `world_size` is 0 or above [`MAX_RANKS`](crate::MAX_RANKS).
    ///
    /// ```
    /// use fast_allreduce::bootstrap::{Bootstrap, Threads};
    ///
    /// let ranks = Threads::world(4)?;
    /// assert!(ranks.iter().enumerate().all(|(rank, thread)| thread.rank() == rank && thread.world_size() == 4));
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    pub fn world(world_size: usize) -> Result<Vec<Self>> {
        if !(1..=crate::abi::MAX_RANKS).contains(&world_size) {
            return Err(Error::WorldSize { world_size });
        }
        let mut world = WorldState::new(world_size);
        for rank in 0..world_size {
            // Joining cannot fail: the world is new, and each rank joins once.
            let joined = world.join(rank);
            debug_assert!(joined.is_ok());
        }
        let state = Mutex::new(State { world, gathered: Arc::default() });
        let meeting = Arc::new(Meeting { state, changed: Condvar::new() });
        let rank = |rank| {
            let (meeting, failure) = (Arc::clone(&meeting), Mutex::default());
            Self { rank, world_size, meeting, failure, fork_check: ForkCheck::new() }
        };
        Ok((0..world_size).map(rank).collect())
    }
}

impl Bootstrap for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_gather(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        if self.fork_check.in_fork() {
            return Err(Error::Forked);
        }
        let mut failure = lock(&self.failure);
        if let Some(error) = &*failure {
            return Err(error.clone());
        }
        let gathered = self.meeting.all_gather(self.rank, bytes.to_vec(), timeout);
        gathered.map(Arc::unwrap_or_clone).inspect_err(|error| *failure = Some(error.clone()))
    }

    fn interrupt(&self) {
        if self.fork_check.in_fork() {
            return;
        }
        lock(&self.meeting.state).world.leave(self.rank, "it was interrupted");
        self.meeting.changed.notify_all();
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if self.fork_check.in_fork() {
            return;
        }
        lock(&self.meeting.state)
            .world
            .leave(self.rank, "it dropped its bootstrap: it has ended, or failed while setting up");
        self.meeting.changed.notify_all();
    }
}

impl Meeting {
    fn all_gather(&self, rank: usize, bytes: Vec<u8>, timeout: Duration) -> Result<Arc<Vec<Vec<u8>>>> {
        let deadline = Deadline::after(timeout);
        let mut state = lock(&self.state);
        let sequence = state.world.sequence();
        match state.world.contribute(rank, sequence, bytes) {
            Ok(Some(Event::Gathered { parts, .. })) => {
                state.gathered = Arc::new(parts);
                self.changed.notify_all();
            }
            Ok(_) => {}
            Err(reason) => return Err(Error::Malformed { rank, reason: reason.into() }),
        }
        loop {
            // The result is checked before failures: a rank may leave as soon as it has the result.
            if state.world.sequence() != sequence {
                return Ok(Arc::clone(&state.gathered));
            }
            if let Some(failure) = state.world.failure() {
                return Err(failure.to_error(rank, deadline.waited()));
            }
            // `next_wait` may call the program, which may need the lock. Changes in the meantime are checked below,
            // before the wait.
            drop(state);
            let wait = deadline.next_wait();
            state = lock(&self.state);
            if wait.is_zero() {
                state.world.give_up(rank, sequence);
                self.changed.notify_all();
            } else if state.world.sequence() == sequence && state.world.failure().is_none() {
                let woken = self.changed.wait_timeout(state, wait);
                state = woken.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

/// Locks a mutex and ignores poisoning: no change under these locks can panic halfway.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{contribution, LIMIT};
    use super::*;
    use std::thread;
    use std::time::Instant;

    #[test]
    fn gathers_of_different_lengths() {
        for world_size in 1..=5 {
            let ranks = Threads::world(world_size).unwrap();
            thread::scope(|scope| {
                for rank in &ranks {
                    scope.spawn(move || {
                        for round in 0..200 {
                            let all = rank.all_gather(&contribution(rank.rank(), round), LIMIT).unwrap();
                            let expected: Vec<_> = (0..world_size).map(|r| contribution(r, round)).collect();
                            assert_eq!(all, expected);
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn world_sizes_are_checked() {
        for world_size in [0, crate::abi::MAX_RANKS + 1, usize::MAX] {
            assert_eq!(Threads::world(world_size).unwrap_err(), Error::WorldSize { world_size });
        }
    }

    #[test]
    fn missing_ranks_are_named_and_the_failure_stays() {
        let ranks = Threads::world(4).unwrap();
        let waited = Duration::from_millis(50);
        let started = Instant::now();
        thread::scope(|scope| {
            let patient = scope.spawn(|| ranks[2].barrier(LIMIT));
            let error = ranks[0].barrier(waited).unwrap_err();
            // Rank 2 may come after rank 0 gave up; then it is among the missing.
            let Error::Timeout { operation: "all_gather", missing, .. } = &error else { panic!("{error}") };
            assert!(*missing == [1, 3] || *missing == [1, 2, 3]);
            patient.join().unwrap().unwrap_err();
            assert!(started.elapsed() < LIMIT / 2, "a timeout wakes the other ranks");
            assert_eq!(ranks[0].barrier(LIMIT).unwrap_err(), error);
            assert!(matches!(ranks[1].barrier(LIMIT), Err(Error::PeerLost { rank: 0, .. })));
        });
    }

    #[test]
    fn a_dropped_rank_is_lost() {
        let mut ranks = Threads::world(3).unwrap();
        let last = ranks.pop().unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| ranks[0].barrier(LIMIT));
            thread::sleep(Duration::from_millis(20));
            drop(last);
            let lost = |result| matches!(result, Err(Error::PeerLost { rank: 2, .. }));
            assert!(lost(waiting.join().unwrap()));
            assert!(lost(ranks[1].barrier(LIMIT)), "a call after the drop");
            assert!(lost(ranks[0].barrier(LIMIT)), "the failure stays");
        });
    }

    #[test]
    fn a_rank_may_leave_once_it_has_the_result() {
        for _ in 0..200 {
            let ranks = Threads::world(3).unwrap();
            let threads: Vec<_> =
                ranks.into_iter().map(|rank| thread::spawn(move || rank.barrier(LIMIT))).collect();
            for thread in threads {
                thread.join().unwrap().unwrap();
            }
        }
    }

    #[test]
    fn a_rank_that_panics_is_lost() {
        let mut ranks = Threads::world(2).unwrap();
        let last = ranks.pop().unwrap();
        let panicking = thread::spawn(move || {
            let _state = last.meeting.state.lock().unwrap();
            // Unwinding drops the guard first, which poisons the mutex, and then the rank.
            std::panic::resume_unwind(Box::new(()));
        });
        panicking.join().unwrap_err();
        assert!(ranks[0].meeting.state.is_poisoned());
        assert!(matches!(ranks[0].barrier(LIMIT), Err(Error::PeerLost { rank: 1, .. })));
    }
}
