//! All ranks of a world in one cooperative launch on one GPU.
//!
//! CUDA promises that ranks which wait for each other all make progress only where their blocks are resident together: in a
//! cooperative launch. That makes this the form in which the kernels are proven on a machine with one GPU. It is no way to
//! serve a model.
//!
//! Cooperative launches can be captured into graphs (a kernel node has the attribute `CU_LAUNCH_ATTRIBUTE_COOPERATIVE`), so
//! that a prepared call can be timed by events around replays.

mod call;
#[cfg(feature = "probes")]
mod in_turns;

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, CudaStream};

pub use self::call::{WorldCall, WorldPlan, WorldRank};
use super::copies::Copies;
use super::driver::{attribute, driver, require, synchronize};
use super::handle::Sharing;
use super::kernels::Kernels;
use super::memory::Memory;
use super::pinned::Pinned;
use super::Cuda;
use crate::abi::{self, FaLaunch, FaRegionHead, FaStatus, MAX_RANKS};
use crate::call::{nanoseconds, LaunchContext};
use crate::catalogue::DType;
use crate::device::sealed::Device as _;
use crate::error::{Error, Result};
use crate::plan::{Algorithm, DeviceKind, Limits};
use crate::region::Layout;

/// Ranks `0..world_size` of one GPU, each with a region.
pub struct CudaWorld {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    kernels: Arc<Kernels>,
    copies: Copies,
    layout: Layout,
    regions: Vec<Region>,
    statuses: Vec<Pinned>,
    multiprocessors: usize,
    timeout: Duration,
}

/// Where the regions of a world's ranks are.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegionMemory {
    Device,
    /// Pinned, behind the GPU's link to the host.
    Host,
}

enum Region {
    Device(Arc<Memory>),
    Host(Pinned),
}

impl Region {
    fn address(&self) -> u64 {
        match self {
            Self::Device(memory) => memory.address(),
            Self::Host(pinned) => pinned.device_address(),
        }
    }

    /// # Safety
    ///
    /// `values` fit at `offset`, and no kernel uses the region.
    unsafe fn write<T: Copy>(&self, copies: &Copies, offset: usize, values: &[T]) -> Result<()> {
        match self {
            // SAFETY: the caller's.
            Self::Device(memory) => unsafe { copies.write(memory.address() + offset as u64, values) },
            Self::Host(pinned) => {
                // SAFETY: the caller's; the values are plain, and the region is another allocation.
                unsafe {
                    let to = pinned.host_pointer().cast::<u8>().add(offset);
                    let from = values.as_ptr().cast::<u8>();
                    to.copy_from_nonoverlapping(from, size_of_val(values));
                }
                Ok(())
            }
        }
    }
}

impl CudaWorld {
    /// A world on the GPU with that ordinal. `max_bytes` is as in [`Builder::max_bytes`](crate::Builder::max_bytes), `epoch` the
    /// number of the launch before the first.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] without a driver, kernels or cooperative launches; [`Error::WorldSize`], [`Error::InvalidSetting`],
    /// [`Error::Allocation`], [`Error::Driver`].
    pub fn new(
        ordinal: usize,
        world_size: usize,
        max_bytes: usize,
        epoch: u32,
        timeout: Duration,
    ) -> Result<Self> {
        Self::in_memory(ordinal, world_size, max_bytes, epoch, timeout, RegionMemory::Device)
    }

