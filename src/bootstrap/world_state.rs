//! State machine of a world: which ranks have joined, the gather under way, and how the world ended.
//!
//! It neither waits nor uses sockets. Rank threads and the rendezvous hub both use it, so that they follow the same
//! rules. Each transition returns at most one [`Event`], which is for every rank that has joined.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// A message to all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Event {
    /// All ranks have joined.
    Formed,
    /// All ranks have contributed to a gather.
    Gathered {
        /// Number of the gather, from 1.
        sequence: u64,
        /// The contributions, in rank order.
        parts: Vec<Vec<u8>>,
    },
    /// The world has ended; no gather follows.
    Failed(Failure),
}

/// Why a world ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Failure {
    /// The time limit of a rank has passed.
    TimedOut {
        /// Number of the gather; 0 if the world had not formed.
        sequence: u64,
        /// The rank that gave up.
        by: usize,
        /// The ranks that it waited for.
        missing: Vec<usize>,
        /// Why one of them was refused; empty if none was.
        refused: String,
    },
    /// A rank left.
    Lost {
        /// The rank that left.
        rank: usize,
        /// How it left.
        reason: String,
    },
}

impl Failure {
    /// Converts the failure to the error of rank `own`, which has waited for `waited`.
    pub(super) fn to_error(&self, own: usize, waited: Duration) -> Error {
        match self {
            // A late rank must not get an error that names itself as missing: it has lost the rank that gave up.
            Self::TimedOut { by, missing, .. } if missing.contains(&own) => {
                Error::PeerLost { rank: *by, reason: format!("it gave up waiting for rank {own}") }
            }
            Self::TimedOut { sequence, missing, refused, .. } => Error::Timeout {
                operation: if *sequence == 0 { "rendezvous" } else { "all_gather" },
                epoch: 0,
                missing: missing.clone(),
                waited,
                last_seen: refused.clone(),
            },
            Self::Lost { rank, reason } if *rank == own => {
                Error::PeerLost { rank: own, reason: format!("it has left this meeting before: {reason}") }
            }
            Self::Lost { rank, reason } => Error::PeerLost { rank: *rank, reason: reason.clone() },
        }
    }
}

/// Why a rank may not join.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Denied {
    /// Another process has joined as this rank.
    Taken,
    /// The world has ended.
    Failed(Failure),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    Awaited,
    Joined,
    Left,
}

#[derive(Debug)]
struct Member {
    presence: Presence,
    contribution: Option<Vec<u8>>,
}

/// State of one world. The ranks passed to its methods must be below its size.
#[derive(Debug)]
pub(super) struct WorldState {
    members: Vec<Member>,
    /// Number of the gather under way, from 1; 0 until all ranks have joined.
    sequence: u64,
    failure: Option<Failure>,
    /// The last rank whose process was refused, and why: see [`Failure::TimedOut`].
    refused: Option<(usize, String)>,
}

impl WorldState {
    pub(super) fn new(size: usize) -> Self {
        let awaited = || Member { presence: Presence::Awaited, contribution: None };
        Self { members: (0..size).map(|_| awaited()).collect(), sequence: 0, failure: None, refused: None }
    }

    pub(super) fn size(&self) -> usize {
        self.members.len()
    }

    /// Returns the number of the gather under way; 0 until all ranks have joined.
    pub(super) fn sequence(&self) -> u64 {
        self.sequence
    }

    pub(super) fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// Adds a rank. Each rank joins once: a world that a rank has left has ended.
    pub(super) fn join(&mut self, rank: usize) -> Result<Option<Event>, Denied> {
        if self.members[rank].presence == Presence::Joined {
            return Err(Denied::Taken);
        }
        if let Some(failure) = &self.failure {
            return Err(Denied::Failed(failure.clone()));
        }
        self.members[rank].presence = Presence::Joined;
        self.refused.take_if(|(refused, _)| *refused == rank);
        if self.members.iter().any(|member| member.presence != Presence::Joined) {
            return Ok(None);
        }
        self.sequence = 1;
        Ok(Some(Event::Formed))
    }

