//! Where a rank's memory lives and its kernels run.
//!
//! A device is one folder beside this file. All of them run the same kernels over the same region layout; what differs is
//! how memory is allocated and shared, and how a kernel is started.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod host;

use std::ffi::c_void;
use std::time::Duration;

pub use host::Host;

use crate::abi::{FaFused, FaLaunch, FaStatus, FaTransfers};
use crate::bootstrap::Bootstrap;
use crate::error::Result;
use crate::plan::{Costs, DeviceKind, Machine, Packing, Plan};
use crate::region::Channels;
use crate::topology::LinkClass;

/// A device that a [`Communicator`](crate::Communicator) can run on.
///
/// The trait is sealed: its methods are between the crate and its devices.
pub trait Device: sealed::Device {
    /// Its name, as on command lines.
    const NAME: &'static str;

    /// Whose plans it takes.
    const KIND: DeviceKind;

    /// `max_bytes` of a communicator that does not say otherwise.
    const DEFAULT_MAX_BYTES: usize;

    /// The facts by which a tuning file knows this machine.
    ///
    /// # Errors
    ///
    /// Those of asking the device.
    fn machine(&self) -> Result<Machine>;

    /// The worst link between any two ranks, once a communicator has been made. The host's ranks are all on one device.
    fn link(&self) -> LinkClass;
}

pub(crate) mod sealed {
    use std::any::Any;

    use super::*;

    pub trait Device: Send + Sync + 'static {
        /// An allocation of every rank, mapped by all.
        type Shared: Shared;

        /// Memory of every rank that the switch between devices reduces from and stores to.
        type Windows: Windows;

        /// Where kernels record a failure and look for an abort.
        type Status: Status;

        /// What orders a call among other work of the device: `()` on the host, a stream on a GPU.
        type Stream<'a>: Copy;

        /// Memory of this rank that must not be freed before all ranks have closed it.
        type Exports: Exports;

        const PACKING: Packing;

        const CHANNELS: Channels;

        /// Messages between pairs from this size on are read where they are, if the receiver can.
        const LEAST_POSTED_BYTES: u64;

        /// Whether receivers may read messages in the memory of another process.
        const READS_DIRECTLY: bool;

        /// Whether receivers that are threads of the sender's process may read messages in memory that is not registered.
        const READS_PRIVATE: bool;

        /// The largest `max_bytes` of a communicator.
        const MAX_BYTES: usize = 1 << 40;

        /// What the address of an input is a multiple of if peers read it where it is; others are staged.
        const SOURCE_ALIGNMENT: u64;

        /// What has been exported so far, and will be: all clones are one list.
        fn exports(&self) -> Self::Exports;

        /// Facts that must be equal on all ranks because plans depend on them.
        fn shared_facts(&self) -> String;

        /// Another device of the same kind and settings, for another world.
        fn reopen(&self) -> Result<Self>
        where
            Self: Sized;

