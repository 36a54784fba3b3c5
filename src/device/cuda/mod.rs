//! The CUDA device: ranks have a GPU each (or share one), memory is shared by CUDA IPC, by file descriptor or within a process,
//! kernels come from the embedded fatbin. The driver is loaded at run time.

mod driver;
mod graph;
mod handle;
mod identity;
mod kernels;
mod machine;
mod memory;
mod order;
mod plan;
mod world;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use cudarc::driver::{result, sys, CudaContext, CudaStream};

use self::driver::{driver, Copies, Pinned};
use self::graph::GraphRows;
use self::handle::Handle;
pub use self::handle::Sharing;
use self::identity::Identity;
use self::kernels::Kernels;
use self::memory::Memory;
use self::order::LastStream;
pub use self::world::CudaWorld;
use super::{all_succeeded, sealed, Device};
use crate::abi::{self, FaLaunch, FaStatus};
use crate::bootstrap::{exchange_descriptors, process_identity, Bootstrap};
use crate::error::{Error, Result};
use crate::plan::{Call, DeviceKind, Machine, Packing, Plan};
use crate::topology::{Gpu, LinkClass, PciAddress, Topology};

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
    kernels: Kernels,
    copies: Copies,
    exports: CudaExports,
    process: [u8; 16],
    sharing: Option<Sharing>,
    /// The kind that worked first, used from then on.
    chosen: OnceLock<Sharing>,
    world: World,
    graph_registration: bool,
    graph_rows: Mutex<GraphRows>,
    last_stream: Mutex<LastStream>,
    /// Held from the ordering of a call to its launch. Taken before the registry's lock and `last_stream`.
    calls: Mutex<()>,
}

/// What a rank learns of the others when it joins them.
#[derive(Debug, Clone, Copy)]
struct World {
    same_process: bool,
    world_size: usize,
    /// Ranks on the most crowded GPU.
    ranks_per_device: usize,
    /// The fewest multiprocessors of a rank's GPU.
    multiprocessors: usize,
    link: LinkClass,
}

impl Default for World {
    fn default() -> Self {
        let link = LinkClass::SameDevice;
        Self { same_process: true, world_size: 1, ranks_per_device: 1, multiprocessors: 1, link }
    }
}

impl World {
    /// Whether every pointer of a rank is good on every rank as it is.
    fn same_device_and_process(&self) -> bool {
        self.same_process && self.ranks_per_device == self.world_size
    }
}

