//! What every device, bootstrap and algorithm must do. The macro at the end makes each function a test for each transport.

use std::sync::Mutex;

use fast_allreduce::device::host::Isa;
use fast_allreduce::{Algorithm, Communicator, DType, Element, Host, ReduceOp};

use crate::message::{Message, Place, Placement, Seat};
use crate::random::{Random, Values};
use crate::worlds::{Setup, Transport, Worlds};

/// One type of each size, floats first.
const SIZES: [DType; 4] = [DType::Bf16, DType::F32, DType::I64, DType::U8];

/// Elements of a host pack.
fn lanes(dtype: DType) -> usize {
    64 / dtype.size()
}

fn most_bytes<'a>(messages: impl IntoIterator<Item = &'a Message>) -> usize {
    messages.into_iter().map(Message::bytes).max().unwrap_or(0)
}

fn types_and_operations() -> impl Iterator<Item = (DType, ReduceOp)> {
    DType::ALL.into_iter().flat_map(|dtype| ReduceOp::ALL.map(|op| (dtype, op)))
}

/// The whole product, with values of all kinds, anywhere in memory; equal bits from all algorithms.
fn every_type_operation_and_algorithm(worlds: &Worlds) {
    for &size in worlds.sizes(&[2, 3, 1, 4, 5, 6, 7, 8, 16]) {
        let random = Random::new(&format!("product in a world of {size}"));
        let prepare = || {
            let mut random = random.fork(size);
            let product = types_and_operations().flat_map(|case| Values::ALL.map(|values| (case, values)));
            let message = |(case, values): ((DType, ReduceOp), _)| {
                let count = 1 + random.below(4 * lanes(case.0));
                Message::new(&mut random, case, count, size, values)
            };
            product.map(message).collect::<Vec<_>>()
        };
        worlds.run(size, prepare, |rank, messages| {
            for algorithm in Algorithm::ALL {
                let setup = Setup { max_bytes: 4 << 10, ..Setup::with(algorithm) };
                let mut seat = Seat::registered(setup.build(rank), most_bytes(messages));
                let mut random = random.fork(100 + rank.rank());
                for message in messages {
                    seat.check(message, Placement::random(&mut random));
                }
            }
        });
    }
}

fn every_small_count(worlds: &Worlds) {
    for &size in worlds.sizes(&[3, 2, 5]) {
        let random = Random::new(&format!("small counts in a world of {size}"));
        let prepare = || {
            let mut random = random.fork(size);
            let counts = SIZES.into_iter().flat_map(|dtype| (0..=257).map(move |count| (dtype, count)));
            let message = |(dtype, count)| {
                Message::new(&mut random, (dtype, ReduceOp::Sum), count, size, Values::Plain)
            };
            counts.map(message).collect::<Vec<_>>()
        };
        worlds.run(size, prepare, |rank, messages| {
            for algorithm in Algorithm::ALL {
                let setup = Setup { max_bytes: 4 << 10, ..Setup::with(algorithm) };
                let mut seat = Seat::registered(setup.build(rank), most_bytes(messages));
                let mut random = random.fork(100 + rank.rank());
                for message in messages {
                    seat.check(message, Placement::random(&mut random));
                }
            }
        });
    }
}

/// Counts around each place where something changes: a pack, a slice of packs, a piece of the message, a block.
fn boundaries(communicator: &Communicator<Host>, dtype: DType) -> Vec<usize> {
    let plan = |count| communicator.plan(count, dtype);
    let (pack, world) = (lanes(dtype), communicator.world_size());
    let piece = plan(1).piece_bytes / dtype.size();
    let mut edges = vec![pack, world * pack, piece, 2 * piece, 5 * piece, piece + world * pack];
    let limit = (400 << 10) / dtype.size();
    let mut from = 1;
    while plan(from).blocks != plan(limit).blocks {
        let next = next_change(from, limit, |count| plan(count).blocks);
        edges.extend([next, plan(next).piece_bytes / dtype.size()]);
        from = next;
    }
    let around = |edge: usize| [edge.saturating_sub(pack + 1), edge - 1, edge, edge + 1, edge + pack - 1];
    let mut counts: Vec<_> =
        edges.into_iter().flat_map(around).filter(|&count| count > 0 && count <= limit).collect();
    counts.sort_unstable();
    counts.dedup();
    counts
}

