//! The host device. Ranks are processes or threads of one machine, memory is shared by memfd, and kernels are
//! ordinary functions that run on the calling thread and on worker threads.

mod binding;
mod calibration;
mod cores;
mod file;
mod isa;
mod limits;
mod machine;
mod memory;
mod pool;
mod workers;

use std::convert::Infallible;
use std::mem::offset_of;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

pub use binding::Binding;
pub(crate) use file::{create, create_named};
pub use isa::Isa;
pub use limits::available_memory;
pub(crate) use memory::Populate;
pub use memory::{Pages, SharedMemory};
use pool::Pool;
pub use pool::ThreadPool;
use workers::Workers;

use super::{sealed, Device};
use crate::abi::{self, FaLaunch, FaRegionHead, FaStatus};
use crate::bootstrap::{all_succeeded, Bootstrap, OfNode};
pub use crate::catalogue::settings::{Bind, Wait};
use crate::error::{Error, Result};
use crate::interruption;
use crate::plan::{thresholds, Costs, DeviceKind, Machine, Packing, Plan};
use crate::region::Channels;
use crate::topology::{Cpus, LinkClass};

/// The CPUs of this machine, as a device that a [`Communicator`](crate::Communicator) runs on.
///
/// ```
/// use fast_allreduce::{Host, Wait};
///
/// let device = Host::new().workers(2)?.wait(Wait::Yield);
/// # Ok::<_, fast_allreduce::Error>(())
/// ```
#[derive(Debug)]
pub struct Host {
    isa: Isa,
    wait: Wait,
    /// `wait` with [`Wait::Auto`] resolved, once the ranks are known.
    resolved: Wait,
    /// Whether this rank's threads may have to share cores with threads of the ranks; and whether any rank's may.
    shares_core: bool,
    any_shares_core: bool,
    /// Threads that run blocks 1 and up.
    workers: Option<Workers>,
    /// The caller's thread pool, instead of workers.
    pool: Option<Pool>,
    blocks: usize,
    bind: Bind,
    binding: Binding,
    /// NUMA node of this rank's memory, if its threads stay on one node of several.
    node: Option<usize>,
    /// Number of ranks of each socket: as the program says, and as the ranks are placed.
    socket_ranks: [Option<usize>; 2],
}

impl Wait {
    /// Resolves `Auto` for a rank that shares its core with others, or does not.
    fn resolve(self, shares_core: bool) -> Self {
        match self {
            Self::Auto if shares_core => Self::Yield,
            Self::Auto => Self::Spin,
            chosen => chosen,
        }
    }

    /// Returns the number of polls before a waiting thread yields its core. A poll takes 20 to 50 ns. With 20 instead
    /// of 4, calls of 4 to 16 ranks on 2 cores took up to 1.2 times as long, single ones up to 1.3 times.
    fn polls(self) -> u32 {
        match self {
            Self::Auto | Self::Spin => 1000,
            Self::Yield => 4,
        }
    }
}

impl Host {
    /// Creates a device with the defaults: one thread for each rank, the best instruction set of this CPU, and
    /// [`Wait::Auto`].
    ///
    /// ```
    /// use fast_allreduce::{device::host::Isa, Host};
    ///
    /// assert_eq!(Host::new().instruction_set(), Isa::best());
    /// ```
    pub fn new() -> Self {
        Self {
            isa: Isa::best(),
            wait: Wait::Auto,
            resolved: Wait::Auto,
            shares_core: false,
            any_shares_core: false,
            workers: None,
            pool: None,
            blocks: 1,
            bind: Bind::None,
            binding: Binding::default(),
            node: None,
            socket_ranks: [None; 2],
        }
    }

