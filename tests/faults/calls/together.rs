//! Threads that share a communicator, ranks that are out of step, and communicators that are dropped at any time.

use std::time::{Duration, Instant};

use fast_allreduce::{Algorithm, Error, ReduceOp};

use crate::fixtures::world::{builder, threads, SOON};
use crate::random::Random;

#[test]
fn the_calls_of_two_threads_run_one_after_the_other() {
    for algorithm in Algorithm::DIRECT {
        threads(
            3,
            |_| builder().algorithm(algorithm),
            |communicator| {
                let calls = || {
                    for _ in 0..100 {
                        let mut data = vec![communicator.rank() as u64; 3000];
                        communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
                        assert!(data.iter().all(|&element| element == 3));
                    }
                };
                std::thread::scope(|scope| {
                    scope.spawn(calls);
                    scope.spawn(calls);
                });
                assert_eq!(communicator.counters().calls, 200);
            },
        );
    }
}

#[test]
fn ranks_out_of_step_have_the_right_data() {
    let random = Random::new("calls::together::ranks_out_of_step");
    threads(
        4,
        |_| builder(),
        |communicator| {
            let mut random = random.fork(communicator.rank());
            for round in 0..40 {
                std::thread::sleep(Duration::from_millis(random.below(51) as u64));
                let mut data = vec![communicator.rank() as i32 + round; 1 + round as usize * 700];
                communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
                assert!(data.iter().all(|&element| element == 6 + 4 * round));
            }
        },
    );
}

#[test]
fn a_rank_that_never_calls_is_named_and_dropping_takes_no_time() {
    // Concurrently, because they sleep most of the time.
    std::thread::scope(|scope| {
        Algorithm::DIRECT
            .into_iter()
            .for_each(|algorithm| drop(scope.spawn(move || one_never_calls(algorithm))));
    });
}

#[test]
fn a_limit_that_is_set_later_is_that_of_the_next_call() {
    let meeting = std::sync::Barrier::new(3);
    threads(
        3,
        |_| builder().timeout(Duration::from_secs(600)),
        |communicator| {
            let mut data = [1u8; 100];
            communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
            if communicator.rank() != 2 {
                let limit = Duration::from_millis(700);
                communicator.set_timeout(limit);
                let error = communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap_err();
                let Error::Timeout { missing, waited, last_seen, .. } = &error else { panic!("{error}") };
                assert_eq!((missing.as_slice(), *waited), ([2].as_slice(), limit));
                assert_eq!(communicator.behind(), [2]);
                let expected = "rank 2 is 1 call behind: it returned from call 1, all_reduce of 100 u8";
                assert!(last_seen.starts_with(expected), "{error}");
                let record = communicator.flight_record();
                let (own, late) = (&record.ranks[communicator.rank()], &record.ranks[2]);
                assert_eq!((own.begun, own.behind, late.begun, late.behind), (2, 0, 1, 1));
                let (call, of_late) = (&own.calls[1], &late.calls[0]);
                assert_eq!((call.number, call.waited_for, of_late.count), (2, Some(2), 100));
                assert!(call.waited_ns > limit.as_nanos() as u64 / 2, "{record:?}");
                assert!(own.waited_ns[2] >= call.waited_ns && own.waits[2] >= 1, "{record:?}");
            }
            meeting.wait();
        },
    );
}

fn one_never_calls(algorithm: Algorithm) {
    let meeting = std::sync::Barrier::new(3);
    threads(
        3,
        |_| builder().algorithm(algorithm).timeout(Duration::from_secs(1)),
        |communicator| {
            if communicator.rank() != 2 {
                let mut data = [1u8; 100];
                let error = communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap_err();
                assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [2]), "{error}");
                let started = Instant::now();
                assert_eq!(communicator.all_reduce_in_place(&mut data, ReduceOp::Sum), Err(error));
                drop(communicator);
                assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
            }
            meeting.wait();
        },
    );
}

/// The limit applies to each wait: ranks that make progress with a message of many pieces do not time out, however long
/// it takes.
#[test]
fn a_message_may_take_longer_than_the_limit() {
    const LIMIT: Duration = Duration::from_secs(1);
    // Between calls a rank may take longer than the limit to get its memory.
    let meeting = std::sync::Barrier::new(2);
    threads(
        2,
        |_| builder().max_bytes(4 << 10).timeout(LIMIT),
        |communicator| {
            let mut data = vec![1u8; 1 << 20];
            loop {
                meeting.wait();
                let started = Instant::now();
                communicator.all_reduce_in_place(&mut data, ReduceOp::Max).unwrap();
                // Both ranks make the same calls: the slower rank's time decides.
                let mut took = [started.elapsed().as_micros() as u64];
                communicator.all_reduce_in_place(&mut took, ReduceOp::Max).unwrap();
                if took[0] > 2 * LIMIT.as_micros() as u64 {
                    return;
                }
                data.resize(2 * data.len(), 1);
            }
        },
    );
}
