//! Tests wrong calls and absent ranks: an error says what is wrong and names the rank, in time; there is never a wrong
//! result.

use std::sync::{mpsc, Arc, Mutex};
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::{Bootstrap, Local, Threads, UniqueId};
use fast_allreduce::{Algorithm, Collective, Communicator, DType, Error, Host, ReduceOp, Result, MAX_RANKS};

use crate::host::Build as _;
use crate::suite::launch::{threads, Rank, LIMIT};
use crate::suite::scenario::Setup;

/// A bootstrap that claims any rank and world size.
struct Claims {
    rank: usize,
    world_size: usize,
}

impl Bootstrap for Claims {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_gather(&self, bytes: &[u8], _: Duration) -> Result<Vec<Vec<u8>>> {
        Ok(vec![bytes.to_vec(); self.world_size])
    }
}

#[test]
fn worlds_of_impossible_sizes() {
    let claim =
        |rank, world_size| Setup::default().try_build(&(Arc::new(Claims { rank, world_size }) as Rank));
    let id = UniqueId::new().unwrap();
    for world_size in [0, MAX_RANKS + 1, usize::MAX] {
        assert_eq!(claim(0, world_size).unwrap_err(), Error::WorldSize { world_size });
        assert_eq!(Threads::world(world_size).unwrap_err(), Error::WorldSize { world_size });
        assert_eq!(Local::connect(&id, 0, world_size, LIMIT).unwrap_err(), Error::WorldSize { world_size });
    }
    assert_eq!(claim(3, 3).unwrap_err(), Error::RankOutOfRange { rank: 3, world_size: 3 });
    assert_eq!(claim(9, 2).unwrap_err(), Error::RankOutOfRange { rank: 9, world_size: 2 });
}

#[test]
fn settings_out_of_range() {
    for max_bytes in [0, 1, 4095, usize::MAX] {
        for result in threads(2, |rank| Setup { max_bytes, ..Setup::default() }.try_build(&rank)) {
            assert!(matches!(result.unwrap_err(), Error::InvalidSetting { name: "max_bytes", .. }));
        }
    }
    for workers in [0, 65, usize::MAX] {
        assert!(matches!(Host::new().workers(workers), Err(Error::InvalidSetting { name: "workers", .. })));
    }
}

#[test]
fn arguments_are_checked_and_do_no_harm() {
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        let (mut data, op) = (vec![1u32; 1000], ReduceOp::Sum);
        let mismatch = communicator.all_reduce(&[1f32; 3], &mut [0.0; 4], op);
        assert_eq!(mismatch, Err(Error::LengthMismatch { input: 3, output: 4 }));

        let base = data.as_mut_ptr().cast::<u8>();
        let at = |offset: usize| base.wrapping_add(offset);
        let call = |input: *mut u8, output: *mut u8, count: usize| {
            // SAFETY: a pointer that is not within `data` is refused before it is accessed.
            unsafe {
                communicator.collective_raw(
                    Collective::AllReduce(op),
                    input.cast(),
                    output.cast(),
                    count,
                    DType::U32,
                )
            }
        };
        let null = std::ptr::null_mut();
        for (input, output, culprit) in [
            (null, at(0), "input"),
            (at(0), null, "output"),
            (at(1), at(400), "input"),
            (at(0), at(402), "output"),
            (at(3), at(3), "input"),
        ] {
            match call(input, output, 100) {
                Err(Error::InvalidPointer { which, element_size: 4, .. }) => assert_eq!(which, culprit),
                other => panic!("{input:?} to {output:?}: {other:?}"),
            }
        }
        let end = std::ptr::without_provenance_mut::<u8>(usize::MAX - 7);
        assert!(matches!(call(at(0), end, 100), Err(Error::InvalidPointer { which: "output", .. })));
        assert!(matches!(call(at(0), at(0), usize::MAX), Err(Error::InvalidSetting { name: "count", .. })));
        for (input, output) in [(0, 4), (4, 0), (0, 396), (396, 0)] {
            let overlap =
                Error::Overlap { input: at(input) as usize, output: at(output) as usize, bytes: 400 };
            assert_eq!(call(at(input), at(output), 100), Err(overlap));
        }
        // Pointers are not checked if there is nothing to reduce.
        assert_eq!(call(null, null, 0), Ok(()));
        // Adjacent buffers do not overlap, and a refused call does not poison the communicator.
        assert_eq!(call(at(0), at(400), 100), Ok(()));
        assert_eq!(call(at(400), at(0), 100), Ok(()));
        assert_eq!([data[0], data[99], data[100], data[199], data[200]], [4, 4, 2, 2, 1]);
    });
}

