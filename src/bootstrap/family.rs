//! A rendezvous for some of the ranks of a world that has met before, whatever its bootstrap was and whether that still works.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::socket::SockType;

use super::local::Local;
use super::place::Place;
use super::socket::{random_bytes, Token, PREFIX};
use super::Bootstrap;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::thread;

/// Between two looks at whether a meeting has begun.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// Meetings that one rank can serve at once, from several threads.
const PLACES: usize = 8;

/// What all ranks of a world share, and nobody else knows: where the later worlds of its ranks meet.
///
/// The first member of a later world serves its rendezvous and shows the others its number: they need not have tried
/// as often as it has. Each attempt has a socket of its own, with a name made of who serves it, its members and number. A rank that
/// comes late to one that is over finds nobody there and goes on to the next, and one that has been to it does not go
/// there again.
pub(crate) struct Family {
    place: Place,
    name: [u8; 16],
    token: Token,
    /// Meetings that this rank has served.
    served: AtomicU32,
    /// The latest meeting that this rank has been to, by who served it and its members as a mask: numbers are the server's.
    attended: Mutex<HashMap<(usize, u32), u32>>,
}

/// The meetings that a rank serves now, in memory that all ranks map; all zeros is none. A peer may write anything
/// here: it then meets nobody.
#[repr(transparent)]
pub(crate) struct Notices([AtomicU64; PLACES]);

/// Shows a meeting for as long as it lives.
struct Notice<'a> {
    place: &'a AtomicU64,
}

impl Notices {
    /// `None` where there is no place.
    fn put_up(&self, mask: u32, number: u32) -> Option<Notice<'_>> {
        let word = u64::from(mask) << 32 | u64::from(number);
        // Relaxed: a notice says where to look, and what is found there comes by a socket.
        let is_free = |place: &&AtomicU64| {
            place.compare_exchange(0, word, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        self.0.iter().find(is_free).map(|place| Notice { place })
    }

    /// The first meeting of these members after the given one.
    fn next(&self, mask: u32, after: u32) -> Option<u32> {
        let words = self.0.iter().map(|place| place.load(Ordering::Relaxed));
        let numbers = words.filter(|word| (word >> 32) as u32 == mask).map(|word| word as u32);
        numbers.filter(|&number| number > after).min()
    }
}

impl Drop for Notice<'_> {
    fn drop(&mut self) {
        self.place.store(0, Ordering::Relaxed);
    }
}

impl Family {
    /// Rank 0's random bytes. Collective.
    pub fn found(bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<Self> {
        let place = Place::new(bootstrap.socket_directory())?;
        let own: [u8; 16 + Token::LENGTH] = random_bytes()?;
        let given = bootstrap.all_gather(&own, timeout)?;
        let split = given.first().and_then(|first| first.split_first_chunk());
        let parts = split.and_then(|(name, token)| Some((*name, Token::from_bytes(token.try_into().ok()?))));
        let (name, token) = parts.ok_or_else(|| Error::Malformed {
            rank: 0,
            reason: "its random bytes for later worlds are cut short".into(),
        })?;
        Ok(Self { place, name, token, served: AtomicU32::new(0), attended: Mutex::default() })
    }

    /// Meets the other `members`, ranks of the old world in their new order, of whom this is `members[index]`.
    /// `notices` are those of the first member, who serves the rendezvous. Errors name ranks of the old world. Waits
    /// no longer when `hopeless` says that there is no use.
    pub fn meet(
        &self,
        members: &[usize],
        index: usize,
        notices: &Notices,
        hopeless: &dyn Fn() -> bool,
        timeout: Duration,
    ) -> Result<Local> {
        let mask = members.iter().fold(0u32, |mask, rank| mask | 1 << rank);
        let deadline = Deadline::unless(timeout, hopeless);
        let met = match index {
            0 => self.serve(members[0], mask, members.len(), notices, &deadline, timeout),
            _ => self.attend(members[0], mask, index, members.len(), notices, &deadline),
        };
        met.map_err(|error| in_old_ranks(error, members))
    }

    fn serve(
        &self,
        server: usize,
        mask: u32,
        size: usize,
        notices: &Notices,
        deadline: &Deadline<'_>,
        timeout: Duration,
    ) -> Result<Local> {
        let number = self.served.fetch_add(1, Ordering::Relaxed) + 1;
        let Some(_notice) = notices.put_up(mask, number) else {
            return Err(Error::Unavailable {
                what: "a meeting for a new communicator".into(),
                reason: format!("{PLACES} others are under way from this rank"),
            });
        };
        let listener = self.place.listen(SockType::Stream, &self.socket_name(server, mask, number))?;
        Local::serve(
            &self.place,
            listener,
            &self.socket_name(server, mask, number),
            &self.token,
            size,
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
        notices: &Notices,
        deadline: &Deadline<'_>,
    ) -> Result<Local> {
        loop {
            // Asked before looking, so that the last look comes after the limit.
            let turn = deadline.turn();
            let latest = self.attended().get(&(server, mask)).copied().unwrap_or_default();
            if let Some(number) = notices.next(mask, latest) {
                // Nobody: it does not listen yet, or not any more.
                if let Some(reached) =
                    Local::reach(&self.place, &self.socket_name(server, mask, number), &self.token, deadline)?
                {
                    self.attended().insert((server, mask), number);
                    return reached.join(index, size, deadline);
                }
            }
            if turn.is_zero() {
                return Err(Error::Timeout {
                    operation: "rendezvous",
                    epoch: 0,
                    missing: vec![0],
                    waited: deadline.waited(),
                    last_seen: String::new(),
                });
            }
            thread::pause(LOOK_INTERVAL.min(turn));
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

/// The error, with ranks numbered as in the world that they come from: `members`, by their new ranks.
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