/// The first number above `from` at which `of`, which only grows, is another than at `from`.
fn next_change(from: usize, to: usize, of: impl Fn(usize) -> usize) -> usize {
    let (mut low, mut high) = (from, to);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if of(middle) == of(from) {
            low = middle;
        } else {
            high = middle;
        }
    }
    high
}

/// Messages that pass in pieces, and end, at each edge.
fn every_boundary(worlds: &Worlds) {
    for &size in worlds.sizes(&[3, 2, 4, 7]) {
        for (algorithm, index) in Algorithm::ALL.into_iter().zip(0..) {
            // Each algorithm with two of the types, so that all pairs come in some world.
            let dtypes = [SIZES[(index + size) % 4], SIZES[(index + size + 1) % 4]];
            for (max_bytes, workers) in [(4 << 10, 1), (10_000, 1), (64 << 10, 1), (1 << 20, 3)] {
                if worlds.is_threads() || workers > 1 {
                    let setup = Setup { max_bytes, workers, ..Setup::with(algorithm) };
                    boundaries_of(worlds, size, setup, dtypes);
                }
            }
        }
    }
}

fn boundaries_of(worlds: &Worlds, size: usize, setup: Setup, dtypes: [DType; 2]) {
    let name = format!("boundaries of {:?}, {} bytes, {size}", setup.algorithm, setup.max_bytes);
    let random = Random::new(&name);
    // Made by the first rank that needs them: the counts come from a communicator.
    let prepared = Mutex::new(None);
    worlds.run(
        size,
        || (),
        |rank, ()| {
            let communicator = setup.build(rank);
            assert!(communicator.region_bytes() <= 4 * setup.max_bytes + (1 << 20));
            let messages = {
                let mut prepared = prepared.lock().unwrap();
                let prepare = || {
                    let mut random = random.fork(size);
                    let counts = dtypes.map(|dtype| (dtype, boundaries(&communicator, dtype)));
                    let counts =
                        counts.into_iter().flat_map(|(d, counts)| counts.into_iter().map(move |c| (d, c)));
                    let messages = counts.map(|(dtype, count)| {
                        Message::new(&mut random, (dtype, ReduceOp::Sum), count, size, Values::Plain)
                    });
                    std::sync::Arc::new(messages.collect::<Vec<_>>())
                };
                std::sync::Arc::clone(prepared.get_or_insert_with(prepare))
            };
            let mut seat = Seat::registered(communicator, most_bytes(&*messages));
            let mut random = random.fork(100 + rank.rank());
            for message in &*messages {
                seat.check(message, Placement::random(&mut random));
            }
        },
    );
}

/// Each pair of offsets, different on each rank; inputs registered on all ranks, on some and on none; in place and not.
fn every_placement(worlds: &Worlds) {
    const OFFSETS: [usize; 6] = [0, 1, 2, 3, 7, 32];
    for &size in worlds.sizes(&[2, 3, 5]) {
        let random = Random::new(&format!("placements in a world of {size}"));
        let prepare = || {
            let mut random = random.fork(size);
            let counts = [1, 37, 1000].into_iter().flat_map(|count| SIZES.map(|dtype| (dtype, count)));
            let message = |(dtype, count)| {
                Message::new(&mut random, (dtype, ReduceOp::Sum), count, size, Values::Plain)
            };
            counts.map(message).collect::<Vec<_>>()
        };
        worlds.run(size, prepare, |rank, messages| {
            let own = rank.rank();
            for algorithm in [None].into_iter().chain(Algorithm::ALL.map(Some)) {
                let setup = Setup { max_bytes: 4 << 10, ..Setup::with(algorithm) };
                let mut seat = Seat::registered(setup.build(rank), most_bytes(messages));
                let offset = |number: usize| OFFSETS[(number + own) % OFFSETS.len()];
                let pairs = (0..OFFSETS.len()).flat_map(|i| (0..OFFSETS.len()).map(move |j| (i, j)));
                for ((input, output), number) in pairs.zip(0..) {
                    // Who is registered: none, all, even ranks, rank 0 alone, all but rank 0.
                    let registered = [false, true, own % 2 == 0, own == 0, own != 0][number % 5];
                    let place = if registered { Place::Registered } else { Place::Private };
                    let output = match number % 3 {
                        // In place on all ranks, on none, on some.
                        0 => None,
                        1 => Some(Place::Private(offset(output))),
                        _ => (own != number % size).then(|| Place::Registered(offset(output))),
                    };
                    let placement = Placement { input: place(offset(input)), output };
                    seat.check(&messages[number % messages.len()], placement);
                }
            }
        });
    }
}

