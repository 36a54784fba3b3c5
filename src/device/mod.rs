//! Devices: where a rank's memory is allocated and its kernels run.
//!
//! Each device has a folder here. All devices run the same kernels on the same region layout. They differ in how
//! memory is allocated and shared, and in how a kernel is started.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod host;

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

pub use host::Host;

use crate::abi::{FaFused, FaGatheredRows, FaLaunch, FaShardedNorm, FaStatus, FaTransfers};
use crate::bootstrap::Bootstrap;
use crate::error::{Error, Result};
use crate::plan::{Costs, DeviceKind, Machine, Packing, Plan};
use crate::region::{Channels, TableRow};
use crate::topology::LinkClass;

/// A device that a [`Communicator`](crate::Communicator) can run on.
///
/// The trait is sealed: only this crate implements it. It is implemented by [`Host`] and, with the feature `cuda`, by
/// `Cuda`.
///
/// ```
/// use fast_allreduce::{device::Device, Host};
///
/// assert_eq!(Host::NAME, "host");
/// ```
pub trait Device: sealed::Device {
    /// Name of the device, as on command lines.
    const NAME: &'static str;

    /// Kind of device, which selects the plans.
    const KIND: DeviceKind;

    /// Default of [`Builder::max_bytes`](crate::Builder::max_bytes).
    const DEFAULT_MAX_BYTES: usize;

    /// Returns the facts by which a tuning file identifies this machine.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] if the CUDA driver fails. The host returns no error.
    ///
    /// ```
    /// use fast_allreduce::{device::Device, Host};
    ///
    /// println!("{:?}", Host::new().machine()?);
    /// # Ok::<_, fast_allreduce::Error>(())
    /// ```
    fn machine(&self) -> Result<Machine>;

    /// Returns the worst link between any two ranks of the communicator; before it is built,
    /// [`LinkClass::SameDevice`]. On the host it is always that. If the ranks share pinned
    /// host memory, it is [`LinkClass::Unreachable`], whatever connects their GPUs.
    ///
    /// ```
    /// use fast_allreduce::topology::LinkClass;
    /// use fast_allreduce::{device::Device, Host};
    ///
    /// assert_eq!(Host::new().link(), LinkClass::SameDevice);
    /// ```
    fn link(&self) -> LinkClass;
}

pub(crate) mod sealed {
    use std::any::Any;

    use super::*;

    pub trait Device: Send + Sync + 'static {
        /// Allocation of every rank, mapped by all ranks.
        type Shared: Shared;

        /// Multicast windows of every rank: the switch reduces loads from them and multicasts stores to them (NVLS).
        type Windows: Windows;

        /// Status words, where kernels record a failure and check for an abort.
        type Status: Status;

        /// Stream that orders a call among other work of the device; `()` on the host.
        type Stream<'a>: Copy;

        /// List of this rank's memory that must not be freed before all ranks have closed it.
        type Exports: Exports;

        /// Sizes of packs and mailbox slots.
        const PACKING: Packing;

        /// Sizes of message channels.
        const CHANNELS: Channels;

        /// Messages between pairs of at least this size are read directly from the sender's buffer, if the receiver
        /// can.
        const LEAST_POSTED_BYTES: u64;

        /// Whether receivers can read messages directly from memory of another process.
        const READS_DIRECTLY: bool;

        /// Whether receivers that are threads of the sender's process can read messages directly from unregistered
        /// memory.
        const READS_PRIVATE: bool;

        /// Largest `max_bytes` of a communicator.
        const MAX_BYTES: usize = 1 << 40;

        /// Alignment of inputs that peers read directly; other inputs are staged.
        const SOURCE_ALIGNMENT: u64;

        /// Returns a handle to this rank's list of exported memory; clones share it.
        fn exports(&self) -> Self::Exports;

        /// Returns facts that must be equal on all ranks because plans depend on them.
        fn shared_facts(&self) -> String;

        /// Opens the device again with the same settings, for another communicator.
        fn reopen(&self) -> Result<Self>
        where
            Self: Sized;

        /// Returns the number of ranks of each socket, after [`Self::join`], if the ranks of the world are on several
        /// CPU sockets and each of them has the same number of neighbouring ranks; else 0. Equal on all ranks.
        fn socket_ranks(&self, _world_size: usize) -> usize {
            0
        }

