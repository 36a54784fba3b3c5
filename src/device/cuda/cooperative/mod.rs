//! All ranks in one cooperative launch on one GPU, without a communicator.
//!
//! CUDA guarantees progress to ranks that wait for each other only if their blocks are resident together, as in a
//! cooperative launch. So this is how the kernels are tested on a machine with one GPU. It is not meant for
//! production.
//!
//! Cooperative launches can be captured into graphs (a kernel node has the attribute
//! `CU_LAUNCH_ATTRIBUTE_COOPERATIVE`), so replays of a prepared call can be timed by events.

mod call;
#[cfg(feature = "probes")]
mod repetitions;

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, CudaStream};

pub use self::call::{CooperativeCall, CooperativePlan, CooperativeRank};
use super::driver::{attribute, driver, require, synchronize};
use super::launch::kernels::Kernels;
use super::memory::{Copies, Memory, Pinned, Sharing};
use super::Cuda;
use crate::abi::{self, FaLaunch, FaRegionHead, FaStatus, MAX_RANKS};
use crate::call::{nanoseconds, LaunchContext};
use crate::catalogue::DType;
use crate::device::sealed::Device as _;
use crate::error::{Error, Result};
use crate::plan::{Algorithm, DeviceKind, Limits};
use crate::region::Layout;

/// Ranks `0..world_size` on one GPU, each with a region.
pub struct CooperativeRanks {
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

/// Kind of memory that holds the regions of the ranks.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegionMemory {
    Device,
    /// Pinned host memory, behind the GPU's link to the host.
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

    /// Writes to the region.
    ///
    /// # Safety
    ///
    /// `values` fit at `offset`, and no kernel uses the region.
    unsafe fn write<T: Copy>(&self, copies: &Copies, offset: usize, values: &[T]) -> Result<()> {
        match self {
            // SAFETY: by the caller's contract.
            Self::Device(memory) => unsafe { copies.write(memory.address() + offset as u64, values) },
            Self::Host(pinned) => {
                // SAFETY: `values` fit by the caller's contract; they are `Copy`, and the region is a different
                // allocation.
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

impl CooperativeRanks {
    /// Creates ranks on the GPU with this ordinal. `max_bytes` is as in
    /// [`Builder::max_bytes`](crate::Builder::max_bytes); `epoch` is the epoch before the first launch.
    ///
    /// # Errors
    ///
    /// * [`Error::WorldSize`], [`Error::InvalidSetting`]: `world_size` or `max_bytes` is out of range.
    /// * [`Error::Unavailable`]: no driver, no kernels in this build, or no cooperative launches on this GPU.
    /// * [`Error::Allocation`], [`Error::Driver`]: the driver failed.
    ///
    /// ```no_run
    /// use std::time::Duration;
    ///
    /// use fast_allreduce::device::cuda::CooperativeRanks;
    ///
    /// let ranks = CooperativeRanks::new(0, 4, 1 << 20, 0, Duration::from_secs(5))?;
    /// println!("{} blocks per rank", ranks.max_blocks());
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    pub fn new(
        ordinal: usize,
        world_size: usize,
        max_bytes: usize,
        epoch: u32,
        timeout: Duration,
    ) -> Result<Self> {
        Self::in_memory(ordinal, world_size, max_bytes, epoch, timeout, RegionMemory::Device)
    }

    /// Creates ranks as [`CooperativeRanks::new`] does, with regions in the given kind of memory. With host memory,
    /// stores and loads between ranks take about as long as over a link.
    ///
    /// # Errors
    ///
    /// Those of [`CooperativeRanks::new`].
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
                what: "all ranks in one launch".into(),
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
            // SAFETY: the epochs are in the head of a new region, which no kernel uses yet.
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

    /// Returns the number of ranks.
    ///
    /// ```no_run
    /// # use fast_allreduce::device::cuda::CooperativeRanks;
    /// let ranks = CooperativeRanks::new(0, 4, 1 << 20, 0, std::time::Duration::from_secs(5))?;
    /// assert_eq!(ranks.world_size(), 4);
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    pub fn world_size(&self) -> usize {
        self.regions.len()
    }

    /// Returns the stream that launches run on.
    ///
    /// ```no_run
    /// # use fast_allreduce::device::cuda::CooperativeRanks;
    /// # let ranks = CooperativeRanks::new(0, 4, 1 << 20, 0, std::time::Duration::from_secs(5))?;
    /// let input = ranks.stream().alloc_zeros::<f32>(1024)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Returns the maximum number of blocks of each rank: the blocks of all ranks are resident at once, one block of
    /// 512 threads on a multiprocessor.
    ///
    /// ```no_run
    /// # use fast_allreduce::device::cuda::CooperativeRanks;
    /// # let ranks = CooperativeRanks::new(0, 4, 1 << 20, 0, std::time::Duration::from_secs(5))?;
    /// let blocks = ranks.max_blocks().min(8);
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    pub fn max_blocks(&self) -> usize {
        (self.multiprocessors / self.world_size()).clamp(1, abi::FA_MAX_BLOCKS as usize)
    }

    /// Returns the maximum number of elements of one launch of an allreduce.
    ///
    /// ```no_run
    /// # use fast_allreduce::device::cuda::CooperativeRanks;
    /// # let ranks = CooperativeRanks::new(0, 4, 1 << 20, 0, std::time::Duration::from_secs(5))?;
    /// use fast_allreduce::{Algorithm, DType};
    ///
    /// let elements = ranks.capacity(Algorithm::TwoShotPull, DType::F16);
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
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
            levels: crate::plan::Levels::default(),
            stream_from: usize::MAX,
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

    /// Returns the failure of the lowest rank that has one.
    fn check(&self) -> Result<()> {
        for (rank, status) in self.statuses.iter().enumerate() {
            // SAFETY: the status is an FaStatus in pinned memory; the kernels that wrote it have ended.
            let status = unsafe { status.host_pointer().cast::<FaStatus>().read_volatile() };
            if status.failure != abi::FA_OK {
                let missing = (0..MAX_RANKS).filter(|rank| status.missing >> rank & 1 == 1).collect();
                return Err(match status.failure {
                    abi::FA_TIMED_OUT => Error::Timeout {
                        operation: "call of all ranks in one launch",
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

impl Drop for CooperativeRanks {
    fn drop(&mut self) {
        // Launches have ended, unless the wait fails: then the context is lost.
        let _ = synchronize(&self.stream);
    }
}
