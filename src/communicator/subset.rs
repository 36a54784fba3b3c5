//! Communicators of a part of the ranks: the survivors of a failure, or groups.

use std::sync::atomic::Ordering;
use std::sync::Arc;

use super::Communicator;
use crate::bootstrap::{all_succeeded, in_old_ranks};
use crate::device::Device;
use crate::endpoint::Membership;
use crate::error::{Error, Result};
use crate::interruption;

impl<D: Device> Communicator<D> {
    /// Returns the surviving ranks, in ascending order.
    ///
    /// A rank survives while its process runs, its GPU works and it has not dropped its communicator, as far as this
    /// rank has noticed; that takes some milliseconds. A rank whose communicator failed counts as a survivor until it
    /// drops the communicator, unless its GPU failed.
    pub fn survivors(&self) -> Vec<usize> {
        let present = |membership: &Arc<Membership<D>>| {
            (0..self.world_size).filter(|&rank| membership.liveness.is_present(rank)).collect()
        };
        self.endpoint.with_membership(present).unwrap_or_default()
    }

    /// Makes a communicator of `survivors` after other ranks have died or left. Collective among the survivors.
    ///
    /// `survivors` are ranks of this communicator in ascending order. Each of them passes the same list. A rank's place
    /// in the list is its new rank. Settings are those of this communicator, which may have failed and does not change:
    /// drop it when convenient.
    ///
    /// After an error it may be called again, with this list or another. It succeeds once all ranks of a list call it
    /// with that list, however often each of them has tried.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(3, |communicator| {
    /// if communicator.rank() == 1 {
    ///     return Ok(()); // Drops its communicator.
    /// }
    /// println!("{}", communicator.barrier().unwrap_err()); // Rank 1 is gone.
    /// # while communicator.survivors().len() == 3 { std::thread::yield_now() }
    /// assert_eq!(communicator.survivors(), [0, 2]);
    /// let communicator = communicator.shrink(&[0, 2])?; // Rank 2 is now rank 1.
    /// communicator.barrier()?;
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`], if the list is not in ascending order, has a rank out of range or lacks this rank;
    /// [`Error::PeerLost`], if a rank of the list has gone; [`Error::Aborted`], if this communicator is aborted
    /// meanwhile; [`Error::Timeout`], which names the survivors, by their old
    /// ranks, that did not come or gave another list; and the errors of [`Builder::build`](crate::Builder::build).
    pub fn shrink(&self, survivors: &[usize]) -> Result<Self> {
        let aborts = self.aborts.load(Ordering::Relaxed);
        let index = self.index_among(survivors)?;
        self.part(survivors, index, aborts, true)
    }

    /// Returns this rank's place in a list of survivors.
    pub(super) fn index_among(&self, survivors: &[usize]) -> Result<usize> {
        let ordered = survivors.windows(2).all(|pair| pair[0] < pair[1]);
        let index = survivors.iter().position(|&rank| rank == self.rank);
        let in_range = survivors.last().is_some_and(|&last| last < self.world_size);
        index.filter(|_| ordered && in_range).ok_or_else(|| Error::InvalidSetting {
            name: "survivors",
            value: format!("{survivors:?}"),
            expected: "ranks of this communicator in ascending order, this one among them",
        })
    }

    /// Makes a communicator of the ranks that give the same `color`, as `MPI_Comm_split` does. Collective.
    ///
    /// New ranks are ordered by `key`, then by the old rank. A rank that gives no color gets `None`.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(4, |communicator| {
    /// let rank = communicator.rank();
    /// let pair = communicator.split(Some(rank as u32 / 2), 0)?.expect("a color was given");
    /// assert_eq!((pair.rank(), pair.world_size()), (rank % 2, 2));
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// [Errors of every step](Communicator#errors-of-every-step), and the errors of
    /// [`Builder::build`](crate::Builder::build).
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        let aborts = self.aborts.load(Ordering::Relaxed);
        let mut own = [0; 13];
        own[0] = u8::from(color.is_some());
        own[1..5].copy_from_slice(&color.unwrap_or(0).to_le_bytes());
        own[5..].copy_from_slice(&key.to_le_bytes());
        let given = self
            .step(|| self.endpoint.membership()?.connection.bootstrap.all_gather(&own, self.setup_timeout));
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
                // Every other step begins with a longer message, of lines. The first line names the step.
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
        // This rank gave that color, so it is a member.
        let index = members.iter().position(|&rank| rank == self.rank).unwrap_or_default();
        self.part(&members, index, aborts, false).map(Some)
    }

    /// Makes a communicator of the members, which goes on after their calls if it `continues`. An abort of this one
    /// ends that, unless it came before: `aborts` is the number of aborts when the program asked for the part.
    fn part(&self, members: &[usize], index: usize, aborts: u32, continues: bool) -> Result<Self> {
        // Relaxed: nothing else is passed on, and waits look ten times a second.
        let is_aborted = || self.aborts.load(Ordering::Relaxed) != aborts;
        let made = interruption::unless(&is_aborted, || self.made(members, index, &is_aborted, continues));
        match is_aborted() {
            // If it was made, the other members notice that it has closed.
            true => Err(Error::Aborted),
            false => made,
        }
    }

    fn made(
        &self,
        members: &[usize],
        index: usize,
        is_aborted: &dyn Fn() -> bool,
        continues: bool,
    ) -> Result<Self> {
        self.can_lock()?;
        let membership = self.endpoint.membership()?;
        let liveness = &membership.liveness;
        // Every member finds one, if the members are on several nodes.
        if let Some(rank) = members.iter().find(|&&rank| liveness.announcements(rank).is_none()) {
            return Err(Error::Unavailable {
                what: "a part of a communicator whose ranks are on several nodes".into(),
                reason: format!(
                    "rank {rank} is on another node: build it with a bootstrap of the part's ranks"
                ),
            });
        }
        let Some(announcements) = liveness.announcements(members[0]) else {
            return Err(Error::PeerLost { rank: members[0], reason: "it never joined".into() });
        };
        let device = self.endpoint.device.reopen();
        if let (Err(error @ Error::Driver { .. }), true) = (&device, self.endpoint.device.is_lost()) {
            // The poisoned communicator notifies the others, so they do not wait for this rank.
            return Err(self.poison(error.clone()));
        }
        let gone = || members.iter().copied().find(|&rank| rank != self.rank && !liveness.is_present(rank));
        let is_hopeless = || is_aborted() || gone().is_some();
        let met = membership.lineage.meet(members, index, announcements, &is_hopeless, self.setup_timeout);
        let local = met.map_err(|error| {
            self.in_world_ranks(match (&error, gone()) {
                // A member that has gone is the cause, not one that is present and has given up because of it.
                (Error::PeerLost { rank, .. }, _) if !liveness.is_present(*rank) => error,
                (Error::Timeout { .. } | Error::Rendezvous { .. } | Error::PeerLost { .. }, Some(rank)) => {
                    Error::PeerLost { rank, reason: "it has left the world whose ranks meet".into() }
                }
                _ => error,
            })
        })?;
        // No rank may wait in a later step for a rank without a device.
        let device = all_succeeded(device, &local, self.setup_timeout)
            .map_err(|error| self.in_world_ranks(in_old_ranks(error, members)))?;
        let mut settings = self.settings.clone();
        if continues {
            settings = settings.completed(self.endpoint.enter()?.calls.completed);
        }
        let made = settings.build(device, local);
        let mut part = made.map_err(|error| self.in_world_ranks(in_old_ranks(error, members)))?;
        let of_world = |&rank: &usize| self.world_ranks.get(rank).copied().unwrap_or(rank);
        part.world_ranks = members.iter().map(of_world).collect();
        Ok(part)
    }
}
