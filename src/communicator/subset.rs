//! Communicators of a part of the ranks: the survivors of a failure, or groups.

use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use super::Communicator;
use crate::abi::MAX_RANKS;
use crate::bootstrap::{all_succeeded, in_old_ranks};
use crate::deadline::Deadline;
use crate::device::Device;
use crate::endpoint::Membership;
use crate::error::{Error, Result};
use crate::interruption;

impl<D: Device> Communicator<D> {
    /// Returns the surviving ranks, in ascending order.
    ///
    /// A rank survives while its process runs, its GPU works and it has not dropped its communicator, as far as this
    /// rank has noticed; that takes some milliseconds. A rank whose communicator failed counts as a survivor until it
    /// drops the communicator, unless its GPU failed. If a [`Communicator::suspend`] failed here and succeeded on
    /// another rank, that rank counts as a survivor: [`Communicator::join`] meets its `resume`. While this communicator
    /// is suspended, the list is empty.
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
    /// meanwhile; [`Error::Unavailable`], if calls of other threads leave no gap within half of the limit of steps (on
    /// the other ranks [`Error::Disagreement`] with that reason); [`Error::Timeout`], which names the survivors, by
    /// their old ranks, that did not come or gave another list; and the errors of
    /// [`Builder::build`](crate::Builder::build).
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

    /// Makes a larger communicator: of all ranks of this one, which keep their numbers, and of new processes, which
    /// take the numbers after them. Collective among all.
    ///
    /// A new process builds its communicator with the same settings, from
    /// [`Local::connect`](crate::bootstrap::Local::connect) with [`Communicator::join_id`]'s id, its rank and the new
    /// world size; or from [`Local::spare`](crate::bootstrap::Local::spare). It may come before or after the others, at
    /// most `timeout` apart. This communicator does not change; it may have failed. Registered buffers stay its own.
    /// If ranks have gone, [`Communicator::shrink`] comes first: the two together replace any ranks, in a world of any
    /// size.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # let limit = std::time::Duration::from_secs(10);
    /// # let (send, receive) = std::sync::mpsc::channel();
    /// # let new = std::thread::spawn(move || -> Result<()> {
    /// use fast_allreduce::bootstrap::{Local, UniqueId};
    ///
    /// // The new process, which has got the id by any means.
    /// let id: UniqueId = receive.recv().unwrap();
    /// let communicator =
    ///     Communicator::builder().build(Host::new(), Local::connect(&id, 2, 3, limit)?)?;
    /// communicator.barrier()
    /// # });
    /// # ranks(2, move |communicator| {
    /// # if communicator.rank() == 0 {
    /// # let send = send.clone();
    /// send.send(communicator.join_id()?).unwrap();
    /// # }
    /// let larger = communicator.grow(3, limit)?;
    /// assert_eq!((larger.rank(), larger.world_size()), (communicator.rank(), 3));
    /// larger.barrier()
    /// # });
    /// # new.join().unwrap().unwrap();
    /// ```
    ///
    /// # Errors
    ///
    /// They name ranks of the larger communicator. Afterwards the ranks can try again.
    ///
    /// * [`Error::InvalidSetting`], unless `world_size` is larger than that of this communicator, and at most
    ///   [`MAX_RANKS`](crate::MAX_RANKS).
    /// * [`Error::Timeout`], if ranks do not come in time; [`Error::PeerLost`], if a rank of this one has gone.
    /// * [`Error::Refused`], if another process is this rank.
    /// * [`Error::Aborted`], if this communicator is aborted meanwhile; [`Error::Unavailable`], if its ranks are on
    ///   several nodes, while it is suspended, within a call, and if calls of other threads leave no gap
    ///   within `timeout` and half of the limit of steps (on the other ranks [`Error::Disagreement`] with that reason).
    /// * The errors of [`Builder::build`](crate::Builder::build): [`Error::Disagreement`] for other settings or builds.
    pub fn grow(&self, world_size: usize, timeout: Duration) -> Result<Self> {
        if !(self.world_size + 1..=MAX_RANKS).contains(&world_size) {
            return Err(Error::InvalidSetting {
                name: "world_size",
                value: world_size.to_string(),
                expected: "more ranks than this communicator has, and at most 16",
            });
        }
        let aborts = self.aborts.load(Ordering::Relaxed);
        self.unless_aborted_since(aborts, |is_aborted| {
            self.can_lock()?;
            let membership = self.endpoint.membership()?;
            let liveness = &membership.liveness;
            let ranks = || (0..self.world_size).filter(|&rank| rank != self.rank);
            if let Some(rank) = ranks().find(|&rank| liveness.announcements(rank).is_none()) {
                return Err(Error::Unavailable {
                    what: "growing a communicator whose ranks are on several nodes".into(),
                    reason: format!("rank {rank} is on another node"),
                });
            }
            let device = self.endpoint.device.reopen();
            if let (Err(error @ Error::Driver { .. }), true) = (&device, self.endpoint.device.is_lost()) {
                // The poisoned communicator notifies the others, so they do not wait for this rank.
                return Err(self.poison(error.clone()));
            }
            let gone = || ranks().find(|&rank| !liveness.is_in_world(rank));
            let is_hopeless = || is_aborted() || gone().is_some();
            let (place, open) = ((self.rank, world_size), u32::MAX << self.world_size);
            let met = membership.lineage.regroup(place, open, &is_hopeless, timeout);
            let local = met.map_err(|error| match (&error, gone()) {
                (
                    Error::Timeout { .. }
                    | Error::Rendezvous { .. }
                    | Error::PeerLost { .. }
                    | Error::Refused { .. },
                    Some(rank),
                ) => Error::PeerLost { rank, reason: "it has left the world that grows".into() },
                _ => error,
            })?;
            // Only now: without this rank the others would wait for it until their limit.
            let device = device?;
            self.settings.clone().completed(self.completed(timeout)).build(device, local)
        })
    }

