//! Tests every collective, and messages between pairs: in one launch, between threads and processes, and in graphs.
//!
//! The expected results are computed here from the documented semantics of each collective.

use std::sync::Arc;

use fast_allreduce::device::cuda::{CooperativePlan, CooperativeRank, CooperativeRanks};
use fast_allreduce::{Algorithm, Collective, DType, Direction, ReduceOp, Transfer};

use crate::fixtures::fixture::{compare, download, upload, Fixture, MemoryKind, Plain, Setup};
use crate::fixtures::gpu::{context, gpu, Gpus, LIMIT};
use crate::fixtures::processes::ranks;
use crate::fixtures::threads::fixtures;
use crate::oracle;
use crate::random::{elements, Random, Values};

tests! {
    gpu => between_threads, between_processes, every_algorithm, in_one_launch, gathers_of_uneven_shares;
}

/// Bytes for the inputs, and for the outputs, of a rank.
pub const BYTES: usize = 96 << 10;
const GUARD: usize = 128;
const CANARY: u8 = 0xC3;

/// A collective with its arguments on all ranks, and all ranks' inputs.
pub struct Case {
    which: usize,
    op: ReduceOp,
    root: usize,
    count: usize,
    pub dtype: DType,
    /// Counts by rank, for collectives that have counts.
    counts: Vec<usize>,
    /// Counts of an all-to-all: `sends` by sender, then receiver; `receives` by receiver, then sender.
    sends: Vec<Vec<usize>>,
    receives: Vec<Vec<usize>>,
    pub inputs: Vec<Vec<u8>>,
}

const COLLECTIVES: usize = 12;

impl Case {
    pub fn new(random: &mut Random, which: usize, world: usize, dtype: DType, most: usize) -> Self {
        let mut length = || random.pick(&[0, 1, 3, most / 7, most / 2 + 1, most]);
        let (count, counts) = (length(), (0..world).map(|_| length()).collect());
        let sends: Vec<Vec<usize>> = (0..world).map(|_| (0..world).map(|_| length()).collect()).collect();
        let receives = (0..world).map(|to| sends.iter().map(|sends| sends[to]).collect()).collect();
        let (op, root) = (random.pick(&ReduceOp::ARITHMETIC), random.below(world));
        let mut case = Self { which, op, root, count, dtype, counts, sends, receives, inputs: Vec::new() };
        case.renew(random, world);
        case
    }

    /// Creates a case of f32 with `count` elements in each share.
    pub fn exactly(random: &mut Random, which: usize, world: usize, count: usize) -> Self {
        let mut case = Self { count, ..Self::new(random, which, world, DType::F32, 1) };
        case.renew(random, world);
        case
    }

    /// Replaces the inputs by other random ones.
    pub fn renew(&mut self, random: &mut Random, world: usize) {
        let length = |rank: usize| self.collective(rank).input_len(self.count, rank, world);
        self.inputs =
            (0..world).map(|rank| elements(random, self.dtype, length(rank), Values::ALL[0])).collect();
    }

