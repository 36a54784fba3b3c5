//! Communicators of some of the ranks: those that are left after a failure, or groups of them all.

use super::Communicator;
use crate::bootstrap::{all_succeeded, in_old_ranks};
use crate::device::Device;
use crate::error::{Error, Result};

impl<D: Device> Communicator<D> {
    /// The ranks that are left, in order: whose processes run, whose GPUs work and whose communicators have not been closed, as far as
    /// this rank has noticed, which takes some milliseconds. A rank whose communicator has failed for another reason than an error of
    /// its GPU is left until it drops it.
    pub fn survivors(&self) -> Vec<usize> {
        (0..self.world_size).filter(|&rank| self.liveness.is_left(rank)).collect()
    }

    /// Makes a communicator of `survivors`, ranks of this one in ascending order, after others have died or left. Collective among
    /// them: each calls it with the same list, which holds itself. Their new ranks are their places in the list; settings are as
    /// before. This communicator may have failed, and is left as it is: drop it when convenient.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for a list that is out of order or range or does not hold this rank,
    /// [`Error::PeerLost`] for one with a rank that is found to have gone, [`Error::Timeout`] naming the survivors,
    /// by their old ranks, that did not come (or came with another list), and as
    /// [`Builder::build`](crate::Builder::build). After an error it may be called again, with this or another list:
    /// it succeeds once all in it call it with the same, however often each has tried.
    pub fn shrink(&self, survivors: &[usize]) -> Result<Self> {
        let ordered = survivors.windows(2).all(|pair| pair[0] < pair[1]);
        let index = survivors.iter().position(|&rank| rank == self.rank);
        let in_range = survivors.last().is_some_and(|&last| last < self.world_size);
        let Some(index) = index.filter(|_| ordered && in_range) else {
            return Err(Error::InvalidSetting {
                name: "survivors",
                value: format!("{survivors:?}"),
                expected: "ranks of this communicator in ascending order, this one among them",
            });
        };
        self.part(survivors, index)
    }

    /// Makes a communicator of the ranks that give the same `color`, ordered by `key`, then by rank. Collective: every rank calls
    /// it. As `MPI_Comm_split`; `None` gives none.
    ///
    /// # Errors
    ///
    /// The error that poisoned this communicator, those of the bootstrap, and as [`Builder::build`](crate::Builder::build).
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        let mut own = [0; 13];
        own[0] = u8::from(color.is_some());
        own[1..5].copy_from_slice(&color.unwrap_or(0).to_le_bytes());
        own[5..].copy_from_slice(&key.to_le_bytes());
        let given = self.step(|| self.connection.bootstrap.all_gather(&own, self.setup_timeout));
        let given = given.map_err(|mut error| {
            if let Error::Timeout { operation, .. } = &mut error {
                *operation = "split";
            }
            self.in_world_ranks(error)
        });
        let given = self.unless_failed(given)?;
        let mut members = Vec::new();
        for (rank, bytes) in given.iter().enumerate() {
            let Some((theirs, key)) = bytes
                .split_first_chunk::<5>()
                .and_then(|(theirs, key)| Some((theirs, i64::from_le_bytes(key.try_into().ok()?))))
            else {
                // What ranks compare at the beginning of every other step is longer: lines, the first of which names the step.
                let theirs = String::from_utf8_lossy(bytes);
                return Err(Error::Disagreement {
                    what: "the step",
                    rank,
                    theirs: theirs.lines().next().unwrap_or("nothing").to_owned(),
                    own_rank: self.rank,
                    ours: "split".into(),
                });
            };
            if own[..5] == *theirs {
                members.push((key, rank));
            }
        }
        if color.is_none() {
            return Ok(None);
        }
        members.sort_unstable();
        let members: Vec<usize> = members.into_iter().map(|(_, rank)| rank).collect();
        // Its own rank is among them: it gave that color.
        let index = members.iter().position(|&rank| rank == self.rank).unwrap_or_default();
        self.part(&members, index).map(Some)
    }

    fn part(&self, members: &[usize], index: usize) -> Result<Self> {
        self.can_lock()?;
        let Some(notices) = self.liveness.notices(members[0]) else {
            return Err(Error::PeerLost { rank: members[0], reason: "it was never here".into() });
        };
        let device = self.endpoint.device.reopen();
        if let (Err(error @ Error::Driver { .. }), true) = (&device, self.endpoint.device.is_lost()) {
            // The others do not wait for it.
            return Err(self.poison(error.clone()));
        }
        let gone = || members.iter().copied().find(|&rank| rank != self.rank && !self.liveness.is_left(rank));
        let met = self.family.meet(members, index, notices, &|| gone().is_some(), self.setup_timeout);
        let local = met.map_err(|error| {
            self.in_world_ranks(match (&error, gone()) {
                (Error::Timeout { .. } | Error::Rendezvous { .. }, Some(rank)) => {
                    Error::PeerLost { rank, reason: "it has left the world whose ranks meet".into() }
                }
                _ => error,
            })
        })?;
        // No rank waits in a later step for one that has no device.
        let device = all_succeeded(device, &local, self.setup_timeout)
            .map_err(|error| self.in_world_ranks(in_old_ranks(error, members)))?;
        let made = self.settings.clone().build(device, local);
        let mut part = made.map_err(|error| self.in_world_ranks(in_old_ranks(error, members)))?;
        let of_world = |&rank: &usize| self.world_ranks.get(rank).copied().unwrap_or(rank);
        part.world_ranks = members.iter().map(of_world).collect();
        Ok(part)
    }
}
