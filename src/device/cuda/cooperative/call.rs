//! Calls of all ranks in one launch: prepared once, then launched any number of times.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr};
use cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut, SyncOnDrop};

#[cfg(feature = "probes")]
use super::repetitions::Repetitions;
use super::CooperativeRanks;
use crate::abi::{self, FaFused, FaGatheredRows, FaLaunch, FaShardedNorm, FaTransfers, MAX_RANKS};
use crate::call::{check_transfers, pack, Call, Collective, Division, RawFused, Transfer, NO_TRANSFERS};
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;
use crate::device::cuda::driver::{api, bind, driver, synchronize};
use crate::device::cuda::memory::{Memory, Sharing};
#[cfg(feature = "probes")]
use crate::device::cuda::probes::Probes;
use crate::device::sealed::Operands;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::plan::{Algorithm, Plan, PlannedCall};
use crate::region::source_word;

/// Algorithm and grid of a call of [`CooperativeRanks`].
#[derive(Debug, Clone, Copy)]
pub struct CooperativePlan {
    /// Algorithm of an allreduce; ignored for other collectives and for quantised transport.
    pub algorithm: Algorithm,
    /// Blocks of each rank.
    pub blocks: usize,
    /// Threads of each block.
    pub threads: usize,
    /// Whether peers pull directly from the inputs, instead of from staging.
    pub registered: bool,
}

impl CooperativePlan {
    fn grid(self) -> Plan {
        let Self { algorithm, blocks, threads, .. } = self;
        Plan { algorithm, blocks, threads, piece_bytes: usize::MAX }
    }
}

/// Arguments of one rank. Collectives may differ between ranks only in the counts of [`Collective::AllToAllV`].
#[derive(Debug, Clone, Copy)]
pub struct CooperativeRank<'a> {
    /// The collective.
    pub collective: Collective<'a>,
    /// Address of the first element, or 0 if the rank reads none.
    pub input: CUdeviceptr,
    /// Address of the first element, or 0 if the rank writes none.
    pub output: CUdeviceptr,
}

