//! Where a rank's memory lives and its kernels run.
//!
//! A device is one folder beside this file. All of them run the same kernels over the same region layout; what differs is
//! how memory is allocated and shared, and how a kernel is started.

pub mod host;

use std::time::Duration;

use crate::abi::FaLaunch;
use crate::bootstrap::Bootstrap;
use crate::error::Result;
use crate::plan::{Call, Plan};

/// A device that a [`Communicator`](crate::Communicator) can run on.
///
/// The trait is sealed: its methods are between the crate and its devices.
pub trait Device: sealed::Device {
    /// What orders a call among other work of the device: `()` on the host, a stream on a GPU.
    type Stream: Copy + Send;

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
        /// Memory that peers can map.
        type Shared: Shared;

        const PACKING: Packing;

        /// Facts that must be equal on all ranks because plans depend on them.
        fn shared_facts(&self) -> u64;

        /// Allocates zeroed memory that peers can map.
        fn allocate(&self, bytes: usize) -> Result<Self::Shared>;

        /// Gives every rank access to every rank's memory. Collective.
        fn map_peers(
            &self,
            own: &mut Self::Shared,
            bootstrap: &dyn Bootstrap,
            timeout: Duration,
        ) -> Result<()>;

        /// The algorithm, grid and piece size for a call. Depends on nothing that ranks do not share.
        fn plan(&self, call: &Call) -> Plan;

        /// Prepares for a world: called once, before the first launch.
        fn set_world(&mut self, world_size: usize);

        /// Runs a kernel; on the host, to its end. Returns the kernel's enum FaFailure.
        ///
        /// # Safety
        ///
        /// All addresses in `launch` are valid for what the kernel does with them.
        unsafe fn launch(&self, launch: &mut FaLaunch) -> Result<u32>;
    }

    /// One allocation of this rank and its peers' counterparts.
    pub trait Shared: Send + Sync {
        /// Address of `rank`'s memory in this process; 0 beyond the world and before `map_peers`.
        fn address(&self, rank: usize) -> u64;
    }
}
