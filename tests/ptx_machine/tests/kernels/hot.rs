//! Sums by the four direct algorithms.

use fast_allreduce_ptx_machine::Program;

use crate::abi::*;
use crate::world::World;

tests! {
    crate::program => sums_of_f32;
}

const ALGORITHMS: [(&str, FaAlgorithm); 4] = [
    ("one_shot_pull", FA_ONE_SHOT_PULL),
    ("two_shot_pull", FA_TWO_SHOT_PULL),
    ("one_shot_push", FA_ONE_SHOT_PUSH),
    ("two_shot_push", FA_TWO_SHOT_PUSH),
];

/// Small integers, which f32 sums exactly in any order.
fn value(rank: usize, i: usize) -> f32 {
    ((i * 7 + rank * 13) % 1001) as f32 - 500.0
}

fn sums_of_f32(program: &Program) {
    for (name, algorithm) in ALGORITHMS {
        for (ranks, count, shape) in
            [(2, 64, (1, 32)), (2, 1000, (3, 64)), (3, 996, (2, 512)), (8, 1024, (1, 128))]
        {
            let mut world = World::new(ranks, count * 4);
            let kernel = format!("{name}_f32_sum_w{ranks}");
            for turn in 0..3 {
                for (rank, input) in world.inputs.iter_mut().enumerate() {
                    let values = (0..count).flat_map(|i| value(rank + turn, i).to_le_bytes());
                    input.write(&values.collect::<Vec<u8>>());
                }
                let results = world.run(program, &kernel, shape, |rank| {
                    world.launch_of(rank, algorithm, FA_F32, count as u64)
                });
                for result in results {
                    result.unwrap_or_else(|error| panic!("{error}"));
                }
                let sums: Vec<u8> = (0..count)
                    .flat_map(|i| (0..ranks).map(|rank| value(rank + turn, i)).sum::<f32>().to_le_bytes())
                    .collect();
                for output in &world.outputs {
                    assert!(output.read(count * 4) == sums, "{kernel}, turn {turn}");
                }
            }
        }
    }
}
