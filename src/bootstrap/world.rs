//! The rules of a world that gathers: who is here, what was given, and how it ends. No waiting, no sockets.
//!
//! The rank threads and the rendezvous hub follow the same rules through this one state machine. Each step
//! answers at most one [`Event`], and every event is for every rank that is here.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// What all ranks are to be told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Event {
    /// All ranks are here.
    Formed,
    /// All ranks gave their bytes to the gather of this number.
    Gathered {
        /// Number of the gather, from 1.
        sequence: u64,
        /// The bytes in rank order.
        parts: Vec<Vec<u8>>,
    },
    /// The world has ended; nothing will be gathered any more.
    Failed(Failure),
}

/// Why a world ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Failure {
    /// A rank waited for as long as it would.
    TimedOut {
        /// Number of the gather, or 0 if the world had not formed.
        sequence: u64,
        /// The rank that gave up.
        by: usize,
        /// The ranks that it waited for.
        missing: Vec<usize>,
    },
    /// A rank left.
    Lost {
        /// The rank that left.
        rank: usize,
        /// What was seen.
        reason: String,
    },
}

impl Failure {
    /// What the failure means to rank `own`, which had waited for so long.
    pub(super) fn to_error(&self, own: usize, waited: Duration) -> Error {
        match self {
            // That it is itself late is no answer for a rank that comes late: it has lost those who gave up.
            Self::TimedOut { by, missing, .. } if missing.contains(&own) => {
                Error::PeerLost { rank: *by, reason: format!("it gave up waiting for rank {own}") }
            }
            Self::TimedOut { sequence, missing, .. } => Error::Timeout {
                operation: if *sequence == 0 { "rendezvous" } else { "all_gather" },
                epoch: 0,
                missing: missing.clone(),
                waited,
                last_seen: String::new(),
            },
            Self::Lost { rank, reason } => Error::PeerLost { rank: *rank, reason: reason.clone() },
        }
    }
}

/// Why a rank may not join.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Denied {
    /// Somebody is, or was, that rank.
    Taken,
    /// The world has ended.
    Failed(Failure),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    Awaited,
    Here,
    Gone,
}

#[derive(Debug)]
struct Member {
    presence: Presence,
    contribution: Option<Vec<u8>>,
}

/// One world. Ranks given to its methods are below its size.
#[derive(Debug)]
pub(super) struct World {
    members: Vec<Member>,
    /// The gather under way, from 1; 0 while ranks are awaited.
    sequence: u64,
    failure: Option<Failure>,
}

impl World {
    pub(super) fn new(size: usize) -> Self {
        let awaited = || Member { presence: Presence::Awaited, contribution: None };
        Self { members: (0..size).map(|_| awaited()).collect(), sequence: 0, failure: None }
    }

    pub(super) fn size(&self) -> usize {
        self.members.len()
    }

    /// Number of the gather under way.
    pub(super) fn sequence(&self) -> u64 {
        self.sequence
    }

    pub(super) fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// Each rank joins once: a rank that has left does not come back.
    pub(super) fn join(&mut self, rank: usize) -> Result<Option<Event>, Denied> {
        if self.members[rank].presence != Presence::Awaited {
            return Err(Denied::Taken);
        }
        if let Some(failure) = &self.failure {
            return Err(Denied::Failed(failure.clone()));
        }
        self.members[rank].presence = Presence::Here;
        if self.members.iter().any(|member| member.presence != Presence::Here) {
            return Ok(None);
        }
        self.sequence = 1;
        Ok(Some(Event::Formed))
    }

    /// Takes the bytes of a rank for the gather under way. An error means that the rank breaks the rules.
    pub(super) fn contribute(
        &mut self,
        rank: usize,
        sequence: u64,
        bytes: Vec<u8>,
    ) -> Result<Option<Event>, &'static str> {
        if self.failure.is_some() {
            // The rank has been told, or is being told now.
            return Ok(None);
        }
        if self.sequence == 0 || sequence != self.sequence {
            return Err("it is at another all_gather than the world");
        }
        let contribution = &mut self.members[rank].contribution;
        if contribution.is_some() {
            return Err("it gave its bytes twice to one all_gather");
        }
        *contribution = Some(bytes);
        if self.members.iter().any(|member| member.contribution.is_none()) {
            return Ok(None);
        }
        let parts = self.members.iter_mut().filter_map(|member| member.contribution.take()).collect();
        self.sequence += 1;
        Ok(Some(Event::Gathered { sequence, parts }))
    }

    /// A rank waits no longer for the gather `sequence`, or for the world to form if that is 0.
    ///
    /// `None` if that had come to its end: its event is on the way.
    pub(super) fn give_up(&mut self, rank: usize, sequence: u64) -> Option<Event> {
        if self.failure.is_some() || sequence != self.sequence {
            return None;
        }
        let is_missing = |member: &Member| match sequence {
            0 => member.presence == Presence::Awaited,
            _ => member.contribution.is_none(),
        };
        let missing = (0..self.size()).filter(|&rank| is_missing(&self.members[rank])).collect();
        Some(self.fail(Failure::TimedOut { sequence, by: rank, missing }))
    }

    /// A rank is gone. `None` if the world had failed before.
    pub(super) fn leave(&mut self, rank: usize, reason: &str) -> Option<Event> {
        self.members[rank].presence = Presence::Gone;
        if self.failure.is_some() {
            return None;
        }
        Some(self.fail(Failure::Lost { rank, reason: reason.to_owned() }))
    }

    /// Whether every rank that came has left again.
    pub(super) fn is_deserted(&self) -> bool {
        self.members.iter().all(|member| member.presence != Presence::Here)
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

    fn formed(size: usize) -> World {
        let mut world = World::new(size);
        for rank in 0..size - 1 {
            assert_eq!(world.join(rank), Ok(None));
        }
        assert_eq!(world.join(size - 1), Ok(Some(Event::Formed)));
        world
    }

    #[test]
    fn gathers_in_rank_order_whoever_comes_first() {
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
        let mut world = World::new(2);
        assert_eq!(world.join(0), Ok(None));
        assert_eq!(world.join(0), Err(Denied::Taken));
        let failure = Failure::Lost { rank: 0, reason: "ended".into() };
        assert_eq!(world.leave(0, "ended"), Some(Event::Failed(failure.clone())));
        assert_eq!(world.join(0), Err(Denied::Taken));
        assert_eq!(world.join(1), Err(Denied::Failed(failure)));
        assert!(world.is_deserted());
    }

    #[test]
    fn rules_are_enforced() {
        let mut world = World::new(2);
        assert_eq!(world.join(0), Ok(None));
        assert!(world.contribute(0, 0, vec![]).is_err(), "before the world forms");
        assert!(world.contribute(0, 1, vec![]).is_err(), "before the world forms");
        let mut world = formed(2);
        assert!(world.contribute(0, 2, vec![]).is_err(), "from the future");
        assert_eq!(world.contribute(0, 1, vec![]), Ok(None));
        assert!(world.contribute(0, 1, vec![]).is_err(), "twice");
    }

    #[test]
    fn giving_up_names_the_missing() {
        let waited = Duration::from_secs(3);
        let mut world = World::new(4);
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
    fn giving_up_too_late_is_nothing() {
        let mut world = formed(1);
        assert_eq!(world.give_up(0, 0), None);
        assert!(matches!(world.contribute(0, 1, vec![]), Ok(Some(Event::Gathered { .. }))));
        assert_eq!(world.give_up(0, 1), None);
        assert_eq!(world.failure(), None);
    }
}