    pub fn collective(&self, rank: usize) -> Collective<'_> {
        let &Self { op, root, ref counts, .. } = self;
        match self.which {
            0 => Collective::AllReduce(op),
            1 => Collective::AllGather,
            2 => Collective::AllGatherV(counts),
            3 => Collective::ReduceScatter(op),
            4 => Collective::ReduceScatterV(op, counts),
            5 => Collective::Broadcast { root },
            6 => Collective::Reduce { op, root },
            7 => Collective::Gather { root },
            8 => Collective::Scatter { root },
            9 => Collective::AllToAll,
            10 => Collective::AllToAllV { send: &self.sends[rank], receive: &self.receives[rank] },
            _ => Collective::Barrier,
        }
    }

    /// Returns the expected output of `rank`.
    pub fn expected(&self, rank: usize) -> Vec<u8> {
        let size = self.dtype.size();
        let reduced = || oracle::reduce(self.dtype, self.op, &self.inputs);
        let share = |all: &[u8], counts: &[usize], rank: usize| {
            let first: usize = counts[..rank].iter().sum();
            all[first * size..][..counts[rank] * size].to_vec()
        };
        let equal = vec![self.count; self.inputs.len()];
        match self.collective(rank) {
            Collective::AllReduce(_) => reduced(),
            Collective::AllGather | Collective::AllGatherV(_) => self.inputs.concat(),
            Collective::ReduceScatter(_) => share(&reduced(), &equal, rank),
            Collective::ReduceScatterV(_, counts) => share(&reduced(), counts, rank),
            Collective::Broadcast { root } => self.inputs[root].clone(),
            Collective::Reduce { root, .. } if root == rank => reduced(),
            Collective::Gather { root } if root == rank => self.inputs.concat(),
            Collective::Scatter { root } => share(&self.inputs[root], &equal, rank),
            Collective::AllToAll => self.inputs.iter().flat_map(|input| share(input, &equal, rank)).collect(),
            Collective::AllToAllV { .. } => {
                let from = self.inputs.iter().zip(&self.sends);
                from.flat_map(|(input, sends)| share(input, sends, rank)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns the offsets of the input and the output in one buffer, if the collective can run in place.
    fn in_place(&self, rank: usize) -> Option<(usize, usize)> {
        let size = self.dtype.size();
        let (equal, before) = (rank * self.count * size, self.counts[..rank].iter().sum::<usize>() * size);
        match self.collective(rank) {
            Collective::AllReduce(_) | Collective::Broadcast { .. } | Collective::Reduce { .. } => {
                Some((0, 0))
            }
            Collective::AllGather | Collective::Gather { .. } => Some((equal, 0)),
            Collective::AllGatherV(_) => Some((before, 0)),
            Collective::ReduceScatter(_) | Collective::Scatter { .. } => Some((0, equal)),
            Collective::ReduceScatterV(..) => Some((0, before)),
            _ => None,
        }
    }

    /// Returns the addresses of a rank's input and output, given a buffer for each.
    fn place(&self, rank: usize, (input, output): (u64, u64), in_place: bool) -> (u64, u64) {
        match self.in_place(rank).filter(|_| in_place) {
            Some((input_at, output_at)) => (input + input_at as u64, input + output_at as u64),
            None => (input, output),
        }
    }

    /// Writes canaries to the output, also around it if the call is out of place, and then the input.
    fn write(&self, put: impl Fn(u64, &[u8]), rank: usize, (input, output): (u64, u64), in_place: bool) {
        let length = self.expected(rank).len();
        match in_place {
            true => put(output, &vec![CANARY; length]),
            false => put(output - GUARD as u64, &vec![CANARY; length + 2 * GUARD]),
        }
        put(input, &self.inputs[rank]);
    }

    fn compare(
        &self,
        get: impl Fn(u64, usize) -> Vec<u8>,
        rank: usize,
        (input, output): (u64, u64),
        in_place: bool,
    ) {
        let (expected, name) = (self.expected(rank), self.collective(rank));
        let check = |result: Result<(), String>| {
            if let Err(problem) = result {
                let (world, count, dtype) = (self.inputs.len(), self.count, self.dtype);
                panic!(
                    "rank {rank} of {world}: {name:?} of {count} {dtype}, in place: {in_place}: {problem}"
                );
            }
        };
        check(compare(&get(output, expected.len()), &expected, self.dtype.size()));
        if !in_place {
            let all = get(output - GUARD as u64, expected.len() + 2 * GUARD);
            let around = all[..GUARD].iter().chain(&all[GUARD + expected.len()..]);
            assert!(around.into_iter().all(|&byte| byte == CANARY), "{name:?} wrote outside of its output");
            check(compare(&get(input, self.inputs[rank].len()), &self.inputs[rank], self.dtype.size()));
        }
    }
}

/// Maximum number of elements of a share.
fn most(dtype: DType, world: usize) -> usize {
    (BYTES - GUARD) / dtype.size() / world
}

/// Makes one call of this rank, waits for it and compares the result.
fn call(fixture: &Fixture, case: &Case, kind: MemoryKind, offset: usize, in_place: bool) {
    let (rank, size) = (fixture.rank(), case.dtype.size());
    let place = |which| fixture.address((kind, offset), which, size);
    let in_place = in_place && case.in_place(rank).is_some();
    let (input, output) = case.place(rank, (place(0), place(1)), in_place);
    case.write(|address, bytes| upload(&fixture.stream, address, bytes), rank, (input, output), in_place);
    let stream = fixture.stream.cu_stream();
    // SAFETY: the memory is the fixture's, and it lives until the stream has been synchronised.
    unsafe {
        let collective = case.collective(rank);
        fixture.communicator.collective_raw(stream, collective, input, output, case.count, case.dtype)
    }
    .unwrap();
    fixture.communicator.synchronize(&fixture.stream).unwrap();
    let get = |address, bytes| download(&fixture.stream, address, bytes);
    case.compare(get, rank, (input, output), in_place);
}

/// Runs each collective from each kind of memory, at any offset, in place and out of place.
fn calls(fixture: &Fixture, random: &Random, rounds: usize) {
    let world = fixture.communicator.world_size();
    for round in 0..rounds * COLLECTIVES {
        let mut shared = random.fork(round);
        let dtype = shared.pick(&DType::ALL);
        let case = Case::new(&mut shared, round % COLLECTIVES, world, dtype, most(dtype, world));
        let mut own = shared.fork(fixture.rank());
        let (kind, offset) = (own.pick(&MemoryKind::ALL), own.pick(&[0, 0, 1, 3, 8]));
        call(fixture, &case, kind, offset, own.one_in(3));
    }
    messages(fixture, random);
    fixture.communicator.barrier().unwrap();
}

/// Returns the message that rank `from` sends to rank `to` with a tag.
fn sent(from: usize, to: usize, tag: u32) -> Vec<u8> {
    const LENGTHS: [usize; 5] = [1, 0, 4096, 9001, 3];
    let length = LENGTHS[(from + 2 * to + tag as usize) % LENGTHS.len()];
    (0..length).map(|at| (at * 7 + from * 31 + to * 17 + tag as usize * 5) as u8).collect()
}

const TAGS: [u32; 2] = [9, 2];

/// The messages of a rank to and from all ranks, including itself.
struct Exchange {
    transfers: Vec<Transfer>,
    /// The addresses and bytes of what is sent.
    sends: Vec<(u64, Vec<u8>)>,
    /// The addresses and expected bytes of what is received.
    receives: Vec<(u64, Vec<u8>)>,
}

/// Lists the transfers of a rank: sent messages are stored contiguously from address `from`, received ones from `to`.
fn exchange(rank: usize, world: usize, (from, to): (u64, u64)) -> Exchange {
    let (mut transfers, mut sends, mut receives) = (Vec::new(), Vec::new(), Vec::new());
    let (mut send_at, mut receive_at) = (from, to);
    for peer in 0..world {
        for tag in TAGS {
            let (send, receive) = (sent(rank, peer, tag), sent(peer, rank, tag));
            let transfer = |direction, address, count| Transfer {
                direction,
                peer,
                address,
                count,
                dtype: DType::U8,
                tag,
            };
            transfers.push(transfer(Direction::Send, send_at, send.len()));
            transfers.push(transfer(Direction::Recv, receive_at, receive.len()));
            (send_at, receive_at) = (send_at + send.len() as u64, receive_at + receive.len() as u64);
            sends.push((send_at - send.len() as u64, send));
            receives.push((receive_at - receive.len() as u64, receive));
        }
    }
    Exchange { transfers, sends, receives }
}

fn messages(fixture: &Fixture, random: &Random) {
    let (rank, world) = (fixture.rank(), fixture.communicator.world_size());
    for round in 0..4 {
        let mut own = random.fork(1000 + round).fork(rank);
        let place = (own.pick(&MemoryKind::ALL), own.below(9));
        let bases = (fixture.address(place, 0, 1), fixture.address(place, 1, 1));
        let Exchange { transfers, sends, receives } = exchange(rank, world, bases);
        sends.iter().for_each(|(address, bytes)| upload(&fixture.stream, *address, bytes));
        receives
            .iter()
            .for_each(|(address, bytes)| upload(&fixture.stream, *address, &vec![CANARY; bytes.len()]));
        // SAFETY: the memory is the fixture's, and it lives until the stream has been synchronised.
        unsafe { fixture.communicator.transfer_raw(fixture.stream.cu_stream(), &transfers) }.unwrap();
        fixture.communicator.synchronize(&fixture.stream).unwrap();
        for (address, bytes) in &receives {
            compare(&download(&fixture.stream, *address, bytes.len()), bytes, 1).unwrap();
        }
    }
}

fn setup() -> Setup {
    // Messages are divided into pieces, and the epoch wraps around.
    Setup { max_bytes: 16 << 10, first_epoch: u32::MAX - 9, ..Setup::default() }
}

fn between_threads(gpus: Gpus) {
    for (size, devices) in [(1, 1), (2, 1), (3, 1), (4, gpus.count.min(2))] {
        let random = Random::new(&format!("calls::collectives::between_threads {size}"));
        fixtures(size, devices, setup(), BYTES, |fixture| calls(fixture, &random, 2));
    }
}

fn between_processes(gpus: Gpus) {
    use fast_allreduce::bootstrap::Bootstrap as _;
    ranks("calls::collectives::between_processes", "collectives", 3, &[], |local| {
        let context = context(local.rank() % gpus.count.min(2));
        let fixture = Fixture::new(setup().try_build(context, local).unwrap(), BYTES);
        calls(&fixture, &Random::new("calls::collectives::between_processes"), 1);
    });
}

/// Tests allreduces by every algorithm, including the ring and halving-doubling, alternating with allgathers.
fn every_algorithm() {
    for algorithm in Algorithm::ALL {
        let random = Random::new(&format!("calls::collectives::every_algorithm {algorithm}"));
        fixtures(3, 1, Setup { algorithm: Some(algorithm), ..setup() }, BYTES, |fixture| {
            for round in 0..8 {
                let mut shared = random.fork(round);
                // Sums of integers are exact in any order.
                let dtype = shared.pick(&[DType::I32, DType::U64, DType::U8]);
                let mut case = Case::new(&mut shared, round % 2, 3, dtype, most(dtype, 3));
                case.op = ReduceOp::Sum;
                call(fixture, &case, shared.pick(&MemoryKind::ALL), round % 3, round % 3 == 1);
            }
        });
    }
}

/// Makes a call of all ranks in one launch and compares the results. `memory` has two sides for each rank, and
/// `offsets` returns how many elements a rank's input and output are from aligned addresses.
fn call_of_all(
    world: &mut CooperativeRanks,
    memory: &[[Plain; 2]],
    case: &Case,
    plan: CooperativePlan,
    in_place: bool,
    offsets: impl Fn(usize) -> [usize; 2],
) {
    let stream = Arc::clone(world.stream());
    let place = |(rank, sides): (usize, &[Plain; 2])| {
        let [from, to] = offsets(rank).map(|offset| (GUARD + offset * case.dtype.size()) as u64);
        case.place(rank, (sides[0].address + from, sides[1].address + to), in_place)
    };
    let places: Vec<_> = memory.iter().enumerate().map(place).collect();
    let put = |address, bytes: &[u8]| upload(&stream, address, bytes);
    places.iter().enumerate().for_each(|(rank, &place)| case.write(put, rank, place, in_place));
    let of_rank = |(rank, &(input, output)): (usize, &(u64, u64))| CooperativeRank {
        collective: case.collective(rank),
        input,
        output,
    };
    let ranks: Vec<_> = places.iter().enumerate().map(of_rank).collect();
    stream.synchronize().unwrap();
    // SAFETY: the memory is the test's, and it lives until the call has finished.
    let mut call = unsafe { world.prepare_raw(&ranks, case.count, case.dtype, plan) }.unwrap();
    call.enqueue().unwrap();
    call.finish().unwrap();
    drop(call);
    let get = |address, bytes| download(&stream, address, bytes);
    places.iter().enumerate().for_each(|(rank, &place)| case.compare(get, rank, place, in_place));
}

/// Tests gathers between five to seven ranks, of which a kernel reads four together and the others later: of shares
/// that differ or are empty, at addresses that are aligned on some ranks only.
fn gathers_of_uneven_shares() {
    let random = Random::new("calls::collectives::gathers_of_uneven_shares");
    for world_size in [5, 6, 7] {
        let mut world = CooperativeRanks::new(0, world_size, 16 << 10, 0, LIMIT).unwrap();
        let stream = Arc::clone(world.stream());
        let memory: Vec<[Plain; 2]> =
            (0..world_size).map(|_| [(); 2].map(|()| Plain::new(stream.context(), 32 << 10))).collect();
        for round in 0..48 {
            let mut random = random.fork(100 * world_size + round);
            let dtype = [DType::U8, DType::Bf16, DType::F32, DType::F64][round % 4];
            // Shares of up to 2000 bytes, and of a few packs of one thread.
            let most = 2000 / dtype.size();
            let mut case = Case::new(&mut random, 1 + usize::from(round % 3 != 0), world_size, dtype, most);
            // In one round of four, packs are whole and aligned.
            let whole = random.one_in(4);
            if whole {
                let pack = 16 / dtype.size();
                case.count = case.count / pack * pack;
                case.counts.iter_mut().for_each(|count| *count = *count / pack * pack);
                case.renew(&mut random, world_size);
            }
            let plan = CooperativePlan {
                algorithm: Algorithm::OneShotPull,
                blocks: 1 + round % 3,
                threads: [32, 64, 96][round / 4 % 3],
                registered: round % 2 == 0,
            };
            let some = random.below(world_size);
            let offset = random.pick(&[1, 3, 8]);
            let offsets = |rank| match (whole, (rank + some) % 3) {
                (true, _) | (_, 0) => [0, 0],
                (_, 1) => [offset, 0],
                _ => [0, offset],
            };
            call_of_all(&mut world, &memory, &case, plan, random.one_in(4), offsets);
        }
    }
}

fn in_one_launch() {
    let random = Random::new("calls::collectives::in_one_launch");
    for world_size in [1, 2, 3, 5, 8, 16] {
        let mut world = CooperativeRanks::new(0, world_size, 16 << 10, u32::MAX - 9, LIMIT).unwrap();
        let stream = Arc::clone(world.stream());
        let room = BYTES + 2 * GUARD;
        let memory: Vec<[Plain; 2]> =
            (0..world_size).map(|_| [(); 2].map(|()| Plain::new(stream.context(), room))).collect();
        for round in 0..2 * COLLECTIVES {
            let mut random = random.fork(100 * world_size + round);
            let dtype = random.pick(&DType::ALL);
            let case =
                Case::new(&mut random, round % COLLECTIVES, world_size, dtype, most(dtype, world_size));
            let plan = CooperativePlan {
                algorithm: random.pick(&Algorithm::DIRECT),
                blocks: 1 + random.below(world.max_blocks()),
                threads: random.pick(&[32, 96, 512]),
                registered: random.one_in(2),
            };
            let in_place = case.in_place(0).is_some() && random.one_in(3);
            call_of_all(&mut world, &memory, &case, plan, in_place, |_| [0; 2]);
        }

        let of_rank = |(rank, sides): (usize, &[Plain; 2])| {
            exchange(rank, world_size, (sides[0].address, sides[1].address))
        };
        let all: Vec<_> = memory.iter().enumerate().map(of_rank).collect();
        let lists: Vec<Vec<Transfer>> = all.iter().map(|exchange| exchange.transfers.clone()).collect();
        for blocks in [1, world.max_blocks()] {
            for Exchange { sends, receives, .. } in &all {
                sends.iter().for_each(|(address, bytes)| upload(&stream, *address, bytes));
                receives
                    .iter()
                    .for_each(|(address, bytes)| upload(&stream, *address, &vec![CANARY; bytes.len()]));
            }
            stream.synchronize().unwrap();
            let plan =
                CooperativePlan { algorithm: Algorithm::OneShotPull, blocks, threads: 64, registered: false };
            // SAFETY: the memory is the test's, and it lives until the call has finished.
            let mut call = unsafe { world.prepare_transfers_raw(&lists, plan) }.unwrap();
            // Enqueues the call twice, as a replayed graph does.
            (0..2).for_each(|_| call.enqueue().unwrap());
            call.finish().unwrap();
            drop(call);
            for (address, bytes) in all.iter().flat_map(|exchange| &exchange.receives) {
                compare(&download(&stream, *address, bytes.len()), bytes, 1).unwrap();
            }
        }
    }
}
