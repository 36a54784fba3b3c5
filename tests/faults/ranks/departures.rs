//! Ranks that leave: ranks that wait for them get an error at once, and nobody else is disturbed.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use fast_allreduce::{Algorithm, Error, ReduceOp};

use crate::fixtures::world::{builder, threads, LIMIT, SOON};
use crate::random::Random;
use crate::tier::rounds;

#[test]
fn a_rank_that_closes_early_is_named_at_once() {
    for algorithm in Algorithm::ALL {
        for world_size in [2, 3, 4] {
            let gone = world_size / 2;
            let results = threads(
                world_size,
                |_| builder().algorithm(algorithm),
                |communicator| {
                    communicator.all_reduce_in_place(&mut [1u8; 1000], ReduceOp::Max).unwrap();
                    if communicator.rank() == gone {
                        return None;
                    }
                    let started = Instant::now();
                    let error =
                        communicator.all_reduce_in_place(&mut [1u8; 1000], ReduceOp::Max).unwrap_err();
                    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
                    // Now this rank leaves too. Ranks that still wait must nevertheless name the first.
                    Some(error)
                },
            );
            for error in results.into_iter().flatten() {
                let Error::PeerLost { rank, reason } = &error else { panic!("{algorithm}: {error}") };
                assert_eq!(*rank, gone, "{algorithm}: {error}");
                assert!(reason.contains("closed its communicator"), "{error}");
            }
        }
    }
}

/// A rank that is gone is the cause of a timeout, whichever missing rank was waited for.
#[test]
fn a_rank_that_has_gone_is_named_beside_one_that_is_late() {
    for algorithm in Algorithm::ALL {
        for late in 0..2 {
            let done = Barrier::new(2);
            let errors = threads(
                3,
                |_| builder().algorithm(algorithm),
                |communicator| {
                    communicator.all_reduce_in_place(&mut [1u8; 1000], ReduceOp::Max).unwrap();
                    let rank = communicator.rank();
                    if rank == 2 {
                        return None;
                    }
                    while communicator.survivors().len() == 3 {
                        std::thread::yield_now();
                    }
                    communicator.set_timeout(Some(Duration::from_millis(300)));
                    let mut data = [1u8; 1000];
                    let result =
                        (rank != late).then(|| communicator.all_reduce_in_place(&mut data, ReduceOp::Max));
                    done.wait();
                    result
                },
            );
            let error = errors[1 - late].clone().unwrap().unwrap_err();
            assert!(matches!(error, Error::PeerLost { rank: 2, .. }), "{algorithm}: {error}");
        }
    }
}

#[test]
fn a_rank_that_is_done_and_leaves_disturbs_nobody() {
    for round in 0..rounds("departures, a rank that is done", 200, 60) {
        let algorithm = Algorithm::ALL[round % Algorithm::ALL.len()];
        threads(
            3,
            |_| builder().algorithm(algorithm),
            |communicator| {
                let mut data = vec![communicator.rank() as i64; 5000];
                communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
                assert!(data.iter().all(|&element| element == 3));
            },
        );
    }
}

#[test]
fn a_rank_that_aborts_fails_the_ranks_that_wait_for_it() {
    for algorithm in Algorithm::ALL {
        let errors = threads(
            3,
            |_| builder().algorithm(algorithm),
            |communicator| {
                communicator.all_reduce_in_place(&mut [1f64; 10], ReduceOp::Sum).unwrap();
                if communicator.rank() == 0 {
                    std::thread::sleep(Duration::from_millis(50));
                    communicator.abort();
                }
                communicator.all_reduce_in_place(&mut [1f64; 10], ReduceOp::Sum).unwrap_err()
            },
        );
        assert_eq!(errors[0], Error::Aborted);
        for error in &errors[1..] {
            assert!(matches!(error, Error::PeerFailed { rank: 0, .. }), "{algorithm}: {error}");
        }
    }
}

#[test]
fn abort_ends_a_wait_in_the_bootstrap_too() {
    let done = Barrier::new(2);
    threads(
        2,
        |_| builder(),
        |communicator| {
            if communicator.rank() == 0 {
                std::thread::scope(|scope| {
                    let waiting = [scope.spawn(|| communicator.barrier())];
                    std::thread::sleep(Duration::from_millis(100));
                    let started = Instant::now();
                    communicator.abort();
                    for waiting in waiting {
                        assert_eq!(waiting.join().unwrap(), Err(Error::Aborted));
                    }
                    assert!(started.elapsed() < LIMIT / 20, "{:?}", started.elapsed());
                });
            }
            done.wait();
        },
    );
}