    /// Uses `count` threads for each rank, including the calling thread, for messages that are large enough. All
    /// ranks must use the same number. Replaces [`Host::thread_pool`].
    ///
    /// # Errors
    ///
    /// * [`Error::InvalidSetting`]: `count` is not 1 to 64.
    /// * [`Error::System`]: a thread could not be started.
    ///
    /// ```
    /// use fast_allreduce::Host;
    ///
    /// let device = Host::new().workers(2)?;
    /// assert!(Host::new().workers(65).is_err());
    /// # Ok::<_, fast_allreduce::Error>(())
    /// ```
    pub fn workers(mut self, count: usize) -> Result<Self> {
        if !(1..=abi::FA_MAX_BLOCKS as usize).contains(&count) {
            return Err(Error::InvalidSetting {
                name: "workers",
                value: count.to_string(),
                expected: "1 to 64",
            });
        }
        self.workers = (count > 1).then(|| Workers::start(count - 1)).transpose()?;
        (self.pool, self.blocks) = (None, count);
        Ok(self)
    }

    /// Runs blocks on threads of the caller instead of [`Host::workers`]. They count as workers do: all ranks must
    /// have the same number, and [`Wait::Auto`] counts them. [`Host::bind`] binds the calling thread only; the caller
    /// binds the others.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] if the pool does not have 1 to 64 threads.
    ///
    /// See [`ThreadPool`] for an example.
    pub fn thread_pool(mut self, pool: Arc<dyn ThreadPool>) -> Result<Self> {
        let threads = pool.threads();
        if !(1..=abi::FA_MAX_BLOCKS as usize).contains(&threads) {
            return Err(Error::InvalidSetting {
                name: "threads of a pool",
                value: threads.to_string(),
                expected: "1 to 64",
            });
        }
        (self.workers, self.pool, self.blocks) = (None, Some(Pool(pool)), threads);
        Ok(self)
    }

    /// Sets what a waiting rank does with its core: spin, or yield it soon.
    ///
    /// ```
    /// use fast_allreduce::{Host, Wait};
    ///
    /// assert_eq!(Host::new().wait(Wait::Yield).wait_mode(), Wait::Yield);
    /// ```
    #[must_use]
    pub fn wait(mut self, wait: Wait) -> Self {
        self.wait = wait;
        self.resolved = wait;
        self
    }

    /// Binds each rank's threads to cores when the communicator is built (default: [`Bind::None`]): the thread that
    /// builds it, which should also make the calls, and the workers. All ranks must use the same value.
    ///
    /// Ranks take cores from those that they are allowed to use, by `taskset` or a container's cpuset. They take all
    /// physical cores before any second hardware thread. They agree on the cores, however they were started. If a
    /// launcher has already given the ranks disjoint cores, nothing changes. If there are fewer cores than threads,
    /// [`Bind::Core`] distributes the threads evenly. If a CPU quota is smaller, nothing is bound, and
    /// [`Host::binding`] says so. Separate communicators do not coordinate: give those that run at the same time
    /// different cores.
    ///
    /// Threads that a bound thread starts later inherit its cores. So start thread pools before building the
    /// communicator, or build it in a separate thread. The thread stays bound when the communicator is dropped.
    ///
    /// ```
    /// use fast_allreduce::{device::host::Bind, Host};
    ///
    /// let device = Host::new().bind(Bind::Core);
    /// ```
    #[must_use]
    pub fn bind(mut self, bind: Bind) -> Self {
        self.bind = bind;
        self
    }

    /// Sets how many neighbouring ranks each socket has, where the system does not describe the sockets (a virtual
    /// machine) or does not bind the ranks. All ranks must use the same number. By default it follows from the cores
    /// that the ranks are bound to.
    ///
    /// With [`Order::Any`](crate::Order::Any), large allreduces between sockets then have two levels: see
    /// `docs/algorithms.md`. A number that does not divide the number of ranks is ignored.
    ///
    /// ```
    /// use fast_allreduce::Host;
    ///
    /// let device = Host::new().ranks_of_socket(4);
    /// ```
    #[must_use]
    pub fn ranks_of_socket(mut self, count: usize) -> Self {
        self.socket_ranks[0] = Some(count);
        self
    }

    /// Returns where the ranks of the communicator run.
    ///
    /// ```
    /// use fast_allreduce::Host;
    ///
    /// // No communicator has been built.
    /// assert_eq!(Host::new().binding().to_string(), "none (no world yet)");
    /// ```
    pub fn binding(&self) -> &Binding {
        &self.binding
    }

