//! The CUDA device: ranks have a GPU each (or share one), memory is shared by CUDA IPC, by file descriptor or within a process,
//! kernels come from the embedded fatbin. The driver is loaded at run time.

#[doc(hidden)]
pub mod api;
pub(crate) mod capture;
mod copies;
pub(crate) mod current;
pub(crate) mod driver;
mod graph;
mod graph_rows;
mod handle;
mod helper_streams;
mod identity;
mod kernels;
mod links;
mod machine;
mod memory;
mod multicast;
mod order;
pub(crate) mod pinned;
#[cfg(feature = "probes")]
#[doc(hidden)]
pub mod probes;
mod programmatic;
mod progress;
mod residency;
mod returned;
mod sharing;
mod stream_context;
mod world;

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use cudarc::driver::{sys, CudaContext, CudaStream};

use self::copies::Copies;
use self::driver::driver;
use self::graph_rows::GraphRows;
pub use self::handle::Sharing;
use self::helper_streams::HelperStreams;
use self::identity::Identity;
use self::kernels::Kernels;
use self::links::DeviceLinks;
pub use self::multicast::CudaWindows;
use self::order::Calls;
use self::pinned::Pinned;
use self::programmatic::Programmatic;
use self::returned::Owner;
pub use self::sharing::{CudaExports, CudaMemory};
pub use self::world::{CudaWorld, RegionMemory, WorldCall, WorldPlan, WorldRank};
use super::{sealed, Device};
use crate::abi::{self, FaLaunch, FaStatus};
use crate::bootstrap::{all_succeeded, process_identity, Bootstrap};
use crate::error::{Error, Result};
use crate::plan::{thresholds, DeviceKind, Machine, Packing, Plan};
use crate::region::Channels;
use crate::topology::{LinkClass, Topology};

/// A GPU as a device.
///
/// ```no_run
/// use fast_allreduce::{bootstrap::Local, Communicator, Cuda};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let local = Local::from_env()?.ok_or("not started by a launcher")?;
/// let communicator = Communicator::builder().build(Cuda::open(0)?, local)?;
/// # Ok(())
/// # }
/// ```
pub struct Cuda {
    context: Arc<CudaContext>,
    default_stream: Arc<CudaStream>,
    kernels: Arc<Kernels>,
    copies: Arc<Copies>,
    pub(crate) helper_streams: HelperStreams,
    exports: CudaExports,
    process: [u8; 16],
    sharing: Option<Sharing>,
    /// The kind that worked first, used from then on.
    chosen: OnceLock<Sharing>,
    world: DeviceLinks,
    graph_registration: bool,
    max_blocks: Option<usize>,
    one_at_a_time: bool,
    wants_programmatic: bool,
    programmatic: Programmatic,
    graph_rows: Mutex<GraphRows>,
    pub(crate) calls: Calls,
    owner: Owner,
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cuda")
            .field("ordinal", &self.context.ordinal())
            .field("sharing", &self.chosen.get())
            .finish_non_exhaustive()
    }
}

impl Cuda {
    /// The GPU with that ordinal, in its primary context.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] without a driver or without kernels in this build, [`Error::Driver`] without such a device.
    pub fn open(ordinal: usize) -> Result<Self> {
        driver::require()?;
        Self::new(CudaContext::new(ordinal).map_err(driver("cuDevicePrimaryCtxRetain"))?)
    }

    /// The GPU of a context.
    ///
    /// # Errors
    ///
    /// As [`Cuda::open`].
    pub fn new(context: Arc<CudaContext>) -> Result<Self> {
        let kernels = Kernels::of(&context)?;
        let copies = Arc::new(Copies::new(&context)?);
        Ok(Self {
            default_stream: context.default_stream(),
            exports: CudaExports::new(&copies),
            helper_streams: HelperStreams::new(&context),
            calls: Calls::new(&context, &copies),
            context,
            copies,
            owner: Owner::new(kernels.context_id()),
            kernels,
            process: process_identity()?,
            sharing: None,
            chosen: OnceLock::new(),
            world: DeviceLinks::default(),
            graph_registration: false,
            max_blocks: None,
            one_at_a_time: false,
            wants_programmatic: false,
            programmatic: Programmatic::default(),
            graph_rows: Mutex::default(),
        })
    }

    /// Shares memory in one way only, instead of the first that a real exchange of data shows to work.
    #[must_use]
    pub fn sharing(mut self, sharing: Sharing) -> Self {
        self.sharing = Some(sharing);
        self
    }

    /// Lets pulled calls that are captured into graphs read the peers' inputs where they are, instead of from staging, where
    /// that memory can be exported. [`Communicator::register_graph_buffers`](crate::Communicator::register_graph_buffers) is then
    /// due after capture, on all ranks, before the first replay.
    ///
    /// A rank has room for 2,048 different inputs at a time. An input has its place until all graphs with calls from it have been
    /// destroyed, and the next `register_graph_buffers` has told the other ranks so. Calls from inputs beyond that are captured with a
    /// copy, as without this setting; the first one is told by a warning.
    #[must_use]
    pub fn graph_registration(mut self, enabled: bool) -> Self {
        self.graph_registration = enabled;
        self
    }

