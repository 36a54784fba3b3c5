//! Several simulated nodes: their ranks are threads, and the engine between nodes is a communicator of this crate
//! between the threads with the same local rank. `tests/mpi` has the same calls over MPI.

mod calls;
mod reference;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::Threads;
use fast_allreduce::hierarchical::{Call, Finish};
use fast_allreduce::{
    Collective, Communicator, DType, Error, Hierarchical, Host, InterNode, ReduceOp, Result,
};

/// The engine between nodes: a communicator of the ranks with the same local rank.
struct AcrossNodes(Communicator<Host>);

impl InterNode<Host> for AcrossNodes {
    fn node(&self) -> usize {
        self.0.rank()
    }

    fn nodes(&self) -> usize {
        self.0.world_size()
    }

    unsafe fn all_reduce(
        &self,
        address: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        _stream: (),
    ) -> Result<()> {
        let data = address as *mut std::ffi::c_void;
        // SAFETY: the caller guarantees the memory; an in-place call has the same pointer as input and output.
        unsafe { self.0.collective_raw(Collective::AllReduce(op), data, data, count, dtype) }
    }
}

/// Runs `rank` in a thread for each rank of nodes of these sizes. A local rank exists on the nodes that have enough
/// ranks.
fn on_nodes<T: Send>(
    sizes: &[usize],
    limit: Duration,
    rank: impl Fn(Result<Hierarchical<Host, AcrossNodes>>) -> T + Sync,
) -> Vec<T> {
    on_nodes_by(|across| across, true, sizes, limit, rank)
}

/// Runs `rank` like [`on_nodes`], with this engine. `check` sets whether calls are checked inside nodes and by the
/// engine.
fn on_nodes_by<E: InterNode<Host>, T: Send>(
    engine: impl Fn(AcrossNodes) -> E + Sync,
    check: bool,
    sizes: &[usize],
    limit: Duration,
    rank: impl Fn(Result<Hierarchical<Host, E>>) -> T + Sync,
) -> Vec<T> {
    let nodes: Vec<_> = sizes.iter().map(|&size| Threads::world(size).unwrap()).collect();
    let most = *sizes.iter().max().unwrap();
    let of_local_rank = |local_rank: usize| sizes.iter().filter(|&&size| size > local_rank).count();
    let mut across_nodes: Vec<_> =
        (0..most).map(|local_rank| Threads::world(of_local_rank(local_rank)).unwrap().into_iter()).collect();
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for local in nodes {
            for (local, across) in local.into_iter().zip(&mut across_nodes) {
                let (across, rank, engine) = (across.next().unwrap(), &rank, &engine);
                threads.push(scope.spawn(move || {
                    let build = || Communicator::builder().timeout(limit).check(check);
                    let local = build().build(Host::new(), local).unwrap();
                    let across = build().build(Host::new(), across).unwrap();
                    rank(Hierarchical::new(local, engine(AcrossNodes(across))))
                }));
            }
        }
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

const LIMIT: Duration = Duration::from_secs(60);

/// One node, several nodes of one rank, and several nodes of several ranks. Ranks are numbered node by node.
#[test]
fn every_type_and_operation() {
    for (nodes, ranks) in [(2, 2), (2, 3), (3, 1), (1, 3), (4, 2), (1, 1)] {
        let digests = on_nodes(&vec![ranks; nodes], LIMIT, |world| {
            let world = world.unwrap();
            assert_eq!(world.world_size(), nodes * ranks);
            calls::special_values(&world);
            calls::large_message(&world);
            if (nodes, ranks) == (2, 2) {
                calls::pieces(&world);
            }
            (world.rank(), calls::every_call(&world))
        });
        let numbers: Vec<_> = digests.iter().map(|(rank, _)| *rank).collect();
        assert_eq!(numbers, (0..nodes * ranks).collect::<Vec<_>>());
        assert!(digests.iter().all(|(_, digest)| *digest == digests[0].1), "ranks have different bits");
    }
}

#[test]
fn more_ranks_than_a_communicator_may_have() {
    const RANKS: usize = fast_allreduce::MAX_RANKS / 2 + 1;
    on_nodes(&[RANKS; 2], LIMIT, |world| {
        let world = world.unwrap();
        assert_eq!(world.world_size(), 2 * RANKS);
        calls::special_values(&world);
        calls::large_message(&world);
    });
}

/// Calls of several threads do not mix.
#[test]
fn calls_of_several_threads() {
    on_nodes(&[2, 2], LIMIT, |world| {
        let world = world.unwrap();
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        let mut data = vec![1u32; 3001];
                        world.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
                        assert_eq!(data, vec![4; 3001]);
                    }
                });
            }
        });
    });
}