impl CooperativeRanks {
    /// Runs an allreduce once: [`CooperativeRanks::prepare`], a launch, and a wait.
    ///
    /// # Errors
    ///
    /// Those of [`CooperativeRanks::prepare`] and [`CooperativeCall::finish`].
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use fast_allreduce::device::cuda::{CooperativePlan, CooperativeRanks};
    /// # use fast_allreduce::{Algorithm, ReduceOp};
    /// let mut ranks = CooperativeRanks::new(0, 2, 1 << 20, 0, Duration::from_secs(5))?;
    /// let stream = ranks.stream().clone();
    /// let mut data = [stream.alloc_zeros::<f32>(1024)?, stream.alloc_zeros(1024)?];
    /// let plan = CooperativePlan { algorithm: Algorithm::OneShotPull, blocks: 1, threads: 512, registered: false };
    /// ranks.all_reduce(&[], &mut data, 0, 1024, ReduceOp::Sum, plan)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn all_reduce<T: Element>(
        &mut self,
        inputs: &[CudaSlice<T>],
        outputs: &mut [CudaSlice<T>],
        offset: usize,
        count: usize,
        op: ReduceOp,
        plan: CooperativePlan,
    ) -> Result<()> {
        let mut call = self.prepare(inputs, outputs, offset, count, op, plan)?;
        call.enqueue()?;
        call.finish()
    }

    /// Prepares an allreduce of `count` elements at `offset` of each rank's slices. Rank r reads `inputs[r]` and
    /// writes `outputs[r]`; if `inputs` is empty, it reads `outputs[r]` (in place).
    ///
    /// # Errors
    ///
    /// * [`Error::LengthMismatch`]: a slice ends before `offset + count`, or there is not one slice for each rank.
    /// * [`Error::InvalidSetting`]: the grid is not resident, or the algorithm does not support the call.
    /// * [`Error::Allocation`], [`Error::Driver`]: the driver failed.
    ///
    /// ```no_run
    /// # use fast_allreduce::device::cuda::{CooperativePlan, CooperativeRanks};
    /// # use fast_allreduce::{ReduceOp, Result};
    /// # use cudarc::driver::CudaSlice;
    /// /// Runs an allreduce ten times.
    /// fn run(ranks: &mut CooperativeRanks, data: &mut [CudaSlice<f32>], plan: CooperativePlan) -> Result<()> {
    ///     let mut call = ranks.prepare(&[], data, 0, 1024, ReduceOp::Sum, plan)?;
    ///     (0..10).try_for_each(|_| call.enqueue())?;
    ///     call.finish()
    /// }
    /// ```
    pub fn prepare<'a, T: Element>(
        &'a mut self,
        inputs: &'a [CudaSlice<T>],
        outputs: &'a mut [CudaSlice<T>],
        offset: usize,
        count: usize,
        op: ReduceOp,
        plan: CooperativePlan,
    ) -> Result<CooperativeCall<'a>> {
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

    /// Prepares any collective on device addresses. `count` is as in [`Collective`].
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`] if `ranks` does not have one entry for each rank, or their collectives differ; those
    /// of [`Communicator::collective_raw`](crate::Communicator::collective_raw) and [`CooperativeRanks::prepare`].
    ///
    /// # Safety
    ///
    /// As long as the call lives, the inputs are valid for reads and the outputs for writes, of as many elements as
    /// the collective has there. Outside the order of [`CooperativeRanks::stream`], nothing writes the inputs or
    /// accesses the outputs.
    ///
    /// ```no_run
    /// # use fast_allreduce::device::cuda::{CooperativePlan, CooperativeRank, CooperativeRanks};
    /// # use fast_allreduce::{Collective, DType, Result};
    /// /// Runs an all-gather of 256 elements from each of two ranks.
    /// ///
    /// /// # Safety
    /// ///
    /// /// The addresses are those of buffers of 256 and 512 elements.
    /// unsafe fn run(ranks: &mut CooperativeRanks, buffers: [(u64, u64); 2], plan: CooperativePlan) -> Result<()> {
    ///     let of_rank = |(input, output)| CooperativeRank { collective: Collective::AllGather, input, output };
    ///     // SAFETY: by the caller's contract; the call ends here.
    ///     let mut call = unsafe { ranks.prepare_raw(&buffers.map(of_rank), 256, DType::F32, plan) }?;
    ///     call.enqueue()?;
    ///     call.finish()
    /// }
    /// ```
    pub unsafe fn prepare_raw(
        &mut self,
        ranks: &[CooperativeRank<'_>],
        count: usize,
        dtype: DType,
        plan: CooperativePlan,
    ) -> Result<CooperativeCall<'_>> {
        let world_size = self.world_size();
        let alike = ranks.windows(2).all(|pair| alike(pair[0].collective, pair[1].collective));
        if ranks.len() != world_size || !alike {
            return Err(Error::LengthMismatch { input: ranks.len(), output: world_size });
        }
        let calls: Vec<_> = ranks
            .iter()
            .map(|&CooperativeRank { collective, input, output }| {
                let output = collective.output(output);
                Call { collective, input, output, count, dtype }
            })
            .collect();
        for (rank, call) in calls.iter().enumerate() {
            call.check(rank, world_size)?;
        }
        self.ready(&calls, plan)
    }

    /// Prepares messages between pairs of ranks. `ranks` has, for each rank, the messages that it sends and receives.
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::transfer_raw`](crate::Communicator::transfer_raw) and [`CooperativeRanks::prepare`].
    ///
    /// # Safety
    ///
    /// As for [`CooperativeRanks::prepare_raw`].
    ///
    /// ```no_run
    /// # use fast_allreduce::device::cuda::{CooperativePlan, CooperativeRanks};
    /// # use fast_allreduce::{DType, Direction, Result, Transfer};
    /// /// Sends 256 elements from rank 0 to rank 1.
    /// ///
    /// /// # Safety
    /// ///
    /// /// The addresses are those of buffers of 256 elements.
    /// unsafe fn run(ranks: &mut CooperativeRanks, from: u64, to: u64, plan: CooperativePlan) -> Result<()> {
    ///     let message = |direction, peer, address| {
    ///         vec![Transfer { direction, peer, address, count: 256, dtype: DType::F32, tag: 0 }]
    ///     };
    ///     let messages = [message(Direction::Send, 1, from), message(Direction::Recv, 0, to)];
    ///     // SAFETY: by the caller's contract; the call ends here.
    ///     let mut call = unsafe { ranks.prepare_transfers_raw(&messages, plan) }?;
    ///     call.enqueue()?;
    ///     call.finish()
    /// }
    /// ```
    pub unsafe fn prepare_transfers_raw(
        &mut self,
        ranks: &[Vec<Transfer>],
        plan: CooperativePlan,
    ) -> Result<CooperativeCall<'_>> {
        for transfers in ranks {
            check_transfers(transfers, self.world_size())?;
        }
        self.ready_transfers(ranks, plan)
    }

    fn check_plan(&self, plan: CooperativePlan) -> Result<()> {
        let CooperativePlan { algorithm, blocks, threads, .. } = plan;
        if algorithm.is_nvls() {
            return Err(Error::InvalidSetting {
                name: "algorithm",
                value: algorithm.to_string(),
                expected: "one that works on one GPU; a multicast group can contain a GPU only once",
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

    /// Prepares a collective whose arguments have been checked. `calls` has the call of each rank.
    fn ready(&self, calls: &[Call<'_>], plan: CooperativePlan) -> Result<CooperativeCall<'_>> {
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
                    expected: "one that supports the operation, on messages that fit the region",
                });
            }
        }
        if first.collective.quantized().is_some() && plan.threads % 32 != 0 {
            return Err(Error::InvalidSetting {
                name: "grid",
                value: format!("{} threads", plan.threads),
                expected: "whole warps for quantised transport",
            });
        }
        if first.collective.sharded().is_some() && plan.threads % 32 != 0 {
            return Err(Error::InvalidSetting {
                name: "grid",
                value: format!("{} threads", plan.threads),
                expected: "whole warps for sharded rows",
            });
        }
        let is_reduced = first.collective.kind().planned_as() == PlannedCall::AllReduce;
        if let Some(fused) = first.collective.fused() {
            let has_kernel = !is_reduced || plan.algorithm.norm_kernel().is_some();
            self.check_rows(fused, has_kernel && piece != 0, first.dtype, plan)?;
        }
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
        if let (Some(rows), 0) = (calls[0].collective.gathered(), piece) {
            return Err(Error::InvalidSetting {
                name: "hidden",
                value: rows.hidden.to_string(),
                expected: "rows that fit the region",
            });
        }
        let extent = calls[0].extent(world_size);
        let (mut launches, mut pieces, mut gathered) = (Vec::new(), Vec::new(), Vec::new());
        let mut sharded = Vec::new();
        for done in division.pieces(extent, piece) {
            launches.extend(first.iter().zip(calls).map(|(launch, call)| {
                let mut of_piece = *launch;
                call.set_piece(&mut of_piece, done, piece, launch.source);
                of_piece
            }));
            sharded.extend(calls.iter().filter_map(|call| call.sharded_of_piece(done, piece)));
            let ranks = calls.iter().enumerate();
            pieces.extend(ranks.clone().filter_map(|(rank, call)| call.fused_of_piece(rank, done, piece)));
            gathered.extend(ranks.filter_map(|(rank, call)| call.gathered_of_piece(rank, world_size, done)));
        }
        let (memory, size, operands) = match (pieces.first(), gathered.first(), sharded.first()) {
            (Some(&fused), ..) => (self.upload(&pieces)?, size_of::<FaFused>(), OwnedOperands::Fused(fused)),
            (_, Some(&rows), _) => {
                (self.upload(&gathered)?, size_of::<FaGatheredRows>(), OwnedOperands::Gathered(rows))
            }
            (.., Some(&rows)) => {
                (self.upload(&sharded)?, size_of::<FaShardedNorm>(), OwnedOperands::Sharded(rows))
            }
            _ => return self.call(&first[0], launches, None, plan),
        };
        for (number, launch) in launches.iter_mut().enumerate() {
            launch.operands = memory.address() + (number * size) as u64;
        }
        self.call(&first[0], launches, Some((memory, operands)), plan)
    }

    /// Checks that the rows of a fused call can be divided among the blocks. `fits`: the algorithm has a kernel, and a
    /// launch takes at least one row.
    fn check_rows(&self, fused: &RawFused, fits: bool, dtype: DType, plan: CooperativePlan) -> Result<()> {
        let refuse = |name, value, expected| Err(Error::InvalidSetting { name, value, expected });
        if !fits {
            let expected = "a direct one, on rows that fit the region";
            return refuse("algorithm", plan.algorithm.to_string(), expected);
        }
        let whole = fused.row().is_none_or(|row| row * dtype.size() % abi::FA_CUDA_PACK_BYTES as usize == 0);
        if plan.threads % 32 != 0 || plan.blocks > 1 && !whole {
            let expected = "whole warps, and one block where rows are not a multiple of 16 bytes";
            return refuse("grid", format!("{} blocks of {}", plan.blocks, plan.threads), expected);
        }
        Ok(())
    }

    /// Returns the number of elements of one launch: of the message, or of each share.
    fn piece(&self, call: &Call<'_>, CooperativePlan { algorithm, blocks, .. }: CooperativePlan) -> usize {
        let (size, limits) = (call.dtype.size(), self.limits());
        match call.collective {
            Collective::AllReduce(_) => limits.capacity(algorithm, size),
            Collective::AllReduceFused(fused) => match fused.row() {
                Some(row) => limits.rows(algorithm, row * size, size, blocks) * row,
                None => limits.capacity(algorithm, size),
            },
            Collective::AllReduceQuantized(_) => limits.quantized_capacity(size),
            Collective::ShardedRmsNorm(_) => limits.sharded_rows(),
            Collective::AllGatherRows(rows) | Collective::AllGatherRowsV(rows, _) => {
                limits.staged_rows(rows.staged_row()) * rows.row_bytes()
            }
            collective => {
                let share = limits.share_bytes(call.staged_shares(limits.world_size), usize::MAX) / size;
                let row = collective.fused().and_then(RawFused::row).unwrap_or(1);
                share / row * row
            }
        }
    }

    fn ready_transfers(&self, ranks: &[Vec<Transfer>], plan: CooperativePlan) -> Result<CooperativeCall<'_>> {
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
        self.call(
            &launches[0].clone(),
            launches,
            Some((memory, OwnedOperands::Transfers(Box::new(packed[0])))),
            plan,
        )
    }

    fn call(
        &self,
        first: &FaLaunch,
        launches: Vec<FaLaunch>,
        operands: Option<(Arc<Memory>, OwnedOperands)>,
        plan: CooperativePlan,
    ) -> Result<CooperativeCall<'_>> {
        Ok(CooperativeCall {
            pieces: launches.len() / self.world_size(),
            kernel: self.kernels.for_world(first),
            #[cfg(feature = "probes")]
            repetitions: Repetitions::of(&launches),
            grid: (plan.blocks as u32, plan.threads as u32),
            first: *first,
            launches: self.upload(&launches)?,
            operands,
            used: Vec::new(),
            world: self,
        })
    }

    /// Copies values to new device memory.
    fn upload<T: Copy>(&self, values: &[T]) -> Result<Arc<Memory>> {
        let bytes = size_of_val(values).max(1);
        let memory = Memory::allocate(&self.context, &self.copies, bytes, Sharing::Pointers)?;
        // SAFETY: the values are `Copy` and fit the allocation, which no kernel uses yet.
        unsafe { self.copies.write(memory.address(), values) }?;
        Ok(memory)
    }

    /// Writes the inputs of a launch to row 0 of every rank's table.
    fn write_row(&self, launches: &[FaLaunch]) -> Result<()> {
        let row: [u64; MAX_RANKS] =
            std::array::from_fn(|rank| launches.get(rank).map_or(0, |launch| launch.input));
        for region in &self.regions {
            // SAFETY: the table is in the rank's region; no kernel runs.
            unsafe { region.write(&self.copies, self.layout.table_offset, &row) }?;
        }
        Ok(())
    }
}