        /// Joins the ranks of a communicator. Called once, before any other method that communicates. Collective.
        fn join(&mut self, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()>;

        /// Checks that the ranks can leave their world and come back. Ranks that share memory in the same way have the
        /// same result.
        ///
        /// # Errors
        ///
        /// [`Error::Unavailable`](crate::Error::Unavailable) with what prevents it.
        fn can_return(&self) -> Result<()> {
            Ok(())
        }

        /// Joins the ranks of another world, some of them new, as the rank that this one was. Collective.
        fn join_again(&self, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()>;

        /// Allocates this rank's part of memory that other ranks have already. [`Device::share_again`] maps theirs.
        fn allocate_part(&self, bytes: usize, rank: usize, world_size: usize) -> Result<Self::Shared>;

        /// Prepares to map the peers' parts of memories again, where they were. Collective. The result maps them, and
        /// is called after this has succeeded on all ranks.
        fn share_again<'a>(
            &self,
            memories: &'a [Arc<Self::Shared>],
            bootstrap: &dyn Bootstrap,
            timeout: Duration,
        ) -> Result<Box<dyn FnOnce() -> Result<()> + 'a>>;

        /// Returns the rows that the device itself has in the table of registered buffers, for the table of another
        /// world.
        fn own_rows(&self) -> Vec<(usize, TableRow)> {
            Vec::new()
        }

        /// Allocates the regions: `bytes` zeroed bytes on every rank, mapped on all ranks. Collective: it succeeds on
        /// every rank or on none.
        fn share(&self, bytes: usize, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<Self::Shared>;

        /// Allocates the regions of a world that is formed again. [`Shared::settle`] is called when they are to be
        /// used.
        fn share_for_return(
            &self,
            bytes: usize,
            bootstrap: &dyn Bootstrap,
            timeout: Duration,
        ) -> Result<Self::Shared>;

        /// Allocates as [`Device::share`] does, but memory for registered buffers: see [`Shared::make_private`].
        fn share_symmetric(
            &self,
            bytes: usize,
            bootstrap: &dyn Bootstrap,
            timeout: Duration,
        ) -> Result<Self::Shared>;

        /// Allocates a window of `bytes` zeroed bytes on every rank, and one address that reaches all windows.
        /// Collective: it succeeds on every rank or on none; the error then says why.
        fn share_windows(
            &self,
            bytes: usize,
            bootstrap: &dyn Bootstrap,
            timeout: Duration,
        ) -> Result<Self::Windows>;

        /// Closes the mappings of the peers' memory. After all ranks have done so, frees this rank's memory.
        /// Collective. After an error the memory is released as if it had been dropped.
        fn free(&self, memory: Self::Shared, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()>;

        /// Measures costs of the machine between two ranks, for the choice between built-in plans. It uses `bytes`
        /// bytes from `offset` on, in memory that all ranks have mapped and no kernel has used; they are 0 before and
        /// after. Takes a few milliseconds at most. Collective. Returns `None` on all ranks if nothing could be
        /// measured.
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

        /// Waits until the kernels of all calls that have returned have ended.
        ///
        /// # Errors
        ///
        /// [`Error::Unavailable`](crate::Error::Unavailable) if the device does not permit the wait now, as during a
        /// capture; [`Error::Driver`](crate::Error::Driver).
        fn wait_for_calls(&self) -> Result<()>;

        /// Forgets the caller's streams, when there are no more calls. If the calls have not ended, or that is not
        /// known, [`wait_for_calls`](Self::wait_for_calls) fails from now on.
        fn forget_streams(&self, _have_ended: bool) {}

        /// Returns whether the device has failed permanently: it runs no work any more.
        fn is_lost(&self) -> bool {
            false
        }

        /// Returns a probe that says, without waiting, whether the kernels of all calls that were not captured have
        /// ended. It is used when they cannot be waited for. `rank` is this rank; `epochs` is the byte offset of the
        /// blocks' epochs in its region; they were `first` before the first launch.
        fn ended_probe(&self, _region: &Self::Shared, _rank: usize, _epochs: usize, _first: u32) -> Probe {
            Box::new(|| true)
        }

        /// Returns the status words of this rank, whose region is `region`. On GPUs they are those of the region of
        /// before, if there was one.
        fn status(&self, region: &Self::Shared) -> Result<Self::Status>;

        /// Writes to this rank's part of shared memory while no kernel uses it.
        ///
        /// # Safety
        ///
        /// `address..address + bytes.len()` is in memory of this rank that `share` returned.
        unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<()>;

        /// Returns the maximum number of blocks of a launch: the number that each rank can run at once. Equal on all
        /// ranks.
        fn most_blocks(&self) -> usize;

        /// Releases this communicator's reservation of the device for other communicators, although its memory stays
        /// allocated until the process ends.
        fn leave(&self) {}

        /// Starts a kernel; on the host, runs it until it ends. The kernel records a failure in the status.
        ///
        /// # Safety
        ///
        /// Until the kernel ends, all addresses in `launch` are valid for the kernel's accesses.
        unsafe fn launch(
            &self,
            launch: &mut FaLaunch,
            plan: &Plan,
            operands: Operands<'_>,
            stream: Self::Stream<'_>,
        ) -> Result<()>;
    }

    /// Returns the error of communicators whose ranks cannot leave their world and come back.
    pub fn cannot_return(reason: impl Into<String>) -> Error {
        let what = "suspending a communicator, or joining its ranks again".into();
        Error::Unavailable { what, reason: reason.into() }
    }

    /// Query that can be repeated.
    pub type Probe = Box<dyn Fn() -> bool + Send>;

    /// Additional operands of some launches.
    #[derive(Debug, Clone, Copy)]
    pub enum Operands<'a> {
        /// Launches of collectives have none.
        None,
        /// Messages of a launch of transfers.
        Transfers(&'a FaTransfers),
        /// Operands of an epilogue, such as a residual and a norm.
        Fused(&'a FaFused),
        /// Rows of an all-gather.
        Gathered(&'a FaGatheredRows),
        /// Rows of a sharded norm.
        Sharded(&'a FaShardedNorm),
    }

    impl Operands<'_> {
        /// Returns the operands' address; null if there are none.
        pub fn address(self) -> *const c_void {
            match self {
                Self::None => std::ptr::null(),
                Self::Transfers(transfers) => std::ptr::from_ref(transfers).cast(),
                Self::Fused(fused) => std::ptr::from_ref(fused).cast(),
                Self::Gathered(rows) => std::ptr::from_ref(rows).cast(),
                Self::Sharded(rows) => std::ptr::from_ref(rows).cast(),
            }
        }
    }

    /// Allocation of this rank and its peers' counterparts.
    pub trait Shared: Send + Sync {
        /// Returns the address of `rank`'s memory in this process; 0 if there is no such rank.
        fn address(&self, rank: usize) -> u64;

        /// Detaches this rank's part after a failed launch: it becomes private memory at the same address with the
        /// same contents, and peers continue to read the old pages. Nobody writes the memory meanwhile. Does nothing
        /// on devices whose kernels ensure this themselves.
        fn make_private(&self) {}

        /// Returns whether the memory is private, so that peers do not see this rank's writes.
        fn is_private(&self) -> bool {
            false
        }

        /// Returns whether [`Device::share_again`] can share this rank's part.
        fn can_be_shared_again(&self) -> bool;

        /// Returns whether the peers' parts are mapped.
        fn has_peers(&self) -> bool;

        /// Closes the mappings of the peers' parts; their addresses stay valid.
        fn close_peers(&self) -> Result<()>;

        /// Returns the size of this rank's part.
        fn own_bytes(&self) -> usize;

        /// [`Shared::close_peers`] of a region, where its addresses outlive it: on GPUs, graphs have them.
        fn unmap_peers(&self) -> Result<()> {
            Ok(())
        }

        /// Gives back this rank's part of a region, which no peer has mapped any more, where its address outlives it.
        fn give_back(&self) -> Result<()> {
            Ok(())
        }

        /// Moves a region of [`Device::share_for_return`] to the addresses of the one before, which is not used any
        /// more, if the device keeps them.
        fn settle(&self) -> Result<()> {
            Ok(())
        }
    }

    /// This rank's window, and the multicast address of all windows.
    pub trait Windows: Send + Sync {
        /// Returns the address of this rank's window.
        fn own(&self) -> u64;

        /// Returns the multicast address: a load returns the sum over all ranks' windows, and a store writes to all
        /// of them.
        fn multicast(&self) -> u64;
    }

    /// Devices without multicast have no value of this type.
    impl Windows for std::convert::Infallible {
        fn own(&self) -> u64 {
            match *self {}
        }

        fn multicast(&self) -> u64 {
            match *self {}
        }
    }

    /// List of exported memory, which it keeps allocated.
    pub trait Exports: Send + Sync {
        /// Returns whether nothing has been exported.
        fn is_empty(&self) -> bool;

        /// Takes the memory out of the list; it is freed when the result is dropped.
        fn take(&self) -> Box<dyn Any + Send>;

        /// Returns whether the device is lost, see [`Device::is_lost`]: mappings of other processes' memory could not
        /// be closed.
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

    /// Status words of a rank, which its kernels and this process access atomically.
    pub trait Status: Send + Sync {
        /// Returns the address for this process, valid as long as self lives.
        fn host_pointer(&self) -> *mut FaStatus;

        /// Returns the address of the same words for kernels.
        fn device_address(&self) -> u64;
    }
}
