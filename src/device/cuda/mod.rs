//! The CUDA device. Each rank has a GPU, or several ranks share one. Memory is shared by CUDA IPC, by file descriptor
//! (VMM) or, within a process, by pointer. Kernels come from the embedded fatbins. The driver library is loaded at
//! run time.
//!
//! Submodules, from the bottom up: `driver` (checked driver calls), `memory`, `launch`, `world` (facts about the ranks
//! of a communicator), `parts` (what all ranks map). Above them is [`Cuda`], whose methods are here and in `sharing`,
//! `share_probe`, `returning`, `multicast`, `graph` and `stream_context`. `cooperative` runs all ranks in one launch.

mod cooperative;
pub(crate) mod driver;
mod graph;
mod launch;
pub(crate) mod memory;
mod multicast;
mod parts;
#[cfg(feature = "probes")]
#[doc(hidden)]
pub mod probes;
mod returning;
mod share_probe;
mod sharing;
mod stream_context;
mod world;

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use cudarc::driver::{sys, CudaContext, CudaStream};

pub use self::cooperative::{
    CooperativeCall, CooperativePlan, CooperativeRank, CooperativeRanks, RegionMemory,
};
#[doc(hidden)]
pub use self::driver::api;
use self::driver::driver;
use self::launch::graph_rows::GraphRows;
use self::launch::helper_streams::HelperStreams;
use self::launch::kernels::Kernels;
use self::launch::order::Calls;
use self::launch::programmatic::{self, Programmatic};
use self::memory::allocation::not_of_gpu;
use self::memory::returned::Owner;
pub use self::memory::Sharing;
use self::memory::{Copies, Pinned};
pub use self::multicast::CudaWindows;
pub use self::parts::CudaMemory;
use self::parts::KeptRegion;
pub use self::sharing::CudaExports;
use self::world::{Identity, World};
use super::{sealed, Device};
use crate::abi::{self, FaLaunch, FaStatus};
use crate::bootstrap::{all_succeeded, process_identity, Bootstrap};
use crate::error::{Error, Result};
use crate::plan::{thresholds, DeviceKind, Machine, Packing, Plan};
use crate::region::{Channels, TableRow};
use crate::topology::{LinkClass, Topology};

/// Numbers of ranks between which sums of f16, bf16 and f32 by a direct algorithm have kernels of their own. Between
/// others they use kernels for any number of ranks.
pub const HOT_WORLDS: &[usize] = &crate::catalogue::HOT_WORLDS;

