//! The host device: ranks are processes or threads of one machine, memory is shared by memfd, kernels are ordinary code.

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
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

pub use binding::Binding;
pub use isa::Isa;
pub use limits::available_memory;
pub use memory::SharedMemory;
use pool::Pool;
pub use pool::ThreadPool;
use workers::Workers;

use super::{sealed, Device};
use crate::abi::{self, FaLaunch, FaRegionHead, FaStatus};
use crate::bootstrap::{all_succeeded, Bootstrap};
pub use crate::catalogue::settings::{Bind, Wait};
use crate::error::{Error, Result};
use crate::interruption;
use crate::plan::{thresholds, Costs, DeviceKind, Machine, Packing, Plan};
use crate::region::Channels;
use crate::topology::LinkClass;

/// The CPU as a device.
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
    /// What `wait` came to in the device's world.
    resolved: Wait,
    /// Threads for blocks 1 and up.
    workers: Option<Workers>,
    /// The caller's, in their place.
    pool: Option<Pool>,
    blocks: usize,
    bind: Bind,
    binding: Binding,
}

impl Wait {
    /// What `Auto` is for so many threads on so many cores.
    fn resolve(self, threads: usize, cores: usize) -> Self {
        match self {
            Self::Auto if threads <= cores => Self::Spin,
            Self::Auto => Self::Yield,
            chosen => chosen,
        }
    }

    /// Polls before a core is given up. A poll takes 20 to 50 ns.
    fn polls(self) -> u32 {
        match self {
            Self::Auto | Self::Spin => 1000,
            Self::Yield => 20,
        }
    }
}

impl Host {
    /// One worker for each rank, the best instruction set of this CPU, waits by the number of cores.
    pub fn new() -> Self {
        Self {
            isa: Isa::best(),
            wait: Wait::Auto,
            resolved: Wait::Auto,
            workers: None,
            pool: None,
            blocks: 1,
            bind: Bind::None,
            binding: Binding::default(),
        }
    }

    /// Uses `count` threads for each rank, the caller's included, on messages that are large enough. All ranks must use the
    /// same number. Takes the place of [`Host::thread_pool`].
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] unless it is 1 to 64; [`Error::System`] if threads cannot be started.
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

    /// Has threads of the caller's run what [`Host::workers`] would start threads for. They count like those: all ranks must have the
    /// same number, and [`Wait::Auto`] sees whether all of them have cores. [`Host::bind`] binds the calling thread alone; the others
    /// are the caller's to bind.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] unless the pool has 1 to 64 threads.
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

    /// Sets what a waiting rank does with its core.
    #[must_use]
    pub fn wait(mut self, wait: Wait) -> Self {
        self.wait = wait;
        self.resolved = wait;
        self
    }

    /// Binds each rank's threads to cores (default: [`Bind::None`]) when the communicator is made: the thread that makes it, which is
    /// to make the calls, and the workers. All ranks must say the same.
    ///
    /// Ranks take cores from what they may use, the masks of `taskset` and of containers' cpusets, a physical core before a
    /// second thread of any; they agree on them, whoever started them. Ranks that a launcher has given cores of their own stay there.
    /// Where there are fewer cores than threads, nothing is bound: [`Host::binding`] says so. Worlds know nothing of each other:
    /// give those that run at a time different cores.
    ///
    /// Threads that the caller's thread starts later inherit its core, as those of any bound thread do: start pools before, or make
    /// the communicator in a thread of its own. The thread stays bound when the communicator is dropped.
    #[must_use]
    pub fn bind(mut self, bind: Bind) -> Self {
        self.bind = bind;
        self
    }

    /// Where the ranks of the communicator run.
    pub fn binding(&self) -> &Binding {
        &self.binding
    }

    /// Uses the kernels of another instruction set than the best.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if this CPU does not have it.
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

    /// What a waiting rank does: what was set, or, in a communicator, what [`Wait::Auto`] came to.
    pub fn wait_mode(&self) -> Wait {
        self.resolved
    }

    /// The instruction set in use.
    pub fn instruction_set(&self) -> Isa {
        self.isa
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
    // The kernel frees a memfd when nobody maps it any more.
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
        match self.bind {
            Bind::None => format!("{} workers", self.blocks),
            bind => format!("{} workers bound to a {bind}", self.blocks),
        }
    }

    fn reopen(&self) -> Result<Self> {
        let again = Self::new().wait(self.wait).bind(self.bind).isa(self.isa)?;
        match &self.pool {
            Some(pool) => again.thread_pool(Arc::clone(&pool.0)),
            None => again.workers(self.blocks),
        }
    }

    fn join(&mut self, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()> {
        let given = bootstrap.all_gather(&binding::given(), timeout)?;
        let cores = cores::of_all(&given).min(cores::quota());
        self.resolved = self.wait.resolve(bootstrap.world_size() * self.blocks, cores);
        self.binding = binding::agree(self.bind, &given, self.blocks, bootstrap, timeout)?;
        self.binding.bind_all(self.workers.as_ref(), bootstrap, timeout)
    }

    fn share(&self, bytes: usize, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<SharedMemory> {
        let mut memory = all_succeeded(SharedMemory::allocate(bytes), bootstrap, timeout)?;
        all_succeeded(memory.map_peers(bootstrap, timeout), bootstrap, timeout)?;
        Ok(memory)
    }

    fn share_symmetric(
        &self,
        bytes: usize,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<SharedMemory> {
        let memory = SharedMemory::allocate(bytes).and_then(SharedMemory::with_spare);
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
        let reason = "no switch between CPUs adds up".into();
        Err(Error::Unavailable { what: "NVLS (the switch's sums)".into(), reason })
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
        /// Beyond the lines that a prefetcher takes together.
        const APART: usize = 1024;
        let address = sealed::Shared::address(memory, 0) + offset as u64;
        let is_possible = bytes >= 2 * APART && address % 8 == 0 && bootstrap.world_size() > 1;
        let word = |offset: usize| {
            // SAFETY: the range lies in rank 0's memory, which this process has mapped for as long as `memory` lives and the address
            // is aligned for; no kernel runs, and ranks access the two words atomically only.
            unsafe { AtomicU64::from_ptr((address + offset as u64) as *mut u64) }
        };
        // Where ranks share cores the scheduler would be measured. Rank 0's view of that counts: it leads, or does not.
        let is_quiet = self.resolved == Wait::Spin;
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
        let said = own.map_or(Vec::new(), |costs| costs.to_bytes().to_vec());
        let all = bootstrap.all_gather(&said, timeout)?;
        if is_possible && bootstrap.rank() == 0 {
            // Rank 1 has gathered, and writes no more. Nobody launches before a later step of all ranks.
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
        // SAFETY: the caller's: the range lies in a mapping of this process, which no Rust slice borrows.
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
        launch.operands = operands.address() as u64;
        launch.goes_on = interruption::for_kernels();
        let entry = self.isa.entry();
        match (&self.workers, &self.pool) {
            // SAFETY: the caller's; `plan` asks for no more blocks than there are threads.
            (Some(workers), _) if launch.blocks > 1 => unsafe { workers.run(entry, launch) },
            // SAFETY: the caller's.
            (_, Some(pool)) if launch.blocks > 1 => unsafe { pool.run(entry, launch)? },
            // SAFETY: the caller's; block 0 is the only one.
            _ => unsafe { entry(launch, 0) },
        }
        Ok(())
    }
}

/// Address of the status in this rank's region. The region outlives it.
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