/// All ranks get the error, including those of the larger node.
#[test]
fn unequal_nodes_are_refused() {
    for sizes in [&[2, 1][..], &[3, 3, 2], &[1, 4]] {
        for outcome in on_nodes(sizes, LIMIT, |world| world.map(drop)) {
            let Err(Error::Unavailable { what, reason }) = outcome else { panic!("{outcome:?}") };
            assert!(
                what.contains("ranks") && reason.contains("same number of ranks on each node"),
                "{what}: {reason}"
            );
        }
    }
}

/// Nodes whose calls differ: all ranks have an error with both calls, whether calls are checked inside nodes or not.
#[test]
fn nodes_whose_calls_differ() {
    for check in [false, true] {
        for sizes in [&[1, 1][..], &[2, 2], &[2, 2, 2]] {
            for difference in calls::DIFFERENCES {
                let differ = |world: Result<_>| calls::differ(&world.unwrap(), difference);
                on_nodes_by(|across| across, check, sizes, LIMIT, differ);
            }
        }
    }
}

/// Pieces of a call have equal lengths in calls of these lengths.
#[test]
fn ranks_of_a_node_whose_calls_differ() {
    let errors = on_nodes(&[2, 2], LIMIT, |world| {
        let world = world.unwrap();
        let count = [1 << 20, 3 << 20][usize::from(world.rank() == 1)];
        (world.rank(), world.all_reduce_in_place(&mut vec![1u32; count], ReduceOp::Sum).unwrap_err())
    });
    for (rank, error) in errors {
        match &error {
            // The text is that of this call, or of a step where a busy machine makes the delay long, and so no pieces.
            Error::Disagreement { rank: other, .. } if rank < 2 => assert_eq!(*other, 1 - rank),
            // Ranks of the other node learn that the ranks of this one have failed.
            error => assert!(rank >= 2, "rank {rank}: {error}"),
        }
    }
}

/// A missing rank is reported by its number in the whole world, at least on the ranks with the same local rank; the
/// ranks of its node fail at once. Texts contain the same numbers.
#[test]
fn a_rank_that_does_not_come() {
    // A small message and one of three steps, at the same time, since they mostly wait.
    thread::scope(|scope| {
        for count in [1000, 5000] {
            scope.spawn(move || no_rank_3(count));
        }
    });
}

fn no_rank_3(count: usize) {
    let failed = AtomicUsize::new(0);
    let outcomes = on_nodes(&[2, 2], Duration::from_secs(2), |world| {
        let world = world.unwrap();
        if world.rank() == 3 {
            let begin = Instant::now();
            while failed.load(Ordering::Relaxed) < 3 && begin.elapsed() < LIMIT {
                thread::sleep(Duration::from_millis(10));
            }
            return None;
        }
        let mut data = vec![1.0f32; count];
        let error = world.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap_err();
        failed.fetch_add(1, Ordering::Relaxed);
        let again = world.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap_err();
        assert_eq!(again, error, "it stays failed");
        Some((world.rank(), error))
    });
    for (rank, error) in outcomes.into_iter().flatten() {
        let text = error.to_string();
        if rank == 2 {
            assert!(text.contains(": rank 3 ") && !text.contains("rank 1"), "rank 2: {text}");
        }
        match error {
            // Rank 2 waits inside its node, rank 1 between nodes for rank 3; rank 0 for rank 2, which gave up.
            Error::Timeout { missing, .. } if rank != 0 => assert_eq!(missing, [3], "rank {rank}"),
            Error::Timeout { missing, .. } => {
                assert!(missing == [2] || missing == [1], "rank {rank}: {missing:?}")
            }
            Error::PeerLost { rank: other, .. } | Error::PeerFailed { rank: other, .. } => {
                assert!(other != rank, "rank {rank}");
            }
            error => panic!("rank {rank}: {error}"),
        }
    }
}

