//! Registered buffers after a failed call: what peers read of them, and what their owners may do.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::Threads;
use fast_allreduce::{Algorithm, Buffer, Communicator, Error, Host, ReduceOp, Result};

use crate::fixtures::world::{builder, threads};
use crate::random::Random;
use crate::tier::rounds;

/// Elements of a call, or of each share.
const COUNT: usize = 60_000;

/// An owner overwrites its buffer with this value as soon as it owns it again. No sum of inputs has this value.
const OVERWRITTEN: u32 = 0xDEAD_0000;

/// A call that reads the inputs of all ranks in their registered buffers.
#[derive(Debug, Clone, Copy)]
enum Call {
    AllReduce(Algorithm),
    ReduceScatter,
    AllGather,
    Reduce,
}

const CALLS: [Call; 5] = [
    Call::AllReduce(Algorithm::OneShotPull),
    Call::AllReduce(Algorithm::TwoShotPull),
    Call::ReduceScatter,
    Call::AllGather,
    Call::Reduce,
];

impl Call {
    /// Makes the call and returns its output in chunks; the elements of a chunk are equal.
    fn make<'a>(
        self,
        communicator: &Communicator<Host>,
        input: &[u32],
        output: &'a mut [u32],
    ) -> Result<std::slice::Chunks<'a, u32>> {
        let sum = ReduceOp::Sum;
        let written = match self {
            Self::AllReduce(_) => {
                let output = &mut output[..COUNT];
                communicator.all_reduce(input, output, sum).map(|()| &*output)
            }
            Self::ReduceScatter => {
                let output = &mut output[..COUNT / communicator.world_size()];
                communicator.reduce_scatter(input, output, sum).map(|()| &*output)
            }
            Self::AllGather => communicator.all_gather(input, output).map(|()| &*output),
            Self::Reduce => {
                let output = &mut output[..if communicator.rank() == 0 { COUNT } else { 0 }];
                communicator.reduce(input, output, sum, 0).map(|()| &*output)
            }
        };
        written.map(|written| written.chunks(COUNT))
    }

    fn algorithm(self) -> Option<Algorithm> {
        match self {
            Self::AllReduce(algorithm) => Some(algorithm),
            _ => None,
        }
    }

    /// Returns the expected value of an output chunk, where each rank contributes one value.
    fn expected(self, chunk: usize, world_size: usize, input: impl Fn(usize) -> u32) -> u32 {
        match self {
            Self::AllGather => input(chunk),
            _ => (0..world_size).map(input).sum(),
        }
    }
}

/// Makes calls from registered buffers until one rank is aborted, at a moment that differs between worlds. A rank whose
/// call fails overwrites its buffer at once; a rank whose call succeeds must have the right result. Returns the number
/// of successful calls.
fn abort_at_random(world_size: usize, call: Call, seed: u64) -> usize {
    let ranks = Threads::world(world_size).unwrap();
    let calls = AtomicUsize::new(0);
    let aborted = (seed % world_size as u64) as usize;
    std::thread::scope(|scope| {
        for (rank, bootstrap) in ranks.into_iter().enumerate() {
            let calls = &calls;
            scope.spawn(move || {
                let settings = builder().max_bytes(1 << 20).algorithm(call.algorithm());
                let communicator = settings.build(Host::new(), bootstrap).unwrap();
                let mut buffer: Buffer<u32> = communicator.alloc(COUNT).unwrap();
                let mut output = vec![0; COUNT * world_size];
                communicator.barrier().unwrap();
                let mut random = Random::fixed(seed);
                let wait = Duration::from_micros(random.below(1500) as u64);
                std::thread::scope(|scope| {
                    if rank == aborted {
                        scope.spawn(|| {
                            std::thread::sleep(wait);
                            communicator.abort();
                        });
                    }
                    for number in 0.. {
                        let input = |rank: usize| (1 << (8 * rank)) + number;
                        buffer.fill(input(rank));
                        let Ok(written) = call.make(&communicator, &buffer, &mut output) else { break };
                        for (chunk, elements) in written.enumerate() {
                            let expected = call.expected(chunk, world_size, input);
                            let wrong = elements.iter().find(|&&element| element != expected);
                            assert_eq!(
                                wrong, None,
                                "{call:?} {number} returned Ok, with {expected} expected"
                            );
                        }
                        calls.fetch_add(1, Ordering::Relaxed);
                    }
                    buffer.fill(OVERWRITTEN);
                });
            });
        }
    });
    calls.into_inner()
}

#[test]
fn an_abort_leaves_no_wrong_data_behind_an_ok() {
    let time = Duration::from_secs(rounds("registered, aborts: a second each", 12, 3) as u64);
    let (started, mut worlds, mut calls) = (Instant::now(), 0, 0);
    while started.elapsed() < time {
        for call in CALLS {
            calls += abort_at_random(2 + worlds as usize % 2, call, worlds);
        }
        worlds += 1;
    }
    println!("{} worlds, {calls} calls", worlds * CALLS.len() as u64);
    assert!(worlds > 3 && calls > 0);
}

/// Rank 2 never calls, so that ranks 0 and 1 fail while they wait and have announced their buffers to each other.
#[test]
fn a_buffer_belongs_to_its_owner_alone_after_a_failure() {
    let errors = threads(
        3,
        |_| builder().timeout(Duration::from_millis(300)),
        |communicator| {
            let mut buffer: Buffer<u32> = communicator.alloc(COUNT).unwrap();
            let mut output = vec![0; COUNT];
            buffer.fill(7);
            if communicator.rank() == 2 {
                std::thread::sleep(Duration::from_millis(900));
                return None;
            }
            let error = communicator.all_reduce(&buffer, &mut output, ReduceOp::Sum).unwrap_err();
            assert!(buffer.iter().all(|&element| element == 7), "the failed call must not change the buffer");
            buffer.fill(8);
            assert!(buffer.iter().all(|&element| element == 8));
            // The other ranks' parts of the buffer no longer belong together.
            let refused = buffer.deregister().unwrap_err();
            assert!(
                matches!(
                    refused,
                    Error::Unavailable { .. } | Error::PeerFailed { .. } | Error::Timeout { .. }
                ),
                "{refused}"
            );
            Some(error)
        },
    );
    for error in errors.into_iter().take(2) {
        assert!(matches!(error, Some(Error::Timeout { missing, .. }) if missing == [2]));
    }
}