#[test]
fn ranks_that_disagree_are_told() {
    let cases: [(&str, [Setup; 2]); 3] = [
        ("max_bytes", [Setup::default(), Setup { max_bytes: 8192, ..Setup::default() }]),
        ("algorithm", [Setup::default(), Setup::with(Algorithm::TwoShotPush)]),
        ("the device", [Setup::default(), Setup { workers: 2, ..Setup::default() }]),
    ];
    for (subject, setups) in cases {
        for (own, result) in
            threads(3, |rank| setups[rank.rank() / 2].try_build(&rank)).into_iter().enumerate()
        {
            let error = result.unwrap_err();
            let Error::Disagreement { what, rank, theirs, own_rank, ours } = &error else {
                panic!("{error}")
            };
            assert!(what.contains(subject), "{error}");
            assert_eq!(*own_rank, own);
            assert_ne!(theirs, ours);
            assert_eq!(*rank, if own == 2 { 0 } else { 2 }, "{error}");
        }
    }
    for (own, error) in threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        let error = communicator.alloc::<f32>(10 + rank.rank()).unwrap_err();
        // The communicator still works.
        communicator.all_reduce_in_place(&mut [1.0f32], ReduceOp::Sum).unwrap();
        let buffer = communicator.alloc::<f32>(10).unwrap();
        communicator.all_reduce(&buffer, &mut [0.0; 10], ReduceOp::Sum).unwrap();
        error
    })
    .into_iter()
    .enumerate()
    {
        assert!(matches!(&error, Error::Disagreement { own_rank, .. } if *own_rank == own), "{error}");
    }
}

/// Timeout of the communicators.
const SHORT: Duration = Duration::from_millis(700);

#[test]
fn a_rank_that_does_not_call_is_named_in_time() {
    let cases = Algorithm::ALL.into_iter().flat_map(|algorithm| [1, 2000].map(|count| (algorithm, count)));
    let cases: Vec<_> = cases.zip(0usize..).collect();
    // Several worlds run concurrently, as they sleep most of the time.
    for some in cases.chunks(4) {
        std::thread::scope(|scope| {
            for &((algorithm, count), number) in some {
                scope.spawn(move || a_rank_does_not_call(algorithm, count, number));
            }
        });
    }
}

fn a_rank_does_not_call(algorithm: Algorithm, count: usize, number: usize) {
    let absent = number % 3;
    // The absent rank stays connected to the bootstrap until the others have dropped these.
    let (present, others) = mpsc::channel::<()>();
    let (present, others) = (Mutex::new(vec![present.clone(), present]), Mutex::new(others));
    let errors = threads(3, |rank| {
        let _present = (rank.rank() != absent).then(|| present.lock().unwrap().pop());
        let workers = 1 + number / 2 % 2;
        let communicator = Setup { timeout: SHORT, workers, ..Setup::with(algorithm) }.build(&rank);
        let mut data = vec![1u64; count];
        for _ in 0..5 {
            communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
        }
        if rank.rank() == absent {
            assert!(others.lock().unwrap().recv().is_err());
            return None;
        }
        let started = Instant::now();
        let error = communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap_err();
        let waited = started.elapsed();
        // A rank that waits for a rank which timed out is notified before its own timeout.
        assert!(waited >= SHORT / 2 && waited < 20 * SHORT, "{algorithm}: {waited:?}");
        // A poisoned communicator returns its first error at once.
        let again = Instant::now();
        assert_eq!(communicator.all_reduce_in_place(&mut data, ReduceOp::Max), Err(error.clone()));
        assert_eq!(communicator.all_reduce(&[1u8], &mut [0], ReduceOp::Max), Err(error.clone()));
        assert_eq!(communicator.alloc::<u8>(1).unwrap_err(), error);
        assert_eq!(communicator.barrier(), Err(error.clone()));
        assert!(again.elapsed() < 10 * SHORT);
        Some(error)
    });
    let context = format!("{algorithm}, {count} elements, rank {absent} does not call: {errors:?}");
    for error in errors.iter().flatten() {
        let Error::Timeout { operation: "all_reduce", epoch, missing, waited: SHORT, last_seen } = error
        else {
            panic!("{context}")
        };
        // Five calls were made before.
        assert!(*epoch >= 6, "{context}");
        assert_eq!(*missing, [absent], "{context}");
        assert!(last_seen.contains("returned from call 5, all_reduce"), "{context}");
    }
}

#[test]
fn a_late_rank_is_in_time() {
    threads(3, |rank| {
        let communicator = Setup { workers: 2, ..Setup::default() }.build(&rank);
        for round in 0..3 {
            if rank.rank() == round {
                // Longer than the time for which waiting ranks spin or yield.
                std::thread::sleep(Duration::from_millis(150));
            }
            let mut data = vec![rank.rank() as i64; 40_000];
            communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
            assert!(data.iter().all(|&element| element == 3));
        }
    });
}