/// Registered buffers that come and go: ids are used again, and views in the new ones are found.
fn buffers_dropped_and_allocated_again(worlds: &Worlds) {
    for &size in worlds.sizes(&[2, 3]) {
        let random = Random::new(&format!("reallocation in a world of {size}"));
        let prepare =
            || Message::new(&mut random.fork(0), (DType::F32, ReduceOp::Sum), 700, size, Values::Plain);
        worlds.run(size, prepare, |rank, message| {
            for algorithm in [Algorithm::OneShotPull, Algorithm::TwoShotPull] {
                let communicator = Setup::with(algorithm).build(rank);
                let empty = communicator.alloc::<f32>(0).unwrap();
                let other = communicator.alloc::<u8>(5).unwrap();
                let mut seat = Seat::new(communicator, message.bytes());
                for round in 0..12 {
                    seat.register();
                    let input = Place::Registered(round % 4);
                    seat.check(message, Placement { input, output: Some(Place::Private(round)) });
                    seat.check(message, Placement { input, output: None });
                }
                // Some ranks drop a buffer earlier than others, and one is dropped after its communicator.
                if rank.rank() == 0 {
                    drop(empty);
                    seat.check(message, Placement { input: Place::Registered(1), output: None });
                    drop(other);
                } else {
                    seat.check(message, Placement { input: Place::Registered(2), output: None });
                    drop((empty, seat, other));
                }
            }
        });
    }
}

