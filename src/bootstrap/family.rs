//! A rendezvous for some of the ranks of a world that has met before, whatever its bootstrap was and whether that still works.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::local::Local;
use super::socket::{random_bytes, Hex, Token};
use super::Bootstrap;
use crate::error::{Error, Result};

/// What all ranks of a world share, and nobody else knows: where the later worlds of its ranks meet.
///
/// Each such world has a socket name made of its ranks, and of how often they have met: ranks that differ on either meet nobody.
pub(crate) struct Family {
    name: [u8; 16],
    token: Token,
    /// How often each list of members, as a mask, has met or tried to; equal on all of them, as they make the same calls.
    tries: Mutex<HashMap<u32, u32>>,
}

impl Family {
    /// Rank 0's random bytes. Collective.
    pub fn found(bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<Self> {
        let own: [u8; 16 + Token::LENGTH] = random_bytes()?;
        let given = bootstrap.all_gather(&own, timeout)?;
        let split = given.first().and_then(|first| first.split_first_chunk());
        let parts = split.and_then(|(name, token)| Some((*name, Token::from_bytes(token.try_into().ok()?))));
        let (name, token) = parts.ok_or_else(|| Error::Malformed {
            rank: 0,
            reason: "its random bytes for later worlds are cut short".into(),
        })?;
        Ok(Self { name, token, tries: Mutex::default() })
    }

    /// Meets the other `members`, ranks of the old world in their new order, of whom this is `members[index]`. The first of
    /// them serves the rendezvous. Errors name ranks of the old world.
    pub fn meet(&self, members: &[usize], index: usize, timeout: Duration) -> Result<Local> {
        let mask = members.iter().fold(0u32, |mask, rank| mask | 1 << rank);
        let number = {
            let mut tries = self.tries.lock().unwrap_or_else(PoisonError::into_inner);
            let tries = tries.entry(mask).or_default();
            *tries += 1;
            *tries
        };
        let name = format!("fast-allreduce-{}-{number:x}-{mask:x}", Hex(&self.name));
        let met = Local::found(name.as_bytes(), &self.token, index, members.len(), timeout);
        met.map_err(|error| in_old_ranks(error, members))
    }
}

/// The error, with ranks numbered as in the world that they come from.
fn in_old_ranks(error: Error, members: &[usize]) -> Error {
    let old = |rank: usize| members.get(rank).copied().unwrap_or(rank);
    match error {
        Error::Timeout { operation, epoch, missing, waited, last_seen } => {
            let missing = missing.into_iter().map(old).collect();
            Error::Timeout { operation, epoch, missing, waited, last_seen }
        }
        Error::PeerLost { rank, reason } => Error::PeerLost { rank: old(rank), reason },
        error => error,
    }
}
