//! Tests the hot set: sums in the types and world sizes with specialised kernels. Checked calls and messages that are
//! not whole packs use other kernels.

use std::collections::BTreeSet;

use fast_allreduce::device::cuda::HOT_WORLDS;
use fast_allreduce::{Algorithm, DType, ReduceOp};

use crate::fixtures::fixture::{MemoryKind, Message, Placement, Setup};
use crate::fixtures::gpu::{gpu, Gpus};
use crate::fixtures::processes::{part, this_test, Process};
use crate::fixtures::threads::fixtures;
use crate::random::Random;
use crate::runner::Found;
use crate::temporary::Folder;

tests! {
    gpu_of_parent => every_type_and_world;
}

const TYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];
/// Limit of the region; larger messages are divided into pieces.
const MAX_BYTES: usize = 8 << 10;
const MOST: usize = 3 * MAX_BYTES;

/// Staged and registered inputs, in place and out of place.
const PLACEMENTS: [Placement; 4] = [
    Placement { input: (MemoryKind::Plain, 0), output: Some((MemoryKind::Pool, 0)) },
    Placement { input: (MemoryKind::Pool, 0), output: None },
    Placement { input: (MemoryKind::Registered, 0), output: Some((MemoryKind::Plain, 0)) },
    Placement { input: (MemoryKind::Registered, 0), output: None },
];

/// Takes the lock on the GPUs, except in a child process: its parent holds the lock while it waits for the child.
fn gpu_of_parent() -> Found<Option<Gpus>> {
    match part() {
        Some(_) => Ok(None),
        None => gpu().map(Some),
    }
}

fn every_type_and_world(gpus: Option<Gpus>) {
    match gpus {
        // The stand-in driver logs the kernels that it runs.
        Some(gpus) if gpus.stand_in => {
            let folder = Folder::new();
            let log = folder.path().join("log");
            let mut child = this_test("calls::hot::every_type_and_world", "logged");
            let ended = Process::start(child.env("STAND_IN_LAUNCH_LOG", &log)).finish();
            let lines = std::fs::read_to_string(&log);
            ended.unwrap_or_else(|report| panic!("{report}"));
            let lines = lines.unwrap();
            let launched: BTreeSet<&str> = lines
                .lines()
                .filter_map(|line| line.split(' ').next())
                .filter(|name| name.contains("_sum_w"))
                .collect();
            assert_eq!(
                launched.len(),
                Algorithm::DIRECT.len() * TYPES.len() * HOT_WORLDS.len(),
                "{launched:?}"
            );
        }
        _ => sums(),
    }
}

fn sums() {
    for &world in HOT_WORLDS {
        for algorithm in Algorithm::DIRECT {
            let random = Random::new(&format!("hot {algorithm} {world}"));
            let setup = Setup { check: Some(false), max_bytes: MAX_BYTES, ..Setup::with(algorithm) };
            fixtures(world, 1, setup, MOST, |fixture| {
                for (turn, dtype) in TYPES.into_iter().enumerate() {
                    for (round, placement) in PLACEMENTS.into_iter().enumerate() {
                        let mut random = random.fork(10 * turn + round);
                        // Whole packs, the same number for each rank; a thread may have several packs or none.
                        let most = if round == turn { MOST } else { MAX_BYTES / 8 };
                        let packs = world * (1 + random.below(most / 16 / world));
                        let kind = (dtype, ReduceOp::Sum);
                        fixture.check(
                            &Message::new(&mut random, kind, packs * 16 / dtype.size(), world),
                            placement,
                        );
                    }
                }
            });
        }
    }
}
