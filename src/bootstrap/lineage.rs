//! Rendezvous among ranks of an existing world, for `shrink` and `split`, and with new ones, for `join`, `resume` and
//! `grow`. It does not use the world's bootstrap, which may have failed.

use std::collections::HashMap;
use std::hash::Hasher as _;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fnv::FnvHasher;
use nix::sys::socket::SockType;

use super::local::{Local, Place, UniqueId};
use super::socket::{random_bytes, Token, PREFIX};
use super::socket_name::SocketNamespace;
use super::Bootstrap;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::thread;

/// Pause between two checks for a rendezvous that has begun.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// Maximum number of rendezvous that one rank serves at the same time, from several threads.
const SLOTS: usize = 8;

/// Secrets shared by all ranks of a world. Subsets of the ranks use them to meet and form later worlds.
///
/// The first member of a later world serves the rendezvous and announces its number in shared memory: the other members
/// may have made a different number of attempts. Each attempt has its own socket; its name contains the server's rank,
/// the members and the number. A rank that comes too late finds nobody listening and looks for the next attempt. A rank
/// does not attend the same attempt twice.
pub(crate) struct Lineage {
    namespace: SocketNamespace,
    name: [u8; 16],
    token: Token,
    /// Number of rendezvous that this rank has served.
    served: AtomicU32,
    /// Number of the latest rendezvous that this rank has attended, by server and mask of members: each server counts
    /// its own.
    attended: Mutex<HashMap<(usize, u32), u32>>,
}

/// The rendezvous that a rank currently serves, in memory that all ranks map; zeros are free slots. If a peer writes
/// garbage here, that peer meets nobody.
#[repr(transparent)]
pub(crate) struct Announcements([AtomicU64; SLOTS]);

/// A rendezvous that is announced until this is dropped.
struct Announcement<'a> {
    slot: &'a AtomicU64,
}

impl Announcements {
    /// Announces a rendezvous. Returns `None` if no slot is free.
    fn announce(&self, mask: u32, number: u32) -> Option<Announcement<'_>> {
        let word = u64::from(mask) << 32 | u64::from(number);
        // Relaxed: an announcement only says which socket to try; all data comes through that socket.
        let is_free =
            |slot: &&AtomicU64| slot.compare_exchange(0, word, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        self.0.iter().find(is_free).map(|slot| Announcement { slot })
    }

    /// Returns the first announced rendezvous of these members with a number above `after`.
    fn next(&self, mask: u32, after: u32) -> Option<u32> {
        let words = self.0.iter().map(|slot| slot.load(Ordering::Relaxed));
        let numbers = words.filter(|word| (word >> 32) as u32 == mask).map(|word| word as u32);
        numbers.filter(|&number| number > after).min()
    }
}

impl Drop for Announcement<'_> {
    fn drop(&mut self) {
        self.slot.store(0, Ordering::Relaxed);
    }
}

impl Lineage {
    /// Returns the world's identity, which is no secret.
    pub fn id(&self) -> u64 {
        let mut hasher = FnvHasher::default();
        hasher.write(&self.name);
        hasher.finish()
    }