    /// Notes why a process that would be a rank of this world was refused, for the error of those that wait for it.
    pub(super) fn note_refusal(&mut self, rank: usize, reason: String) {
        if self.sequence == 0 {
            self.refused = Some((rank, reason));
        }
    }

    /// Returns the first of the ranks in a mask that has not joined.
    pub(super) fn awaited_among(&self, mask: u32) -> Option<usize> {
        let is_awaited = |rank: &usize| self.members[*rank].presence == Presence::Awaited;
        (0..self.size())
            .filter(|&rank| 1_u32.checked_shl(rank as u32).is_some_and(|bit| mask & bit != 0))
            .find(is_awaited)
    }

    /// Adds a rank's contribution to the gather under way. An error means that the rank violates the protocol.
    pub(super) fn contribute(
        &mut self,
        rank: usize,
        sequence: u64,
        bytes: Vec<u8>,
    ) -> Result<Option<Event>, &'static str> {
        if self.failure.is_some() {
            // The event of the failure has been sent to the rank, or is being sent.
            return Ok(None);
        }
        if self.sequence == 0 || sequence != self.sequence {
            return Err("it is in another all_gather than the world");
        }
        let contribution = &mut self.members[rank].contribution;
        if contribution.is_some() {
            return Err("it contributed twice to one all_gather");
        }
        *contribution = Some(bytes);
        if self.members.iter().any(|member| member.contribution.is_none()) {
            return Ok(None);
        }
        let parts = self.members.iter_mut().filter_map(|member| member.contribution.take()).collect();
        self.sequence += 1;
        Ok(Some(Event::Gathered { sequence, parts }))
    }

    /// Handles the timeout of a rank that waited for the gather `sequence`, or for the world to form if it is 0.
    ///
    /// Returns `None` if that wait has ended: its event is on the way.
    pub(super) fn give_up(&mut self, rank: usize, sequence: u64) -> Option<Event> {
        if self.failure.is_some() || sequence != self.sequence {
            return None;
        }
        let is_missing = |member: &Member| match sequence {
            0 => member.presence == Presence::Awaited,
            _ => member.contribution.is_none(),
        };
        let missing = (0..self.size()).filter(|&rank| is_missing(&self.members[rank])).collect();
        let refused = self.refused.as_ref().filter(|_| sequence == 0);
        let refused = refused.map(|(_, reason)| reason.clone()).unwrap_or_default();
        Some(self.fail(Failure::TimedOut { sequence, by: rank, missing, refused }))
    }

    /// Handles a rank that has left. Returns `None` if the world had failed before.
    pub(super) fn leave(&mut self, rank: usize, reason: &str) -> Option<Event> {
        self.members[rank].presence = Presence::Left;
        if self.failure.is_some() {
            return None;
        }
        Some(self.fail(Failure::Lost { rank, reason: reason.to_owned() }))
    }

    /// Returns whether every rank that joined has left.
    pub(super) fn is_deserted(&self) -> bool {
        self.members.iter().all(|member| member.presence != Presence::Joined)
    }

    fn fail(&mut self, failure: Failure) -> Event {
        self.failure = Some(failure.clone());
        self.members.iter_mut().for_each(|member| member.contribution = None);
        Event::Failed(failure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn formed(size: usize) -> WorldState {
        let mut world = WorldState::new(size);
        for rank in 0..size - 1 {
            assert_eq!(world.join(rank), Ok(None));
        }
        assert_eq!(world.join(size - 1), Ok(Some(Event::Formed)));
        world
    }

    #[test]
    fn a_refusal_is_told_until_the_rank_joins() {
        let refused = |joins: bool| {
            let mut world = WorldState::new(3);
            world.join(0).unwrap();
            world.note_refusal(1, "another size".into());
            if joins {
                world.join(1).unwrap();
            }
            match world.give_up(0, 0) {
                Some(Event::Failed(Failure::TimedOut { refused, .. })) => refused,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!([refused(false), refused(true)], ["another size", ""]);
    }

    #[test]
    fn gathers_are_in_rank_order_in_any_order_of_contributions() {
        let mut world = formed(3);
        for sequence in 1..5 {
            assert_eq!(world.contribute(2, sequence, vec![2]), Ok(None));
            assert_eq!(world.contribute(0, sequence, vec![]), Ok(None));
            let parts = vec![vec![], vec![1, 1], vec![2]];
            assert_eq!(
                world.contribute(1, sequence, vec![1, 1]),
                Ok(Some(Event::Gathered { sequence, parts }))
            );
        }
    }

    #[test]
    fn a_rank_joins_once() {
        let mut world = WorldState::new(2);
        assert_eq!(world.join(0), Ok(None));
        assert_eq!(world.join(0), Err(Denied::Taken));
        let failure = Failure::Lost { rank: 0, reason: "ended".into() };
        assert_eq!(world.leave(0, "ended"), Some(Event::Failed(failure.clone())));
        // The meeting is over for all, also for another process of the rank that has left.
        for rank in [0, 1] {
            assert_eq!(world.join(rank), Err(Denied::Failed(failure.clone())));
        }
        assert!(world.is_deserted());
        let reason = |own| match failure.to_error(own, Duration::ZERO) {
            Error::PeerLost { rank: 0, reason } => reason,
            error => panic!("{error}"),
        };
        assert_eq!([0, 1].map(reason), ["it has left this meeting before: ended", "ended"]);

        let mut world = formed(3);
        world.leave(1, "ended").unwrap();
        assert_eq!(world.join(0), Err(Denied::Taken));
        assert!(matches!(world.join(1), Err(Denied::Failed(Failure::Lost { rank: 1, .. }))));
    }

    #[test]
    fn rules_are_enforced() {
        let mut world = WorldState::new(2);
        assert_eq!(world.join(0), Ok(None));
        assert!(world.contribute(0, 0, vec![]).is_err(), "before the world forms");
        assert!(world.contribute(0, 1, vec![]).is_err(), "before the world forms");
        let mut world = formed(2);
        assert!(world.contribute(0, 2, vec![]).is_err(), "a later gather");
        assert_eq!(world.contribute(0, 1, vec![]), Ok(None));
        assert!(world.contribute(0, 1, vec![]).is_err(), "twice");
    }

    #[test]
    fn giving_up_names_the_missing() {
        let waited = Duration::from_secs(3);
        let mut world = WorldState::new(4);
        assert_eq!(world.join(1), Ok(None));
        assert_eq!(world.join(3), Ok(None));
        let Some(Event::Failed(failure)) = world.give_up(3, 0) else { panic!("no failure") };
        let (operation, missing) = ("rendezvous", vec![0, 2]);
        let last_seen = String::new;
        let timeout = Error::Timeout { operation, epoch: 0, missing, waited, last_seen: last_seen() };
        assert_eq!(failure.to_error(1, waited), timeout);
        assert!(matches!(failure.to_error(2, waited), Error::PeerLost { rank: 3, .. }));

        let mut world = formed(3);
        assert_eq!(world.contribute(0, 1, vec![]), Ok(None));
        let Some(Event::Failed(failure)) = world.give_up(0, 1) else { panic!("no failure") };
        let (operation, missing) = ("all_gather", vec![1, 2]);
        let timeout = Error::Timeout { operation, epoch: 0, missing, waited, last_seen: last_seen() };
        assert_eq!(failure.to_error(0, waited), timeout);
        assert_eq!(world.give_up(1, 1), None, "a world fails once");
        assert_eq!(world.leave(1, "ended"), None, "a world fails once");
        assert_eq!(world.contribute(2, 1, vec![]), Ok(None));
    }

    #[test]
    fn giving_up_after_the_end_of_a_gather_has_no_effect() {
        let mut world = formed(1);
        assert_eq!(world.give_up(0, 0), None);
        assert!(matches!(world.contribute(0, 1, vec![]), Ok(Some(Event::Gathered { .. }))));
        assert_eq!(world.give_up(0, 1), None);
        assert_eq!(world.failure(), None);
    }
}
