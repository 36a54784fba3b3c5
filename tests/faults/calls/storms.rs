//! Aborts at random moments during calls from private memory and during messages: a call that returns `Ok` has the
//! right data, the others end with an error, and the ranks can go on.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fast_allreduce::{Algorithm, Communicator, Error, Host, ReduceOp, Result};

use crate::fixtures::world::{builder, threads_on, LIMIT};
use crate::random::Random;
use crate::tier;

const RANKS: usize = 3;

/// The longest time after which a rank is aborted: about the time of dozens of calls.
const MOMENTS_US: usize = 4000;

fn value(rank: usize, at: usize) -> u32 {
    (at * 2_654_435_761 % 1_000_003 + rank * 17) as u32
}

type Call = fn(&Communicator<Host>, &mut [u32], &mut [u32]) -> Result<()>;

/// Makes calls until a rank is aborted. Every rank overwrites its input as soon as its call has returned.
fn storm(
    name: &str,
    (all, quick): (usize, usize),
    algorithm: Option<Algorithm>,
    call: Call,
    expected: fn(usize, usize) -> u32,
) {
    let rounds = tier::rounds(name, all, quick);
    let random = Random::new(name);
    let (good, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    for round in 0..rounds {
        let mut drawn = random.fork(round);
        let victim = drawn.below(RANKS);
        let moment = Duration::from_micros(drawn.below(MOMENTS_US) as u64);
        let count = drawn.pick(&[1000, 20_000, 150_000]);
        let (started, is_aborted) = (Instant::now(), AtomicBool::new(false));
        threads_on(
            || Host::new().workers(1 + round % 3).unwrap(),
            RANKS,
            |_| builder().algorithm(algorithm),
            |communicator| {
                let rank = communicator.rank();
                let own: Vec<u32> = (0..count).map(|at| value(rank, at)).collect();
                let right: Vec<u32> = (0..count).map(|at| expected(rank, at)).collect();
                let check = |communicator: &Communicator<Host>| {
                    let (mut input, mut output) = (own.clone(), vec![u32::MAX; count]);
                    let result = call(communicator, &mut input, &mut output);
                    input.fill(0x5b5b_5b5b);
                    if result.is_ok() {
                        assert!(output == right, "{name}, round {round}: Ok, with wrong data");
                    }
                    result
                };
                let error = std::thread::scope(|scope| loop {
                    match check(&communicator) {
                        Err(error) => break error,
                        // Not before the first call has succeeded, however late a busy machine starts it.
                        Ok(()) if rank == victim && !is_aborted.swap(true, Ordering::Relaxed) => {
                            drop(scope.spawn(|| {
                                std::thread::sleep(moment);
                                communicator.abort();
                            }));
                        }
                        Ok(()) => {}
                    }
                    good.fetch_add(1, Ordering::Relaxed);
                });
                failed.fetch_add(1, Ordering::Relaxed);
                match (rank == victim, &error) {
                    (true, Error::Aborted) => {}
                    // Regardless of the rank from which it learned this.
                    (false, Error::PeerFailed { rank: failed, reason })
                        if *failed == victim && *reason == Error::Aborted.to_string() => {}
                    _ => panic!("{name}, round {round}: rank {rank}, {victim} aborted: {error}"),
                }
                let next = communicator.shrink(&communicator.survivors()).unwrap();
                assert_eq!(next.world_size(), RANKS);
                check(&next).unwrap();
            },
        );
        assert!(started.elapsed() < LIMIT / 2, "{name}, round {round}: {:?}", started.elapsed());
    }
    let (good, failed) = (good.into_inner(), failed.into_inner());
    println!("{name}: {good} calls succeeded, {failed} failed");
    assert_eq!(failed, rounds * RANKS);
    assert!(good >= rounds, "{name}: aborts came before the first call: {good}");
}

#[test]
fn allreduces_from_private_memory() {
    let sum = |_: usize, at: usize| (0..RANKS).map(|rank| value(rank, at)).sum();
    for algorithm in Algorithm::ALL {
        storm(
            &format!("storm, {algorithm}"),
            (8, 3),
            Some(algorithm),
            |communicator, input, output| communicator.all_reduce(input, output, ReduceOp::Sum),
            sum,
        );
        storm(
            &format!("storm in place, {algorithm}"),
            (4, 2),
            Some(algorithm),
            |communicator, input, output| {
                communicator.all_reduce_in_place(input, ReduceOp::Sum)?;
                output.copy_from_slice(input);
                Ok(())
            },
            sum,
        );
    }
}

#[test]
fn messages_in_a_circle() {
    storm(
        "storm of messages",
        (40, 12),
        None,
        |communicator, input, output| {
            let [left, right] = [RANKS - 1, 1].map(|far| (communicator.rank() + far) % RANKS);
            communicator.send_recv(input, right, output, left, 7)
        },
        |rank, at| value((rank + RANKS - 1) % RANKS, at),
    );
}

#[test]
fn groups_of_messages() {
    storm(
        "storm of groups",
        (40, 12),
        None,
        |communicator, input, output| {
            let [left, right] = [RANKS - 1, 1].map(|far| (communicator.rank() + far) % RANKS);
            let middle = input.len() / 3;
            let ((one, other), (first, second)) = (input.split_at(middle), output.split_at_mut(middle));
            communicator.group(|group| {
                group.recv(second, left, 2).send(one, right, 1).send(other, right, 2).recv(first, left, 1);
                Ok(())
            })
        },
        |rank, at| value((rank + RANKS - 1) % RANKS, at),
    );
}