/// An engine that fails on rank 2, in its first reduction of a slice.
struct Failing(AcrossNodes);

impl InterNode<Host> for Failing {
    fn node(&self) -> usize {
        self.0.node()
    }

    fn nodes(&self) -> usize {
        self.0.nodes()
    }

    unsafe fn all_reduce(&self, address: u64, count: usize, dtype: DType, op: ReduceOp, _: ()) -> Result<()> {
        // The first rank of a node has the lower half of the values.
        // SAFETY: the caller guarantees elements, which are of this type.
        if dtype == DType::U32 && self.node() == 1 && unsafe { *(address as *const u32) } == 0 {
            return Err(Error::PeerLost { rank: 0, reason: "rank 0 does not answer".into() });
        }
        // SAFETY: the caller's guarantees are the same.
        unsafe { self.0.all_reduce(address, count, dtype, op, ()) }
    }
}

/// The other ranks of its node learn why, in numbers of the whole world.
#[test]
fn an_engine_that_fails_on_one_rank() {
    let errors = on_nodes_by(Failing, true, &[2, 2], LIMIT, |world| {
        let world = world.unwrap();
        let mut data: Vec<u32> = (0..10_000).collect();
        world.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap_err().to_string()
    });
    assert_eq!(errors[2], "rank 0 is gone: rank 0 does not answer");
    assert_eq!(errors[3], "rank 2 failed: rank 0 is gone: rank 0 does not answer");
}

/// An engine that panics in its third reduction of a slice.
struct Panicking {
    across: AcrossNodes,
    reductions: AtomicUsize,
}

impl InterNode<Host> for Panicking {
    fn node(&self) -> usize {
        self.across.node()
    }

    fn nodes(&self) -> usize {
        self.across.nodes()
    }

    unsafe fn all_reduce(&self, address: u64, count: usize, dtype: DType, op: ReduceOp, _: ()) -> Result<()> {
        if dtype == DType::U32 && self.reductions.fetch_add(1, Ordering::Relaxed) == 2 {
            // Without the message of a panic.
            std::panic::resume_unwind(Box::new("on purpose"));
        }
        // SAFETY: the caller's guarantees are the same.
        unsafe { self.across.all_reduce(address, count, dtype, op, ()) }
    }
}

/// The call of a program that catches the panic must not meet the rest of the other node's call.
#[test]
fn a_panic_of_the_engine_ends_the_world() {
    let worlds = Threads::world(2).unwrap();
    thread::scope(|scope| {
        for (node, across) in worlds.into_iter().enumerate() {
            scope.spawn(move || {
                let alone = Threads::world(1).unwrap().remove(0);
                let build = || Communicator::builder().timeout(LIMIT);
                let local = build().build(Host::new(), alone).unwrap();
                let across = AcrossNodes(build().build(Host::new(), across).unwrap());
                // The other node's engine never comes as far.
                let engine = Panicking { across, reductions: AtomicUsize::new(0) };
                if node == 1 {
                    engine.reductions.store(3, Ordering::Relaxed);
                }
                let world = Hierarchical::new(local, engine).unwrap();
                // Of 8 pieces, if the delay between the nodes is short, so that the third step is within a call.
                let mut data = vec![1u32; 1 << 20];
                let mut call = || world.all_reduce_in_place(&mut data, ReduceOp::Sum);
                let mut attempt = || std::panic::catch_unwind(std::panic::AssertUnwindSafe(&mut call));
                let failed =
                    (0..3).map(|_| attempt()).find(|outcome| !matches!(outcome, Ok(Ok(())))).unwrap();
                match (node, failed) {
                    (0, Err(_)) => {
                        let error = attempt().unwrap().unwrap_err();
                        assert!(error.to_string().contains("has panicked in a call"), "{error}");
                    }
                    (1, Ok(error)) => assert!(error.is_err(), "node 1"),
                    (node, outcome) => panic!("node {node}: {outcome:?}"),
                }
            });
        }
    });
}

