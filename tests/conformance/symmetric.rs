//! Tests symmetric memory on the host: views of the peers' parts, its states, and how it is freed; between threads and
//! between processes.

use fast_allreduce::{Algorithm, Communicator, Element, Error, Host, ReduceOp, SymmetricMemory};

use crate::host::Build as _;
use crate::suite::launch::{threads, InThreads, Launch, LocalProcesses, Rank};
use crate::suite::scenario::Setup;

/// Each rank writes to every part, and checks its own part for the data of all ranks.
fn exchange<T: Element + Default + PartialEq + std::fmt::Debug>(
    communicator: &Communicator<Host>,
    to: fn(u8) -> T,
) {
    let (rank, world) = (communicator.rank(), communicator.world_size());
    let memory = communicator.symmetric_memory::<T>(world + 3).unwrap();
    assert_eq!((memory.len(), memory.is_empty()), (world + 3, false));
    for peer in 0..world {
        let view = memory.view(peer).unwrap();
        assert_eq!((view.rank(), view.len()), (peer, world + 3));
        view.store(rank, to((10 * rank + peer) as u8)).unwrap();
    }
    communicator.barrier().unwrap();
    for peer in 0..world {
        let mut all = vec![to(99); world + 3];
        memory.view(peer).unwrap().copy_to(&mut all).unwrap();
        let written = (0..world).map(|from| to((10 * from + peer) as u8));
        assert_eq!(all, Vec::from_iter(written.chain([T::default(); 3])), "the part of rank {peer}");
        assert_eq!(memory.view(peer).unwrap().load(rank), Ok(all[rank]));
    }
    communicator.barrier().unwrap();
    // Copies whole parts to the next rank.
    let next = (rank + 1) % world;
    memory.view(next).unwrap().copy_from(&vec![to(rank as u8 + 50); world + 3]).unwrap();
    communicator.barrier().unwrap();
    let own = memory.view(rank).unwrap();
    // SAFETY: no rank writes after the barrier.
    assert_eq!(unsafe { own.as_slice() }, vec![to(((rank + world - 1) % world) as u8 + 50); world + 3]);
    memory.free().unwrap();
}

fn exchanges(rank: &Rank) {
    let communicator = Setup::default().build(rank);
    exchange(&communicator, |value| half::f16::from_f32(value.into()));
    exchange(&communicator, |value| half::bf16::from_f32(value.into()));
    exchange(&communicator, f32::from);
    exchange(&communicator, f64::from);
    exchange(&communicator, |value| value as i8);
    exchange(&communicator, |value| value);
    exchange(&communicator, i32::from);
    exchange(&communicator, u32::from);
    exchange(&communicator, i64::from);
    exchange(&communicator, u64::from);
}

#[test]
fn views_between_threads() {
    [1, 2, 3].into_iter().for_each(|size| InThreads.run(size, &exchanges));
}

#[test]
fn views_between_processes() {
    let processes = LocalProcesses::new("symmetric::views_between_processes");
    [2, 3].into_iter().for_each(|size| processes.run(size, &exchanges));
}

/// Alternates the states of memory. Registered memory is reduced without staging and keeps its contents; then views of
/// the peers' parts work again.
fn states(rank: &Rank) {
    let (own, world) = (rank.rank(), rank.world_size());
    let sum = (world * (world + 1) / 2) as u32;
    for algorithm in [Algorithm::OneShotPull, Algorithm::TwoShotPull, Algorithm::OneShotPush] {
        let communicator = Setup::with(algorithm).build(rank);
        let mut memory = communicator.symmetric_memory::<u32>(3000).unwrap();
        for round in 1..4 {
            let next = (own + 1) % world;
            memory.view(next).unwrap().copy_from(&vec![round * (next as u32 + 1); 3000]).unwrap();
            communicator.barrier().unwrap();
            let address = memory.peer_address(next);
            let mut buffer = memory.register().unwrap();
            assert_eq!((buffer.peer_address(next), buffer.peer_address(16)), (address, None));
            let mut output = vec![0; 3000];
            communicator.all_reduce(&buffer, &mut output, ReduceOp::Sum).unwrap();
            assert_eq!(output, vec![round * sum; 3000]);
            buffer.fill(7);
            communicator.all_reduce_in_place(&mut buffer[5..2000], ReduceOp::Sum).unwrap();
            memory = buffer.deregister().unwrap();
            let view = memory.view(next).unwrap();
            assert_eq!((view.load(4), view.load(5)), (Ok(7), Ok(7 * world as u32)));
            communicator.barrier().unwrap();
        }
        memory.free().unwrap();
    }
}

