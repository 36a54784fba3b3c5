//! Allreduce by the kernels of the hot set and those for any world size: between host threads, and in
//! turns.

use catalogue::types::HOT_WORLDS;
use fast_allreduce_ptx_machine::{Program, Settings};

use crate::abi::*;
use crate::elements::{Element, BF16, F16, F32, I64, U8};
use crate::world::World;

tests! {
    crate::program => sums_between_threads_of_the_host, loops_that_go_round_often, zeros_of_both_signs;
    crate::observed => nothing_races_in_the_hot_set, nothing_races_in_kernels_of_any_world;
}

pub const ALGORITHMS: [(&str, FaAlgorithm); 4] = [
    ("one_shot_pull", FA_ONE_SHOT_PULL),
    ("two_shot_pull", FA_TWO_SHOT_PULL),
    ("one_shot_push", FA_ONE_SHOT_PUSH),
    ("two_shot_push", FA_TWO_SHOT_PUSH),
];

/// Fills outputs before a call, and must be intact around them after it.
const POISON: u8 = 0xA5;

/// A call to test.
#[derive(Clone, Copy)]
struct Call {
    algorithm: FaAlgorithm,
    ty: Element,
    count: usize,
    /// Offset of inputs and outputs from pack alignment, in bytes.
    skew: usize,
    /// Whether peers read the input directly.
    registered: bool,
    /// Whether the output replaces the input.
    in_place: bool,
}

impl Call {
    fn launches(&self, world: &World) -> Vec<FaLaunch> {
        let of_rank = |rank| {
            let mut launch = world.launch_of(rank, self.algorithm, self.ty.code, self.count as u64);
            launch.input += self.skew as u64;
            launch.output += self.skew as u64;
            if self.in_place {
                launch.output = launch.input;
            }
            if self.registered {
                launch.source = (1 << FA_SOURCE_ID_SHIFT) + self.skew as u64;
            }
            launch
        };
        (0..world.regions.len()).map(of_rank).collect()
    }

    fn fill(&self, world: &mut World, turn: usize) {
        for (rank, input) in world.inputs.iter_mut().enumerate() {
            input.fill(POISON);
            input.write(self.skew, &self.ty.input(rank, turn, self.count));
        }
        world.outputs.iter_mut().for_each(|output| output.fill(POISON));
    }

    fn check(&self, world: &World, kernel: &str, turn: usize) {
        let ranks = world.regions.len();
        let expected = self.ty.sums(ranks, turn, self.count);
        let outputs = if self.in_place { &world.inputs } else { &world.outputs };
        for (rank, output) in outputs.iter().enumerate() {
            let bytes = output.read();
            let (before, rest) = bytes.split_at(self.skew);
            let (result, after) = rest.split_at(expected.len());
            let wrong = (0..expected.len()).find(|&at| result[at] != expected[at]);
            assert_eq!(
                wrong, None,
                "{kernel}, {} elements, turn {turn}, rank {rank}, failure {}: the first wrong byte of the sum",
                self.count,
                world.failure_of(rank)
            );
            assert!(
                [before, after].concat().iter().all(|&byte| byte == POISON),
                "{kernel}, turn {turn}: around the sum"
            );
            assert_eq!(world.failure_of(rank), FA_OK, "{kernel}, turn {turn}, rank {rank}");
        }
    }

    /// Makes several calls, so that both generations of all staging are used and reused.
    fn play(&self, program: &Program, kernel: &str, ranks: usize, shape: (u32, u32)) {
        let mut world = World::new(ranks, self.count * self.ty.bytes + self.skew);
        for turn in 0..4 {
            self.fill(&mut world, turn);
            let settings = Settings {
                seed: turn as u64 * 7 + ranks as u64,
                race: program.is_observed(),
                ..Settings::default()
            };
            world
                .run_together(program, kernel, shape, &self.launches(&world), settings)
                .unwrap_or_else(|error| panic!("turn {turn}: {error}"));
            self.check(&world, kernel, turn);
        }
    }
}

fn sums_between_threads_of_the_host(program: &Program) {
    for (name, algorithm) in ALGORITHMS {
        for (ty, ranks, count, shape) in [
            (F32, 2, 64, (1, 32)),
            (F16, 2, 1008, (3, 64)),
            (BF16, 3, 1008, (2, 512)),
            (F32, 8, 1024, (1, 128)),
        ] {
            let kernel = format!("{name}_{}_sum_w{ranks}", ty.name);
            if crate::is_left_out(program, &kernel) {
                continue;
            }
            let call = Call { algorithm, ty, count, skew: 0, registered: false, in_place: false };
            let mut world = World::new(ranks, count * ty.bytes);
            for turn in 0..4 {
                call.fill(&mut world, turn);
                let launches = call.launches(&world);
                for result in world.run(program, &kernel, shape, &launches) {
                    result.unwrap_or_else(|error| panic!("{error}"));
                }
                call.check(&world, &kernel, turn);
            }
        }
    }
}

/// Returns a number of packs that the hot kernel handles, at least `packs`; a two-shot needs equal numbers
/// for each rank.
fn whole_packs(algorithm: &str, packs: usize, ranks: usize) -> usize {
    if algorithm.starts_with("two_shot") {
        packs.next_multiple_of(ranks)
    } else {
        packs
    }
}

