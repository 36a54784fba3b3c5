//! Ranks of an MPI communicator that exchange messages among themselves, whichever nodes they are on.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::mpi::traits::Communicator;

use super::channel::Channel;
use super::gather::{exchange, gather, message, Limits, HEADER_BYTES};
use crate::bootstrap::join;
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
    /// Number of the latest exchange.
    sequence: u64,
    /// What every call answers once one has failed.
    failure: Option<Error>,
}

impl Peers {
    /// The ranks of `communicator` that give the same color, in its order. Collective over it; it stays the caller's.
    pub(crate) fn split(communicator: &impl Communicator, color: usize) -> Result<Self> {
        let deadline = Deadline::after(join::limit()?);
        // SAFETY: the borrow keeps the communicator.
        let all = unsafe { Channel::duplicate(communicator.as_raw(), &deadline) }?;
        let (sequence, color) = (1, (color as u64).to_le_bytes());
        let colors = gather(&all, sequence, &color, &deadline)?;
        let members = (0..all.size()).filter(|&rank| colors[rank] == color).collect();
        let channel = all.part(members);
        let (rank, size) = (channel.rank(), channel.size());
        Ok(Self { rank, size, state: Mutex::new(State { channel, sequence, failure: None }) })
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// A call, of several exchanges that those of no other call come between, with one limit for all of them.
    ///
    /// What has failed stays so.
    pub(crate) fn call<T>(
        &self,
        limit: Duration,
        steps: impl FnOnce(&mut Exchanges<'_>) -> Result<T>,
    ) -> Result<T> {
        // What a panic leaves behind is whole: the number of an exchange is taken before it begins.
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = &state.failure {
            return Err(error.clone());
        }
        let mut exchanges = Exchanges { state, deadline: Deadline::after(limit) };
        let outcome = steps(&mut exchanges);
        outcome.inspect_err(|error| {
            exchanges.state.failure = Some(error.clone());
            exchanges.state.channel.abandon();
        })
    }
}

/// A call between peers.
pub(crate) struct Exchanges<'a> {
    state: MutexGuard<'a, State>,
    deadline: Deadline<'static>,
}

impl Exchanges<'_> {
    /// Gives each rank what `fill` adds for it, and returns what each has for this one. Collective.
    pub(crate) fn each(&mut self, fill: impl Fn(usize, &mut Vec<u8>)) -> Result<Parts> {
        let sequence = self.next();
        let of = |peer| Arc::new(message(sequence, |message| fill(peer, message)));
        let messages = (0..self.state.channel.size()).map(of).collect();
        self.exchange(messages)
    }

    /// Gives all ranks what `fill` adds, and returns what each has for this one. Collective.
    pub(crate) fn all(&mut self, fill: impl FnOnce(&mut Vec<u8>)) -> Result<Parts> {
        let sequence = self.next();
        let message = Arc::new(message(sequence, fill));
        self.exchange(vec![message; self.state.channel.size()])
    }

    fn next(&mut self) -> u64 {
        self.state.sequence += 1;
        self.state.sequence
    }

    fn exchange(&mut self, messages: Vec<Arc<Vec<u8>>>) -> Result<Parts> {
        // For as long as an allreduce should take.
        const BUSY: Duration = Duration::from_millis(100);
        // A rank that differs sends what is as long as its own call makes it, and is to be told that.
        const MAX_BYTES: usize = i32::MAX as usize - HEADER_BYTES;
        let State { channel, sequence, .. } = &*self.state;
        let limits = Limits { bytes: MAX_BYTES, busy: BUSY, deadline: &self.deadline };
        exchange(channel, *sequence, messages, &limits).map(Parts).map_err(|mut error| {
            if let Error::Timeout { operation, .. } = &mut error {
                *operation = "the allreduce between nodes";
            }
            error
        })
    }
}

/// What ranks gave.
pub(crate) struct Parts(Vec<Vec<u8>>);

impl Parts {
    /// By rank.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.0.iter().map(|part| part.get(HEADER_BYTES..).unwrap_or_default())
    }
}
