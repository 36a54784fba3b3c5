//! Ranks that leave after different numbers of calls, and drop registered buffers before or after the communicator.

use std::time::Instant;

use fast_allreduce::{Algorithm, Communicator, Error, Host, ReduceOp, Result};

use crate::fixtures::world::{builder, threads, LIMIT};
use crate::random::Random;
use crate::tier::rounds;

const ROUNDS: usize = 120;

/// Calls of a rank that does not leave.
const CALLS: usize = 12;

/// Makes one call of the round, from registered memory if it reduces or gathers, and checks the result if it succeeds.
fn call(
    communicator: &Communicator<Host>,
    input: &mut [u64],
    output: &mut [u64],
    random: &mut Random,
) -> Result<()> {
    let (rank, world) = (communicator.rank() as u64, communicator.world_size());
    let (kind, root, salt) = (random.below(5), random.below(world), random.below(1000) as u64);
    let count = random.pick(&[1, 100, 3000, 20_000]);
    let (input, output) = (&mut input[..count], &mut output[..count * world]);
    let value = |rank: u64, at: usize| salt * at as u64 + rank;
    input.iter_mut().enumerate().for_each(|(at, element)| *element = value(rank, at));
    output.fill(u64::MAX);
    let sum = |at| (0..world as u64).map(|rank| value(rank, at)).sum();
    let expected: Vec<u64> = match kind {
        0 => {
            communicator.all_gather(input, output)?;
            (0..world as u64).flat_map(|rank| (0..count).map(move |at| value(rank, at))).collect()
        }
        1 => {
            communicator.broadcast(input, root)?;
            output[..count].copy_from_slice(input);
            (0..count).map(|at| value(root as u64, at)).collect()
        }
        2 => {
            let [left, right] = [world - 1, 1].map(|far| (rank as usize + far) % world);
            communicator.send_recv(input, right, &mut output[..count], left, salt as u32)?;
            (0..count).map(|at| value(left as u64, at)).collect()
        }
        3 => {
            communicator.all_reduce_in_place(input, ReduceOp::Sum)?;
            output[..count].copy_from_slice(input);
            (0..count).map(sum).collect()
        }
        _ => {
            communicator.all_reduce(input, &mut output[..count], ReduceOp::Sum)?;
            (0..count).map(sum).collect()
        }
    };
    assert!(output.starts_with(&expected), "kind {kind} of {count} elements");
    Ok(())
}

#[test]
fn ranks_leave_at_any_call_and_drop_in_any_order() {
    let random = Random::new("leaving");
    for round in 0..rounds("leaving", ROUNDS, 40) {
        let mut drawn = random.fork(round);
        let world_size = 2 + drawn.below(3);
        let algorithm = drawn.one_in(3).then(|| drawn.pick(&Algorithm::ALL));
        // The number of calls after which each rank leaves. With CALLS it stays to the end.
        let leaves: Vec<usize> = (0..world_size).map(|_| drawn.below(CALLS + 1)).collect();
        let started = Instant::now();
        threads(
            world_size,
            |_| builder().algorithm(algorithm).max_bytes(64 << 10),
            |communicator| {
                let rank = communicator.rank();
                let (mut calls, mut own) = (random.fork(1000 + round), random.fork(rank * ROUNDS + round));
                let mut input = communicator.alloc::<u64>(20_000).unwrap();
                let mut output = communicator.alloc::<u64>(20_000 * world_size).unwrap();
                let error = (0..leaves[rank])
                    .find_map(|_| call(&communicator, &mut input, &mut output, &mut calls).err());
                if let Some(error) = error {
                    let Error::PeerLost { rank: gone, .. } = &error else { panic!("{leaves:?}: {error}") };
                    assert!(leaves[*gone] < leaves[rank], "{leaves:?}: {error}");
                }
                // Immediately, while others may still be in a call.
                match own.below(3) {
                    0 => drop((communicator, input, output)),
                    1 => drop((input, communicator, output)),
                    _ => {
                        drop(communicator);
                        // The buffers still belong to this rank.
                        input.fill(rank as u64);
                        assert!(input.iter().all(|&element| element == rank as u64));
                        drop((output, input));
                    }
                }
            },
        );
        assert!(started.elapsed() < LIMIT / 2, "{leaves:?}: {:?}", started.elapsed());
    }
}