/// What a rank writes to its memory for the peers to read, once.
type Pattern = [u64; 2];

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
        let kernels = Kernels::load(&context)?;
        Ok(Self {
            default_stream: context.default_stream(),
            copies: Copies::new(&context)?,
            exports: CudaExports::default(),
            context,
            kernels,
            process: process_identity()?,
            sharing: None,
            chosen: OnceLock::new(),
            world: World::default(),
            graph_registration: false,
            graph_rows: Mutex::default(),
            last_stream: Mutex::default(),
            calls: Mutex::default(),
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
    #[must_use]
    pub fn graph_registration(mut self, enabled: bool) -> Self {
        self.graph_registration = enabled;
        self
    }

    /// The GPUs of this machine and their links as NVML tells them, and whether each may access another's memory as the
    /// driver does, for those that this process sees.
    ///
    /// # Errors
    ///
    /// As [`Topology::discover`]; [`Error::Driver`].
    pub fn topology() -> Result<Topology> {
        let topology = Topology::discover()?;
        if driver::require().is_err() {
            return Ok(topology);
        }
        result::init().map_err(driver("cuInit"))?;
        let visible = |gpu: &Gpu| gpu.pci.and_then(driver::device_at);
        let devices = topology.gpus().iter().map(visible).collect::<Vec<_>>();
        let known = topology.clone();
        topology.with_peer_access(|a, b| match (devices[a], devices[b]) {
            (Some(a), Some(b)) => driver::can_access_peer(a, b),
            _ => Ok(known.reachable(a, b)),
        })
    }

    /// How memory is shared, once a communicator has been made.
    pub fn chosen_sharing(&self) -> Option<Sharing> {
        self.chosen.get().copied()
    }

    /// The context.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    pub(crate) fn default_stream(&self) -> &Arc<CudaStream> {
        &self.default_stream
    }

    pub(crate) fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))
    }

    pub(crate) fn error(&self, call: &'static str, error: cudarc::driver::DriverError) -> Error {
        driver(call)(error)
    }

    /// Refuses an address that is not memory of this device.
    pub(crate) fn check_address(&self, which: &'static str, address: u64, element_size: usize) -> Result<()> {
        let problem = match driver::device_of(address) {
            Some(ordinal) if ordinal == self.context.ordinal() => return Ok(()),
            Some(_) => "memory of another device",
            None => "not device memory",
        };
        Err(Error::InvalidPointer { which, address: address as usize, problem, element_size })
    }

    /// The ways to try, best first.
    fn candidates(&self) -> Vec<Sharing> {
        if let Some(&chosen) = self.chosen.get() {
            return vec![chosen];
        }
        match self.sharing {
            Some(sharing) => vec![sharing],
            None if self.world.same_process => vec![Sharing::Pointers],
            None => vec![Sharing::Descriptor, Sharing::Ipc],
        }
    }

    /// Maps the peers' counterparts of a caller's buffer, as far as it can be exported. Collective.
    pub(crate) fn share_foreign(
        &self,
        address: u64,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<CudaMemory> {
        let memory = Memory::foreign(&self.context, address).and_then(|memory| {
            // A context that lets a peer in does so for this kind of memory only, the kind that IPC exports.
            if self.world.same_device_and_process() || driver::is_exportable(address) {
                return Ok(memory);
            }
            Err(Error::Unavailable {
                what: "this memory on the other ranks' GPUs".into(),
                reason: "only what cuMemAlloc gives can be registered, not stream-ordered or VMM memory"
                    .into(),
            })
        });
        let memory = all_succeeded(memory, bootstrap, timeout)?;
        let offset = address - memory.address();
        let sharing = if self.world.same_process { Sharing::Pointers } else { Sharing::Ipc };
        self.map_peers(memory, offset, sharing, bootstrap, timeout)
    }

    /// One way of sharing, tried to the end: allocate, map, and exchange data.
    fn share_by(
        &self,
        sharing: Sharing,
        bytes: usize,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<CudaMemory> {
        // The probe needs room for its pattern.
        let bytes = bytes.max(size_of::<Pattern>());
        let own = Memory::allocate(&self.context, &self.copies, bytes, sharing);
        let own = all_succeeded(own, bootstrap, timeout)?;
        if sharing == Sharing::Ipc {
            self.exports.keep(Arc::clone(&own));
        }
        let memory = self.map_peers(own, 0, sharing, bootstrap, timeout)?;
        self.probe(&memory, bootstrap, timeout)?;
        Ok(memory)
    }

    /// Swaps handles and maps the peers' memory. Collective.
    fn map_peers(
        &self,
        own: Arc<Memory>,
        offset: u64,
        sharing: Sharing,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<CudaMemory> {
        let exported = own.handle(self.process, offset, sharing).and_then(|handle| {
            let descriptor = (sharing == Sharing::Descriptor).then(|| own.descriptor()).transpose()?;
            Ok((handle, descriptor))
        });
        let (handle, descriptor) = all_succeeded(exported, bootstrap, timeout)?;
        let handles = bootstrap.all_gather(&handle.encode(), timeout)?;
        let descriptors: Vec<Option<OwnedFd>> = match &descriptor {
            Some(descriptor) => exchange_descriptors(bootstrap, descriptor.as_fd(), timeout)?,
            None => handles.iter().map(|_| None).collect(),
        };
        let import = |rank: usize| -> Result<(Arc<Memory>, u64)> {
            if rank == bootstrap.rank() {
                return Ok((Arc::clone(&own), offset));
            }
            let handle = Handle::decode(rank, &handles[rank])?;
            let descriptor = descriptors[rank].as_ref();
            let memory = Memory::import(&self.context, rank, &handle, self.process, descriptor)?;
            Ok((memory, handle.offset))
        };
        let imported = (0..handles.len()).map(import).collect::<Result<Vec<_>>>();
        let ranks = all_succeeded(imported, bootstrap, timeout)?;
        Ok(CudaMemory { ranks })
    }

    /// Writes a pattern to own memory and reads the peers': a device may report peer access, and open handles, and still not
    /// deliver data (containers, virtual machines, confidential computing).
    fn probe(&self, memory: &CudaMemory, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()> {
        use sealed::Shared as _;
        let pattern = |rank: usize| [0xA5A5_0000_5A5A_0000 | rank as u64, !(rank as u64)];
        let rank = bootstrap.rank();
        // SAFETY: `share_by` allocates room for a pattern, and no kernel uses it yet.
        let written = unsafe { self.copies.write(memory.address(rank), &pattern(rank)) };
        all_succeeded(written, bootstrap, timeout)?;
        let read = |peer: usize| -> Result<()> {
            let mut words = Pattern::default();
            // SAFETY: as above, for the peer's mapping.
            unsafe { self.copies.read(memory.address(peer), &mut words) }?;
            if words != pattern(peer) {
                return Err(Error::Unavailable {
                    what: format!("rank {peer}'s memory"),
                    reason: format!(
                        "it maps, but reads {words:x?} where that rank wrote {:x?}",
                        pattern(peer)
                    ),
                });
            }
            Ok(())
        };
        let exchanged = (0..memory.ranks.len()).try_for_each(read);
        all_succeeded(exchanged, bootstrap, timeout)?;
        // SAFETY: as above; every rank has read.
        all_succeeded(
            unsafe { self.copies.write(memory.address(rank), &Pattern::default()) },
            bootstrap,
            timeout,
        )
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // Its kernels must have ended before the module and, after it, the region go. An error means that the context is gone.
        let _ = self.bind();
        let _ = self.wait_for_last_call();
    }
}

impl Device for Cuda {
    const NAME: &'static str = Self::KIND.name();
    const KIND: DeviceKind = DeviceKind::Cuda;
    const DEFAULT_MAX_BYTES: usize = 8 << 20;

    fn machine(&self) -> Result<Machine> {
        machine::of(self)
    }

    fn link(&self) -> LinkClass {
        self.world.link
    }
}

impl sealed::Device for Cuda {
    type Shared = CudaMemory;
    type Status = CudaStatus;
    type Stream<'a> = sys::CUstream;
    type Exports = CudaExports;

    const PACKING: Packing = Packing {
        pack_bytes: abi::FA_CUDA_PACK_BYTES as usize,
        slot_bytes: abi::FA_CUDA_SLOT_BYTES as usize,
    };

    const SYNCHRONOUS: bool = false;

    fn exports(&self) -> CudaExports {
        self.exports.clone()
    }

    fn shared_facts(&self) -> String {
        let sharing = self.sharing.map_or("automatic", Sharing::name);
        format!("sharing by {sharing}")
    }

    fn again(&self) -> Result<Self> {
        let mut device = Self::new(Arc::clone(&self.context))?;
        device.sharing = self.sharing;
        Ok(device.graph_registration(self.graph_registration))
    }

    fn join(&mut self, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()> {
        let own = Identity::of(self)?;
        let all = bootstrap.all_gather(&own.encode(), timeout)?.into_iter().enumerate();
        let all = all.map(|(rank, bytes)| Identity::decode(rank, &bytes)).collect::<Result<Vec<_>>>()?;
        let link = link_class(&all);
        // Ranks may see different parts of the machine: the worst that any sees holds for all.
        let links = bootstrap.all_gather(&[link as u8], timeout)?;
        let worst = links.iter().filter_map(|byte| byte.first()).max().copied().unwrap_or(link as u8);
        let link =
            LinkClass::ALL.into_iter().find(|&class| class as u8 == worst).unwrap_or(LinkClass::Unreachable);
        let on = |uuid: &[u8; 16]| all.iter().filter(|other| other.uuid == *uuid).count();
        self.world = World {
            same_process: all.iter().all(|other| other.process == own.process),
            world_size: all.len(),
            ranks_per_device: all.iter().map(|other| on(&other.uuid)).max().unwrap_or(1),
            multiprocessors: all.iter().map(|other| other.multiprocessors as usize).min().unwrap_or(1).max(1),
            link,
        };
        Ok(())
    }

    fn share(&self, bytes: usize, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<CudaMemory> {
        let mut reasons = Vec::new();
        let candidates = self.candidates();
        for &sharing in &candidates {
            match self.share_by(sharing, bytes, bootstrap, timeout) {
                Ok(memory) => {
                    self.chosen.get_or_init(|| sharing);
                    return Ok(memory);
                }
                Err(error) if candidates.len() == 1 => return Err(error),
                // The ranks have lost each other.
                Err(error @ (Error::Timeout { .. } | Error::PeerLost { .. } | Error::Rendezvous { .. })) => {
                    return Err(error);
                }
                // All else that a rank fails with, all ranks hear of: all try the next.
                Err(error) => reasons.push(format!("{}: {error}", sharing.name())),
            }
        }
        let what = "memory that the ranks' GPUs share".into();
        Err(Error::Unavailable { what, reason: reasons.join("; ") })
    }

    fn status(&self, _region: &CudaMemory) -> Result<CudaStatus> {
        Pinned::allocate(&self.context, size_of::<FaStatus>()).map(CudaStatus)
    }

    unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        // Kernels of calls that have returned may still run, and read what is written here.
        self.wait_for_last_call()?;
        // SAFETY: the caller's: the range lies in an allocation of this rank.
        unsafe { self.copies.write(address, bytes) }
    }

    fn plan(&self, call: &Call) -> Plan {
        plan::grid(call, self.world.multiprocessors / self.world.ranks_per_device)
    }

    unsafe fn launch(&self, launch: &mut FaLaunch, plan: &Plan, stream: sys::CUstream) -> Result<()> {
        let function = self.kernels.for_launch(launch);
        let mut parameters = [std::ptr::from_mut(launch).cast()];
        let (blocks, threads) = (plan.blocks as u32, plan.threads as u32);
        // SAFETY: the function takes one FaLaunch by value, which the driver copies; the addresses in it are the caller's.
        unsafe {
            result::launch_kernel(function, (blocks, 1, 1), (threads, 1, 1), 0, stream, &mut parameters)
        }
        .map_err(driver("cuLaunchKernel"))
    }
}

/// The worst link among the ranks' GPUs, as far as this process can tell. What it cannot tell is taken as PCIe, which every
/// plan works on; whether memory can be shared at all is found out by sharing it.
fn link_class(ranks: &[Identity]) -> LinkClass {
    if ranks.iter().all(|rank| rank.uuid == ranks[0].uuid) {
        return LinkClass::SameDevice;
    }
    let class = Cuda::topology().and_then(|topology| {
        let gpus = ranks.iter().map(|rank| topology.find(rank.pci.parse::<PciAddress>().ok()?));
        gpus.collect::<Option<Vec<_>>>().map_or(Ok(LinkClass::Pcie), |gpus| topology.class(&gpus))
    });
    class.unwrap_or(LinkClass::Pcie)
}

/// An allocation of this rank and its mappings of the peers' counterparts.
pub struct CudaMemory {
    /// By rank: the memory, and where in it the shared bytes begin.
    ranks: Vec<(Arc<Memory>, u64)>,
}

impl sealed::Shared for CudaMemory {
    fn address(&self, rank: usize) -> u64 {
        self.ranks.get(rank).map_or(0, |(memory, offset)| memory.address() + offset)
    }
}

/// Memory that other processes have opened by an IPC handle: CUDA leaves undefined what happens if it is freed before they close
/// it. So it stays until the communicators have met once more.
#[derive(Clone, Default)]
pub struct CudaExports(Arc<Mutex<Vec<Arc<Memory>>>>);

impl CudaExports {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Memory>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, memory: Arc<Memory>) {
        self.lock().push(memory);
    }
}

impl sealed::Exports for CudaExports {
    fn is_empty(&self) -> bool {
        self.lock().is_empty()
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
