//! Converts the failure that a kernel recorded when it gave up into an [`Error`].

use super::Communicator;
use crate::abi::{self, FaFailure};
use crate::call::{no_expert, tag_in_words, CallId};
use crate::device::Device;
use crate::endpoint::Membership;
use crate::error::Error;

impl<D: Device> Communicator<D> {
    #[cold]
    pub(super) fn failure(&self, membership: &Membership<D>, failure: FaFailure) -> Error {
        let liveness = &membership.liveness;
        let (missing, epoch) = membership.region.missing();
        let waited = self.wait_limits.latest().unwrap_or_default();
        let operation = liveness.operation();
        let error = match (failure, missing.first()) {
            (abi::FA_TIMED_OUT, _) => liveness.timed_out(missing, operation, epoch, waited),
            (abi::FA_PEER_GONE, Some(&rank)) => liveness.lost(rank, operation, epoch, waited),
            (abi::FA_OTHER_MESSAGE, Some(&rank)) => self.other_message(membership, rank),
            (abi::FA_MISMATCH, Some(&rank)) => self.other_call(membership, rank),
            (abi::FA_NO_EXPERT, _) => no_expert(epoch, ""),
            (abi::FA_REVOKED, Some(&rank)) => revoked(membership, rank),
            _ => other_failure(failure),
        };
        self.in_world_ranks(error)
    }

    /// Adds the numbers of the named ranks in the original world to an error, because programs know their processes by
    /// those.
    pub(super) fn in_world_ranks(&self, mut error: Error) -> Error {
        let named = match &error {
            Error::Timeout { missing, .. } => missing.clone(),
            Error::PeerLost { rank, .. }
            | Error::PeerFailed { rank, .. }
            | Error::Disagreement { rank, .. } => {
                vec![*rank]
            }
            _ => Vec::new(),
        };
        let known = named.iter().filter_map(|&rank| Some((rank, *self.world_ranks.get(rank)?)));
        let others = known.filter(|(rank, of_world)| rank != of_world);
        let notes: Vec<_> = others
            .map(|(rank, of_world)| format!("rank {rank} here is rank {of_world} of the world"))
            .collect();
        let text = match &mut error {
            Error::Timeout { last_seen, .. } => last_seen,
            Error::PeerLost { reason, .. } | Error::PeerFailed { reason, .. } => reason,
            Error::Disagreement { theirs, .. } => theirs,
            _ => return error,
        };
        for note in notes {
            // A text that comes from another rank may already have it.
            if !text.contains(&note) {
                *text += if text.is_empty() { "" } else { "; " };
                *text += &note;
            }
        }
        error
    }

    /// Returns the error for a message that is not the one that this rank was to receive.
    fn other_message(&self, membership: &Membership<D>, rank: usize) -> Error {
        let others = membership.region.others();
        let described = |rank| {
            let message = others.iter().find(|(other, _)| *other == rank);
            message.map_or_else(
                || "a message that the kernel did not record".into(),
                |(_, message)| {
                    format!("a message of {} bytes {}", message.count, tag_in_words(message.what as u32))
                },
            )
        };
        Error::Disagreement {
            what: "the message between them",
            rank,
            theirs: described(rank),
            own_rank: self.rank,
            ours: described(self.rank),
        }
    }

    /// Returns the error for ranks that make different calls. It names a rank whose call the kernel recorded, if there
    /// is one.
    fn other_call(&self, membership: &Membership<D>, first: usize) -> Error {
        let known = membership.region.others().into_iter().next();
        let (rank, theirs) = match known {
            Some((rank, call)) => (rank, CallId::describe(call)),
            // Only hashes of the calls were compared.
            None => (first, membership.liveness.call_of(first)),
        };
        let ours = membership.liveness.call();
        Error::Disagreement { what: "the call", rank, theirs, own_rank: self.rank, ours }
    }
}

/// Returns the error for a peer whose call failed while this rank was reading its registered input: the peer may
/// have overwritten the input since.
fn revoked<D: Device>(membership: &Membership<D>, rank: usize) -> Error {
    let reason = membership.liveness.reason_of(rank).unwrap_or_else(|| "its call failed".into());
    Error::PeerFailed { rank, reason: format!("{reason}; its registered buffer was being read") }
}

/// Returns the error for a failure that names no rank.
fn other_failure(failure: FaFailure) -> Error {
    match failure {
        abi::FA_ABORTED => Error::Aborted,
        abi::FA_UNKNOWN_BUFFER => Error::Unavailable {
            what: "a peer's registered buffer".into(),
            reason: "this rank has dropped its part, or the call is in a graph that was replayed before \
                     register_graph_buffers(); drop a buffer after the last call that uses it on any rank"
                .into(),
        },
        _ => Error::Unavailable {
            what: "this kernel".into(),
            reason: format!("the device has no such type, operation or algorithm (failure {failure})"),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::bootstrap::Threads;
    use crate::{Communicator, Host};

    #[test]
    fn a_wait_for_the_own_blocks_names_this_rank() {
        let alone = Threads::world(1).unwrap().remove(0);
        let communicator = Communicator::builder().build(Host::new(), alone).unwrap();
        let liveness = &communicator.endpoint.membership().unwrap().liveness;
        let error = liveness.timed_out(Vec::new(), "all_reduce_fused", 3, Duration::from_secs(1));
        let text = error.to_string();
        assert!(text.contains("waiting for rank 0") && text.contains("other blocks of this rank"), "{text}");
    }
}