    /// Shares random bytes of rank 0 with all ranks. Collective.
    pub fn establish(bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<Self> {
        let namespace = SocketNamespace::new(bootstrap.socket_directory())?;
        let own: [u8; 16 + Token::LENGTH] = random_bytes()?;
        let given = bootstrap.all_gather(&own, timeout)?;
        let split = given.first().and_then(|first| first.split_first_chunk());
        let parts = split.and_then(|(name, token)| Some((*name, Token::from_bytes(token.try_into().ok()?))));
        let (name, token) = parts.ok_or_else(|| Error::Malformed {
            rank: 0,
            reason: "its random bytes for later worlds are truncated".into(),
        })?;
        Ok(Self { namespace, name, token, served: AtomicU32::new(0), attended: Mutex::default() })
    }

    /// Forms a world of `members`, which are ranks of the old world in their new order. This rank is `members[index]`.
    ///
    /// `announcements` are those of the first member, which serves the rendezvous. The wait ends early if `is_hopeless`
    /// returns true. Errors name ranks of the old world.
    pub fn meet(
        &self,
        members: &[usize],
        index: usize,
        announcements: &Announcements,
        is_hopeless: &dyn Fn() -> bool,
        timeout: Duration,
    ) -> Result<Local> {
        let mask = members.iter().fold(0u32, |mask, rank| mask | 1 << rank);
        let deadline = Deadline::unless(timeout, is_hopeless);
        let met = match index {
            0 => self.serve(members[0], mask, members.len(), announcements, &deadline, timeout),
            _ => self.attend(members[0], mask, index, members.len(), announcements, &deadline),
        };
        met.map_err(|error| in_old_ranks(error, members))
    }

    /// Returns the id of the rendezvous at which the ranks of this world form the next one: see [`Lineage::regroup`].
    pub fn next_id(&self) -> UniqueId {
        UniqueId::served_later(&self.namespace, &self.next_name(), &self.token)
    }

    /// Forms the next world from ranks of this one, in their places, and of new ones that have [`Lineage::next_id`].
    /// `open` is a mask of the places that spares may take. The wait ends early if `is_hopeless` returns true.
    pub fn regroup(
        &self,
        (rank, world_size): (usize, usize),
        open: u32,
        is_hopeless: &dyn Fn() -> bool,
        timeout: Duration,
    ) -> Result<Local> {
        let deadline = Deadline::unless(timeout, is_hopeless);
        let place = Place { rank, world_size, open, frees_name: true };
        Local::regroup(&self.namespace, &self.next_name(), &self.token, place, &deadline, timeout)
    }

    fn next_name(&self) -> Vec<u8> {
        format!("{PREFIX}{}-next", base16ct::lower::encode_string(&self.name)).into_bytes()
    }

    fn serve(
        &self,
        server: usize,
        mask: u32,
        size: usize,
        announcements: &Announcements,
        deadline: &Deadline<'_>,
        timeout: Duration,
    ) -> Result<Local> {
        let number = self.served.fetch_add(1, Ordering::Relaxed) + 1;
        let Some(_announcement) = announcements.announce(mask, number) else {
            return Err(Error::Unavailable {
                what: "a rendezvous for a new communicator".into(),
                reason: format!("this rank already serves {SLOTS} others"),
            });
        };
        let listener = self.namespace.listen(SockType::Stream, &self.socket_name(server, mask, number))?;
        Local::serve(
            &self.namespace,
            listener,
            &self.socket_name(server, mask, number),
            &self.token,
            Place { rank: 0, world_size: size, open: 0, frees_name: false },
            deadline,
            timeout,
        )
    }

    fn attend(
        &self,
        server: usize,
        mask: u32,
        index: usize,
        size: usize,
        announcements: &Announcements,
        deadline: &Deadline<'_>,
    ) -> Result<Local> {
        loop {
            // The deadline is checked first, so that the last attempt comes after the limit.
            let wait = deadline.next_wait();
            let latest = self.attended().get(&(server, mask)).copied().unwrap_or_default();
            if let Some(number) = announcements.next(mask, latest) {
                // `None`: the server does not listen yet, or no longer.
                if let Some(reached) = Local::reach(
                    &self.namespace,
                    &self.socket_name(server, mask, number),
                    &self.token,
                    deadline,
                )? {
                    self.attended().insert((server, mask), number);
                    return reached.join(index, size, deadline);
                }
            }
            if wait.is_zero() {
                return Err(Error::Timeout {
                    operation: "rendezvous",
                    epoch: 0,
                    missing: vec![0],
                    waited: deadline.waited(),
                    last_seen: String::new(),
                });
            }
            thread::pause(LOOK_INTERVAL.min(wait));
        }
    }

    fn attended(&self) -> MutexGuard<'_, HashMap<(usize, u32), u32>> {
        self.attended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn socket_name(&self, server: usize, mask: u32, number: u32) -> Vec<u8> {
        format!("{PREFIX}{}-{server:x}-{number:x}-{mask:x}", base16ct::lower::encode_string(&self.name))
            .into_bytes()
    }
}

/// Converts the ranks in an error to those of the old world: `members[new rank]`.
pub(crate) fn in_old_ranks(mut error: Error, members: &[usize]) -> Error {
    let old = |rank: &mut usize| *rank = members.get(*rank).copied().unwrap_or(*rank);
    match &mut error {
        Error::Timeout { missing, .. } => missing.iter_mut().for_each(old),
        Error::PeerLost { rank, .. } | Error::PeerFailed { rank, .. } | Error::Malformed { rank, .. } => {
            old(rank)
        }
        Error::Disagreement { rank, own_rank, .. } => [rank, own_rank].into_iter().for_each(old),
        _ => {}
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_ranks_of_the_world_that_the_members_come_from() {
        let old = |error: Error| in_old_ranks(error, &[1, 3, 4]);
        let reason = String::new;
        let timeout = |missing: [usize; 2]| Error::Timeout {
            operation: "all_gather",
            epoch: 0,
            missing: missing.into(),
            waited: Duration::ZERO,
            last_seen: String::new(),
        };
        assert_eq!(old(timeout([0, 2])), timeout([1, 4]));
        assert_eq!(
            old(Error::PeerLost { rank: 1, reason: reason() }),
            Error::PeerLost { rank: 3, reason: reason() }
        );
        assert_eq!(
            old(Error::PeerFailed { rank: 2, reason: reason() }),
            Error::PeerFailed { rank: 4, reason: reason() }
        );
        let disagreement = |rank, own_rank| {
            let (theirs, ours) = (reason(), reason());
            Error::Disagreement { what: "the step", rank, theirs, own_rank, ours }
        };
        assert_eq!(old(disagreement(0, 1)), disagreement(1, 3));
        assert_eq!(old(Error::Aborted), Error::Aborted);
    }
}
