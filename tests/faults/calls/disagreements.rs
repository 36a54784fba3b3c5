//! Ranks whose calls differ: every rank gets an error that names both calls, before anything is reduced, in checked
//! communicators and in others.

use std::time::{Duration, Instant};

use fast_allreduce::{Algorithm, Communicator, Error, Fused, Host, Norm, ReduceOp, Result};

use crate::fixtures::world::{builder, threads, threads_on, SOON};

type Call = fn(&Communicator<Host>) -> Result<()>;

fn small(communicator: &Communicator<Host>) -> Result<()> {
    communicator.all_reduce_in_place(&mut [1f32; 100], ReduceOp::Sum)
}

fn longer(communicator: &Communicator<Host>) -> Result<()> {
    communicator.all_reduce_in_place(&mut [1f32; 101], ReduceOp::Sum)
}

/// An allreduce of many pieces, with another plan.
fn huge(communicator: &Communicator<Host>) -> Result<()> {
    communicator.all_reduce_in_place(&mut vec![1f32; 200_000], ReduceOp::Sum)
}

fn of_integers(communicator: &Communicator<Host>) -> Result<()> {
    communicator.all_reduce_in_place(&mut [1i32; 100], ReduceOp::Sum)
}

fn of_another_operation(communicator: &Communicator<Host>) -> Result<()> {
    communicator.all_reduce_in_place(&mut [1f32; 100], ReduceOp::Max)
}

#[test]
fn a_rank_that_makes_another_call_is_named_on_every_rank() {
    let others: [(Call, &str); 4] = [
        (longer, "all_reduce of 101 f32 (sum"),
        (huge, "all_reduce of 200000 f32 (sum"),
        (of_integers, "all_reduce of 100 i32 (sum"),
        (of_another_operation, "all_reduce of 100 f32 (max"),
    ];
    for world_size in [2, 3, 5] {
        for (other, words) in others {
            let algorithms = [None, Some(Algorithm::OneShotPush), Some(Algorithm::TwoShotPull)];
            for (algorithm, check) in algorithms.into_iter().flat_map(|one| [(one, true), (one, false)]) {
                let odd = world_size - 1;
                let settings = |_| builder().max_bytes(64 << 10).check(check).algorithm(algorithm);
                let errors = threads(world_size, settings, |communicator| {
                    for _ in 0..3 {
                        small(&communicator).unwrap();
                    }
                    let started = Instant::now();
                    let call = if communicator.rank() == odd { other } else { small };
                    let error = call(&communicator).unwrap_err();
                    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
                    assert_eq!(small(&communicator), Err(error.clone()), "poisoned");
                    error
                });
                for (own, error) in errors.iter().enumerate() {
                    let Error::Disagreement { rank, theirs, own_rank, ours, .. } = error else {
                        panic!("{error}")
                    };
                    assert_eq!(*own_rank, own);
                    let (of_odd, of_others) = if own == odd { (ours, theirs) } else { (theirs, ours) };
                    assert!(own == odd || *rank == odd, "{error}");
                    assert!(of_odd.starts_with(words), "{error}");
                    assert!(of_others.starts_with("all_reduce of 100 f32 (sum"), "{error}");
                }
            }
        }
    }
}

/// A call that differs on the odd rank (for which the flag is true), and the descriptions of both calls.
type Pair = (fn(&Communicator<Host>, bool) -> Result<()>, &'static str, &'static str);