    /// [`CudaWorld::new`], with regions elsewhere: what ranks store for each other, and read of each other, then takes about as
    /// long as over a link.
    ///
    /// # Errors
    ///
    /// As [`CudaWorld::new`].
    #[doc(hidden)]
    pub fn in_memory(
        ordinal: usize,
        world_size: usize,
        max_bytes: usize,
        epoch: u32,
        timeout: Duration,
        memory: RegionMemory,
    ) -> Result<Self> {
        if !(1..=MAX_RANKS).contains(&world_size) {
            return Err(Error::WorldSize { world_size });
        }
        require()?;
        let context = CudaContext::new(ordinal).map_err(driver("cuDevicePrimaryCtxRetain"))?;
        if attribute(&context, Attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH) == 0 {
            return Err(Error::Unavailable {
                what: "a world on one GPU".into(),
                reason: format!("device {ordinal} has no cooperative launches"),
            });
        }
        let layout = Layout::new(max_bytes, world_size, &Cuda::PACKING, &Cuda::CHANNELS, Cuda::MAX_BYTES)?;
        let copies = Copies::new(&context)?;
        let allocate = || match memory {
            RegionMemory::Device => {
                Memory::allocate(&context, &copies, layout.total_bytes, Sharing::Pointers).map(Region::Device)
            }
            RegionMemory::Host => Pinned::allocate(&context, layout.total_bytes).map(Region::Host),
        };
        let regions = (0..world_size).map(|_| allocate()).collect::<Result<Vec<_>>>()?;
        let epochs = epoch.to_ne_bytes().repeat(abi::FA_MAX_BLOCKS as usize);
        for region in &regions {
            // SAFETY: the epochs lie in the head of a region that was just made.
            unsafe { region.write(&copies, std::mem::offset_of!(FaRegionHead, epoch), &epochs) }?;
        }
        let status = |_| Pinned::allocate(&context, size_of::<FaStatus>());
        let count = attribute(&context, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        Ok(Self {
            stream: context.new_stream().map_err(driver("cuStreamCreate"))?,
            kernels: Kernels::of(&context)?,
            statuses: (0..world_size).map(status).collect::<Result<_>>()?,
            multiprocessors: usize::try_from(count).unwrap_or(1).max(1),
            copies,
            context,
            layout,
            regions,
            timeout,
        })
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.regions.len()
    }

    /// The stream that launches run on.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The most blocks that each rank can have: all ranks' are resident at once, one block of 512 threads to a
    /// multiprocessor.
    pub fn max_blocks(&self) -> usize {
        (self.multiprocessors / self.world_size()).clamp(1, abi::FA_MAX_BLOCKS as usize)
    }

    /// The most elements that one launch of an allreduce takes.
    pub fn capacity(&self, algorithm: Algorithm, dtype: DType) -> usize {
        self.limits().capacity(algorithm, dtype.size())
    }

    fn limits(&self) -> Limits {
        Limits {
            device: DeviceKind::Cuda,
            packing: Cuda::PACKING,
            world_size: self.world_size(),
            mailbox_bytes: self.layout.mailbox_bytes,
            staging_bytes: self.layout.staging_bytes,
        }
    }

    fn launch(&self, rank: usize, input: u64, output: u64) -> FaLaunch {
        let context = LaunchContext {
            rank,
            world_size: self.world_size(),
            layout: &self.layout,
            regions: std::array::from_fn(|rank| self.regions.get(rank).map_or(0, |region| region.address())),
            table: self.regions[rank].address() + self.layout.table_offset as u64,
            status: self.statuses[rank].device_address(),
            threads: 0,
            direct: 0,
            window: 0,
            multicast: 0,
        };
        FaLaunch { input, output, timeout_ns: nanoseconds(self.timeout), ..context.launch() }
    }

    /// The first rank's failure, if any.
    fn check(&self) -> Result<()> {
        for (rank, status) in self.statuses.iter().enumerate() {
            // SAFETY: the status is one FaStatus of pinned memory; the kernels that wrote it have ended.
            let status = unsafe { status.host_pointer().cast::<FaStatus>().read_volatile() };
            if status.failure != abi::FA_OK {
                let missing = (0..MAX_RANKS).filter(|rank| status.missing >> rank & 1 == 1).collect();
                return Err(match status.failure {
                    abi::FA_TIMED_OUT => Error::Timeout {
                        operation: "call of a world on one GPU",
                        epoch: status.epoch,
                        missing,
                        waited: self.timeout,
                        last_seen: String::new(),
                    },
                    failure => Error::Unavailable {
                        what: format!("the kernel of rank {rank}"),
                        reason: format!("it recorded failure {failure}"),
                    },
                });
            }
        }
        Ok(())
    }
}

impl Drop for CudaWorld {
    fn drop(&mut self) {
        // Every launch was waited for unless waiting failed, and then the context is lost.
        let _ = synchronize(&self.stream);
    }
}