/// An engine that starts its reductions, and completes them later. It does not compare calls.
struct Starting {
    across: AcrossNodes,
    /// It fails when it completes a reduction.
    fails: AtomicBool,
    completed: AtomicUsize,
}

/// Bytes of a rank's slice in a piece, where the delay between nodes is short.
const SLICE_BYTES: usize = 256 << 10;

impl InterNode<Host> for Starting {
    fn node(&self) -> usize {
        self.across.node()
    }

    fn nodes(&self) -> usize {
        self.across.nodes()
    }

    unsafe fn all_reduce(&self, address: u64, count: usize, dtype: DType, op: ReduceOp, _: ()) -> Result<()> {
        // SAFETY: the caller's guarantees are the same.
        unsafe { self.across.all_reduce(address, count, dtype, op, ()) }
    }

    unsafe fn start_all_reduce(
        &self,
        _: Call,
        address: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        _: (),
    ) -> Option<Result<Finish<'_>>> {
        Some(Ok(Box::new(move || {
            let is_first = self.completed.fetch_add(1, Ordering::Relaxed) == 0;
            if is_first && dtype == DType::U32 && count * dtype.size() == SLICE_BYTES {
                let next = address as usize + 2 * SLICE_BYTES;
                // SAFETY: the first call of a test has three pieces of two such slices. Only this thread writes its
                // output.
                let next = unsafe { *(next as *const u32) };
                assert_eq!(next, 2, "the next piece, a 1 of each rank, has not been reduced in the node");
            }
            if self.fails.load(Ordering::Relaxed) {
                return Err(Error::Rendezvous { reason: "on purpose".into() });
            }
            // SAFETY: the caller's guarantees are the same.
            unsafe { self.across.all_reduce(address, count, dtype, op, ()) }
        })))
    }
}

fn starting(across: AcrossNodes) -> Starting {
    Starting { across, fails: AtomicBool::new(false), completed: AtomicUsize::new(0) }
}

/// While a piece is under way between the nodes, the next one is reduced inside them.
#[test]
fn pieces_overlap() {
    on_nodes_by(starting, true, &[2, 2], LIMIT, |world| {
        let world = world.unwrap();
        // Three pieces. Longer delays, measured on a busy machine, make fewer.
        let mut data = vec![1u32; 3 * 2 * SLICE_BYTES / size_of::<u32>()];
        world.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
        assert!(data.iter().all(|&sum| sum == 4));
        let completed = world.engine().completed.load(Ordering::Relaxed);
        assert!((1..=3).contains(&completed), "{completed} reductions");
        calls::pieces(&world);
    });
}

/// The other rank of its node, which may have a piece under way, learns why.
#[test]
fn an_engine_that_fails_between_pieces() {
    let errors = on_nodes_by(starting, true, &[2, 2], LIMIT, |world| {
        let world = world.unwrap();
        world.engine().fails.store(world.rank() == 3, Ordering::Relaxed);
        let mut data = vec![1u32; 3 * 2 * SLICE_BYTES / size_of::<u32>()];
        world.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap_err().to_string()
    });
    assert!(errors[2..].iter().all(|error| error.contains("on purpose")), "{errors:?}");
}

/// An engine that also exchanges messages, with the rank with the same local rank on the other one of two nodes. It
/// loses `lost` bytes at the end of each.
struct Exchanging {
    across: AcrossNodes,
    to: Mutex<Sender<Vec<u8>>>,
    from: Mutex<Receiver<Vec<u8>>>,
    lost: usize,
}

impl InterNode<Host> for Exchanging {
    fn node(&self) -> usize {
        self.across.node()
    }

    fn nodes(&self) -> usize {
        self.across.nodes()
    }