    /// Makes a communicator of the members, which goes on after their calls if it `continues`. An abort of this one
    /// ends that, unless it came before: `aborts` is the number of aborts when the program asked for the part.
    fn part(&self, members: &[usize], index: usize, aborts: u32, continues: bool) -> Result<Self> {
        self.unless_aborted_since(aborts, |is_aborted| self.made(members, index, is_aborted, continues))
    }

    fn unless_aborted_since(
        &self,
        aborts: u32,
        make: impl FnOnce(&dyn Fn() -> bool) -> Result<Self>,
    ) -> Result<Self> {
        // Relaxed: nothing else is passed on, and waits look ten times a second.
        let is_aborted = || self.aborts.load(Ordering::Relaxed) != aborts;
        let made = interruption::unless(&is_aborted, || make(&is_aborted));
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
        let gone = || members.iter().copied().find(|&rank| rank != self.rank && !liveness.is_in_world(rank));
        let is_hopeless = || is_aborted() || gone().is_some();
        let met = membership.lineage.meet(members, index, announcements, &is_hopeless, self.setup_timeout);
        let local = met.map_err(|error| {
            self.in_world_ranks(match (&error, gone()) {
                // A member that has gone is the cause, not one that is present and has given up because of it.
                (Error::PeerLost { rank, .. }, _) if !liveness.is_in_world(*rank) => error,
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
            settings = settings.completed(self.completed(self.setup_timeout));
        }
        let made = settings.build(device, local);
        let mut part = made.map_err(|error| self.in_world_ranks(in_old_ranks(error, members)))?;
        let of_world = |&rank: &usize| self.world_ranks.get(rank).copied().unwrap_or(rank);
        part.world_ranks = members.iter().map(of_world).collect();
        Ok(part)
    }

    /// Returns the number of calls that this rank has completed. Calls of other threads end first, if they leave a gap
    /// in time: the others wait for this rank as long as for any step, so it tells them before that limit.
    fn completed(&self, timeout: Duration) -> Result<u64> {
        let limit = timeout.min(self.setup_timeout / 2);
        Ok(self.endpoint.enter_within(&Deadline::after(limit))?.calls.completed)
    }
}
