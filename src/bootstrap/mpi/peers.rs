//! Ranks of an MPI communicator that reduce among themselves, whichever nodes they are on.

use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use ::mpi::traits::Communicator;

use super::channel::{Channel, Pause};
use super::gather::gather;
use super::library::turn;
use super::words::{Combine, Words};
use super::SETUP_TIMEOUT;
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// The ranks of one color.
pub(crate) struct Peers {
    rank: usize,
    size: usize,
    state: Mutex<State>,
}

struct State {
    channel: Channel,
    /// What every call answers once one has failed.
    failure: Option<Error>,
}

impl Peers {
    /// The ranks of `communicator` that give the same color, in its order. Collective over it; it stays the caller's.
    pub(crate) fn split(communicator: &impl Communicator, color: usize) -> Result<Self> {
        let deadline = Deadline::after(SETUP_TIMEOUT);
        // SAFETY: the borrow keeps the communicator.
        let all = unsafe { Channel::duplicate(communicator.as_raw(), &deadline) }?;
        // Splitting has no limit, so it waits until all ranks are known to be here.
        gather(&all, 1, &[], &deadline)?;
        let channel = all.split(color)?;
        let (rank, size) = (channel.rank(), channel.size());
        Ok(Self { rank, size, state: Mutex::new(State { channel, failure: None }) })
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Combines the ranks' words one by one. All ranks get the same bits, which MPI promises of an allreduce.
    ///
    /// MPI does not say who is missing when the time is up: the error names all others. What has failed stays so.
    pub(crate) fn all_reduce(&self, words: Words, combine: Combine, limit: Duration) -> Result<Words> {
        // What a panic leaves behind is whole: the state changes last.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = &state.failure {
            return Err(error.clone());
        }
        let reduced = self.reduce(&state.channel, words, combine, &Deadline::after(limit));
        reduced.inspect_err(|error| {
            state.failure = Some(error.clone());
            state.channel.abandon();
        })
    }

    fn reduce(
        &self,
        channel: &Channel,
        words: Words,
        combine: Combine,
        deadline: &Deadline<'_>,
    ) -> Result<Words> {
        // MPI makes progress while it is called: without a break, for as long as an allreduce should take.
        const BUSY: Duration = Duration::from_millis(100);
        let mut reducing = channel.all_reduce(words, combine, &turn()?)?;
        let mut pause = Pause::default();
        loop {
            // Asked before looking, so that the last look comes after the limit.
            let is_late = deadline.has_passed();
            if let Some(words) = reducing.take(&turn()?)? {
                return Ok(words);
            }
            if is_late {
                return Err(Error::Timeout {
                    operation: "MPI_Iallreduce, which does not say who is missing,",
                    epoch: 0,
                    missing: (0..self.size).filter(|&other| other != self.rank).collect(),
                    waited: deadline.waited(),
                    last_seen: String::new(),
                });
            }
            if deadline.waited() < BUSY {
                thread::yield_now();
            } else {
                pause.take();
            }
        }
    }
}
