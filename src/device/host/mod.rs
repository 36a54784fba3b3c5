//! The host device: ranks are processes or threads of one machine, memory is shared by memfd, kernels are ordinary code.

mod cores;
mod isa;
mod limits;
mod machine;
mod memory;
mod workers;

use std::mem::offset_of;
use std::time::Duration;

pub use isa::Isa;
pub use limits::available_memory;
pub use memory::SharedMemory;
use workers::Workers;

use super::{sealed, Device};
use crate::abi::{self, FaLaunch, FaRegionHead, FaStatus, FaTransfers};
use crate::bootstrap::{all_succeeded, Bootstrap};
use crate::error::{Error, Result};
use crate::plan::{DeviceKind, Machine, Packing, Plan};
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
    blocks: usize,
}

/// What a rank does while it waits for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Wait {
    /// [`Wait::Spin`] where every rank can have a core of its own, else [`Wait::Yield`].
    #[default]
    Auto,
    /// Polls for some tens of microseconds before it gives up its core.
    Spin,
    /// Polls a few times, then gives its core to other threads.
    Yield,
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
        Self { isa: Isa::best(), wait: Wait::Auto, resolved: Wait::Auto, workers: None, blocks: 1 }
    }

    /// Uses `count` threads for each rank, the caller's included, on messages that are large enough. All ranks must use the
    /// same number.
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
        self.blocks = count;
        Ok(self)
    }

    /// Sets what a waiting rank does with its core.
    #[must_use]
    pub fn wait(mut self, wait: Wait) -> Self {
        self.wait = wait;
        self.resolved = wait;
        self
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
    const DEFAULT_MAX_BYTES: usize = 1 << 20;

    fn machine(&self) -> Result<Machine> {
        Ok(Machine::host())
    }

    fn link(&self) -> LinkClass {
        LinkClass::SameDevice
    }
}

impl sealed::Device for Host {
    type Shared = SharedMemory;
    type Status = HostStatus;
    type Stream<'a> = ();
    // The kernel frees a memfd when nobody maps it any more.
    type Exports = ();

    const PACKING: Packing = Packing {
        pack_bytes: abi::FA_HOST_PACK_BYTES as usize,
        slot_bytes: abi::FA_HOST_SLOT_BYTES as usize,
    };

    const SOURCE_ALIGNMENT: u64 = 1;

    fn exports(&self) {}

    fn shared_facts(&self) -> String {
        format!("{} workers", self.blocks)
    }

    fn again(&self) -> Result<Self> {
        Self::new().wait(self.wait).isa(self.isa)?.workers(self.blocks)
    }

    fn join(&mut self, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()> {
        let own = cores::of_this_process();
        let cores = cores::of_all(&bootstrap.all_gather(&own, timeout)?).min(cores::quota(&own));
        self.resolved = self.wait.resolve(bootstrap.world_size() * self.blocks, cores);
        Ok(())
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

    fn free(&self, memory: SharedMemory, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()> {
        memory.free(bootstrap, timeout)
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
        transfers: Option<&FaTransfers>,
        (): (),
    ) -> Result<()> {
        launch.spin = self.resolved.polls();
        launch.transfers = transfers.map_or(0, |transfers| std::ptr::from_ref(transfers) as u64);
        let entry = self.isa.entry();
        match &self.workers {
            // SAFETY: the caller's; `plan` asks for no more blocks than there are threads.
            Some(workers) if launch.blocks > 1 => unsafe { workers.run(entry, launch) },
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
