//! Properties of the MPI bootstrap. Each part runs under its own `mpirun`, since some parts damage or finalise MPI.

use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::{Bootstrap, Mpi};
use fast_allreduce::hierarchical::MpiNodes;
use fast_allreduce::{Communicator, DType, Error, Hierarchical, Host, InterNode, ReduceOp};
use mpi::topology::{Color, SimpleCommunicator};
use mpi::traits::{Communicator as _, Destination, Source};
use mpi::Threading;

use crate::calls;
use crate::runner::{self, Missing, Trial};

/// A limit that is reached only if something hangs.
const LIMIT: Duration = Duration::from_secs(60);

const PARTS: [(&str, fn()); 17] = [
    ("gathers", gathers),
    ("borrowed", borrowed),
    ("threads", || threads(Threading::Multiple)),
    ("threads-in-turns", || threads(Threading::Serialized)),
    ("late", || late(8)),
    ("late-and-large", || late(1 << 20)),
    ("funneled", funneled),
    ("finalized", finalized),
    ("nodes", nodes),
    ("nodes-of-1", || nodes_of(1)),
    ("nodes-of-2", || nodes_of(2)),
    ("nodes-of-3", || nodes_of(3)),
    ("machines", machines),
    ("unequal-nodes", unequal_nodes),
    ("late-node", late_node),
    ("different-calls", || different_calls(1)),
    ("different-calls-of-2", || different_calls(2)),
];

/// Runs the part of that name; returns false if there is none.
pub fn run(name: &str) -> bool {
    let Some((name, part)) = PARTS.into_iter().find(|(known, _)| *known == name) else { return false };
    super::end_all_with_this_rank();
    part();
    println!("{name}: passed");
    true
}

/// Lists the parts for the runner, which does not run them.
pub fn tests() -> Vec<Trial> {
    let reason = "a part of scripts/test-mpi.sh, with an mpirun of its own";
    let test = |(name, _)| {
        runner::test(&format!("mpi::parts::{name}"), move || Err(Missing::new("mpirun", reason)), |()| {})
    };
    PARTS.map(test).into()
}

/// Payload of `rank` for gather `round`: both its length and its contents identify rank and round.
fn contribution(rank: usize, round: usize) -> Vec<u8> {
    let length = match round % 7 {
        3 => 0,
        5 => (rank * 37 + round * 101) * 997 % (1 << 20),
        _ => (rank * 37 + round * 101) % 1500,
    };
    (0..length).map(|index| (rank * 59 + round * 31 + index) as u8).collect()
}

fn gather_all(mpi: &Mpi, rounds: usize) {
    for round in 0..rounds {
        let all = mpi.all_gather(&contribution(mpi.rank(), round), LIMIT).unwrap();
        let expected: Vec<_> = (0..mpi.world_size()).map(|rank| contribution(rank, round)).collect();
        assert!(all == expected, "gather {round}");
    }
}

/// Payloads of any length; worlds in several threads; a new world after the last one was dropped.
fn gathers() {
    let mpi = Mpi::init().unwrap();
    let world = SimpleCommunicator::world();
    assert_eq!((mpi.rank() as i32, mpi.world_size() as i32), (world.rank(), world.size()));
    gather_all(&mpi, 100);
    for length in [1 << 20, 0, (1 << 20) - 1] {
        let all = mpi.all_gather(&vec![mpi.rank() as u8; length], LIMIT).unwrap();
        let is_right = |(rank, part): (usize, &Vec<u8>)| *part == vec![rank as u8; length];
        assert!(all.iter().enumerate().all(is_right));
    }
    let too_long = mpi.all_gather(&vec![0; (1 << 20) + 1], LIMIT).unwrap_err();
    assert!(matches!(too_long, Error::InvalidSetting { .. }), "{too_long}");
    mpi.barrier(LIMIT).unwrap();

    let others = [Mpi::init().unwrap(), Mpi::from_communicator(&world).unwrap()];
    std::thread::scope(|scope| {
        for other in &others {
            scope.spawn(|| gather_all(other, 50));
        }
        gather_all(&mpi, 50);
    });
    drop((others, mpi));
    // Dropped in another thread, and at different times on different ranks.
    let again = Mpi::init().unwrap();
    gather_all(&again, 5);
    std::thread::spawn(move || drop(again)).join().unwrap();
    let communicator = Communicator::builder().build(Host::new(), Mpi::init().unwrap()).unwrap();
    let mut data = vec![1u32; 5000];
    communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
    assert_eq!(data, vec![communicator.world_size() as u32; 5000]);
}