/// Two views of one registered buffer, through the typed calls.
fn typed_calls(worlds: &Worlds) {
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
    for &size in worlds.sizes(&[2, 3, 1]) {
        worlds.run(
            size,
            || (),
            |rank, ()| {
                for algorithm in [None].into_iter().chain(Algorithm::ALL.map(Some)) {
                    let communicator = Setup::with(algorithm).build(rank);
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
            },
        );
    }
}

/// Epochs that pass 2^32, at every parity, with launches of different grids.
fn epochs_that_wrap_around(worlds: &Worlds) {
    for &size in worlds.sizes(&[3, 2]) {
        let random = Random::new(&format!("wrap-around in a world of {size}"));
        let prepare = || {
            let message = |count| {
                Message::new(&mut random.fork(count), (DType::U8, ReduceOp::Sum), count, size, Values::Plain)
            };
            [5, 200_000, 64, 9000].map(message)
        };
        worlds.run(size, prepare, |rank, messages| {
            for algorithm in Algorithm::ALL {
                for first_epoch in (u32::MAX - 6)..=u32::MAX {
                    let setup =
                        Setup { workers: 3, max_bytes: 256 << 10, first_epoch, ..Setup::with(algorithm) };
                    let mut seat = Seat::registered(setup.build(rank), most_bytes(messages));
                    let mut random = random.fork(100 + rank.rank());
                    for message in messages.iter().cycle().take(12) {
                        seat.check(message, Placement::random(&mut random));
                    }
                }
            }
        });
    }
}

/// Launches of 1, 2 and 3 blocks in turn: epochs of unused blocks keep up, slices change hands.
fn grids_that_change(worlds: &Worlds) {
    for &size in worlds.sizes(&[2, 3]) {
        let random = Random::new(&format!("grids in a world of {size}"));
        let prepare = || {
            let message = |count| {
                Message::new(&mut random.fork(count), (DType::U8, ReduceOp::Sum), count, size, Values::Plain)
            };
            [3, 70_000, 140_000, 200_001, 1000].map(message)
        };
        worlds.run(size, prepare, |rank, messages| {
            for algorithm in Algorithm::ALL {
                let setup = Setup { workers: 3, max_bytes: 256 << 10, ..Setup::with(algorithm) };
                let mut seat = Seat::registered(setup.build(rank), most_bytes(messages));
                let blocks =
                    [3, 70_000, 140_000].map(|count| seat.communicator.plan(count, DType::U8).blocks);
                assert_eq!(blocks, [1, 2, 3]);
                // The order is the same on all ranks, the placements are not.
                let mut order = random.fork(99);
                let mut random = random.fork(100 + rank.rank());
                for _ in 0..60 {
                    let message = &messages[order.below(messages.len())];
                    seat.check(message, Placement::random(&mut random));
                }
            }
        });
    }
}

/// Several communicators of one world, of each algorithm and of none in particular, used in any order.
fn communicators_in_turn(worlds: &Worlds) {
    for &size in worlds.sizes(&[3, 4, 2, 8]) {
        let random = Random::new(&format!("sequences in a world of {size}"));
        let prepare = || {
            let mut random = random.fork(size);
            let message = |_| {
                let case = (random.pick(&DType::ALL), random.pick(&ReduceOp::ALL));
                let count = match random.below(4) {
                    0 => random.below(20),
                    1 => random.below(20_000),
                    _ => random.below(1500),
                };
                let values = random.pick(&Values::ALL);
                Message::new(&mut random, case, count, size, values)
            };
            (0..80).map(message).collect::<Vec<_>>()
        };
        worlds.run(size, prepare, |rank, messages| {
            let seat = |(algorithm, max_bytes)| {
                let setup = Setup { max_bytes, ..Setup::with(algorithm) };
                Seat::registered(setup.build(rank), most_bytes(messages))
            };
            let algorithms = [None, None].into_iter().chain(Algorithm::ALL.map(Some));
            let mut seats =
                Vec::from_iter(algorithms.zip([4096, 1 << 20, 4096, 4224, 5000, 64 << 10]).map(seat));
            let mut order = random.fork(99);
            let mut random = random.fork(100 + rank.rank());
            for _ in 0..400 {
                let seat = order.below(seats.len());
                let message = &messages[order.below(messages.len())];
                seats[seat].check(message, Placement::random(&mut random));
            }
        });
    }
}

/// Threads that use one communicator one after the other; where all ranks call in the same order, that is enough.
fn calls_from_several_threads(worlds: &Worlds) {
    worlds.run(
        3,
        || (),
        |rank, ()| {
            let communicator = Setup { workers: 2, ..Setup::default() }.build(rank);
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
        },
    );
}

/// Every instruction set gives the expected bits, also where ranks use different ones.
fn every_instruction_set(worlds: &Worlds) {
    for &size in worlds.sizes(&[3, 2, 9]) {
        let random = Random::new(&format!("instruction sets in a world of {size}"));
        let prepare = || {
            let mut random = random.fork(size);
            let product = types_and_operations().flat_map(|case| Values::ALL.map(|values| (case, values)));
            let message = |(case, values)| Message::new(&mut random, case, 301, size, values);
            product.map(message).collect::<Vec<_>>()
        };
        worlds.run(size, prepare, |rank, messages| {
            let supported = Vec::from_iter(Isa::supported());
            for mix in 0..=supported.len() {
                let isa = supported.get(mix).copied().unwrap_or(supported[rank.rank() % supported.len()]);
                let mut seat = Seat::new(Setup { isa, ..Setup::default() }.build(rank), most_bytes(messages));
                assert_eq!(seat.communicator.device().instruction_set(), isa);
                for message in messages {
                    seat.check(message, Placement::PLAIN);
                }
            }
        });
    }
}

macro_rules! over_every_transport {
    ($($case:ident)*) => {
        over_every_transport!(threads Threads: $($case)*);
        over_every_transport!(local_threads LocalThreads: $($case)*);
        over_every_transport!(local_processes LocalProcesses: $($case)*);
        #[cfg(feature = "mpi")]
        over_every_transport!(mpirun Mpirun: $($case)*);
    };
    ($module:ident $transport:ident: $($case:ident)*) => {
        mod $module {
            use super::{Transport, Worlds};
            $(
                #[test]
                fn $case() {
                    let path = concat!(module_path!(), "::", stringify!($case));
                    super::$case(&Worlds::new(Transport::$transport, path));
                }
            )*
        }
    };
}

over_every_transport! {
    every_type_operation_and_algorithm
    every_small_count
    every_boundary
    every_placement
    buffers_dropped_and_allocated_again
    typed_calls
    epochs_that_wrap_around
    grids_that_change
    communicators_in_turn
    calls_from_several_threads
    every_instruction_set
}