    /// The most blocks of a launch on any rank, at least 1. All communicators of a process that are alive have room on a GPU at the
    /// same time, so that they can be used at the same time: unless this is set, each takes half of the multiprocessors that those
    /// before it have left, at most 64; less where several of its ranks share the GPU. Where there are none, a communicator is refused
    /// ([`Error::Unavailable`]); whoever needs many gives each of them fewer, or has them [one at a time](Cuda::one_at_a_time). What is split off, and what is left after a rank was
    /// lost, counts as another communicator, beside the first until that is dropped.
    #[must_use]
    pub fn max_blocks(mut self, blocks: usize) -> Self {
        self.max_blocks = Some(blocks.max(1));
        self
    }

    /// Promises that no call of the communicator runs on the GPU at the same time as one of another communicator of this process: that
    /// they are on one stream, say, on all ranks. It may then use all multiprocessors, and takes none from others. Where the promise
    /// is broken, calls may wait for each other until they give up.
    #[must_use]
    pub fn one_at_a_time(mut self) -> Self {
        self.one_at_a_time = true;
        self
    }

    /// Launches with the attribute of programmatic dependent launch: a call's kernel may become resident while the kernel before it in
    /// the stream ends, and waits for that end before it touches memory; and so may the next kernel while a call's ends, if that is
    /// launched with the attribute. In captures too, from CUDA 12.3 on. Without effect on GPUs older than compute capability 9.0, and
    /// where the driver has made the kernels from PTX of an older one. No GPU has run it yet: off unless enabled.
    ///
    /// Whoever enables it promises that every kernel which is launched with the attribute on the streams of calls executes
    /// `griddepcontrol.wait` (`cudaGridDependencySynchronize`) before it ends: the wait of a call is for the kernel before it, and covers
    /// those before that only if it waited for them.
    #[must_use]
    pub fn programmatic_launch(mut self, enabled: bool) -> Self {
        self.wants_programmatic = enabled;
        self
    }

    /// How memory is shared, once a communicator has been made.
    pub fn chosen_sharing(&self) -> Option<Sharing> {
        self.chosen.get().copied()
    }

    /// The GPUs of this machine and their links as NVML tells them, and whether each may access another's memory as the
    /// driver does, for those that this process sees.
    ///
    /// # Errors
    ///
    /// As [`Topology::discover`]; [`Error::Driver`].
    pub fn topology() -> Result<Topology> {
        links::topology()
    }

    /// The context.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    pub(crate) fn default_stream(&self) -> &Arc<CudaStream> {
        &self.default_stream
    }

    pub(crate) fn bind(&self) -> Result<()> {
        driver::bind(&self.context)
    }

    /// Whether memory of other processes stays open here, whatever is dropped: the context is lost.
    pub(crate) fn keeps_open_what_it_drops(&self) -> bool {
        !self.world.same_process && self.copies.is_broken()
    }

    /// Refuses an address that is not memory of this device; an [`Error::Driver`] says nothing of it.
    pub(crate) fn check_address(&self, which: &'static str, address: u64, element_size: usize) -> Result<()> {
        let problem = match driver::device_of(address)? {
            Some(ordinal) if ordinal == self.context.ordinal() => return Ok(()),
            Some(_) => "memory of another device",
            None => "not device memory",
        };
        Err(Error::InvalidPointer { which, address: address as usize, problem, element_size })
    }
}

impl Device for Cuda {
    const NAME: &'static str = Self::KIND.name();
    const KIND: DeviceKind = DeviceKind::Cuda;
    const DEFAULT_MAX_BYTES: usize = thresholds::GPU_MAX_BYTES;

    fn machine(&self) -> Result<Machine> {
        self.bind()?;
        machine::of_context()
    }

    fn link(&self) -> LinkClass {
        self.world.link
    }
}

impl sealed::Device for Cuda {
    type Shared = CudaMemory;
    type Windows = CudaWindows;
    type Status = CudaStatus;
    type Stream<'a> = sys::CUstream;
    type Exports = CudaExports;

    // Kernels count packs in 32 bits, with room for the stride of a grid.
    const MAX_BYTES: usize = 1 << 35;

    const PACKING: Packing = Packing {
        pack_bytes: abi::FA_CUDA_PACK_BYTES as usize,
        slot_bytes: abi::FA_CUDA_SLOT_BYTES as usize,
        sentinel_bytes: abi::FA_CUDA_SENTINEL_BYTES as usize,
    };

    const CHANNELS: Channels = Channels {
        bytes: thresholds::GPU_CHANNEL_BYTES,
        chunk_bytes: thresholds::GPU_CHUNK_BYTES,
        least_slots: 2,
        stripes: abi::FA_MAX_STRIPES as usize,
        packet_bytes: thresholds::GPU_PACKET_BYTES,
    };

