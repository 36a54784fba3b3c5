//! How ranks find each other and swap a few bytes before they share memory.
//!
//! One trait with one collective: [`Bootstrap::all_gather`]. Everything else that start-up needs (a barrier,
//! the exchange of file descriptors) is built on it, so a bootstrap over any transport is a page of code.

mod agree;
mod descriptors;
mod family;
mod join;
mod local;
#[cfg(feature = "mpi")]
mod mpi;
mod place;
mod socket;
#[cfg(test)]
mod testing;
mod threads;
mod world;

use std::path::Path;
use std::time::Duration;

pub(crate) use agree::{agree_on, all_succeeded};
pub(crate) use descriptors::{exchange_descriptors, exchange_several};
pub(crate) use family::{in_old_ranks, Family, Notices};
pub use local::{Local, UniqueId};
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
#[cfg(feature = "mpi")]
pub(crate) use mpi::{Exchanges, Parts, Peers};
pub use threads::Threads;

use crate::error::Result;
use crate::fork;

/// A rank's connection to the other ranks at start-up.
///
/// All ranks call the same methods in the same order.
pub trait Bootstrap: Send + Sync {
    /// This rank, in `0..world_size`.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// Gives `bytes` to every rank and returns every rank's, in rank order. Lengths may differ.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`](crate::Error::Timeout) naming the ranks that did not come within `timeout`, [`Error::PeerLost`](crate::Error::PeerLost)
    /// if one ended. A bootstrap that has failed stays failed.
    fn all_gather(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>>;

    /// Returns when every rank has called it.
    ///
    /// # Errors
    ///
    /// As [`Bootstrap::all_gather`].
    fn barrier(&self, timeout: Duration) -> Result<()> {
        self.all_gather(&[], timeout).map(drop)
    }

    /// Ends a wait of another thread in this object, soon, with any error; the bootstrap has then failed. Where an
    /// implementation cannot, the wait goes on to its timeout.
    fn interrupt(&self) {}

    /// A directory that all ranks share, each by a path of its own, for the sockets by which they pass descriptors. Without one they
    /// have abstract names, which ranks of another network namespace cannot reach. All ranks have one, or none has.
    fn socket_directory(&self) -> Option<&Path> {
        None
    }
}

impl<B: Bootstrap + ?Sized> Bootstrap for std::sync::Arc<B> {
    fn rank(&self) -> usize {
        (**self).rank()
    }

    fn world_size(&self) -> usize {
        (**self).world_size()
    }

    fn all_gather(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        (**self).all_gather(bytes, timeout)
    }

    fn barrier(&self, timeout: Duration) -> Result<()> {
        (**self).barrier(timeout)
    }

    fn interrupt(&self) {
        (**self).interrupt();
    }

    fn socket_directory(&self) -> Option<&Path> {
        (**self).socket_directory()
    }
}

/// Names this process among all: random, and another after a fork. Ranks with the same name share an address space.
pub(crate) fn process_identity() -> Result<[u8; 16]> {
    static RANDOM: std::sync::OnceLock<[u8; 12]> = std::sync::OnceLock::new();
    let random = match RANDOM.get() {
        Some(random) => *random,
        None => {
            let fresh = socket::random_bytes()?;
            *RANDOM.get_or_init(|| fresh)
        }
    };
    let mut identity = [0; 16];
    identity[..12].copy_from_slice(&random);
    // A fork has a copy of the rest, and in another namespace it may have the same id.
    let nonce = fork::nonce(|| Ok(u64::from_ne_bytes(socket::random_bytes()?)))?;
    if let Some(nonce) = nonce {
        identity[..8].copy_from_slice(&nonce.to_ne_bytes());
    }
    identity[12..].copy_from_slice(&std::process::id().to_le_bytes());
    Ok(identity)
}