/// Returns whether two ranks make the same call. They may differ in the counts of an all-to-all, in scales, and in
/// the addresses of a fused call's operands. The call IDs are compared, as the kernels compare them.
fn alike(one: Collective<'_>, other: Collective<'_>) -> bool {
    let words = |collective| {
        let call = Call { collective, input: 0, output: 0, count: 0, dtype: DType::U8 };
        let call = call.id(None).encode();
        (call.what, call.count, call.digest)
    };
    words(one) == words(other)
}

/// Kernel parameter after the launch. Where one kernel runs all ranks, it reads only whether there are experts.
enum OwnedOperands {
    Transfers(Box<FaTransfers>),
    Fused(FaFused),
    Gathered(FaGatheredRows),
    Sharded(FaShardedNorm),
}

impl OwnedOperands {
    fn operands(&self) -> Operands<'_> {
        match self {
            Self::Transfers(transfers) => Operands::Transfers(transfers),
            Self::Fused(fused) => Operands::Fused(fused),
            Self::Gathered(rows) => Operands::Gathered(rows),
            Self::Sharded(rows) => Operands::Sharded(rows),
        }
    }
}

/// A prepared call of [`CooperativeRanks`], whose arguments are on the GPU. Each piece of the message is one launch.
pub struct CooperativeCall<'a> {
    world: &'a CooperativeRanks,
    kernel: sys::CUfunction,
    #[cfg(feature = "probes")]
    repetitions: Repetitions,
    grid: (u32, u32),
    /// The kernel's parameter, except the address of the piece's launches.
    first: FaLaunch,
    /// The `FaLaunch` of each rank, for one piece after the other.
    launches: Arc<Memory>,
    /// Operands of the launches, and a kernel parameter of the same type.
    operands: Option<(Arc<Memory>, OwnedOperands)>,
    pieces: usize,
    /// Guards of the borrowed slices: once they are dropped, other uses of the slices wait for the work on the
    /// stream.
    used: Vec<SyncOnDrop<'a>>,
}