    /// Uses the kernels of this instruction set instead of the best one.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if this CPU does not support it.
    ///
    /// ```
    /// use fast_allreduce::{device::host::Isa, Host};
    ///
    /// let device = Host::new().isa(Isa::Baseline)?;
    /// # Ok::<_, fast_allreduce::Error>(())
    /// ```
    pub fn isa(mut self, isa: Isa) -> Result<Self> {
        if !Isa::supported().any(|supported| supported == isa) {
            return Err(Error::Unavailable {
                what: format!("instruction set {}", isa.name()),
                reason: format!("this CPU has {}", Isa::best().name()),
            });
        }
        self.isa = isa;
        Ok(self)
    }

    /// Returns what a waiting rank does: the value that was set; in a communicator, [`Wait::Auto`] is resolved.
    ///
    /// ```
    /// use fast_allreduce::{Host, Wait};
    ///
    /// assert_eq!(Host::new().wait_mode(), Wait::Auto);
    /// ```
    pub fn wait_mode(&self) -> Wait {
        self.resolved
    }

    /// Returns the instruction set in use.
    ///
    /// ```
    /// use fast_allreduce::Host;
    ///
    /// println!("{}", Host::new().instruction_set().name());
    /// ```
    pub fn instruction_set(&self) -> Isa {
        self.isa
    }
}

impl Host {
    /// Allocates a region on every rank and maps it on all ranks. Collective.
    fn share_region(
        &self,
        bytes: usize,
        populate: Populate,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<SharedMemory> {
        let memory = SharedMemory::allocate(bytes, populate).map(|memory| memory.placed(self.node));
        let mut memory = all_succeeded(memory, bootstrap, timeout)?;
        all_succeeded(memory.map_peers(bootstrap, timeout), bootstrap, timeout)?;
        Ok(memory)
    }
}

impl Default for Host {
    fn default() -> Self {
        Self::new()
    }
}

impl Device for Host {
    const NAME: &'static str = Self::KIND.name();
    const KIND: DeviceKind = DeviceKind::Host;
    const DEFAULT_MAX_BYTES: usize = thresholds::HOST_MAX_BYTES;

    fn machine(&self) -> Result<Machine> {
        Ok(Machine::host())
    }

    fn link(&self) -> LinkClass {
        LinkClass::SameDevice
    }
}

impl sealed::Device for Host {
    type Shared = SharedMemory;
    type Windows = Infallible;
    type Status = HostStatus;
    type Stream<'a> = ();
    // The operating system frees a memfd when no process maps it any more.
    type Exports = ();

    const PACKING: Packing = Packing {
        pack_bytes: abi::FA_HOST_PACK_BYTES as usize,
        slot_bytes: abi::FA_HOST_SLOT_BYTES as usize,
        sentinel_bytes: 0,
    };

    const CHANNELS: Channels = Channels {
        bytes: thresholds::HOST_CHANNEL_BYTES,
        chunk_bytes: thresholds::HOST_CHUNK_BYTES,
        least_slots: 8,
        stripes: 1,
        packet_bytes: 0,
    };

    const READS_PRIVATE: bool = true;

    const LEAST_POSTED_BYTES: u64 = thresholds::HOST_LEAST_POSTED_BYTES;

    const READS_DIRECTLY: bool = true;

    const SOURCE_ALIGNMENT: u64 = 1;

    fn exports(&self) {}

    fn shared_facts(&self) -> String {
        let sockets =
            self.socket_ranks[0].map_or(String::new(), |count| format!(", {count} ranks of a socket"));
        match self.bind {
            Bind::None => format!("{} workers{sockets}", self.blocks),
            bind => format!("{} workers bound to a {bind}{sockets}", self.blocks),
        }
    }

    fn reopen(&self) -> Result<Self> {
        let mut device = Self::new().wait(self.wait).bind(self.bind).isa(self.isa)?;
        device.socket_ranks[0] = self.socket_ranks[0];
        match &self.pool {
            Some(pool) => device.thread_pool(Arc::clone(&pool.0)),
            None => device.workers(self.blocks),
        }
    }

