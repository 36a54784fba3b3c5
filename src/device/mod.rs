//! Where a rank's memory lives and its kernels run.
//!
//! A device is one folder beside this file. All of them run the same kernels over the same region layout; what differs is
//! how memory is allocated and shared, and how a kernel is started.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod host;

use std::time::Duration;

pub use host::Host;

use crate::abi::{FaLaunch, FaStatus};
use crate::bootstrap::Bootstrap;
use crate::error::{Error, Result};
use crate::plan::{Call, Plan};

/// A device that a [`Communicator`](crate::Communicator) can run on.
///
/// The trait is sealed: its methods are between the crate and its devices.
pub trait Device: sealed::Device {
    /// Its name, as on command lines.
    const NAME: &'static str;

    /// `max_bytes` of a communicator that does not say otherwise.
    const DEFAULT_MAX_BYTES: usize;
}

pub(crate) mod sealed {
    use super::*;

    /// Geometry of the device's packs, which the capacity of a region is computed from.
    #[derive(Debug, Clone, Copy)]
    pub struct Packing {
        /// Bytes of a pack.
        pub pack_bytes: usize,
        /// Bytes of the mailbox slot that holds one pack.
        pub slot_bytes: usize,
    }

    pub trait Device: Send + Sync + 'static {
        /// An allocation of every rank, mapped by all.
        type Shared: Shared;

        /// Where kernels record a failure and look for an abort.
        type Status: Status;

        /// What orders a call among other work of the device: `()` on the host, a stream on a GPU.
        type Stream<'a>: Copy;

        /// Memory of this rank that must not be freed before all ranks have closed it.
        type Exports: Exports;

        const PACKING: Packing;

        /// What has been exported so far, and will be: all clones are one list.
        fn exports(&self) -> Self::Exports;

        /// Facts that must be equal on all ranks because plans depend on them.
        fn shared_facts(&self) -> String;

        /// Learns of its world: called once, before all else. Collective.
        fn join(&mut self, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()>;

        /// Allocates `bytes` zeroed bytes on every rank and maps them on all. Collective: it succeeds on every rank or on
        /// none.
        fn share(&self, bytes: usize, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<Self::Shared>;

        /// The status of this rank, whose region is `region`.
        fn status(&self, region: &Self::Shared) -> Result<Self::Status>;

        /// Writes to this rank's part of shared memory, while no kernel uses it.
        ///
        /// # Safety
        ///
        /// `address..address + bytes.len()` lies in memory of this rank that `share` returned.
        unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<()>;

        /// The algorithm, grid and piece size for a call. Depends on nothing that ranks do not share.
        fn plan(&self, call: &Call) -> Plan;

        /// Starts a kernel; on the host, runs it to its end. A failure of the kernel is in the status.
        ///
        /// # Safety
        ///
        /// All addresses in `launch` are valid for what the kernel does with them, until it ends.
        unsafe fn launch(&self, launch: &mut FaLaunch, plan: &Plan, stream: Self::Stream<'_>) -> Result<()>;
    }

    /// One allocation of this rank and its peers' counterparts.
    pub trait Shared: Send + Sync {
        /// Address of `rank`'s memory in this process; 0 beyond the world.
        fn address(&self, rank: usize) -> u64;
    }

    /// A list of exported memory, which it keeps.
    pub trait Exports: Send + Sync {
        fn is_empty(&self) -> bool;

        /// Gives the memory up without freeing it.
        fn leave(&self);
    }

    impl Exports for () {
        fn is_empty(&self) -> bool {
            true
        }

        fn leave(&self) {}
    }

    /// A rank's status words, which its kernels and this process access atomically.
    pub trait Status: Send + Sync {
        /// Valid for the life of self.
        fn host_pointer(&self) -> *mut FaStatus;

        /// The same words as kernels address them.
        fn device_address(&self) -> u64;
    }
}

/// Tells every rank whether a step succeeded on all: one that failed must not leave the others waiting.
///
/// Returns this rank's own error, or [`Error::PeerFailed`] naming the first that failed.
pub(crate) fn all_succeeded<T>(step: Result<T>, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<T> {
    let report = step.as_ref().err().map(Error::to_string).unwrap_or_default();
    let reports = bootstrap.all_gather(report.as_bytes(), timeout)?;
    let value = step?;
    match reports.iter().position(|report| !report.is_empty()) {
        None => Ok(value),
        Some(rank) => {
            Err(Error::PeerFailed { rank, reason: String::from_utf8_lossy(&reports[rank]).into_owned() })
        }
    }
}