impl CooperativeCall<'_> {
    /// Makes each launch run the call `repetitions` times, by the code of the hot set. An in-place call reduces its
    /// own result again. Each block adds its times to `STAMPS.len() + 1` words at `sums` (see
    /// [`STAMPS`](crate::device::cuda::probes::STAMPS)). Block b of rank r has the words of block number r x blocks +
    /// b.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if the hot set has no kernel for the call, or the driver does not find it.
    ///
    /// # Safety
    ///
    /// The module of `probes` and the words at `sums` live as long as the call and the graphs that it was captured in.
    #[cfg(feature = "probes")]
    pub unsafe fn repeated(mut self, probes: &Probes, repetitions: u32, sums: CUdeviceptr) -> Result<Self> {
        self.kernel = probes.function(self.repetitions.enable(repetitions, sums)?)?;
        Ok(self)
    }

    /// Launches the call on the ranks' stream; may be repeated. While the stream is captured, the launches become
    /// part of the graph, which may be launched on that stream as long as self lives.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`].
    ///
    /// [`CooperativeRanks::prepare`] has an example.
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
            self.repetitions.set_parameters(&mut parameters);
            // SAFETY: the function takes one FaLaunch by value and, if the launch has operands, those as a second
            // parameter. The driver copies both. The FaLaunch has the address of the piece's launches. All addresses
            // in them belong to these ranks, or are valid until the stream has been waited for: slices are borrowed
            // for that long, and other memory is covered by the contract of the function that prepared the call.
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

    /// Waits for the work on the stream, and returns an error if a rank timed out.
    ///
    /// # Errors
    ///
    /// * [`Error::Timeout`]: a rank waited for another one longer than the limit.
    /// * [`Error::Unavailable`]: a kernel recorded another failure.
    /// * [`Error::Driver`]: the driver failed.
    ///
    /// [`CooperativeRanks::prepare`] has an example.
    pub fn finish(&mut self) -> Result<()> {
        synchronize(&self.world.stream)?;
        self.world.check()
    }
}

impl Drop for CooperativeCall<'_> {
    fn drop(&mut self) {
        // The launches and the slices are in use until the work ends. An error means that the context is lost.
        let _ = synchronize(&self.world.stream);
    }
}