    fn socket_ranks(&self, world_size: usize) -> usize {
        let count = self.socket_ranks.into_iter().flatten().next();
        // Two ranks have no other rank on their socket, and they swap staging.
        count.filter(|&count| (2..world_size).contains(&count) && world_size % count == 0).unwrap_or(0)
    }

    fn join(&mut self, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()> {
        if !OfNode::new(bootstrap)?.is_whole_world() {
            return Err(Error::Unavailable {
                what: "a world of several nodes on the host device".into(),
                reason: "its ranks share memory of one machine: build one for each node, and join them by \
                         Hierarchical"
                    .into(),
            });
        }
        let given = bootstrap.all_gather(&binding::given(), timeout)?;
        // A bound thread no longer sees a quota.
        let exceeds_quota = given.len() * self.blocks > binding::given_with_quota().1;
        self.binding = binding::agree(self.bind, &given, self.blocks, bootstrap, timeout)?;
        self.binding.bind_all(self.workers.as_ref(), bootstrap, timeout)?;
        let sharing = self.binding.sharing(&given, self.blocks);
        self.shares_core = exceeds_quota || sharing[bootstrap.rank()];
        self.any_shares_core = exceeds_quota || sharing.contains(&true);
        self.resolved = self.wait.resolve(self.shares_core);
        let own = match self.binding.cores() {
            Some(cores) => cores[bootstrap.rank()].clone(),
            None => cores::listed(&cores::of_this_thread()),
        };
        let mut found = Vec::new();
        if let (0, Some(cores)) = (bootstrap.rank(), self.binding.cores()) {
            let cpus = Cpus::read(Path::new("/sys"), Some(&cores.concat()));
            found.extend(cpus.ranks_of_socket(cores).map(|count| count as u8));
        }
        let all = bootstrap.all_gather(&found, timeout)?;
        // The plans of ranks that enter again are made (see `join_again`); else rank 0's view of the machine decides.
        let decided = all.iter().find(|found| found.len() == 2).unwrap_or(&all[0]);
        self.socket_ranks[1] = decided.first().filter(|&&count| count > 0).map(|&count| count.into());
        self.node = Cpus::read(Path::new("/sys"), Some(&[])).memory_of(&own);
        Ok(())
    }

    fn join_again(&self, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()> {
        // As in `join`. How this rank waits stays: it need not be equal on all ranks.
        let given = bootstrap.all_gather(&binding::given(), timeout)?;
        let mut binding = binding::agree(self.bind, &given, self.blocks, bootstrap, timeout)?;
        binding.bind_all(self.workers.as_ref(), bootstrap, timeout)?;
        // New ranks take the number of ranks of a socket that this rank's plans have; 0: none. They send fewer bytes.
        let found = [self.socket_ranks[1].unwrap_or(0) as u8, 1];
        bootstrap.all_gather(&found, timeout)?;
        Ok(())
    }

    fn allocate_part(&self, bytes: usize, rank: usize, world_size: usize) -> Result<SharedMemory> {
        let memory = SharedMemory::allocate(bytes, Populate::Now)?;
        memory.placed(self.node).with_spare()?.with_places(rank, world_size)
    }

    fn share_again<'a>(
        &self,
        memories: &'a [Arc<SharedMemory>],
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<Box<dyn FnOnce() -> Result<()> + 'a>> {
        Ok(Box::new(SharedMemory::share_again(memories, bootstrap, timeout)?))
    }

    fn share(&self, bytes: usize, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<SharedMemory> {
        self.share_region(bytes, Populate::Now, bootstrap, timeout)
    }

    fn share_for_return(
        &self,
        bytes: usize,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<SharedMemory> {
        // Only pages of a mapping can be moved to a NUMA node.
        let populate = self.node.map_or(Populate::AtFirstTouch, |_| Populate::Now);
        self.share_region(bytes, populate, bootstrap, timeout)
    }

    fn share_symmetric(
        &self,
        bytes: usize,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<SharedMemory> {
        let memory = SharedMemory::allocate(bytes, Populate::Now).map(|memory| memory.placed(self.node));
        let memory = memory.and_then(SharedMemory::with_spare);
        let mut memory = all_succeeded(memory, bootstrap, timeout)?;
        all_succeeded(memory.map_peers(bootstrap, timeout), bootstrap, timeout)?;
        Ok(memory)
    }

    fn share_windows(
        &self,
        _bytes: usize,
        _bootstrap: &dyn Bootstrap,
        _timeout: Duration,
    ) -> Result<Infallible> {
        let reason = "there is no such switch between CPUs".into();
        Err(Error::Unavailable { what: "NVLS (in-switch reduction)".into(), reason })
    }

    fn free(&self, memory: SharedMemory, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()> {
        memory.free(bootstrap, timeout)
    }

    fn costs(
        &self,
        memory: &SharedMemory,
        offset: usize,
        bytes: usize,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<Option<Costs>> {
        /// Distance of the two words: beyond the cache lines that a prefetcher loads together.
        const APART: usize = 1024;
        let address = sealed::Shared::address(memory, 0) + offset as u64;
        let is_possible = bytes >= 2 * APART && address % 8 == 0 && bootstrap.world_size() > 1;
        let word = |offset: usize| {
            // SAFETY: the word is in rank 0's memory, which this process has mapped as long as `memory` lives;
            // `is_possible` checks the alignment. No kernel runs, and ranks access the two words only atomically.
            unsafe { AtomicU64::from_ptr((address + offset as u64) as *mut u64) }
        };
        // If ranks share cores, the scheduler would be measured. Only rank 0's view matters, because rank 0 decides
        // whether to measure.
        let is_quiet = self.resolved == Wait::Spin && !self.any_shares_core;
        let mut own = None;
        if is_possible {
            let lines = calibration::Lines { first: word(0), second: word(APART) };
            match bootstrap.rank() {
                0 if is_quiet => own = calibration::lead(&lines),
                0 => lines.first.store(calibration::DONE, Ordering::Release),
                1 => calibration::follow(&lines),
                _ => {}
            }
        }
        let encoded = own.map_or(Vec::new(), |costs| costs.to_bytes().to_vec());
        let all = bootstrap.all_gather(&encoded, timeout)?;
        if is_possible && bootstrap.rank() == 0 {
            // Rank 1 has gathered, so it writes no more. Nobody launches before a later step of all ranks.
            for offset in [0, APART] {
                word(offset).store(0, Ordering::Release);
            }
        }
        Ok(all.first().and_then(|bytes| Costs::from_bytes(bytes)))
    }

    fn wait_for_calls(&self) -> Result<()> {
        Ok(())
    }

    fn status(&self, region: &SharedMemory) -> Result<HostStatus> {
        Ok(HostStatus(region.own_address() + offset_of!(FaRegionHead, status) as u64))
    }

    unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: by the caller's contract, the range is in a mapping of this process; no Rust slice borrows it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
        Ok(())
    }

    fn most_blocks(&self) -> usize {
        self.blocks
    }

    unsafe fn launch(
        &self,
        launch: &mut FaLaunch,
        _plan: &Plan,
        operands: sealed::Operands<'_>,
        (): (),
    ) -> Result<()> {
        launch.spin = self.resolved.polls();
        launch.shares_core = self.shares_core.into();
        launch.operands = operands.address() as u64;
        launch.goes_on = interruption::for_kernels();
        let entry = self.isa.entry();
        match (&self.workers, &self.pool) {
            // SAFETY: by the caller's contract; a plan has at most `most_blocks` blocks, and there are as many
            // threads.
            (Some(workers), _) if launch.blocks > 1 => unsafe { workers.run(entry, launch) },
            // SAFETY: by the caller's contract.
            (_, Some(pool)) if launch.blocks > 1 => unsafe { pool.run(entry, launch)? },
            // SAFETY: by the caller's contract; block 0 is the only one.
            _ => unsafe { entry(launch, 0) },
        }
        Ok(())
    }
}

/// Address of the status words in this rank's region, which outlives it.
#[derive(Debug)]
pub struct HostStatus(u64);

impl sealed::Status for HostStatus {
    fn host_pointer(&self) -> *mut FaStatus {
        self.0 as *mut FaStatus
    }

    fn device_address(&self) -> u64 {
        self.0
    }
}
