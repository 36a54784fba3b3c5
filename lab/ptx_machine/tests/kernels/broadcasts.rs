//! Broadcasts, one-shot and scattered: from every rank, with odd counts, at addresses that are not aligned
//! to packs or to each other.

use fast_allreduce_ptx_machine::{Program, Settings};

use crate::abi::*;
use crate::world::World;

tests! {
    crate::observed => nothing_races_in_broadcasts;
}

/// Fills outputs before a call, and must be intact around them after it.
const POISON: u8 = 0xA5;

fn nothing_races_in_broadcasts(program: &Program) {
    for (kernel, algorithm) in [("broadcast", FA_BROADCAST), ("scattered_broadcast", FA_SCATTERED_BROADCAST)]
    {
        if crate::is_left_out(program, kernel) {
            continue;
        }
        for ranks in [2, 3, 5] {
            for (bytes, input, output) in
                [(1, 0, 0), (2000, 0, 0), (2003, 5, 5), (1999, 4, 8), (3000, 8, 8), (3001, 3, 8), (778, 2, 4)]
            {
                for registered in [false, true] {
                    broadcast(program, (kernel, algorithm), ranks, (bytes, input, output), registered);
                }
            }
        }
    }
}

/// Broadcasts from each rank in turn, twice: `input` and `output` are the offsets from pack alignment in
/// bytes.
fn broadcast(
    program: &Program,
    (kernel, algorithm): (&str, FaAlgorithm),
    ranks: usize,
    (bytes, input, output): (usize, usize, usize),
    registered: bool,
) {
    let mut world = World::new(ranks, bytes + input.max(output));
    for turn in 0..2 * ranks {
        let (root, is_in_place) = (turn % ranks, turn >= ranks);
        let message: Vec<u8> = (0..bytes).map(|at| (at * 7 + turn * 31) as u8).collect();
        world.inputs[root].write(input, &message);
        world.outputs.iter_mut().for_each(|memory| memory.fill(POISON));
        let of_rank = |rank| {
            let mut launch = world.launch_of(rank, algorithm, FA_U8, bytes as u64);
            launch.input += input as u64;
            launch.output += output as u64;
            launch.root = root as u32;
            // In place once: the message is already in the output.
            if rank == root && is_in_place {
                launch.output = launch.input;
            }
            if registered {
                launch.source = (1 << FA_SOURCE_ID_SHIFT) + input as u64;
            }
            launch
        };
        let launches: Vec<_> = (0..ranks).map(of_rank).collect();
        let settings = Settings { seed: turn as u64, race: program.is_observed(), ..Settings::default() };
        let case = format!("{kernel}, {bytes} bytes at {input} and {output} from rank {root} of {ranks}");
        world
            .run_together(program, kernel, (2, 32), &launches, settings)
            .unwrap_or_else(|error| panic!("{case}: {error}"));
        for (rank, memory) in world.outputs.iter().enumerate() {
            assert_eq!(world.failure_of(rank), FA_OK, "{case}: rank {rank}");
            if rank == root && is_in_place {
                continue;
            }
            let (before, rest) = memory.read().split_at(output);
            let (result, after) = rest.split_at(bytes);
            assert!(result == message, "{case}: rank {rank} has another message");
            let around = [before, after].concat();
            assert!(around.iter().all(|&byte| byte == POISON), "{case}: around that of rank {rank}");
        }
    }
}
