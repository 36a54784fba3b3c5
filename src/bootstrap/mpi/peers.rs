//! Exchanges among ranks of an MPI communicator, on one or several nodes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::mpi::traits::Communicator;

use super::channel::Channel;
use super::gather::{gather, Exchange, Limits, Spare, HEADER_BYTES};
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

    /// Begins a call of several exchanges. Those of other calls cannot come between them.
    ///
    /// After a failed call, all later calls return its error.
    pub(crate) fn begin(&self) -> Result<Exchanges<'_>> {
        // Poisoning is ignored: the number of an exchange is taken before it starts, so that a panic leaves a valid
        // state.
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match &state.failure {
            Some(error) => Err(error.clone()),
            None => Ok(Exchanges { state, deadline: Deadline::after(Duration::ZERO), has_ended: false }),
        }
    }
}

/// A call of several exchanges. If it is dropped before its end, all later calls fail, since the peers may wait for the
/// rest of it.
pub(crate) struct Exchanges<'a> {
    state: MutexGuard<'a, State>,
    /// Set by [`Exchanges::end`]: nothing waits before.
    deadline: Deadline<'static>,
    has_ended: bool,
}

/// An exchange that has been started.
pub(crate) struct Started(Exchange);

impl Exchanges<'_> {
    /// Ends the call by these steps, with a common time limit.
    pub(crate) fn end(mut self, limit: Duration, steps: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.deadline = Deadline::after(limit);
        let outcome = steps(&mut self);
        self.has_ended = true;
        outcome.inspect_err(|error| self.state.fail(error.clone()))
    }

    /// Sends each rank the message that `fill` writes for it. Collective, like [`Exchanges::finish`].
    pub(crate) fn start_each(&mut self, fill: impl Fn(usize, &mut Vec<u8>)) -> Result<Started> {
        let sequence = self.next();
        let State { channel, spare, .. } = &mut *self.state;
        let of = |peer| spare.message(sequence, |message| fill(peer, message));
        let messages = (0..channel.size()).map(of).collect();
        self.start(sequence, messages)
    }

    /// Sends all ranks the message that `fill` writes. Collective, like [`Exchanges::finish`].
    pub(crate) fn start_all(&mut self, fill: impl FnOnce(&mut Vec<u8>)) -> Result<Started> {
        let sequence = self.next();
        let message = self.state.spare.message(sequence, fill);
        let messages = vec![message; self.state.channel.size()];
        self.start(sequence, messages)
    }

    /// Returns the messages for this rank. An exchange is finished before the next one is started.
    pub(crate) fn finish(&mut self, started: Started) -> Result<Parts> {
        // Long enough for most allreduces to complete without sleeping.
        const BUSY: Duration = Duration::from_millis(100);
        // The length depends on the sender's call. It is not limited to that of this rank's call, so that a rank that
        // makes a different call gets an error that says so.
        const MAX_BYTES: usize = i32::MAX as usize - HEADER_BYTES;
        let State { channel, spare, .. } = &mut *self.state;
        let limits = Limits { bytes: MAX_BYTES, busy: BUSY, deadline: &self.deadline };
        started.0.finish(channel, &limits, spare).map(Parts).map_err(|mut error| {
            if let Error::Timeout { operation, .. } = &mut error {
                *operation = "the allreduce between nodes";
            }
            error
        })
    }

    /// Uses the memory of these messages for later ones.
    pub(crate) fn reuse(&mut self, Parts(messages): Parts) {
        messages.into_iter().for_each(|message| self.state.spare.put(message));
    }

    fn next(&mut self) -> u64 {
        self.state.sequence += 1;
        self.state.sequence
    }

    fn start(&mut self, sequence: u64, messages: Vec<Arc<Vec<u8>>>) -> Result<Started> {
        let started = Exchange::start(&self.state.channel, sequence, messages).map(Started);
        started.inspect_err(|error| self.state.fail(error.clone()))
    }
}

impl State {
    fn fail(&mut self, error: Error) {
        self.failure.get_or_insert(error);
        self.spare = Spare::default();
        self.channel.abandon();
    }
}

impl Drop for Exchanges<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.state.fail(Error::Unavailable {
                what: "an engine between nodes whose last call did not end".into(),
                reason: "the other nodes may wait for the rest of it: make a new world".into(),
            });
        }
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
