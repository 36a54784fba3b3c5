//! Tests the typed calls of the host, buffers that outlive their communicators, and calls from several threads.

use fast_allreduce::{Algorithm, Communicator, Element, Host, ReduceOp};

use crate::host::Build as _;
use crate::suite::launch::threads;
use crate::suite::scenario::Setup;

fn typed<T: Element + Default + PartialEq + std::fmt::Debug>(
    communicator: &Communicator<Host>,
    to: fn(u8) -> T,
) {
    let count = 100;
    let (rank, world) = (communicator.rank() as u8, communicator.world_size() as u8);
    let input = Vec::from_iter((0..count as u8).map(|i| to(i % 5 + rank)));
    let sum = Vec::from_iter((0..count as u8).map(|i| to(i % 5 * world + world * (world - 1) / 2)));
    let mut output = vec![T::default(); count];
    communicator.all_reduce(&input, &mut output, ReduceOp::Sum).unwrap();
    assert_eq!(output, sum);
    let mut buffer = communicator.alloc::<T>(2 * count + 1).unwrap();
    assert!(buffer.iter().all(|element| *element == T::default()));
    let (front, back) = buffer.split_at_mut(count);
    front.copy_from_slice(&input);
    communicator.all_reduce(front, &mut back[1..], ReduceOp::Sum).unwrap();
    assert_eq!(back[1..], sum);
    communicator.all_reduce_in_place(front, ReduceOp::Sum).unwrap();
    assert_eq!(front, sum);
}

/// Tests private slices, and two views of one registered buffer.
#[test]
fn typed_calls() {
    for size in [2, 3, 1] {
        threads(size, |rank| {
            for algorithm in [None].into_iter().chain(Algorithm::DIRECT.map(Some)) {
                let communicator = Setup::with(algorithm).build(&rank);
                assert_eq!((communicator.rank(), communicator.world_size()), (rank.rank(), size));
                typed(&communicator, |value| half::f16::from_f32(value.into()));
                typed(&communicator, |value| half::bf16::from_f32(value.into()));
                typed(&communicator, f32::from);
                typed(&communicator, f64::from);
                typed(&communicator, |value| value as i8);
                typed(&communicator, |value| value);
                typed(&communicator, i32::from);
                typed(&communicator, u32::from);
                typed(&communicator, i64::from);
                typed(&communicator, u64::from);
                communicator.all_reduce::<f32>(&[], &mut [], ReduceOp::Sum).unwrap();
                communicator.barrier().unwrap();
            }
        });
    }
}

/// Tests ranks that drop a buffer at different times, one of them after its communicator.
#[test]
fn buffers_dropped_at_different_times() {
    threads(3, |rank| {
        for algorithm in [Algorithm::OneShotPull, Algorithm::TwoShotPull] {
            let communicator = Setup::with(algorithm).build(&rank);
            let empty = communicator.alloc::<f32>(0).unwrap();
            let other = communicator.alloc::<u8>(5).unwrap();
            let mut data = communicator.alloc::<f32>(700).unwrap();
            data.fill(1.0);
            if rank.rank() == 0 {
                drop(empty);
                communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
                drop((other, communicator));
            } else {
                communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
                drop((empty, communicator, other));
            }
            assert_eq!(*data, [3.0; 700]);
        }
    });
}

/// Tests threads that use one communicator in turn: it is sufficient that all ranks call in the same order.
#[test]
fn calls_from_several_threads() {
    threads(3, |rank| {
        let communicator = Setup { workers: 2, ..Setup::default() }.build(&rank);
        let turn = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (communicator, turn) = (&communicator, &turn);
                scope.spawn(move || {
                    use std::sync::atomic::Ordering::{Acquire, Release};
                    for round in (thread..60).step_by(3) {
                        while turn.load(Acquire) != round {
                            std::thread::yield_now();
                        }
                        let mut data = vec![1u32 << communicator.rank(); round * 800 + 1];
                        communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
                        assert!(data.iter().all(|&element| element == 7));
                        turn.store(round + 1, Release);
                    }
                });
            }
        });
    });
}