#[test]
fn a_rank_with_other_counts_or_another_root_or_collective_is_named_on_every_rank() {
    let pairs: [Pair; 7] = [
        (
            |c, odd| {
                let mut counts = [4, 4, 5];
                counts[0] += 2 * usize::from(odd);
                counts[1] -= 2 * usize::from(odd);
                c.all_gather_v(&vec![1f32; counts[c.rank()]], &mut [0.0; 13], &counts)
            },
            "all_gather_v of 13 f32 (counts by rank with the digest",
            "all_gather_v of 13 f32 (counts by rank with the digest",
        ),
        (
            |c, odd| {
                let counts = if odd { [4, 4, 5] } else { [4, 4, 4] };
                let total = counts.iter().sum();
                c.reduce_scatter_v(
                    &vec![1f32; total],
                    &mut vec![0.0; counts[c.rank()]],
                    &counts,
                    ReduceOp::Max,
                )
            },
            "reduce_scatter_v of 13 f32 (max, counts",
            "reduce_scatter_v of 12 f32 (max, counts",
        ),
        (
            |c, odd| c.broadcast(&mut [1i8; 9], usize::from(odd)),
            "broadcast of 9 i8 (root 1)",
            "broadcast of 9 i8 (root 0)",
        ),
        (
            |c, odd| c.reduce(&[1f64; 9], &mut [0.0; 9], ReduceOp::Sum, 1 + usize::from(odd)),
            "reduce of 9 f64 (sum, root 2)",
            "reduce of 9 f64 (sum, root 1)",
        ),
        (
            |c, odd| match odd {
                true => c.all_gather(&[1u32; 5], &mut [0; 15]),
                false => c.reduce_scatter(&[1u32; 15], &mut [0; 5], ReduceOp::Sum),
            },
            "all_gather of 5 u32",
            "reduce_scatter of 5 u32 (sum)",
        ),
        (
            |c, odd| if odd { c.barrier() } else { c.broadcast(&mut [1u32; 3000], 0) },
            "barrier",
            "broadcast of 3000 u32 (root 0)",
        ),
        (
            |c, odd| match odd {
                true => c.all_reduce_in_place(&mut [1u32; 5000], ReduceOp::Sum),
                false => c.all_gather(&[1u32; 5000], &mut [0; 15_000]),
            },
            "all_reduce of 5000 u32 (sum",
            "all_gather of 5000 u32",
        ),
    ];
    for (call, of_odd, of_others) in pairs {
        for odd in 0..3 {
            let settings = |_| builder().max_bytes(4 << 10).check(odd == 0);
            let errors = threads(3, settings, |communicator| {
                call(&communicator, false).unwrap();
                let started = Instant::now();
                let error = call(&communicator, communicator.rank() == odd).unwrap_err();
                assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
                error
            });
            for (own, error) in errors.iter().enumerate() {
                let Error::Disagreement { rank, theirs, own_rank, ours, .. } = error else {
                    panic!("{error}")
                };
                let (of_own, of_peer) = if own == odd { (of_odd, of_others) } else { (of_others, of_odd) };
                assert!(*own_rank == own && (own == odd || *rank == odd), "{error}");
                assert!(ours.starts_with(of_own) && theirs.starts_with(of_peer) && ours != theirs, "{error}");
            }
        }
    }
}

/// Collectives made of messages have no barrier at which ranks could compare them, except in checked communicators.
#[test]
fn messages_are_compared_where_calls_are_checked() {
    let pairs: [Pair; 5] = [
        (
            |c, odd| c.scatter(&[1u8; 12], &mut [0; 4], usize::from(odd)),
            "scatter of 4 u8 (root 1)",
            "scatter of 4 u8 (root 0)",
        ),
        (
            |c, odd| match odd {
                true => c.gather(&[1u8; 4], &mut [0; 12], 0),
                false => c.scatter(&[1u8; 12], &mut [0; 4], 0),
            },
            "gather of 4 u8 (root 0)",
            "scatter of 4 u8 (root 0)",
        ),
        (
            |c, odd| match odd {
                true => c.all_to_all(&[1f32; 12], &mut [0.0; 12]),
                false => c.all_to_all(&[1u32; 12], &mut [0; 12]),
            },
            "all_to_all of 4 f32",
            "all_to_all of 4 u32",
        ),
        (
            |c, odd| if odd { c.gather(&[1u8; 4], &mut [0; 12], 0) } else { c.barrier() },
            "gather of 4 u8 (root 0)",
            "barrier",
        ),
        (
            |c, odd| if odd { small(c) } else { c.all_to_all(&[1u32; 3], &mut [0; 3]) },
            "all_reduce of 100 f32 (sum",
            "all_to_all of 1 u32",
        ),
    ];
    for (call, of_odd, of_others) in pairs {
        let errors = threads(
            3,
            |_| builder().check(true),
            |c| {
                call(&c, false).unwrap();
                // Counts by rank may differ between ranks.
                let mut output = [9; 3];
                let (send, receive) = ([[1, 2, 0], [1, 0, 0], [1, 0, 0]], [[1, 1, 1], [2, 0, 0], [0, 0, 0]]);
                let (send, receive) = (send[c.rank()], receive[c.rank()]);
                let input = vec![c.rank() as u8; send.iter().sum()];
                let received = receive.iter().sum();
                c.all_to_all_v(&input, &send, &mut output[..received], &receive).unwrap();
                let started = Instant::now();
                let error = call(&c, c.rank() == 1).unwrap_err();
                assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
                (output, error)
            },
        );
        for (own, (output, error)) in errors.iter().enumerate() {
            assert_eq!(*output, [[0, 1, 2], [0, 0, 9], [9, 9, 9]][own]);
            let Error::Disagreement { rank, theirs, ours, .. } = error else { panic!("{error}") };
            let (of_own, of_peer) = if own == 1 { (of_odd, of_others) } else { (of_others, of_odd) };
            assert!(own == 1 || *rank == 1, "{error}");
            assert!(ours.starts_with(of_own) && theirs.starts_with(of_peer), "{error}");
        }
    }
}

