//! All ranks of a world in one cooperative launch on one GPU.
//!
//! CUDA promises that ranks which wait for each other all make progress only where their blocks are resident together: in a
//! cooperative launch. That makes this the form in which the kernels are proven on a machine with one GPU. It is no way to
//! serve a model.
//!
//! Cooperative launches can be captured into graphs (a kernel node has the attribute `CU_LAUNCH_ATTRIBUTE_COOPERATIVE`), so
//! that a prepared call can be timed by events around replays.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use cudarc::driver::{result, CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};

use super::driver::{attribute, driver, require, Copies, Pinned};
use super::handle::Sharing;
use super::kernels::Kernels;
use super::memory::Memory;
use super::Cuda;
use crate::abi::{self, FaCall, FaLaunch, FaRegionHead, FaShare, FaStatus};
use crate::device::sealed::Device as _;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::op::ReduceOp;
use crate::plan::Algorithm;
use crate::region::{Layout, TABLE_ROWS};
use crate::MAX_RANKS;

/// Ranks `0..world_size` of one GPU, each with a region.
pub struct CudaWorld {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    kernels: Kernels,
    copies: Copies,
    layout: Layout,
    regions: Vec<Arc<Memory>>,
    statuses: Vec<Pinned>,
    multiprocessors: usize,
    timeout: Duration,
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
        let layout = Layout::new(max_bytes, Cuda::PACKING.slot_bytes)?;
        let copies = Copies::new(&context)?;
        let allocate = |bytes| Memory::allocate(&context, &copies, bytes, Sharing::Pointers);
        let regions = (0..world_size).map(|_| allocate(layout.total_bytes)).collect::<Result<Vec<_>>>()?;
        let epochs = epoch.to_ne_bytes().repeat(abi::FA_MAX_BLOCKS as usize);
        for region in &regions {
            let address = region.address() + std::mem::offset_of!(FaRegionHead, epoch) as u64;
            // SAFETY: the epochs lie in the head of a region that was just made.
            unsafe { copies.write(address, &epochs) }?;
        }
        let status = |_| Pinned::allocate(&context, size_of::<FaStatus>());
        let count = attribute(&context, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        Ok(Self {
            stream: context.new_stream().map_err(driver("cuStreamCreate"))?,
            kernels: Kernels::load(&context)?,
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

    /// [`CudaWorld::prepare`], once started and waited for.
    ///
    /// # Errors
    ///
    /// As [`CudaWorld::prepare`] and [`WorldCall::finish`].
    #[allow(clippy::too_many_arguments)]
    pub fn all_reduce<T: Element>(
        &mut self,
        inputs: &[CudaSlice<T>],
        outputs: &mut [CudaSlice<T>],
        offset: usize,
        count: usize,
        op: ReduceOp,
        algorithm: Algorithm,
        grid: (usize, usize),
        registered: bool,
    ) -> Result<()> {
        let mut call = self.prepare(inputs, outputs, offset, count, op, algorithm, grid, registered)?;
        call.enqueue()?;
        call.finish()
    }

    /// Makes a call ready that reduces `count` elements at `offset` of each rank's input into those of its output. Rank r reads
    /// `inputs[r]`, or `outputs[r]` where `inputs` is empty: in place. With `registered` the pull algorithms read the peers'
    /// inputs where they are. `grid` is blocks for each rank, and threads for each block.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`] where a slice ends before `offset + count`, or there is not one for each rank;
    /// [`Error::InvalidSetting`] for a grid that is not resident; [`Error::Allocation`], [`Error::Driver`].
    #[allow(clippy::too_many_arguments)]
    pub fn prepare<'a, T: Element>(
        &'a mut self,
        inputs: &'a [CudaSlice<T>],
        outputs: &'a mut [CudaSlice<T>],
        offset: usize,
        count: usize,
        op: ReduceOp,
        algorithm: Algorithm,
        (blocks, threads): (usize, usize),
        registered: bool,
    ) -> Result<WorldCall<'a>> {
        let world_size = self.world_size();
        if !(1..=self.max_blocks()).contains(&blocks) || !(32..=512).contains(&threads) {
            let value = format!("{blocks} blocks of {threads}");
            return Err(Error::InvalidSetting {
                name: "grid",
                value,
                expected: "resident blocks of 32 to 512 threads",
            });
        }
        let in_place = inputs.is_empty();
        let slices = if in_place { outputs.len() } else { inputs.len().min(outputs.len()) };
        if slices != world_size || outputs.len() != world_size {
            return Err(Error::LengthMismatch { input: slices, output: world_size });
        }
        let shortest =
            inputs.iter().map(|slice| slice.len()).chain(outputs.iter().map(|slice| slice.len())).min();
        if let Some(length) =
            shortest.filter(|&length| offset.checked_add(count).is_none_or(|end| end > length))
        {
            return Err(Error::LengthMismatch { input: length, output: offset.saturating_add(count) });
        }
        let world: &'a Self = self;
        let direct = registered && !(in_place && algorithm == Algorithm::OneShotPull);
        let start = (offset * size_of::<T>()) as u64;
        let outputs: Vec<_> = outputs.iter_mut().map(|slice| slice.device_ptr_mut(&world.stream)).collect();
        let inputs: Vec<_> = inputs.iter().map(|slice| slice.device_ptr(&world.stream)).collect();
        let input_of = |rank: usize| if in_place { outputs[rank].0 } else { inputs[rank].0 } + start;
        let first = (0..world_size).map(|rank| FaLaunch {
            blocks: blocks as u32,
            dtype: T::DTYPE as u32,
            op: op as u32,
            algorithm: algorithm as u32,
            source: if direct { 1 << abi::FA_SOURCE_ID_SHIFT } else { 0 },
            ..world.launch(rank, input_of(rank), outputs[rank].0 + start)
        });
        let first: Vec<_> = first.collect();
        if direct {
            world.write_row(&first)?;
        }

        let capacity =
            algorithm.capacity(world.layout.mailbox_bytes, Cuda::PACKING, size_of::<T>(), world_size);
        let piece_at = |done: usize| {
            let shift = (done * size_of::<T>()) as u64;
            first.iter().map(move |launch| FaLaunch {
                count: (count - done).min(capacity) as u64,
                input: launch.input + shift,
                output: launch.output + shift,
                source: if direct { launch.source + shift } else { 0 },
                ..*launch
            })
        };
        let launches: Vec<FaLaunch> = (0..count).step_by(capacity).flat_map(piece_at).collect();
        let bytes = size_of_val(&launches[..]).max(1);
        let memory = Memory::allocate(&world.context, &world.copies, bytes, Sharing::Pointers)?;
        // SAFETY: the launches are plain structs, and fit the allocation, which no kernel uses yet.
        unsafe { world.copies.write(memory.address(), &launches) }?;
        Ok(WorldCall {
            pieces: launches.len() / world_size,
            kernel: world.kernels.for_world(&first[0]),
            grid: (blocks as u32, threads as u32),
            launches: memory,
            _used: outputs.into_iter().chain(inputs).map(|(_, used)| used).collect(),
            world,
        })
    }

    fn launch(&self, rank: usize, input: u64, output: u64) -> FaLaunch {
        FaLaunch {
            regions: std::array::from_fn(|rank| self.regions.get(rank).map_or(0, |region| region.address())),
            input,
            output,
            count: 0,
            source: 0,
            buffers: self.regions[rank].address() + self.layout.table_offset as u64,
            buffer_count: TABLE_ROWS as u64,
            status: self.statuses[rank].device_address(),
            mailbox_offset: self.layout.mailbox_offset as u64,
            mailbox_bytes: self.layout.mailbox_bytes as u64,
            staging_offset: self.layout.staging_offset as u64,
            staging_bytes: self.layout.staging_bytes as u64,
            channel_offset: self.layout.channel_offset as u64,
            channel_bytes: self.layout.channel_bytes as u64,
            transfers: 0,
            timeout_ns: u64::try_from(self.timeout.as_nanos()).unwrap_or(u64::MAX).clamp(1, u64::MAX / 2),
            rank: rank as u32,
            world: self.world_size() as u32,
            blocks: 0,
            dtype: 0,
            op: 0,
            algorithm: 0,
            spin: 0,
            checked: 0,
            root: 0,
            reserved: 0,
            call: FaCall { what: 0, count: 0 },
            shares: [FaShare { first: 0, count: 0 }; MAX_RANKS],
        }
    }

    /// Makes the inputs of a launch row 0 of every rank's table.
    fn write_row(&self, launches: &[FaLaunch]) -> Result<()> {
        let row: [u64; MAX_RANKS] =
            std::array::from_fn(|rank| launches.get(rank).map_or(0, |launch| launch.input));
        for launch in launches {
            // SAFETY: the table lies in the rank's region; no kernel runs.
            unsafe { self.copies.write(launch.buffers, &row) }?;
        }
        Ok(())
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
                        operation: "all_reduce of a world on one GPU",
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

/// A call of a [`CudaWorld`] whose arguments are on the GPU: starting it is one launch for each piece of the message.
pub struct WorldCall<'a> {
    world: &'a CudaWorld,
    kernel: sys::CUfunction,
    grid: (u32, u32),
    /// `FaLaunch` of each rank, piece after piece.
    launches: Arc<Memory>,
    pieces: usize,
    /// The slices, which are free for other uses after what is on the stream when this goes.
    _used: Vec<SyncOnDrop<'a>>,
}

impl WorldCall<'_> {
    /// Puts the call on the world's stream, once more for each time. While the stream is captured the launches become a part of
    /// the graph, which may be launched on that stream as long as this lives.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`].
    pub fn enqueue(&mut self) -> Result<()> {
        let world = self.world;
        world.context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))?;
        let world_size = world.world_size();
        let (blocks, threads) = self.grid;
        for piece in 0..self.pieces {
            let offset = piece * world_size * size_of::<FaLaunch>();
            let mut address = self.launches.address() + offset as u64;
            let mut parameters = [(&raw mut address).cast()];
            // SAFETY: the kernel takes the address of the piece's launches, and every address in them is of this world or of
            // slices that are borrowed until the stream has been waited for.
            unsafe {
                result::launch_cooperative_kernel(
                    self.kernel,
                    (blocks, world_size as u32, 1),
                    (threads, 1, 1),
                    0,
                    world.stream.cu_stream(),
                    &mut parameters,
                )
            }
            .map_err(driver("cuLaunchCooperativeKernel"))?;
        }
        Ok(())
    }

    /// Waits for the end of what is on the stream, and says whether every rank came.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`], [`Error::Driver`].
    pub fn finish(&mut self) -> Result<()> {
        self.world.stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
        self.world.check()
    }
}

impl Drop for WorldCall<'_> {
    fn drop(&mut self) {
        // The launches and the slices are in use until then. An error means that the context is lost.
        let _ = self.world.stream.synchronize();
    }
}

impl Drop for CudaWorld {
    fn drop(&mut self) {
        // Every launch was waited for unless waiting failed, and then the context is lost.
        let _ = self.stream.synchronize();
    }
}
