//! All ranks of a world in one cooperative launch, as a world of the conformance suite.

use std::ops::Range;

use cudarc::driver::{CudaSlice, DevicePtr};
use fast_allreduce::device::cuda::{CooperativePlan, CooperativeRank, CooperativeRanks};
use fast_allreduce::{Algorithm, DType, Plan, ReduceOp, Result};

use crate::fixture::{download, upload, Plain};
use crate::gpu::{is_observed, Gpus};
use crate::suite::message::{Collective, MemoryKind, Message, Place, Placement};
use crate::suite::ranks::{Part, Ranks, Side};
use crate::suite::scenario::{Scenario, Setup};
use crate::suite::world::World;

/// On the first GPU.
pub struct OneLaunch {
    _gpus: Gpus,
}

impl OneLaunch {
    pub fn new(gpus: Gpus) -> Self {
        Self { _gpus: gpus }
    }
}

impl World for OneLaunch {
    /// Where each access is looked at, which takes a hundred times as long, the first two.
    fn sizes(&self, sizes: &[usize]) -> Vec<usize> {
        let most = if is_observed() { 2 } else { sizes.len() };
        sizes[..most.min(sizes.len())].to_vec()
    }

    fn thin(&self) -> usize {
        if is_observed() {
            4
        } else {
            1
        }
    }

    fn run(&self, size: usize, scenarios: &[Scenario]) {
        scenarios.iter().for_each(|scenario| scenario.run(|setup| AllRanks::new(size, *setup)));
    }
}

/// All ranks, and memory of each kind for each to call from.
struct AllRanks {
    // Before the memory, which its last launch must not outlive.
    world: CooperativeRanks,
    setup: Setup,
    /// By rank, then by side.
    plain: Vec<[Plain; 2]>,
    pool: Vec<[CudaSlice<u8>; 2]>,
}

impl AllRanks {
    fn new(size: usize, setup: Setup) -> Self {
        let world =
            CooperativeRanks::new(0, size, setup.max_bytes, setup.first_epoch, setup.timeout).unwrap();
        Self { world, setup, plain: Vec::new(), pool: Vec::new() }
    }
}

/// In turn.
fn direct(count: usize) -> Algorithm {
    Algorithm::DIRECT[count % Algorithm::DIRECT.len()]
}

impl Ranks for AllRanks {
    const PACK_BYTES: usize = 16;

    fn ranks(&self) -> Range<usize> {
        0..self.world.world_size()
    }

    fn world_size(&self) -> usize {
        self.world.world_size()
    }

    /// A world takes any algorithm and grid: here by the size of the message, so that they change from call to call.
    fn plan(&self, count: usize, dtype: DType) -> Plan {
        let of_count = match self.setup.every_algorithm {
            true => Algorithm::ALL[count % Algorithm::ALL.len()],
            false => direct(count),
        };
        // A ring has no room for the steps of a large world in a small region.
        let algorithm = self.setup.algorithm.unwrap_or(of_count);
        let algorithm = if self.world.capacity(algorithm, dtype) > 0 { algorithm } else { direct(count) };
        // In all no more threads than can be looked at, of 16 ranks too.
        let (blocks, threads) = if is_observed() { (2, [32, 64, 96, 128]) } else { (9, [32, 64, 160, 512]) };
        Plan {
            algorithm,
            blocks: (1 + count * dtype.size() / 16_000).min(blocks).min(self.world.max_blocks()),
            threads: threads[count / 4 % 4],
            piece_bytes: self.world.capacity(algorithm, dtype) * dtype.size(),
        }
    }

    /// All ranks are in place, and all registered, as rank 0 is.
    fn placement(&self, placements: &[Placement], rank: usize) -> Placement {
        let (first, own) = (placements[0], placements[rank]);
        let kind = match (first.input.kind, own.input.kind) {
            (MemoryKind::Registered, _) => MemoryKind::Registered,
            (_, MemoryKind::Registered) => MemoryKind::Plain,
            (_, kind) => kind,
        };
        Placement {
            input: Place { kind, ..own.input },
            output: first.output.map(|place| own.output.unwrap_or(place)),
        }
    }

    fn make_room(&mut self, bytes: usize) {
        let stream = self.world.stream();
        self.plain = self.ranks().map(|_| [(); 2].map(|()| Plain::new(stream.context(), bytes))).collect();
        self.pool = self.ranks().map(|_| [(); 2].map(|()| stream.alloc_zeros(bytes).unwrap())).collect();
        stream.synchronize().unwrap();
    }

    fn base(&mut self, rank: usize, kind: MemoryKind, side: Side) -> u64 {
        match kind {
            MemoryKind::Pool => self.pool[rank][side as usize].device_ptr(self.world.stream()).0,
            MemoryKind::Plain | MemoryKind::Registered => self.plain[rank][side as usize].address,
        }
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        upload(self.world.stream(), address, bytes);
    }

    fn read(&mut self, address: u64, bytes: usize) -> Vec<u8> {
        download(self.world.stream(), address, bytes)
    }

    fn call(&mut self, message: &Message, parts: &[Part]) -> Result<()> {
        let Plan { mut algorithm, blocks, threads, .. } = self.plan(message.count, message.dtype);
        if message.collective == Collective::AllReduce(ReduceOp::Avg) && !message.dtype.is_float() {
            // The others take no averages of integers.
            algorithm = if algorithm.is_direct() { algorithm } else { direct(message.count) };
        }
        let registered = parts[0].placement.input.kind == MemoryKind::Registered;
        let (plan, dtype) = (CooperativePlan { algorithm, blocks, threads, registered }, message.dtype);
        let of_rank = |(rank, part): (usize, &Part)| {
            let Part { input, output, .. } = *part;
            message.collective.call(rank).map(|collective| CooperativeRank { collective, input, output })
        };
        let ranks: Option<Vec<_>> = parts.iter().enumerate().map(of_rank).collect();
        // SAFETY: `check` has room for the message there, aligned to the element, until the call has been waited for.
        let mut call = unsafe {
            match ranks {
                Some(ranks) => self.world.prepare_raw(&ranks, message.count, dtype, plan)?,
                None => {
                    let of_rank = |(rank, part): (usize, &Part)| {
                        let items = message.collective.items(rank).iter();
                        items.map(|item| item.transfer(part.input, part.output, dtype)).collect()
                    };
                    let lists: Vec<Vec<_>> = parts.iter().enumerate().map(of_rank).collect();
                    self.world.prepare_transfers_raw(&lists, plan)?
                }
            }
        };
        call.enqueue()?;
        call.finish()
    }
}
