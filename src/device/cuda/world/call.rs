//! Calls of a world on one GPU: made ready once, then started as often as wanted.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr};
use cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut, SyncOnDrop};

#[cfg(feature = "probes")]
use super::in_turns::InTurns;
use super::CudaWorld;
use crate::abi::{self, FaFused, FaLaunch, FaTransfers, MAX_RANKS};
use crate::call::{check_transfers, pack, Call, Collective, Division, RawFused, Transfer, NO_TRANSFERS};
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;
use crate::device::cuda::api;
use crate::device::cuda::driver::{bind, driver, synchronize};
use crate::device::cuda::handle::Sharing;
use crate::device::cuda::memory::Memory;
#[cfg(feature = "probes")]
use crate::device::cuda::probes::Probes;
use crate::device::sealed::Operands;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::plan::{Algorithm, Plan, PlannedCall};
use crate::region::source_word;

/// How a [`CudaWorld`] carries out a call.
#[derive(Debug, Clone, Copy)]
pub struct WorldPlan {
    /// Of an allreduce, but for one with quantised transport.
    pub algorithm: Algorithm,
    /// For each rank.
    pub blocks: usize,
    /// For each block.
    pub threads: usize,
    /// Whether peers pull from the inputs where they are.
    pub registered: bool,
}

impl WorldPlan {
    fn grid(self) -> Plan {
        let Self { algorithm, blocks, threads, .. } = self;
        Plan { algorithm, blocks, threads, piece_bytes: usize::MAX }
    }
}

/// What one rank of a [`CudaWorld`] does in a call. Collectives differ between ranks in the counts of
/// [`Collective::AllToAllV`] alone.
#[derive(Debug, Clone, Copy)]
pub struct WorldRank<'a> {
    /// What.
    pub collective: Collective<'a>,
    /// Of the first element, or 0 where the rank reads none.
    pub input: CUdeviceptr,
    /// Of the first element, or 0 where the rank writes none.
    pub output: CUdeviceptr,
}

impl CudaWorld {
    /// [`CudaWorld::prepare`], once started and waited for.
    ///
    /// # Errors
    ///
    /// As [`CudaWorld::prepare`] and [`WorldCall::finish`].
    pub fn all_reduce<T: Element>(
        &mut self,
        inputs: &[CudaSlice<T>],
        outputs: &mut [CudaSlice<T>],
        offset: usize,
        count: usize,
        op: ReduceOp,
        plan: WorldPlan,
    ) -> Result<()> {
        let mut call = self.prepare(inputs, outputs, offset, count, op, plan)?;
        call.enqueue()?;
        call.finish()
    }