#[test]
fn abort_ends_a_call_of_another_thread() {
    for algorithm in Algorithm::ALL {
        threads(2, |rank| {
            // Large enough for both blocks.
            let communicator =
                Setup { workers: 2, max_bytes: 1 << 20, ..Setup::with(algorithm) }.build(&rank);
            let mut data = vec![1f32; 50_000];
            communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
            if rank.rank() == 1 {
                std::thread::sleep(Duration::from_millis(300));
                return;
            }
            std::thread::scope(|scope| {
                let calling =
                    scope.spawn(|| communicator.all_reduce_in_place(&mut [1f32; 50_000], ReduceOp::Sum));
                std::thread::sleep(Duration::from_millis(50));
                assert!(!calling.is_finished());
                let aborted = Instant::now();
                communicator.abort();
                assert_eq!(calling.join().unwrap(), Err(Error::Aborted));
                assert!(aborted.elapsed() < LIMIT / 8);
            });
            assert_eq!(communicator.all_reduce_in_place(&mut data, ReduceOp::Sum), Err(Error::Aborted));
            assert_eq!(communicator.barrier(), Err(Error::Aborted));
            assert_eq!(communicator.alloc::<u8>(1).unwrap_err(), Error::Aborted);
            communicator.abort();
        });
    }
}

#[test]
fn allocations_that_are_too_large() {
    for result in threads(2, |rank| Setup { max_bytes: 1 << 40, ..Setup::default() }.try_build(&rank)) {
        assert!(matches!(result.unwrap_err(), Error::Allocation { .. }));
    }
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        for count in [usize::MAX, isize::MAX as usize / 8 + 1, isize::MAX as usize / 8, 1 << 42] {
            let error = communicator.alloc::<f64>(count).unwrap_err();
            assert!(matches!(error, Error::Allocation { .. }), "{count}: {error}");
        }
        let mut buffer = communicator.alloc::<f64>(100).unwrap();
        buffer.fill(1.0);
        communicator.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(*buffer, [2.0; 100]);
    });
}

#[test]
fn zero_and_unlimited_timeouts() {
    // With a timeout of zero a single rank works; several ranks get an error, but do not hang.
    let started = Instant::now();
    let none = |rank: &Rank| Setup { timeout: Duration::ZERO, ..Setup::default() }.try_build(rank);
    threads(1, |rank| {
        let mut data = [3u8];
        none(&rank).unwrap().all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [3]);
    });
    let together = threads(3, |rank| none(&rank).map(drop));
    assert!(together.iter().any(Result::is_err));
    for error in together.into_iter().filter_map(Result::err) {
        assert!(matches!(error, Error::Timeout { .. } | Error::PeerLost { .. }), "{error}");
    }
    assert!(started.elapsed() < LIMIT / 2);

    threads(2, |rank| {
        let builder = Communicator::builder().timeout(None).max_bytes(4096);
        let communicator = builder.build(Host::new(), Arc::clone(&rank)).unwrap();
        std::thread::sleep(Duration::from_millis(60 * rank.rank() as u64));
        let mut data = vec![2u16 as i32; 3000];
        communicator.all_reduce_in_place(&mut data, ReduceOp::Prod).unwrap();
        assert_eq!(data, [4; 3000]);
    });
}

#[test]
fn communicators_dropped_in_any_order() {
    for round in 0..30 {
        threads(3, |rank| {
            let setup = Setup { workers: 1 + round % 2, ..Setup::default() };
            let first = setup.build(&rank);
            let mut of_first = first.alloc::<i32>(500).unwrap();
            let second = setup.build(&rank);
            let of_second = second.alloc::<i32>(500).unwrap();
            of_first.fill(rank.rank() as i32);
            let mut output = [0; 500];
            match (round + rank.rank()) % 3 {
                0 => {
                    first.all_reduce(&of_first, &mut output, ReduceOp::Max).unwrap();
                    // Dropped at once, while other ranks may still be calling.
                    drop((first, of_first, second, of_second));
                }
                1 => {
                    first.all_reduce(&of_first, &mut output, ReduceOp::Max).unwrap();
                    drop((of_second, first, second));
                    assert_eq!(of_first[499], rank.rank() as i32);
                }
                _ => {
                    drop(second);
                    first.all_reduce(&of_first, &mut output, ReduceOp::Max).unwrap();
                    assert_eq!(of_second[0], 0);
                    drop((of_first, of_second, first));
                }
            }
            assert_eq!(output, [2; 500]);
        });
    }
}
