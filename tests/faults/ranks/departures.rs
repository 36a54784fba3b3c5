//! Ranks that leave: ranks that wait for them get an error at once, and nobody else is disturbed.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use fast_allreduce::{Algorithm, Error, ReduceOp};

use crate::fixtures::world::{builder, threads, LIMIT, SOON};
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
    // A few rounds may take longer on a busy machine.
    assert!(took[TIMES / 2] < Duration::from_millis(10), "{took:?}");
}