    const LEAST_POSTED_BYTES: u64 = thresholds::GPU_LEAST_POSTED_BYTES;

    const READS_DIRECTLY: bool = false;

    const READS_PRIVATE: bool = false;

    // The hot set has no code for parts of packs.
    const SOURCE_ALIGNMENT: u64 = abi::FA_CUDA_PACK_BYTES as u64;

    fn exports(&self) -> CudaExports {
        self.exports.clone()
    }

    fn shared_facts(&self) -> String {
        let sharing = self.sharing.map_or("automatic", Sharing::name);
        format!("sharing by {sharing}")
    }

    fn again(&self) -> Result<Self> {
        let mut device = Self::new(Arc::clone(&self.context))?;
        (device.sharing, device.max_blocks, device.one_at_a_time) =
            (self.sharing, self.max_blocks, self.one_at_a_time);
        device.wants_programmatic = self.wants_programmatic;
        Ok(device.graph_registration(self.graph_registration))
    }

    fn join(&mut self, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()> {
        let own = Identity::of(&self.context, self.process);
        self.world = DeviceLinks::meet(own, self.max_blocks, self.one_at_a_time, bootstrap, timeout)?;
        let possible = match self.wants_programmatic {
            true => Programmatic::wherever_possible(&self.kernels),
            false => Ok(Programmatic::Nowhere),
        };
        self.programmatic = all_succeeded(possible, bootstrap, timeout)?;
        Ok(())
    }

    fn share(&self, bytes: usize, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<CudaMemory> {
        self.share_by_any(bytes, bootstrap, timeout)
    }

    fn share_windows(
        &self,
        bytes: usize,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<CudaWindows> {
        self.share_by_multicast(bytes, bootstrap, timeout)
    }

    fn free(&self, memory: CudaMemory, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()> {
        self.free_shared(memory, bootstrap, timeout)
    }

    fn wait_for_calls(&self) -> Result<()> {
        self.calls.wait_for_last_call()
    }

    fn is_lost(&self) -> bool {
        self.copies.is_broken()
    }

    fn ended_probe(&self, region: &CudaMemory, rank: usize, epochs: usize, first: u32) -> sealed::Probe {
        let (memory, offset) = region.part(rank);
        self.calls.ended_probe(Arc::clone(memory), memory.address() + offset + epochs as u64, first)
    }

    fn status(&self, _region: &CudaMemory) -> Result<CudaStatus> {
        Pinned::allocate(&self.context, size_of::<FaStatus>()).map(CudaStatus)
    }

    unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        // Kernels of calls that have returned may still run, and read what is written here.
        self.calls.wait_for_last_call()?;
        // SAFETY: the caller's: the range lies in an allocation of this rank.
        unsafe { self.copies.write(address, bytes) }
    }

    fn most_blocks(&self) -> usize {
        self.world.blocks
    }

    fn leave(&self) {
        if let Some(reservation) = &self.world.reservation {
            reservation.keep(0);
        }
    }

    unsafe fn launch(
        &self,
        launch: &mut FaLaunch,
        plan: &Plan,
        operands: sealed::Operands<'_>,
        stream: sys::CUstream,
    ) -> Result<()> {
        let function = self.kernels.for_launch(launch);
        let second = operands.address().cast_mut();
        let mut both = [std::ptr::from_mut(launch).cast(), second];
        let (parameters, extra) = (both.as_mut_ptr(), std::ptr::null_mut());
        let (blocks, threads) = (plan.blocks as u32, plan.threads as u32);
        // SAFETY: the caller's: the stream is alive.
        if unsafe { self.programmatic.is_for(stream) }? {
            // SAFETY: as below; kernels wait where that is in force.
            unsafe { programmatic::launch(function, (blocks, threads), stream, parameters) }
                // SAFETY: the caller's: the stream is alive.
                .map_err(|code| unsafe { self.refusal("cuLaunchKernelEx", stream, code) })?;
            self.calls.progress.count_launch();
            return Ok(());
        }
        // SAFETY: the function takes one FaLaunch by value, and those with operands take them after it, which the driver copies; the
        // addresses in them are the caller's.
        unsafe { api::cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, extra) }
            // SAFETY: the caller's: the stream is alive.
            .map_err(|code| unsafe { self.refusal("cuLaunchKernel", stream, code) })?;
        self.calls.progress.count_launch();
        Ok(())
    }
}

/// The status words of a rank, in pinned host memory: the host reads and writes them while a kernel spins.
pub struct CudaStatus(Pinned);

impl sealed::Status for CudaStatus {
    fn host_pointer(&self) -> *mut FaStatus {
        self.0.host_pointer().cast()
    }

    fn device_address(&self) -> u64 {
        self.0.device_address()
    }
}