/// An abort ends children that are being made; those that exist go on.
#[test]
fn abort_of_a_parent_ends_children_in_the_making_alone() {
    let done = Barrier::new(2);
    threads(
        2,
        |_| builder(),
        |communicator| {
            let child = communicator.split(Some(0), 0).unwrap().unwrap();
            if communicator.rank() == 0 {
                std::thread::scope(|scope| {
                    // The other rank never comes.
                    let making = scope.spawn(|| communicator.shrink(&[0, 1]).map(drop));
                    std::thread::sleep(Duration::from_millis(100));
                    let started = Instant::now();
                    // The first may come before the shrink has begun.
                    while !making.is_finished() {
                        communicator.abort();
                        std::thread::yield_now();
                    }
                    assert_eq!(making.join().unwrap(), Err(Error::Aborted));
                    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
                });
                assert_eq!(communicator.split(Some(0), 0).map(drop), Err(Error::Aborted));
            }
            done.wait();
            let mut data = [communicator.rank() as u64 + 1];
            child.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [3]);
            done.wait();
        },
    );
}

#[test]
fn abort_of_a_parent_at_any_moment_of_a_split() {
    let random = Random::new("ranks::departures::abort_of_a_parent");
    for round in 0..rounds("departures, aborts of a parent", 200, 20) {
        let world_size = 2 + round % 3;
        threads(
            world_size,
            |_| builder(),
            |communicator| {
                let wait = Duration::from_micros(random.fork(round).below(20_000) as u64);
                let started = Instant::now();
                let child = std::thread::scope(|scope| {
                    if communicator.rank() == 0 {
                        scope.spawn(|| {
                            std::thread::sleep(wait);
                            communicator.abort();
                        });
                    }
                    communicator.split(Some(0), 0)
                });
                assert!(started.elapsed() < LIMIT / 2, "{:?}", started.elapsed());
                let mut data = [1u64];
                // A child that one rank did not get ends for all.
                let summed =
                    child.and_then(|child| child.unwrap().all_reduce_in_place(&mut data, ReduceOp::Sum));
                match summed {
                    Ok(()) => assert_eq!(data, [world_size as u64]),
                    Err(Error::Aborted) => assert_eq!(communicator.check(), Err(Error::Aborted)),
                    // If the aborted rank waited for a third, the others are told for which.
                    Err(error) => assert!(
                        matches!(
                            error,
                            Error::PeerFailed { .. } | Error::PeerLost { .. } | Error::Timeout { .. }
                        ),
                        "{error}"
                    ),
                }
            },
        );
    }
}

#[test]
fn counters_count() {
    threads(
        2,
        |_| builder(),
        |communicator| {
            let before = communicator.counters();
            assert_eq!((before.calls, before.bytes), (0, 0));
            for _ in 0..5 {
                communicator.all_reduce_in_place(&mut [1f64; 10], ReduceOp::Sum).unwrap();
            }
            if communicator.rank() == 1 {
                // Longer than the polling at the start of a wait.
                std::thread::sleep(Duration::from_millis(50));
            }
            communicator.all_reduce_in_place(&mut [1f64; 10], ReduceOp::Sum).unwrap();
            let after = communicator.counters();
            assert_eq!((after.calls, after.bytes), (6, 480));
            assert_eq!(after.timeouts, [0, 0]);
            if communicator.rank() == 0 {
                assert!(after.waits[1] >= 1 && after.waits[0] == 0, "{after:?}");
            }
        },
    );
}

#[test]
fn abort_ends_a_wait_within_ten_milliseconds() {
    const TIMES: usize = 11;
    let done = Barrier::new(2);
    let mut took: Vec<Duration> = (0..TIMES)
        .map(|_| {
            let took = threads(
                2,
                |_| builder(),
                |communicator| {
                    let mut took = Duration::ZERO;
                    if communicator.rank() == 0 {
                        std::thread::scope(|scope| {
                            let waiting = scope
                                .spawn(|| communicator.all_reduce_in_place(&mut [1u8; 100], ReduceOp::Sum));
                            std::thread::sleep(Duration::from_millis(40));
                            let started = Instant::now();
                            communicator.abort();
                            assert_eq!(waiting.join().unwrap(), Err(Error::Aborted));
                            took = started.elapsed();
                        });
                    }
                    done.wait();
                    took
                },
            );
            took[0]
        })
        .collect();
    took.sort_unstable();
    // On a busy machine most rounds may take longer. If waits looked at the abort less often, all would.
    assert!(took[1] < Duration::from_millis(10), "{took:?}");
}