/// Counts differ, and therefore plans, pieces and ends of buffers. Peers do not read past the end of the shorter
/// buffer.
#[test]
fn ranks_with_other_counts_get_no_data() {
    for counts in [[40_000, 10], [10, 40_000], [100, 101], [3_000_000, 2_999_999]] {
        for registered in [false, true] {
            let errors = threads(
                2,
                |_| builder().check(false),
                |communicator| {
                    let count = counts[communicator.rank()];
                    let mut buffer =
                        communicator.alloc::<f32>(if registered { 3_000_000 } else { 1 }).unwrap();
                    let mut private = vec![1f32; if registered { 0 } else { count }];
                    let data = if registered { &mut buffer[..count] } else { &mut private[..] };
                    communicator.all_reduce_in_place(data, ReduceOp::Sum).unwrap_err()
                },
            );
            for error in errors {
                let is_told = matches!(error, Error::Disagreement { what: "the call", .. });
                assert!(is_told, "{counts:?}, registered {registered}: {error}");
            }
        }
    }
}

#[test]
fn calls_in_another_order_are_told_apart() {
    let orders: [[Call; 2]; 2] = [[small, longer], [longer, small]];
    let results = threads(
        2,
        |_| builder().check(false),
        |communicator| {
            orders[communicator.rank()].iter().map(|call| call(&communicator)).collect::<Result<Vec<_>>>()
        },
    );
    for result in results {
        assert!(matches!(result, Err(Error::Disagreement { what: "the call", .. })), "{result:?}");
    }
}

#[test]
fn a_fused_call_that_fails_leaves_memory_as_it_was() {
    const HIDDEN: usize = 40;
    for algorithm in Algorithm::DIRECT {
        for (plain_sum, workers) in [(false, 1), (true, 1), (true, 2)] {
            threads_on(
                || Host::new().workers(workers).unwrap(),
                3,
                |_| builder().algorithm(Some(algorithm)),
                |communicator| {
                    let [mut data, mut residual, mut sum] = [1.0, 2.0, 3.0].map(|value| [value; 50 * HIDDEN]);
                    let odd = communicator.rank() == 2;
                    let norm = Norm::Rms { epsilon: if odd { 1e-5 } else { 1e-6 }, unit_offset: false };
                    let mut fused = Fused::on_host(&mut residual).norm(norm, HIDDEN);
                    if plain_sum {
                        fused = fused.sum(&mut sum);
                    }
                    let error = communicator.all_reduce_fused_in_place(&mut data, fused).unwrap_err();
                    assert!(matches!(error, Error::Disagreement { .. }), "{error}");
                    let is = |memory: &[f32], value| memory.iter().all(|&element| element == value);
                    let kept = [is(&data, 1.0), is(&residual, 2.0), is(&sum, 3.0)];
                    assert_eq!(kept, [true; 3], "{algorithm}, {plain_sum}, {workers} workers");
                },
            );
        }
    }
}

#[test]
fn placement_may_differ_between_ranks() {
    threads(
        3,
        |_| builder().check(true),
        |communicator| {
            let rank = communicator.rank();
            let mut buffer = communicator.alloc::<u32>(1000).unwrap();
            for round in 0..30 {
                buffer.fill(1);
                let mut output = vec![0; 1000];
                match (round + rank) % 3 {
                    0 => communicator.all_reduce(&buffer, &mut output, ReduceOp::Sum).unwrap(),
                    1 => communicator.all_reduce(&vec![1; 1000], &mut output, ReduceOp::Sum).unwrap(),
                    _ => {
                        communicator.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap();
                        output.copy_from_slice(&buffer);
                    }
                }
                assert_eq!(output, [3; 1000]);
            }
        },
    );
}

#[test]
fn whether_calls_are_compared_is_agreed_on_first() {
    let ranks = fast_allreduce::bootstrap::Threads::world(2).unwrap();
    std::thread::scope(|scope| {
        let build = |(rank, bootstrap)| {
            scope.spawn(move || builder().check(rank == 0).build(Host::new(), bootstrap).map(drop))
        };
        let building: Vec<_> = ranks.into_iter().enumerate().map(build).collect();
        for built in building {
            let error = built.join().unwrap().unwrap_err();
            assert!(matches!(error, Error::Disagreement { what: "check", .. }), "{error}");
        }
    });
}

#[test]
fn a_rank_without_elements_is_named_with_its_call() {
    const LIMIT: Duration = Duration::from_millis(500);
    let results = threads(
        3,
        |_| builder().check(true).timeout(LIMIT),
        |communicator| {
            if communicator.rank() == 1 {
                communicator.all_reduce_in_place::<f32>(&mut [], ReduceOp::Sum).unwrap();
                // This rank is alive and waits outside of any call.
                std::thread::sleep(3 * LIMIT);
                return None;
            }
            Some(small(&communicator).unwrap_err())
        },
    );
    for error in results.into_iter().flatten() {
        let Error::Timeout { missing, last_seen, .. } = &error else { panic!("{error}") };
        assert_eq!(*missing, [1], "{error}");
        assert!(last_seen.contains("returned from call 1, all_reduce of 0 f32"), "{error}");
    }
}