/// One warp handles a whole message: every loop has several iterations, also in slices. Or there are so few
/// packs that some threads have none.
fn loops_that_go_round_often(program: &Program) {
    for (name, algorithm) in ALGORITHMS {
        for ty in [F16, BF16, F32] {
            for ranks in HOT_WORLDS.map(|ranks| ranks as usize) {
                let kernel = format!("{name}_{}_sum_w{ranks}", ty.name);
                if crate::is_left_out(program, &kernel) {
                    continue;
                }
                let packs = 32 * 3 * if name.starts_with("two_shot") { ranks } else { 1 };
                for packs in [packs, whole_packs(name, 3, ranks)] {
                    let call = Call {
                        algorithm,
                        ty,
                        count: packs * 16 / ty.bytes,
                        skew: 0,
                        registered: false,
                        in_place: false,
                    };
                    call.play(program, &kernel, ranks, (1, 32));
                }
            }
        }
    }
}

/// Packets of sums are marked by their content: words of zeros of either sign, and sums equal to zero, must
/// arrive unchanged. Some ranks use the kernel for any world size. Everything that was read must be empty
/// again.
fn zeros_of_both_signs(program: &Program) {
    for (name, algorithm) in &ALGORITHMS[2..] {
        for (ty, one) in [(F16, 0x3C00), (BF16, 0x3F80), (F32, 0x3F80_0000_u32)] {
            for ranks in [2, 3, 8] {
                let (hot, any) = (format!("{name}_{}_sum_w{ranks}", ty.name), format!("{name}_{}", ty.name));
                if crate::is_left_out(program, &hot) || crate::is_left_out(program, &any) {
                    continue;
                }
                let count = whole_packs(name, 40, ranks) * 16 / ty.bytes;
                let call =
                    Call { algorithm: *algorithm, ty, count, skew: 0, registered: false, in_place: false };
                let mut world = World::new(ranks, count * ty.bytes);
                let minus = 1_u32 << (8 * ty.bytes - 1);
                for turn in 0..5 {
                    // Each element depends on a digit of its index and turn: +0, -0, or a value that
                    // another rank has negated.
                    for (rank, input) in world.inputs.iter_mut().enumerate() {
                        for i in 0..count {
                            let value = match (i * 7 + i / 5 + turn) % 3 {
                                0 => 0,
                                1 => minus,
                                _ if rank < 2 => one | (minus * rank as u32),
                                _ => minus,
                            };
                            input.write(i * ty.bytes, &value.to_le_bytes()[..ty.bytes]);
                        }
                    }
                    world.outputs.iter_mut().for_each(|output| output.fill(POISON));
                    let kernels: Vec<&str> =
                        (0..ranks).map(|rank| if (rank + turn) % 3 == 0 { &*any } else { &*hot }).collect();
                    let settings = Settings { seed: turn as u64, ..Settings::default() };
                    world
                        .run_each(program, &kernels, (2, 32), &call.launches(&world), settings)
                        .unwrap_or_else(|error| panic!("{hot}, turn {turn}: {error}"));
                    for (rank, output) in world.outputs.iter().enumerate() {
                        let sum = &output.read()[..count * ty.bytes];
                        assert!(
                            sum.iter().all(|&byte| byte == 0),
                            "{hot}, turn {turn}, rank {rank}: the sum"
                        );
                    }
                    let empty = world.sentinels().all(|bytes| bytes.iter().all(|&byte| byte == 0));
                    assert!(empty, "{hot}, turn {turn}: a packet is left");
                }
            }
        }
    }
}

/// Every algorithm, type and world size, pulls staged and registered, pushes to an output and (bf16) in place: two
/// blocks of 32 threads, an odd number of packs.
fn nothing_races_in_the_hot_set(program: &Program) {
    for (name, algorithm) in ALGORITHMS {
        for ty in [F16, BF16, F32] {
            for ranks in HOT_WORLDS.map(|ranks| ranks as usize) {
                let kernel = format!("{name}_{}_sum_w{ranks}", ty.name);
                if crate::is_left_out(program, &kernel) {
                    continue;
                }
                let pull = algorithm == FA_ONE_SHOT_PULL || algorithm == FA_TWO_SHOT_PULL;
                for other in [false, true] {
                    let (registered, in_place) = (other && pull, other && !pull);
                    // The type makes no difference to what is in place.
                    if in_place && ty.code != BF16.code {
                        continue;
                    }
                    // In place a thread without a pack loads one of another thread, which may store its sum at
                    // that moment. The value is not used, but it is a race: here every thread has a pack.
                    let packs = if in_place { 77 * ranks } else { 77 };
                    let count = whole_packs(name, packs, ranks) * 16 / ty.bytes;
                    let call = Call { algorithm, ty, count, skew: 0, registered, in_place };
                    call.play(program, &kernel, ranks, (2, 32));
                }
            }
        }
    }
}

/// Odd counts, and addresses that are not aligned to packs.
fn nothing_races_in_kernels_of_any_world(program: &Program) {
    for (name, algorithm) in ALGORITHMS {
        for ty in [U8, F16, F32, I64] {
            let kernel = format!("{name}_{}", ty.name);
            if crate::is_left_out(program, &kernel) {
                continue;
            }
            let many = 4000 / ty.bytes;
            for (ranks, count, skew) in
                [(2, 333, 0), (3, 517, ty.bytes), (5, 64, 0), (4, 1, 2 * ty.bytes), (3, many, 0)]
            {
                let call = Call { algorithm, ty, count, skew, registered: false, in_place: false };
                call.play(program, &kernel, ranks, (2, 64));
            }
        }
    }
}