        /// Learns of its world: called once, before all else. Collective.
        fn join(&mut self, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()>;

        /// Allocates `bytes` zeroed bytes on every rank and maps them on all. Collective: it succeeds on every rank or on
        /// none.
        fn share(&self, bytes: usize, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<Self::Shared>;

        /// The same for memory that may be registered: see [`Shared::make_private`].
        fn share_symmetric(
            &self,
            bytes: usize,
            bootstrap: &dyn Bootstrap,
            timeout: Duration,
        ) -> Result<Self::Shared> {
            self.share(bytes, bootstrap, timeout)
        }

        /// Allocates `bytes` zeroed bytes on every rank, with an address that means all of them. Collective: it succeeds on every
        /// rank or on none, and then says why not.
        fn share_windows(
            &self,
            bytes: usize,
            bootstrap: &dyn Bootstrap,
            timeout: Duration,
        ) -> Result<Self::Windows>;

        /// Closes the mappings of the peers' memory and, when all ranks have, frees this rank's. Collective. On an error the
        /// memory goes as if it had been dropped.
        fn free(&self, memory: Self::Shared, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()>;

        /// What two ranks measure of the machine, for the choice between built-in plans, in memory that all ranks have mapped and no
        /// kernel has used: `bytes` from `offset` on, which are 0 before and after. Takes some milliseconds at most; collective.
        /// `None` where nothing could be measured, on all ranks alike.
        fn costs(
            &self,
            _memory: &Self::Shared,
            _offset: usize,
            _bytes: usize,
            _bootstrap: &dyn Bootstrap,
            _timeout: Duration,
        ) -> Result<Option<Costs>> {
            Ok(None)
        }

        /// Returns when the kernels of all calls that have returned have ended.
        ///
        /// # Errors
        ///
        /// [`Error::Unavailable`](crate::Error::Unavailable) where that cannot be waited for now; what the device said.
        fn wait_for_calls(&self) -> Result<()>;

        /// Whether the device has failed for good: nothing runs there any more, and nothing will.
        fn is_lost(&self) -> bool {
            false
        }

        /// What tells, without waiting, whether the kernels of all calls that were not captured have ended, for when they cannot be
        /// waited for. `rank` is this one; its region has the epochs of blocks at the byte `epochs`, which were `first` before the
        /// first launch.
        fn ended_probe(&self, _region: &Self::Shared, _rank: usize, _epochs: usize, _first: u32) -> Probe {
            Box::new(|| true)
        }

        /// The status of this rank, whose region is `region`.
        fn status(&self, region: &Self::Shared) -> Result<Self::Status>;

        /// Writes to this rank's part of shared memory, while no kernel uses it.
        ///
        /// # Safety
        ///
        /// `address..address + bytes.len()` lies in memory of this rank that `share` returned.
        unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<()>;

        /// The most blocks of a launch, in the device's world: those that each rank can run at once. Equal on all ranks.
        fn most_blocks(&self) -> usize;

        /// Lets other communicators have what this one has of the device, though its memory stays to the end of the process.
        fn leave(&self) {}

        /// Starts a kernel; on the host, runs it to its end. A failure of the kernel is in the status.
        ///
        /// # Safety
        ///
        /// All addresses in `launch` are valid for what the kernel does with them, until it ends.
        unsafe fn launch(
            &self,
            launch: &mut FaLaunch,
            plan: &Plan,
            operands: Operands<'_>,
            stream: Self::Stream<'_>,
        ) -> Result<()>;
    }

    /// A question that may be asked again and again.
    pub type Probe = Box<dyn Fn() -> bool + Send>;

    /// What some launches come with.
    #[derive(Debug, Clone, Copy)]
    pub enum Operands<'a> {
        None,
        /// Of a launch of transfers.
        Transfers(&'a FaTransfers),
        /// Of a launch that goes on with its sums.
        Fused(&'a FaFused),
    }

    impl Operands<'_> {
        /// Null for none.
        pub fn address(self) -> *const c_void {
            match self {
                Self::None => std::ptr::null(),
                Self::Transfers(transfers) => std::ptr::from_ref(transfers).cast(),
                Self::Fused(fused) => std::ptr::from_ref(fused).cast(),
            }
        }
    }

    /// One allocation of this rank and its peers' counterparts.
    pub trait Shared: Send + Sync {
        /// Address of `rank`'s memory in this process; 0 beyond the world.
        fn address(&self, rank: usize) -> u64;

        /// After a launch that failed: from now on this rank's part is its own, at the same address and as it was, and
        /// what peers read of it stays as it is. Nobody writes it meanwhile. Where the device's kernels see to that
        /// themselves, nothing.
        fn make_private(&self) {}

        /// Whether that has been done, so that peers do not see what this rank writes.
        fn is_private(&self) -> bool {
            false
        }
    }

    /// This rank's window, and all ranks' at once.
    pub trait Windows: Send + Sync {
        /// Address of this rank's own.
        fn own(&self) -> u64;

        /// What is loaded there is the sum over all ranks' windows, and what is stored there goes to all.
        fn multicast(&self) -> u64;
    }

    /// Of devices that have none.
    impl Windows for std::convert::Infallible {
        fn own(&self) -> u64 {
            match *self {}
        }

        fn multicast(&self) -> u64 {
            match *self {}
        }
    }

    /// A list of exported memory, which it keeps.
    pub trait Exports: Send + Sync {
        fn is_empty(&self) -> bool;

        /// Gives up what it keeps, to be freed by being dropped.
        fn take(&self) -> Box<dyn Any + Send>;

        /// As [`Device::is_lost`]: mappings of other processes' memory could not be closed.
        fn is_lost(&self) -> bool {
            false
        }
    }

    impl Exports for () {
        fn is_empty(&self) -> bool {
            true
        }

        fn take(&self) -> Box<dyn Any + Send> {
            Box::new(())
        }
    }

    /// A rank's status words, which its kernels and this process access atomically.
    pub trait Status: Send + Sync {
        /// Valid for the life of self.
        fn host_pointer(&self) -> *mut FaStatus;

        /// The same words as kernels address them.
        fn device_address(&self) -> u64;
    }
}