/// The caller's communicator: its rank order is kept, and the caller's messages on it are not received.
fn borrowed() {
    let (_universe, _) = mpi::initialize_with_threading(Threading::Serialized).unwrap();
    let world = SimpleCommunicator::world();
    let (rank, size) = (world.rank(), world.size());
    // In reverse order.
    let reversed = world.split_by_color_with_key(Color::with_value(0), size - rank).unwrap();
    let (next, previous) = ((reversed.rank() + 1) % size, (reversed.rank() + size - 1) % size);
    for tag in [0, 1] {
        reversed.process_at_rank(next).buffered_send_once(tag);
    }
    let mpi = Mpi::from_communicator(&reversed).unwrap();
    assert_eq!(mpi.rank() as i32, size - 1 - rank);
    gather_all(&mpi, 30);
    for tag in [1, 0] {
        let (number, _) = reversed.process_at_rank(previous).receive_with_tag::<i32>(tag);
        assert_eq!(number, 1000 * previous + tag);
    }
    // The world remains usable after the communicator that it was made from is freed.
    drop(reversed);
    gather_all(&mpi, 10);
}

/// Sends a small message of the caller, for which MPI does not wait for the receiver.
trait SendOnce {
    fn buffered_send_once(&self, tag: i32);
}

impl<D: Destination + mpi::topology::AsCommunicator> SendOnce for D {
    fn buffered_send_once(&self, tag: i32) {
        self.send_with_tag(&(1000 * self.as_communicator().rank() + tag), tag);
    }
}

/// A communicator that another thread may use.
struct Shared(SimpleCommunicator);

// SAFETY: the handle belongs to no thread, and MPI was initialised so that several threads may call it, at least in
// turns.
unsafe impl Sync for Shared {}

