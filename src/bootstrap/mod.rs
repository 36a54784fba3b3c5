//! How ranks find each other and exchange small messages before they share memory.
//!
//! The trait requires one collective: [`Bootstrap::all_gather`]. The rest of the start-up (barriers, the exchange of
//! file descriptors) is built on it, so that a bootstrap over another transport needs little code.
//!
//! | bootstrap | ranks |
//! |---|---|
//! | [`Threads`] | threads of one process |
//! | [`Local`] | processes of one machine, which meet at a Unix socket |
//! | `Tcp` (feature `tcp`) | processes of several machines, which meet at an address |
//! | `Mpi` (feature `mpi`) | processes that an MPI launcher started |

mod agree;
mod descriptors;
mod join;
mod lineage;
mod local;
#[cfg(any(feature = "mpi", feature = "tcp"))]
mod location;
#[cfg(feature = "mpi")]
mod mpi;
mod of_node;
mod socket;
mod socket_name;
#[cfg(feature = "tcp")]
mod tcp;
#[cfg(test)]
pub(crate) mod testing;
mod threads;
mod world_state;

use std::path::Path;
use std::time::Duration;

pub(crate) use agree::{agree_on, all_exchanged, all_succeeded};
pub(crate) use descriptors::{exchange_descriptors, exchange_several};
pub(crate) use lineage::{in_old_ranks, Announcements, Lineage};
pub use local::{Local, UniqueId};
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
#[cfg(feature = "mpi")]
pub(crate) use mpi::{Exchanges, Parts, Peers, Started};
pub(crate) use of_node::OfNode;
#[cfg(feature = "tcp")]
pub use tcp::{Secret, Tcp};
pub use threads::Threads;

use crate::error::Result;
use crate::fork;

/// A rank's connection to the other ranks at start-up.
///
/// All ranks call the same methods in the same order.
///
/// ```
/// use std::time::Duration;
/// use fast_allreduce::bootstrap::{Bootstrap, Threads};
/// use fast_allreduce::Result;
///
/// /// Returns the host names of all ranks, in rank order.
/// fn host_names(bootstrap: &dyn Bootstrap, own: &str) -> Result<Vec<String>> {
///     let names = bootstrap.all_gather(own.as_bytes(), Duration::from_secs(10))?;
///     Ok(names.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect())
/// }
///
/// let only = Threads::world(1)?.remove(0);
/// assert_eq!((only.rank(), only.world_size()), (0, 1));
/// assert_eq!(host_names(&only, "node-7")?, ["node-7"]);
/// # Ok::<(), fast_allreduce::Error>(())
/// ```
pub trait Bootstrap: Send + Sync {
    /// Returns this rank, in `0..world_size`.
    fn rank(&self) -> usize;

    /// Returns the number of ranks.
    fn world_size(&self) -> usize;

    /// Sends `bytes` to every rank, and returns the bytes of every rank in rank order. Lengths may differ.
    ///
    /// # Errors
    ///
    /// * [`Error::Timeout`](crate::Error::Timeout) with the ranks that did not call this within `timeout`.
    /// * [`Error::PeerLost`](crate::Error::PeerLost) if a rank ended.
    ///
    /// A bootstrap that has failed stays failed: later calls return the same error.
    fn all_gather(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>>;

    /// Returns when every rank has called this.
    ///
    /// # Errors
    ///
    /// Those of [`Bootstrap::all_gather`]: a timeout or a lost rank.
    ///
    /// ```
    /// use std::time::Duration;
    /// use fast_allreduce::bootstrap::{Bootstrap, Threads};
    ///
    /// let ranks = Threads::world(2)?;
    /// std::thread::scope(|scope| {
    ///     for rank in &ranks {
    ///         scope.spawn(|| rank.barrier(Duration::from_secs(10)).unwrap());
    ///     }
    /// });
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    fn barrier(&self, timeout: Duration) -> Result<()> {
        self.all_gather(&[], timeout).map(drop)
    }

    /// Makes calls of other threads that wait in this bootstrap return an error soon; the bootstrap has then failed.
    /// The default does nothing: the calls wait until their timeout.
    fn interrupt(&self) {}

    /// Returns the directory of the sockets over which ranks pass file descriptors. All ranks share it; the path may
    /// differ by rank. Either all ranks return a directory or none does.
    ///
    /// Without a directory, the sockets have abstract names, which ranks in another network namespace cannot reach.
    fn socket_directory(&self) -> Option<&Path> {
        None
    }

    /// Returns the node of each rank, in rank order, equal on all ranks. Ranks with equal numbers are on one machine
    /// and can pass file descriptors to each other. The default says that all are on one.
    ///
    /// GPUs of one NVLink domain can be on several machines, between which they share memory by fabric handles: see
    /// `Sharing::Fabric` of the CUDA device. Ranks on other nodes are not watched: if one ends, calls that wait for it
    /// time out.
    ///
    /// ```
    /// use fast_allreduce::bootstrap::{Bootstrap, Threads};
    ///
    /// assert_eq!(Threads::world(2)?[0].nodes(), [0, 0]);
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    fn nodes(&self) -> Vec<usize> {
        vec![0; self.world_size()]
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

    fn nodes(&self) -> Vec<usize> {
        (**self).nodes()
    }
}

/// Returns a random identity of this process; a fork gets another one. Ranks with equal identities share an address
/// space.
pub(crate) fn process_identity() -> Result<[u8; 16]> {
    // A fork may have the same process id in another namespace.
    let nonce = fork::nonce(|| socket::random_bytes().map(u64::from_ne_bytes))?;
    let mut identity = [0; 16];
    identity[..8].copy_from_slice(&nonce.to_ne_bytes());
    identity[8..12].copy_from_slice(&std::process::id().to_le_bytes());
    Ok(identity)
}