/// A GPU that a [`Communicator`](crate::Communicator) runs on.
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
    /// The first kind of sharing that worked. All later allocations use it.
    chosen: OnceLock<Sharing>,
    world: World,
    graph_registration: bool,
    max_blocks: Option<usize>,
    one_at_a_time: bool,
    wants_programmatic: bool,
    programmatic: Programmatic,
    graph_rows: Mutex<GraphRows>,
    pub(crate) calls: Calls,
    returning: Mutex<KeptRegion>,
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
    /// Opens the GPU with this ordinal, in its primary context.
    ///
    /// # Errors
    ///
    /// * [`Error::Unavailable`]: no driver is installed, this build has no kernels, or none for this GPU.
    /// * [`Error::Driver`]: there is no such device, or the driver failed.
    ///
    /// ```no_run
    /// use fast_allreduce::Cuda;
    ///
    /// let device = Cuda::open(0)?.max_blocks(32);
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    pub fn open(ordinal: usize) -> Result<Self> {
        driver::require()?;
        Self::new(CudaContext::new(ordinal).map_err(driver("cuDevicePrimaryCtxRetain"))?)
    }

    /// Uses the GPU of an existing context.
    ///
    /// # Errors
    ///
    /// * [`Error::Unavailable`]: this build has no kernels, or none for this GPU.
    /// * [`Error::Driver`]: the driver failed.
    ///
    /// ```no_run
    /// use cudarc::driver::CudaContext;
    /// use fast_allreduce::Cuda;
    ///
    /// let context = CudaContext::new(0)?;
    /// let device = Cuda::new(context)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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
            world: World::default(),
            graph_registration: false,
            max_blocks: None,
            one_at_a_time: false,
            wants_programmatic: false,
            programmatic: Programmatic::default(),
            graph_rows: Mutex::default(),
            returning: Mutex::default(),
        })
    }

    /// Shares memory by this mechanism only. By default, the ranks take the first mechanism that a real exchange of
    /// data proves to work.
    ///
    /// ```no_run
    /// use fast_allreduce::device::cuda::Sharing;
    /// use fast_allreduce::Cuda;
    ///
    /// let device = Cuda::open(0)?.sharing(Sharing::Ipc);
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    #[must_use]
    pub fn sharing(mut self, sharing: Sharing) -> Self {
        self.sharing = Some(sharing);
        self
    }

    /// Registers the inputs of captured calls: pull algorithms in graphs then read the peers' inputs directly instead
    /// of from staging, if that memory can be exported. After capture and before the first replay, all ranks must
    /// call [`Communicator::register_graph_buffers`](crate::Communicator::register_graph_buffers). Off by default.
    ///
    /// A rank can have 2,048 different inputs registered at a time. The entry of an input is released when all graphs
    /// with calls on it have been destroyed and the next `register_graph_buffers` has notified the other ranks.
    /// Further inputs are captured with a copy into staging, as without this setting; the first one logs a warning.
    ///
    /// ```no_run
    /// use fast_allreduce::Cuda;
    ///
    /// let device = Cuda::open(0)?.graph_registration(true);
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    #[must_use]
    pub fn graph_registration(mut self, enabled: bool) -> Self {
        self.graph_registration = enabled;
        self
    }

    /// Limits the number of blocks of a launch on any rank; at least 1.
    ///
    /// All live communicators of a process have blocks reserved on a GPU at the same time, so that they can run
    /// concurrently. A communicator reserves half of the multiprocessors that earlier ones have left, or an eighth if
    /// several of its ranks share the GPU; at most 64, and at most this limit. If none is left, the communicator is
    /// refused ([`Error::Unavailable`]). Programs with many communicators give each of them fewer blocks, or use them
    /// [one at a time](Cuda::one_at_a_time). A communicator from a split or a shrink counts in addition to its parent
    /// until the parent is dropped.
    ///
    /// ```no_run
    /// use fast_allreduce::Cuda;
    ///
    /// let device = Cuda::open(0)?.max_blocks(16);
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    #[must_use]
    pub fn max_blocks(mut self, blocks: usize) -> Self {
        self.max_blocks = Some(blocks.max(1));
        self
    }

    /// Lets the communicator use all multiprocessors and reserve none. The caller promises that, on every rank, no
    /// call of this communicator runs on the GPU at the same time as a call of another communicator of this process;
    /// for example because all of them use one stream. If the promise is broken, calls may deadlock until they time
    /// out.
    ///
    /// ```no_run
    /// use fast_allreduce::Cuda;
    ///
    /// let device = Cuda::open(0)?.one_at_a_time();
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    #[must_use]
    pub fn one_at_a_time(mut self) -> Self {
        self.one_at_a_time = true;
        self
    }

    /// Launches kernels with the attribute for programmatic dependent launch
    /// (`CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`). A call's kernel may then become resident while the
    /// previous kernel of the stream ends; it waits for that end before it accesses memory. The next kernel may do
    /// the same if it has the attribute. In captures, this needs CUDA 12.3. It has no effect on GPUs older than
    /// compute capability 9.0, nor where the driver has compiled the kernels from PTX of an older architecture. Off by
    /// default, because it needs a promise.
    ///
    /// The caller promises that every kernel launched with the attribute on the streams of calls executes
    /// `griddepcontrol.wait` (`cudaGridDependencySynchronize`) before it ends. A call waits for the kernel directly
    /// before it; that covers earlier kernels only if the kernel before it waited for them.
    ///
    /// ```no_run
    /// use fast_allreduce::Cuda;
    ///
    /// let device = Cuda::open(0)?.programmatic_launch(true);
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    #[must_use]
    pub fn programmatic_launch(mut self, enabled: bool) -> Self {
        self.wants_programmatic = enabled;
        self
    }

    /// Returns how memory is shared; `None` before a communicator has been built.
    ///
    /// ```no_run
    /// use fast_allreduce::{bootstrap::Local, Communicator, Cuda};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let local = Local::from_env()?.ok_or("not started by a launcher")?;
    /// let communicator = Communicator::builder().build(Cuda::open(0)?, local)?;
    /// println!("{:?}", communicator.device().chosen_sharing());
    /// # Ok(())
    /// # }
    /// ```
    pub fn chosen_sharing(&self) -> Option<Sharing> {
        self.chosen.get().copied()
    }

    /// Returns the GPUs of this machine and their links as NVML reports them. For GPUs that this process sees, the
    /// driver says whether they can access each other's memory.
    ///
    /// # Errors
    ///
    /// * [`Error::Unavailable`]: NVML is not installed, or reports no usable topology.
    /// * [`Error::Driver`]: the driver failed.
    ///
    /// ```no_run
    /// let topology = fast_allreduce::Cuda::topology()?;
    /// println!("{} GPUs", topology.gpus().len());
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    pub fn topology() -> Result<Topology> {
        world::topology()
    }

    /// Returns the device's context.
    ///
    /// ```no_run
    /// use fast_allreduce::Cuda;
    ///
    /// let device = Cuda::open(0)?;
    /// let stream = device.context().new_stream()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    pub(crate) fn default_stream(&self) -> &Arc<CudaStream> {
        &self.default_stream
    }

    pub(crate) fn bind(&self) -> Result<()> {
        driver::bind(&self.context)
    }

    /// Returns whether mappings of other processes' memory stay open even when they are dropped, because the context
    /// is lost.
    pub(crate) fn keeps_mappings_open(&self) -> bool {
        !self.world.same_process && self.copies.is_broken()
    }

    /// Checks that an address is memory of this device. [`Error::InvalidPointer`] if it is not; [`Error::Driver`] if
    /// that is unknown.
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
        world::machine_of_context()
    }

    fn link(&self) -> LinkClass {
        // Then the plan is that for host memory, whatever connects the GPUs.
        match self.shares_host_memory() {
            true => LinkClass::Unreachable,
            false => self.world.link,
        }
    }
}