/// Several threads make bootstraps from separate duplicates, in different orders on different ranks.
fn threads(level: Threading) {
    const ROUNDS: usize = 10;
    let (_universe, given) = mpi::initialize_with_threading(level).unwrap();
    assert!(given >= level, "this MPI gives {given:?}");
    let world = SimpleCommunicator::world();
    let rank = world.rank() as usize;
    let duplicates = [Shared(world.duplicate()), Shared(world.duplicate())];
    std::thread::scope(|scope| {
        for (thread, own) in duplicates.iter().enumerate() {
            scope.spawn(move || {
                let Shared(own) = own;
                for round in 0..ROUNDS {
                    if (rank + thread + round) % 2 == 1 {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    gather_all(&Mpi::from_communicator(own).unwrap(), 3);
                    gather_all(&Mpi::of_node(own).unwrap(), 3);
                    let nodes = MpiNodes::from_communicator(own, rank % 2).unwrap();
                    let mut sum = [1u32];
                    // SAFETY: one element, exclusively borrowed.
                    unsafe { nodes.all_reduce(sum.as_mut_ptr() as u64, 1, DType::U32, ReduceOp::Sum, ()) }
                        .unwrap();
                    assert_eq!(sum, [nodes.nodes() as u32]);
                }
            });
        }
    });
}

/// A rank that arrives too late is named; the bootstrap stays failed, and other bootstraps are not affected.
fn late(bytes: usize) {
    const SHORT: Duration = Duration::from_millis(700);
    let mpi = Mpi::init().unwrap();
    let other = Mpi::init().unwrap();
    let absent = mpi.world_size() - 1;
    let part = vec![7; bytes];
    mpi.all_gather(&part, LIMIT).unwrap();
    let started = Instant::now();
    if mpi.rank() == absent {
        std::thread::sleep(3 * SHORT);
        let called = Instant::now();
        // The others' payloads may arrive before their notices of failure; then the next gather reports the failure.
        let first = mpi.all_gather(&part, LIMIT).map(drop);
        let error = first.and_then(|()| mpi.barrier(LIMIT)).unwrap_err();
        assert!(matches!(&error, Error::PeerLost { rank, .. } if *rank != absent), "{error}");
        assert!(called.elapsed() < LIMIT / 4, "the ranks that gave up have notified this one");
        assert_eq!(mpi.barrier(LIMIT), Err(error));
    } else {
        let error = mpi.all_gather(&part, SHORT).unwrap_err();
        let Error::Timeout { operation: "all_gather", missing, .. } = &error else { panic!("{error}") };
        // Another rank may arrive after this one timed out only if it is slower by the whole limit.
        assert_eq!(*missing, [absent], "{error}");
        assert!(started.elapsed() >= SHORT / 2 && started.elapsed() < LIMIT / 4);
        let again = Instant::now();
        assert_eq!(mpi.all_gather(&part, LIMIT).unwrap_err(), error);
        assert_eq!(mpi.barrier(LIMIT), Err(error));
        assert!(again.elapsed() < SHORT);
    }
    gather_all(&other, 10);
    if bytes > 1 << 10 {
        // Messages that are never received keep MPI from finalising, and a launcher may kill the others when the first
        // rank exits without it.
        println!("late-and-large: passed");
        std::thread::sleep(SHORT);
    }
}

/// MPI initialised so that only the main thread may call it.
fn funneled() {
    let (_universe, level) = mpi::initialize_with_threading(Threading::Funneled).unwrap();
    let mpi = Mpi::init().unwrap();
    gather_all(&mpi, 10);
    assert!(level < Threading::Serialized, "this MPI gives {level:?}, and there is nothing to test");
    let elsewhere = std::thread::scope(|scope| scope.spawn(|| mpi.barrier(LIMIT)).join().unwrap());
    let Err(Error::Unavailable { what, reason }) = &elsewhere else { panic!("{elsewhere:?}") };
    assert!(what == "MPI" && reason.contains("main thread") && reason.contains("Serialized"), "{reason}");
    assert_eq!(mpi.barrier(LIMIT), elsewhere, "a failure stays");
    std::thread::scope(|scope| scope.spawn(|| Mpi::init().unwrap_err()).join().unwrap());
}

/// MPI that is not initialised yet, and MPI that is finalised.
fn finalized() {
    let world = SimpleCommunicator::world();
    let error = Mpi::from_communicator(&world).unwrap_err();
    assert!(error.to_string().contains("not initialised"), "{error}");
    let (universe, _) = mpi::initialize_with_threading(Threading::Multiple).unwrap();
    let mpi = Mpi::init().unwrap();
    gather_all(&mpi, 3);
    drop(universe);
    for error in [mpi.barrier(LIMIT).unwrap_err(), Mpi::init().unwrap_err()] {
        assert!(error.to_string().contains("finalised"), "{error}");
    }
}

/// Ranks on two simulated nodes, alternating.
fn nodes() {
    let (_universe, _) = mpi::initialize_with_threading(Threading::Serialized).unwrap();
    let world = SimpleCommunicator::world();
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    let node = if rank % 2 == 0 { "even" } else { "odd" };
    // SAFETY: only this thread uses the environment: MPI has read it when it was initialised.
    unsafe { std::env::set_var("FAST_ALLREDUCE_NODE", node) };
    let error = Mpi::init().unwrap_err();
    let Error::Unavailable { what, reason } = &error else { panic!("{error}") };
    assert!(what.contains("several nodes") && reason.contains("Mpi::of_node"), "{error}");
    assert!(reason.contains("NODE=even") && reason.contains("NODE=odd"), "{error}");
    let all = Mpi::of_all_nodes(&world).unwrap();
    assert_eq!((all.rank(), all.nodes()), (rank, (0..size).map(|rank| rank % 2).collect()));
    gather_all(&all, 5);
    let error = Communicator::builder().build(Host::new(), all).map(drop).unwrap_err();
    assert!(size == 1 || error.to_string().contains("several nodes on the host device"), "{error}");
    let mpi = Mpi::of_node(&world).unwrap();
    assert_eq!(mpi.nodes(), vec![rank % 2; mpi.world_size()]);
    assert_eq!((mpi.rank(), mpi.world_size()), (rank / 2, size.div_ceil(2) - rank % 2 * (size % 2)));
    gather_all(&mpi, 10);
    let communicator = Communicator::builder().build(Host::new(), mpi).unwrap();
    let mut data = vec![1u8; 100];
    communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
    assert_eq!(data, vec![communicator.world_size() as u8; 100]);
}

/// Creates a world of simulated nodes, each with `ranks` consecutive ranks (fewer in the last node).
fn simulate_nodes(ranks: usize, limit: Duration) -> fast_allreduce::Result<Hierarchical<Host, MpiNodes>> {
    let _ = Mpi::init().unwrap();
    let world = SimpleCommunicator::world();
    let node = world.split_by_color(Color::with_value(world.rank() / ranks as i32)).unwrap();
    let local = Mpi::from_communicator(&node)?;
    let local = Communicator::builder().timeout(LIMIT).build(Host::new(), local)?;
    let nodes = MpiNodes::from_communicator(&world, local.rank())?.timeout(limit);
    Hierarchical::new(local, nodes)
}

/// Allreduces between simulated nodes of `ranks` ranks each.
fn nodes_of(ranks: usize) {
    let world = simulate_nodes(ranks, LIMIT).unwrap();
    assert_eq!(world.engine().nodes(), world.world_size() / ranks);
    all_reduces(&world);
}

/// Allreduces between machines, which are found.
fn machines() {
    let (_universe, _) = mpi::initialize_with_threading(Threading::Serialized).unwrap();
    let world = SimpleCommunicator::world();
    let local =
        Communicator::builder().timeout(LIMIT).build(Host::new(), Mpi::of_node(&world).unwrap()).unwrap();
    let nodes = MpiNodes::from_communicator(&world, local.rank()).unwrap().timeout(LIMIT);
    let world = Hierarchical::new(local, nodes).unwrap();
    assert!(world.engine().nodes() > 1);
    all_reduces(&world);
}

/// Allreduces in a world of several nodes: all ranks get the same bits.
fn all_reduces(world: &Hierarchical<Host, MpiNodes>) {
    let all = SimpleCommunicator::world();
    assert_eq!((world.rank() as i32, world.world_size() as i32), (all.rank(), all.size()));
    calls::special_values(world);
    calls::large_message(world);
    calls::pieces(world);
    let digest = calls::every_call(world).to_le_bytes();
    let digests = Mpi::of_all_nodes(&all).unwrap().all_gather(&digest, LIMIT).unwrap();
    assert!(digests.iter().all(|other| *other == digest), "ranks have different bits");
}

/// Nodes of two ranks, with fewer ranks in the last node: all ranks get an error.
fn unequal_nodes() {
    let error = simulate_nodes(2, LIMIT).map(drop).unwrap_err();
    assert!(error.to_string().contains("nodes with 1 to 2 ranks"), "{error}");
}

/// A node that arrives too late: the others name its rank by its global number.
fn late_node() {
    const SHORT: Duration = Duration::from_millis(700);
    let world = simulate_nodes(1, SHORT).unwrap();
    let late = world.world_size() - 1;
    let mut data = [1u32; 10];
    if world.rank() == late {
        std::thread::sleep(3 * SHORT);
    } else {
        let started = Instant::now();
        let error = world.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap_err();
        let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
        assert_eq!(*missing, [late], "{error}");
        assert!(started.elapsed() >= SHORT / 2 && started.elapsed() < LIMIT / 4);
        assert_eq!(world.all_reduce_in_place(&mut data, ReduceOp::Sum), Err(error), "it stays failed");
    }
    // Operations that are never completed keep MPI from finalising, and a launcher may kill the others when the first
    // rank exits without it.
    println!("late-node: passed");
    std::thread::sleep(3 * SHORT);
}

/// Nodes whose calls differ: all ranks get an error at once, with both calls.
fn different_calls(ranks: usize) {
    for difference in calls::DIFFERENCES {
        let world = simulate_nodes(ranks, LIMIT).unwrap();
        calls::differ(&world, difference);
    }
}
