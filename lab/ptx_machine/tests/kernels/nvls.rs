//! In-switch reduction (NVLS): in turns, and with race detection.

use fast_allreduce_ptx_machine::{Fault, Program, Settings};

use crate::abi::*;
use crate::elements::{Element, BF16, F16, F32};
use crate::world::World;

tests! {
    crate::program => sums_in_any_world, an_address_of_multicast_is_no_other;
    crate::observed => nothing_races;
}

pub const ALGORITHMS: [(&str, FaAlgorithm); 2] =
    [("one_shot_nvls", FA_ONE_SHOT_NVLS), ("two_shot_nvls", FA_TWO_SHOT_NVLS)];
/// Fills outputs before a call, and must be intact around them after it.
const POISON: u8 = 0xA5;

/// Makes several calls, so that both generations are used and reused.
fn play(program: &Program, (name, algorithm): (&str, FaAlgorithm), ty: Element, ranks: usize, count: usize) {
    let kernel = format!("{name}_{}", ty.name);
    if crate::is_left_out(program, &kernel) {
        return;
    }
    let skew = if count % 3 == 1 { ty.bytes } else { 0 };
    let mut world = World::new(ranks, count * ty.bytes + skew);
    for turn in 0..4 {
        for (rank, input) in world.inputs.iter_mut().enumerate() {
            input.write(skew, &ty.input(rank, turn, count));
        }
        world.outputs.iter_mut().for_each(|output| output.fill(POISON));
        let launch = |rank| {
            let mut launch = world.launch_of(rank, algorithm, ty.code, count as u64);
            launch.input += skew as u64;
            launch.output += skew as u64;
            launch.checked = u32::from(turn % 2 == 1);
            launch
        };
        let launches: Vec<_> = (0..ranks).map(launch).collect();
        let settings = Settings {
            seed: turn as u64 * 7 + ranks as u64,
            race: program.is_observed(),
            ..Settings::default()
        };
        // Grids differ from call to call.
        let shape = [(2, 64), (1, 32), (3, 32), (2, 64)][turn];
        world
            .run_together(program, &kernel, shape, &launches, settings)
            .unwrap_or_else(|error| panic!("turn {turn}: {error}"));
        let expected = ty.sums(ranks, turn, count);
        for (rank, output) in world.outputs.iter().enumerate() {
            let (before, rest) = output.read().split_at(skew);
            let (sum, after) = rest.split_at(expected.len());
            let wrong = (0..expected.len()).find(|&at| sum[at] != expected[at]);
            assert_eq!(
                wrong,
                None,
                "{kernel}, {count} elements, turn {turn}, rank {rank} of {ranks}, failure {}: the first wrong \
                    byte of the sum",
                world.failure_of(rank)
            );
            assert!([before, after].concat().iter().all(|&byte| byte == POISON), "{kernel}: around the sum");
            assert_eq!(world.failure_of(rank), FA_OK);
        }
    }
}

fn sums_in_any_world(program: &Program) {
    for kernel in ALGORITHMS {
        for ty in [F16, BF16, F32] {
            for (ranks, count) in [(2, 64), (2, 1), (3, 517), (5, 1000), (8, 4000), (16, 33)] {
                play(program, kernel, ty, ranks, count);
            }
        }
    }
}

fn nothing_races(program: &Program) {
    for kernel in ALGORITHMS {
        for (ty, ranks, count) in [(F16, 2, 333), (BF16, 3, 517), (F32, 4, 700)] {
            play(program, kernel, ty, ranks, count);
        }
    }
}

/// Only multimem instructions may use a multicast address, as on a GPU.
fn an_address_of_multicast_is_no_other(program: &Program) {
    let kernel = "one_shot_nvls_f32";
    if crate::is_left_out(program, kernel) {
        return;
    }
    let world = World::new(2, 256);
    for (rank, fault) in [(0, "own"), (1, "multicast")] {
        let mut launch = world.launch_of(rank, FA_ONE_SHOT_NVLS, FA_F32, 64);
        launch.world = 1;
        launch.rank = 0;
        launch.own = launch.regions[0];
        match fault {
            "own" => launch.window = launch.multicast,
            _ => launch.multicast = launch.window,
        }
        let error = world.run_one(program, kernel, (1, 32), &launch, 1).unwrap_err();
        assert_eq!(error.fault, Fault::IllegalAddress, "{fault}: {error}");
    }
}