    /// Makes a call ready that reduces `count` elements at `offset` of each rank's input into those of its output. Rank r reads
    /// `inputs[r]`, or `outputs[r]` where `inputs` is empty: in place.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`] where a slice ends before `offset + count`, or there is not one for each rank;
    /// [`Error::InvalidSetting`] for a grid that is not resident, and an algorithm that cannot do it; [`Error::Allocation`],
    /// [`Error::Driver`].
    pub fn prepare<'a, T: Element>(
        &'a mut self,
        inputs: &'a [CudaSlice<T>],
        outputs: &'a mut [CudaSlice<T>],
        offset: usize,
        count: usize,
        op: ReduceOp,
        plan: WorldPlan,
    ) -> Result<WorldCall<'a>> {
        let world_size = self.world_size();
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
        let start = (offset * size_of::<T>()) as u64;
        let outputs: Vec<_> = outputs.iter_mut().map(|slice| slice.device_ptr_mut(&world.stream)).collect();
        let inputs: Vec<_> = inputs.iter().map(|slice| slice.device_ptr(&world.stream)).collect();
        let call = |rank: usize| Call {
            collective: Collective::AllReduce(op),
            input: if in_place { outputs[rank].0 } else { inputs[rank].0 } + start,
            output: outputs[rank].0 + start,
            count,
            dtype: T::DTYPE,
        };
        let calls: Vec<_> = (0..world_size).map(call).collect();
        let mut call = world.ready(&calls, plan)?;
        call.used = outputs.into_iter().chain(inputs).map(|(_, used)| used).collect();
        Ok(call)
    }

    /// Makes any collective ready, on raw pointers. `count` is as in [`Collective`].
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`] unless there is one of `ranks` for each rank, or they differ in their collectives; as
    /// [`Communicator::collective_raw`](crate::Communicator::collective_raw) and [`CudaWorld::prepare`].
    ///
    /// # Safety
    ///
    /// As long as the call lives, the inputs are valid for reads and the outputs for writes, of as many elements as the
    /// collective has there, and nothing outside the order of [`CudaWorld::stream`] writes the ones or accesses the others.
    pub unsafe fn prepare_raw(
        &mut self,
        ranks: &[WorldRank<'_>],
        count: usize,
        dtype: DType,
        plan: WorldPlan,
    ) -> Result<WorldCall<'_>> {
        let world_size = self.world_size();
        let alike = ranks.windows(2).all(|pair| alike(pair[0].collective, pair[1].collective));
        if ranks.len() != world_size || !alike {
            return Err(Error::LengthMismatch { input: ranks.len(), output: world_size });
        }
        let calls: Vec<_> = ranks
            .iter()
            .map(|&WorldRank { collective, input, output }| {
                let output = collective.output(output);
                Call { collective, input, output, count, dtype }
            })
            .collect();
        for (rank, call) in calls.iter().enumerate() {
            call.check(rank, world_size)?;
        }
        self.ready(&calls, plan)
    }

    /// Makes messages between pairs of ranks ready: for each rank, those that it sends and receives.
    ///
    /// # Errors
    ///
    /// As [`Communicator::transfer_raw`](crate::Communicator::transfer_raw) and [`CudaWorld::prepare`].
    ///
    /// # Safety
    ///
    /// As [`CudaWorld::prepare_raw`].
    pub unsafe fn prepare_transfers_raw(
        &mut self,
        ranks: &[Vec<Transfer>],
        plan: WorldPlan,
    ) -> Result<WorldCall<'_>> {
        for transfers in ranks {
            check_transfers(transfers, self.world_size())?;
        }
        self.ready_transfers(ranks, plan)
    }

    fn check_plan(&self, plan: WorldPlan) -> Result<()> {
        let WorldPlan { algorithm, blocks, threads, .. } = plan;
        if algorithm.is_nvls() {
            return Err(Error::InvalidSetting {
                name: "algorithm",
                value: algorithm.to_string(),
                expected: "one that ranks on one GPU can take: a multicast group has a GPU once",
            });
        }
        if (1..=self.max_blocks()).contains(&blocks) && (32..=512).contains(&threads) {
            return Ok(());
        }
        Err(Error::InvalidSetting {
            name: "grid",
            value: format!("{blocks} blocks of {threads}"),
            expected: "resident blocks of 32 to 512 threads",
        })
    }

    /// A collective as each rank calls it, which has been checked.
    fn ready(&self, calls: &[Call<'_>], plan: WorldPlan) -> Result<WorldCall<'_>> {
        self.check_plan(plan)?;
        let world_size = self.world_size();
        let division = calls[0].division();
        if division == Division::Transfers {
            let mut transfers = vec![Vec::new(); calls.len()];
            for (rank, (call, list)) in calls.iter().zip(&mut transfers).enumerate() {
                call.transfers(rank, world_size, list);
            }
            return self.ready_transfers(&transfers, plan);
        }
        let (first, piece) = (&calls[0], self.piece(&calls[0], plan));
        if let Collective::AllReduce(op) = first.collective {
            if !plan.algorithm.can_reduce(first.dtype, op, piece) {
                return Err(Error::InvalidSetting {
                    name: "algorithm",
                    value: plan.algorithm.to_string(),
                    expected: "one that can do the operation, on messages that fit the region",
                });
            }
        }
        if first.collective.quantized().is_some() && plan.threads % 32 != 0 {
            return Err(Error::InvalidSetting {
                name: "grid",
                value: format!("{} threads", plan.threads),
                expected: "whole warps where transport is quantized",
            });
        }
        if let Some(fused) = first.collective.fused() {
            self.check_rows(fused, first.dtype, plan, piece)?;
        }
        let is_reduced = first.collective.kind().planned_as() == PlannedCall::AllReduce;
        let (algorithm, limits) = (is_reduced.then_some(plan.algorithm), self.limits());
        let first = calls.iter().enumerate().map(|(rank, call)| {
            let pulls = call.pulls(algorithm, call.input_bytes(rank, world_size));
            let mut launch = FaLaunch {
                source: if plan.registered && pulls { source_word(0, 0) } else { 0 },
                ..self.launch(rank, call.input, call.output)
            };
            call.set_call(&mut launch, &plan.grid(), &limits);
            launch
        });
        let first: Vec<_> = first.collect();
        if plan.registered {
            self.write_row(&first)?;
        }
        let extent = calls[0].extent(world_size);
        let (mut launches, mut pieces) = (Vec::new(), Vec::new());
        for done in division.pieces(extent, piece) {
            launches.extend(first.iter().zip(calls).map(|(launch, call)| {
                let mut of_piece = *launch;
                call.set_piece(&mut of_piece, done, piece, launch.source);
                of_piece
            }));
            pieces.extend(calls.iter().filter_map(|call| call.fused_of_piece(done, piece)));
        }
        let Some(&fused) = pieces.first() else {
            return self.call(&first[0], launches, None, plan);
        };
        let memory = self.upload(&pieces)?;
        for (number, launch) in launches.iter_mut().enumerate() {
            launch.operands = memory.address() + (number * size_of::<FaFused>()) as u64;
        }
        self.call(&first[0], launches, Some((memory, Own::Fused(fused))), plan)
    }

    /// Refuses algorithms and grids that rows cannot be divided among.
    fn check_rows(&self, fused: &RawFused, dtype: DType, plan: WorldPlan, piece: usize) -> Result<()> {
        let refuse = |name, value, expected| Err(Error::InvalidSetting { name, value, expected });
        if fused.kernel(plan.algorithm).is_none() || piece == 0 {
            let expected = "a direct one, on rows that fit the region";
            return refuse("algorithm", plan.algorithm.to_string(), expected);
        }
        let whole = fused.row().is_none_or(|row| row * dtype.size() % abi::FA_CUDA_PACK_BYTES as usize == 0);
        if plan.threads % 32 != 0 || plan.blocks > 1 && !whole {
            let expected = "whole warps, and one block where rows are no multiple of 16 bytes";
            return refuse("grid", format!("{} blocks of {}", plan.blocks, plan.threads), expected);
        }
        Ok(())
    }

    /// Elements that one launch takes: of the message, or of each share.
    fn piece(&self, call: &Call<'_>, WorldPlan { algorithm, blocks, .. }: WorldPlan) -> usize {
        let (size, limits) = (call.dtype.size(), self.limits());
        match call.collective {
            Collective::AllReduce(_) => limits.capacity(algorithm, size),
            Collective::AllReduceFused(fused) => match fused.row() {
                Some(row) => limits.rows(algorithm, row * size, size, blocks) * row,
                None => limits.capacity(algorithm, size),
            },
            Collective::AllReduceQuantized(_) => limits.quantized_capacity(size),
            _ => limits.share_bytes(call.staged_shares(limits.world_size), usize::MAX) / size,
        }
    }

    fn ready_transfers(&self, ranks: &[Vec<Transfer>], plan: WorldPlan) -> Result<WorldCall<'_>> {
        self.check_plan(plan)?;
        let world_size = self.world_size();
        if ranks.len() != world_size {
            return Err(Error::LengthMismatch { input: ranks.len(), output: world_size });
        }
        let packed = ranks.iter().enumerate().map(|(rank, list)| {
            let mut packed = NO_TRANSFERS;
            pack(list, rank, world_size, self.layout.stripes, &mut packed).map(|_| packed)
        });
        let packed = packed.collect::<Result<Vec<_>>>()?;
        let memory = self.upload(&packed)?;
        let launch = |rank: usize| FaLaunch {
            blocks: plan.blocks as u32,
            algorithm: abi::FA_TRANSFER,
            operands: memory.address() + (rank * size_of::<FaTransfers>()) as u64,
            ..self.launch(rank, 0, 0)
        };
        let launches: Vec<_> = (0..world_size).map(launch).collect();
        self.call(&launches[0].clone(), launches, Some((memory, Own::Transfers(Box::new(packed[0])))), plan)
    }

    fn call(
        &self,
        first: &FaLaunch,
        launches: Vec<FaLaunch>,
        operands: Option<(Arc<Memory>, Own)>,
        plan: WorldPlan,
    ) -> Result<WorldCall<'_>> {
        Ok(WorldCall {
            pieces: launches.len() / self.world_size(),
            kernel: self.kernels.for_world(first),
            #[cfg(feature = "probes")]
            in_turns: InTurns::of(&launches),
            grid: (plan.blocks as u32, plan.threads as u32),
            first: *first,
            launches: self.upload(&launches)?,
            operands,
            used: Vec::new(),
            world: self,
        })
    }

    /// Memory that holds what no kernel uses yet.
    fn upload<T: Copy>(&self, values: &[T]) -> Result<Arc<Memory>> {
        let bytes = size_of_val(values).max(1);
        let memory = Memory::allocate(&self.context, &self.copies, bytes, Sharing::Pointers)?;
        // SAFETY: the values are plain structs, and fit the allocation, which no kernel uses yet.
        unsafe { self.copies.write(memory.address(), values) }?;
        Ok(memory)
    }

    /// Makes the inputs of a launch row 0 of every rank's table.
    fn write_row(&self, launches: &[FaLaunch]) -> Result<()> {
        let row: [u64; MAX_RANKS] =
            std::array::from_fn(|rank| launches.get(rank).map_or(0, |launch| launch.input));
        for region in &self.regions {
            // SAFETY: the table lies in the rank's region; no kernel runs.
            unsafe { region.write(&self.copies, self.layout.table_offset, &row) }?;
        }
        Ok(())
    }
}

/// Whether two ranks do the same but for the counts of an all-to-all and for scales and the addresses of a fused call's operands, which
/// are each rank's own.
fn alike(one: Collective<'_>, other: Collective<'_>) -> bool {
    let words = |collective| {
        let call = Call { collective, input: 0, output: 0, count: 0, dtype: DType::U8 };
        let call = call.id(None).encode();
        (call.what, call.count, call.digest)
    };
    words(one) == words(other)
}

/// What a kernel is given after its launch. Where one launch runs a world it is not looked at.
enum Own {
    Transfers(Box<FaTransfers>),
    Fused(FaFused),
}

impl Own {
    fn operands(&self) -> Operands<'_> {
        match self {
            Self::Transfers(transfers) => Operands::Transfers(transfers),
            Self::Fused(fused) => Operands::Fused(fused),
        }
    }
}

/// A call of a [`CudaWorld`] whose arguments are on the GPU: starting it is one launch for each piece of the message.
pub struct WorldCall<'a> {
    world: &'a CudaWorld,
    kernel: sys::CUfunction,
    #[cfg(feature = "probes")]
    in_turns: InTurns,
    grid: (u32, u32),
    /// What the kernel is given, but for the address of the piece's launches.
    first: FaLaunch,
    /// `FaLaunch` of each rank, piece after piece.
    launches: Arc<Memory>,
    /// What each launch comes with, and a place of the size that the kernel is given.
    operands: Option<(Arc<Memory>, Own)>,
    pieces: usize,
    /// The slices, which are free for other uses after what is on the stream when this goes.
    used: Vec<SyncOnDrop<'a>>,
}

impl WorldCall<'_> {
    /// Makes the call by the code of the hot set, `turns` times in each launch. What is reduced in place is reduced again in each
    /// turn. Each block adds its times to [`STAMPS`](crate::device::cuda::probes::STAMPS) and one words at `sums`, those of rank r
    /// and block b at block number r x blocks + b.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] where the hot set has no kernel for the call, or the driver does not find it.
    ///
    /// # Safety
    ///
    /// The module of `probes` and the words at `sums` live as long as the call and the graphs that it was captured in.
    #[cfg(feature = "probes")]
    pub unsafe fn in_turns(mut self, probes: &Probes, turns: u32, sums: CUdeviceptr) -> Result<Self> {
        self.kernel = probes.function(self.in_turns.enable(turns, sums)?)?;
        Ok(self)
    }

    /// Puts the call on the world's stream, once more for each time. While the stream is captured the launches become a part of
    /// the graph, which may be launched on that stream as long as this lives.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`].
    pub fn enqueue(&mut self) -> Result<()> {
        let world = self.world;
        bind(&world.context)?;
        let world_size = world.world_size();
        let (blocks, threads) = self.grid;
        for piece in 0..self.pieces {
            let offset = piece * world_size * size_of::<FaLaunch>();
            self.first.launches = self.launches.address() + offset as u64;
            let second = self.operands.as_ref().map_or(std::ptr::null(), |(_, own)| own.operands().address());
            let mut parameters = [(&raw mut self.first).cast(), second.cast_mut(), std::ptr::null_mut()];
            #[cfg(feature = "probes")]
            self.in_turns.put(&mut parameters);
            // SAFETY: the function takes one FaLaunch by value, and those with operands take them after it, which the driver copies.
            // It finds the piece's launches by the first, and every address in them is of this world, or valid until the stream
            // has been waited for: the slices are borrowed for that long, the rest is the promise of who made the call.
            unsafe {
                let (ranks, stream) = (world_size as u32, world.stream.cu_stream());
                let parameters = parameters.as_mut_ptr();
                api::cuLaunchCooperativeKernel(
                    self.kernel,
                    blocks,
                    ranks,
                    1,
                    threads,
                    1,
                    1,
                    0,
                    stream,
                    parameters,
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
        synchronize(&self.world.stream)?;
        self.world.check()
    }
}

impl Drop for WorldCall<'_> {
    fn drop(&mut self) {
        // The launches and the slices are in use until then. An error means that the context is lost.
        let _ = synchronize(&self.world.stream);
    }
}