    unsafe fn all_reduce(&self, address: u64, count: usize, dtype: DType, op: ReduceOp, _: ()) -> Result<()> {
        assert!(
            dtype.is_float() && dtype.size() == 1 || dtype == DType::I64 && op == ReduceOp::Min && count <= 4,
            "data and calls are exchanged, except of 8-bit floats"
        );
        // SAFETY: the caller's guarantees are the same.
        unsafe { self.across.all_reduce(address, count, dtype, op, ()) }
    }

    fn exchange(&self, message: &[u8], space: &mut [u8]) -> Option<Result<usize>> {
        let failed = |reason: &str| Some(Err(Error::Rendezvous { reason: reason.into() }));
        let (to, from) = (self.to.lock(), self.from.lock());
        let to = to.unwrap_or_else(PoisonError::into_inner);
        if to.send(message[..message.len() - self.lost].into()).is_err() {
            return failed("the other end has gone");
        }
        match from.unwrap_or_else(PoisonError::into_inner).recv_timeout(LIMIT) {
            Ok(theirs) => {
                space[..theirs.len()].copy_from_slice(&theirs);
                Some(Ok(theirs.len()))
            }
            Err(error) => failed(&error.to_string()),
        }
    }
}

/// Runs `rank` in a thread for each rank of two nodes of `ranks`, whose engines exchange messages.
fn exchanging<T: Send>(
    ranks: usize,
    lost: usize,
    rank: impl Fn(Hierarchical<Host, Exchanging>) -> T + Sync,
) -> Vec<T> {
    let nodes = [Threads::world(ranks).unwrap(), Threads::world(ranks).unwrap()];
    let mut across: Vec<_> = (0..ranks)
        .map(|_| {
            let (one, other) = (channel(), channel());
            Threads::world(2).unwrap().into_iter().zip([(one.0, other.1), (other.0, one.1)])
        })
        .collect();
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for node in nodes {
            for (local, across) in node.into_iter().zip(&mut across) {
                let (across, (to, from)) = across.next().unwrap();
                let rank = &rank;
                threads.push(scope.spawn(move || {
                    let build = || Communicator::builder().timeout(LIMIT);
                    let local = build().build(Host::new(), local).unwrap();
                    let across = AcrossNodes(build().build(Host::new(), across).unwrap());
                    let engine = Exchanging { across, to: Mutex::new(to), from: Mutex::new(from), lost };
                    rank(Hierarchical::new(local, engine).unwrap())
                }));
            }
        }
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn calls_by_messages() {
    for ranks in [1, 2] {
        let digests = exchanging(ranks, 0, |world| {
            calls::special_values(&world);
            calls::large_message(&world);
            calls::pieces(&world);
            // 1 in e4m3, whose sums the engine reduces.
            let mut ones = [0x38u8; 7];
            let address = ones.as_mut_ptr().cast();
            // SAFETY: the array has 7 elements of one byte, and is exclusively borrowed.
            unsafe { world.all_reduce_raw(address, address, 7, DType::F8E4M3, ReduceOp::Sum) }.unwrap();
            assert_eq!(ones, [if ranks == 1 { 0x40 } else { 0x48 }; 7], "2 or 4 in e4m3");
            calls::every_call(&world)
        });
        assert!(digests.iter().all(|digest| *digest == digests[0]), "ranks have different bits");
    }
}

#[test]
fn different_calls_by_messages() {
    for difference in calls::DIFFERENCES {
        exchanging(2, 0, |world| calls::differ(&world, difference));
    }
}

#[test]
fn messages_of_another_length() {
    for (lost, what) in [(1, "has 19 bytes, not 20"), (5, "has 15 bytes, not 20")] {
        for ranks in [1, 2] {
            let mut found = 0;
            for (rank, error) in exchanging(ranks, lost, |world| {
                (world.rank(), world.all_reduce_in_place(&mut [1.0f32], ReduceOp::Sum).unwrap_err())
            }) {
                match error {
                    Error::Malformed { rank: other, reason } => {
                        assert!(other == (rank + ranks) % (2 * ranks) && reason.contains(what), "{reason}");
                        found += 1;
                    }
                    // The other rank of this node or its counterpart has failed before.
                    error => assert!(ranks == 2, "{error}"),
                }
            }
            assert!(found > 0, "the first rank that fails has another error");
        }
    }
}