#[test]
fn registered_and_back_between_threads() {
    [1, 3].into_iter().for_each(|size| InThreads.run(size, &states));
}

#[test]
fn registered_and_back_between_processes() {
    let processes = LocalProcesses::new("symmetric::registered_and_back_between_processes");
    processes.run(3, &states);
}

#[test]
fn what_is_out_of_range_is_refused() {
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        let memory = communicator.symmetric_memory::<f32>(10).unwrap();
        let error = memory.view(2).unwrap_err();
        assert_eq!(error, Error::RankOutOfRange { rank: 2, world_size: 2 });
        assert_eq!(memory.peer_address(2), None);
        let view = memory.view(1).unwrap();
        for error in [view.load(10).unwrap_err(), view.store(usize::MAX, 1.0).unwrap_err()] {
            assert!(matches!(error, Error::InvalidSetting { name: "index", .. }), "{error}");
        }
        let short = &mut [0.0; 9];
        assert_eq!(view.copy_to(short), Err(Error::LengthMismatch { input: 10, output: 9 }));
        assert_eq!(view.copy_from(short), Err(Error::LengthMismatch { input: 9, output: 10 }));
        let error = communicator.symmetric_memory::<u64>(usize::MAX / 4).unwrap_err();
        assert!(matches!(error, Error::Allocation { .. }), "{error}");
        let empty = communicator.symmetric_memory::<u8>(0).unwrap();
        assert!(empty.is_empty() && empty.view(1).unwrap().load(0).is_err());
        empty.free().unwrap();
    });
}

/// Tests that ranks at different steps, with different memory or sizes, all get an error before anything is freed.
#[test]
fn ranks_that_disagree_are_told() {
    threads(3, |rank| {
        let communicator = Setup::default().build(&rank);
        let disagreement = |result: Result<(), Error>| {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::Disagreement { .. }), "{error}");
            communicator.barrier().unwrap();
        };
        let last = rank.rank() == 2;
        disagreement(communicator.symmetric_memory::<u8>(5 + usize::from(last)).map(drop));
        let [first, second, third, fourth] =
            [(); 4].map(|()| communicator.symmetric_memory::<u8>(8).unwrap());
        disagreement(if last { first.register().map(drop) } else { first.free() });
        let (mine, other) = if last { (second, third) } else { (third, second) };
        disagreement(mine.free());
        let buffer = other.register();
        disagreement(buffer.map(drop));
        let buffer = fourth.register().unwrap();
        let fifth = communicator.symmetric_memory::<u8>(8).unwrap();
        disagreement(if last { buffer.deregister().map(drop) } else { fifth.free() });
        communicator.symmetric_memory::<u8>(8).unwrap().free().unwrap();
    });
}

/// Tests that ranks with equal numbers of bytes but different types get an error, and ranks with different counts too.
#[test]
fn ranks_agree_on_type_and_count() {
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        let first = rank.rank() == 0;
        let types = match first {
            true => communicator.symmetric_memory::<u64>(1).map(drop),
            false => communicator.symmetric_memory::<u32>(2).map(drop),
        };
        let registered = match first {
            true => communicator.alloc::<f32>(3).map(drop),
            false => communicator.alloc::<i32>(3).map(drop),
        };
        let counts = communicator.alloc::<u8>(3 + rank.rank()).map(drop);
        for (result, facts) in [(types, ["u32", "u64"]), (registered, ["f32", "i32"]), (counts, ["3", "4"])] {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::Disagreement { .. }), "{error}");
            assert!(facts.iter().all(|fact| error.to_string().contains(fact)), "{error}");
        }
        communicator.symmetric_memory::<u64>(1).unwrap().free().unwrap();
    });
}

/// Tests that ranks at different steps get an error without waiting for a timeout, and that the next step works.
#[test]
fn ranks_at_different_steps_go_on_after_it() {
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        let memory = communicator.symmetric_memory::<u8>(8).unwrap();
        let result = match rank.rank() {
            0 => memory.free(),
            _ => communicator.symmetric_memory::<u8>(8).map(drop),
        };
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Disagreement { .. }), "{error}");
        communicator.alloc::<u8>(8).unwrap().deregister().unwrap().free().unwrap();
    });
}