impl sealed::Device for Cuda {
    type Shared = CudaMemory;
    type Windows = CudaWindows;
    type Status = CudaStatus;
    type Stream<'a> = sys::CUstream;
    type Exports = CudaExports;

    // Kernels count packs in 32 bits, which must also hold a grid's stride beyond the last pack.
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

    // The specialised kernels of the hot set process whole packs only.
    const SOURCE_ALIGNMENT: u64 = abi::FA_CUDA_PACK_BYTES as u64;

    fn exports(&self) -> CudaExports {
        self.exports.clone()
    }

    fn shared_facts(&self) -> String {
        let sharing = self.sharing.map_or("automatic", Sharing::name);
        format!("sharing by {sharing}")
    }

    fn reopen(&self) -> Result<Self> {
        let mut device = Self::new(Arc::clone(&self.context))?;
        (device.sharing, device.max_blocks, device.one_at_a_time) =
            (self.sharing, self.max_blocks, self.one_at_a_time);
        device.wants_programmatic = self.wants_programmatic;
        Ok(device.graph_registration(self.graph_registration))
    }

    fn join(&mut self, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()> {
        let own = Identity::of(&self.context, self.process, 0);
        self.world = World::meet(own, self.max_blocks, self.one_at_a_time, bootstrap, timeout)?;
        let possible = match self.wants_programmatic {
            true => Programmatic::wherever_possible(&self.kernels),
            false => Ok(Programmatic::Nowhere),
        };
        self.programmatic = all_succeeded(possible, bootstrap, timeout)?;
        Ok(())
    }

    fn can_return(&self) -> Result<()> {
        self.check_return()
    }

    fn join_again(&self, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()> {
        self.meet_again(bootstrap, timeout)
    }

    fn allocate_part(&self, bytes: usize, rank: usize, world_size: usize) -> Result<CudaMemory> {
        self.allocate_own_part(bytes, rank, world_size)
    }

    fn share_again<'a>(
        &self,
        memories: &'a [Arc<CudaMemory>],
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<Box<dyn FnOnce() -> Result<()> + 'a>> {
        self.share_kept(memories, bootstrap, timeout)
    }

    fn own_rows(&self) -> Vec<(usize, TableRow)> {
        self.graph_rows().table()
    }

    fn share(&self, bytes: usize, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<CudaMemory> {
        self.share_by_any(bytes, false, bootstrap, timeout).inspect(|memory| self.keep_region(memory))
    }

    fn share_for_return(
        &self,
        bytes: usize,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<CudaMemory> {
        self.share_region_again(bytes, bootstrap, timeout)
    }

    fn share_symmetric(
        &self,
        bytes: usize,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<CudaMemory> {
        match self.shares_host_memory() {
            true => Err(not_of_gpu()),
            false => self.share_by_any(bytes, false, bootstrap, timeout),
        }
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

    fn forget_streams(&self, have_ended: bool) {
        self.calls.forget_streams(have_ended);
    }

    fn is_lost(&self) -> bool {
        self.copies.is_broken()
    }

    fn ended_probe(&self, region: &CudaMemory, rank: usize, epochs: usize, first: u32) -> sealed::Probe {
        let address = sealed::Shared::address(region, rank) + epochs as u64;
        self.calls.ended_probe(region.parts(), address, (first, region.runs_before))
    }

    fn status(&self, _region: &CudaMemory) -> Result<CudaStatus> {
        self.status_words().map(CudaStatus)
    }

    unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        // Kernels of calls that have returned may still run and read this memory.
        self.calls.wait_for_last_call()?;
        // SAFETY: by the caller's contract, the range is in an allocation of this rank.
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
        let second_parameter = operands.address().cast_mut();
        let mut all_parameters = [std::ptr::from_mut(launch).cast(), second_parameter];
        let (parameters, extra) = (all_parameters.as_mut_ptr(), std::ptr::null_mut());
        let (blocks, threads) = (plan.blocks as u32, plan.threads as u32);
        // SAFETY: by the caller's contract, the stream is live.
        if unsafe { self.programmatic.is_for(stream) }? {
            // SAFETY: as for the launch below. `programmatic` is set only for kernels that wait for the launch before
            // them.
            unsafe { programmatic::launch(function, (blocks, threads), stream, parameters) }
                // SAFETY: by the caller's contract, the stream is live.
                .map_err(|code| unsafe { self.refusal("cuLaunchKernelEx", stream, code) })?;
            self.calls.progress.count_launch();
            return Ok(());
        }
        // SAFETY: the function takes one FaLaunch by value and, if the launch has operands, those as a second
        // parameter. The driver copies both. The addresses in them are valid by the caller's contract.
        unsafe { api::cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, extra) }
            // SAFETY: by the caller's contract, the stream is live.
            .map_err(|code| unsafe { self.refusal("cuLaunchKernel", stream, code) })?;
        self.calls.progress.count_launch();
        Ok(())
    }
}

/// Status words of a rank in pinned host memory: the host reads and writes them while a kernel spins.
pub struct CudaStatus(Arc<Pinned>);

impl sealed::Status for CudaStatus {
    fn host_pointer(&self) -> *mut FaStatus {
        self.0.host_pointer().cast()
    }

    fn device_address(&self) -> u64 {
        self.0.device_address()
    }
}
