//! Exchanges among ranks of an MPI communicator, on one or several nodes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::mpi::traits::Communicator;

use super::channel::Channel;
use super::gather::{exchange, gather, Limits, Spare, HEADER_BYTES};
use crate::bootstrap::join;
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// Ranks of an MPI communicator that have the same colour.
pub(crate) struct Peers {
    rank: usize,
    size: usize,
    state: Mutex<State>,
}

struct State {
    channel: Channel,
    /// Number of the latest exchange.
    sequence: u64,
    /// The error of the first failed call, which all later calls return.
    failure: Option<Error>,
    spare: Spare,
}

impl Peers {
    /// Groups the ranks of `communicator` with the same colour, in their order, as `MPI_Comm_split` does. Collective
    /// over `communicator`, of which this uses a duplicate.
    pub(crate) fn split(communicator: &impl Communicator, color: usize) -> Result<Self> {
        let deadline = Deadline::after(join::limit()?);
        // SAFETY: the borrow keeps the communicator alive.
        let all = unsafe { Channel::duplicate(communicator.as_raw(), &deadline) }?;
        let (sequence, color) = (1, (color as u64).to_le_bytes());
        let colors = gather(&all, sequence, &color, &deadline)?;
        let members = (0..all.size()).filter(|&rank| colors[rank] == color).collect();
        let channel = all.subset(members);
        let (rank, size) = (channel.rank(), channel.size());
        let state = State { channel, sequence, failure: None, spare: Spare::default() };
        Ok(Self { rank, size, state: Mutex::new(state) })
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Makes a call of several exchanges with one common time limit. Exchanges of other calls cannot come between them.
    ///
    /// After a failed call, all later calls return its error.
    pub(crate) fn call<T>(
        &self,
        limit: Duration,
        steps: impl FnOnce(&mut Exchanges<'_>) -> Result<T>,
    ) -> Result<T> {
        // Poisoning is ignored: the number of an exchange is taken before it starts, so that a panic leaves a valid
        // state.
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = &state.failure {
            return Err(error.clone());
        }
        let mut exchanges = Exchanges { state, deadline: Deadline::after(limit) };
        let outcome = steps(&mut exchanges);
        outcome.inspect_err(|error| {
            exchanges.state.failure = Some(error.clone());
            exchanges.state.spare = Spare::default();
            exchanges.state.channel.abandon();
        })
    }
}

/// A call of several exchanges.
pub(crate) struct Exchanges<'a> {
    state: MutexGuard<'a, State>,
    deadline: Deadline<'static>,
}

impl Exchanges<'_> {
    /// Sends each rank the message that `fill` writes for it, and returns the messages for this rank. Collective.
    pub(crate) fn each(&mut self, fill: impl Fn(usize, &mut Vec<u8>)) -> Result<Parts> {
        let sequence = self.next();
        let State { channel, spare, .. } = &mut *self.state;
        let of = |peer| spare.message(sequence, |message| fill(peer, message));
        let messages = (0..channel.size()).map(of).collect();
        self.exchange(messages)
    }

    /// Sends all ranks the message that `fill` writes, and returns the messages for this rank. Collective.
    pub(crate) fn all(&mut self, fill: impl FnOnce(&mut Vec<u8>)) -> Result<Parts> {
        let sequence = self.next();
        let message = self.state.spare.message(sequence, fill);
        self.exchange(vec![message; self.state.channel.size()])
    }

    /// Uses the memory of these messages for later ones.
    pub(crate) fn reuse(&mut self, Parts(messages): Parts) {
        messages.into_iter().for_each(|message| self.state.spare.put(message));
    }

    fn next(&mut self) -> u64 {
        self.state.sequence += 1;
        self.state.sequence
    }

    fn exchange(&mut self, messages: Vec<Arc<Vec<u8>>>) -> Result<Parts> {
        // Long enough for most allreduces to complete without sleeping.
        const BUSY: Duration = Duration::from_millis(100);
        // The length depends on the sender's call. It is not limited to that of this rank's call, so that a rank that
        // makes a different call gets an error that says so.
        const MAX_BYTES: usize = i32::MAX as usize - HEADER_BYTES;
        let State { channel, sequence, spare, .. } = &mut *self.state;
        let limits = Limits { bytes: MAX_BYTES, busy: BUSY, deadline: &self.deadline };
        exchange(channel, *sequence, messages, &limits, spare).map(Parts).map_err(|mut error| {
            if let Error::Timeout { operation, .. } = &mut error {
                *operation = "the allreduce between nodes";
            }
            error
        })
    }
}

/// The messages for this rank, in rank order.
pub(crate) struct Parts(Vec<Arc<Vec<u8>>>);

impl Parts {
    /// Iterates over the messages, in rank order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.0.iter().map(|part| part.get(HEADER_BYTES..).unwrap_or_default())
    }
}