/// Runs `body` in several threads of a rank at the same time, and returns the results.
fn at_once<R: Send>(count: usize, body: impl Fn(usize) -> R + Sync) -> Vec<R> {
    let meeting = std::sync::Barrier::new(count);
    std::thread::scope(|scope| {
        let run = |thread| {
            let (body, meeting) = (&body, &meeting);
            scope.spawn(move || {
                meeting.wait();
                body(thread)
            })
        };
        let running: Vec<_> = (0..count).map(run).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Tests threads that make equal allocations at the same time: the parts of each allocation belong together on all
/// ranks, and have the same number.
#[test]
fn threads_that_allocate_at_once_get_whole_memories() {
    threads(3, |rank| {
        let communicator = Setup::default().build(&rank);
        let own = rank.rank();
        let allocate =
            |_| (0..6).map(|_| communicator.symmetric_memory::<u64>(3).unwrap()).collect::<Vec<_>>();
        let mut memories: Vec<_> = at_once(4, allocate).into_iter().flatten().collect();
        for (index, memory) in (1..).zip(&memories) {
            memory.view(own).unwrap().store(0, index).unwrap();
        }
        communicator.barrier().unwrap();
        let tag = |memory: &SymmetricMemory<u64>, rank| memory.view(rank).unwrap().load(0).unwrap();
        for peer in 0..3 {
            let mut tags: Vec<_> = memories.iter().map(|memory| tag(memory, peer)).collect();
            tags.sort_unstable();
            assert_eq!(tags, Vec::from_iter(1..=24), "parts of rank {peer}");
        }
        // The same order on all ranks, so that each frees memory whose parts belong together.
        memories.sort_by_key(|memory| tag(memory, 0));
        communicator.barrier().unwrap();
        for (index, memory) in (1..).zip(memories) {
            assert_eq!(tag(&memory, 0), index);
            memory.free().unwrap();
        }
    });
}

/// Tests threads that allocate different memory, or free it, at the same time: a step fails on all ranks or on none,
/// and no thread hangs.
#[test]
fn threads_at_different_steps_at_once_are_told() {
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        let step = |thread: usize| match thread % 4 {
            0 => communicator.alloc::<u32>(6).map(|buffer| assert_eq!(*buffer, [0; 6])),
            1 => communicator.symmetric_memory::<u32>(6).map(drop),
            2 => communicator.symmetric_memory::<u64>(3).map(drop),
            _ => communicator.split(Some(0), 0).map(drop),
        };
        let results = at_once(4, |thread| (0..20).map(|_| step(thread)).collect::<Vec<_>>());
        for error in results.into_iter().flatten().filter_map(Result::err) {
            assert!(matches!(error, Error::Disagreement { .. } | Error::Malformed { .. }), "{error}");
        }
        communicator.barrier().unwrap();
        communicator.alloc::<u8>(8).unwrap().deregister().unwrap().free().unwrap();
    });
}

/// Tests memory that outlives its communicator, and a rank that drops memory while others use their parts.
#[test]
fn freed_after_its_communicator_and_dropped_early() {
    threads(3, |rank| {
        let communicator = Setup::default().build(&rank);
        let kept = communicator.symmetric_memory::<u32>(1000).unwrap();
        let dropped = communicator.symmetric_memory::<u32>(1000).unwrap();
        if rank.rank() == 1 {
            drop(dropped);
            communicator.barrier().unwrap();
        } else {
            communicator.barrier().unwrap();
            dropped.view(1).unwrap().store(999, 3).unwrap();
            assert_eq!(dropped.view(1).unwrap().load(999), Ok(3));
        }
        drop(communicator);
        kept.view((rank.rank() + 1) % 3).unwrap().store(0, 5).unwrap();
        kept.free().unwrap();
    });
}

/// Tests that if a peer does not free its memory, an error names it within the timeout, and no thread hangs.
#[test]
fn a_free_without_a_rank_is_an_error() {
    let errors = threads(2, |rank| {
        let setup = Setup { timeout: std::time::Duration::from_secs(1), ..Setup::default() };
        let communicator = setup.build(&rank);
        let memory = communicator.symmetric_memory::<u8>(8).unwrap();
        match rank.rank() {
            0 => Some(memory.free().unwrap_err()),
            _ => {
                std::thread::sleep(std::time::Duration::from_secs(2));
                None
            }
        }
    });
    assert!(matches!(&errors[0], Some(Error::Timeout { missing, .. }) if *missing == [1]), "{errors:?}");
}
