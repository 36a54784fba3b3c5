//! All ranks of the hot set on one thread, in many orders, with every access looked at.

use fast_allreduce_ptx_machine::{Program, Settings};

use crate::hot::{fill, sums, ALGORITHMS, TYPES};
use crate::world::World;

tests! {
    crate::observed => nothing_races;
}

/// Every algorithm, type and world: two blocks of 32 threads and an odd number of packs, twice, so that flags are used again.
fn nothing_races(program: &Program) {
    for (name, algorithm) in ALGORITHMS {
        for ty in TYPES {
            for ranks in 2..=8 {
                let count = 8 * 77;
                let mut world = World::new(ranks, count * 4);
                let kernel = format!("{name}_{}_sum_w{ranks}", ty.name);
                for turn in 0..3 {
                    fill(&mut world, ty, count, turn);
                    let launches: Vec<_> = (0..ranks)
                        .map(|rank| world.launch_of(rank, algorithm, ty.code, count as u64))
                        .collect();
                    let settings = Settings { seed: turn as u64 + 1, race: true, ..Settings::default() };
                    world
                        .run_together(program, &kernel, (2, 32), &launches, settings)
                        .unwrap_or_else(|error| panic!("{error}"));
                    for output in &world.outputs {
                        assert!(
                            output.read(count * ty.bytes) == sums(ty, count, ranks, turn),
                            "{kernel}, turn {turn}"
                        );
                    }
                }
            }
        }
    }
}
