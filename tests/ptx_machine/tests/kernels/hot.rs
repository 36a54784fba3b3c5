//! Sums by the four direct algorithms.

use fast_allreduce_ptx_machine::Program;

use crate::abi::*;
use crate::world::World;

tests! {
    crate::program => sums_between_threads_of_the_host;
}

pub const ALGORITHMS: [(&str, FaAlgorithm); 4] = [
    ("one_shot_pull", FA_ONE_SHOT_PULL),
    ("two_shot_pull", FA_TWO_SHOT_PULL),
    ("one_shot_push", FA_ONE_SHOT_PUSH),
    ("two_shot_push", FA_TWO_SHOT_PUSH),
];

/// An element type of the hot set.
#[derive(Clone, Copy)]
pub struct Element {
    pub name: &'static str,
    pub code: FaDtype,
    pub bytes: usize,
    /// Bits of a small integer.
    bits: fn(i32) -> u32,
}

pub const TYPES: [Element; 3] = [
    Element { name: "f16", code: FA_F16, bytes: 2, bits: |value| small(value, 10, 15) },
    Element { name: "bf16", code: FA_BF16, bytes: 2, bits: |value| small(value, 7, 127) },
    Element { name: "f32", code: FA_F32, bytes: 4, bits: |value| (value as f32).to_bits() },
];

/// An integer that the format has exactly, by the bits of its fraction and the bias of its exponent.
fn small(value: i32, fraction: u32, bias: u32) -> u32 {
    let magnitude = value.unsigned_abs();
    if magnitude == 0 {
        return 0;
    }
    let top = magnitude.ilog2();
    let kept = (magnitude << fraction >> top) & ((1 << fraction) - 1);
    u32::from(value < 0) << 15 | (top + bias) << fraction | kept
}

/// Small integers: sums of eight are exact in every type, in any order.
fn value(rank: usize, i: usize) -> i32 {
    ((i * 7 + rank * 13) % 31) as i32 - 15
}

fn bytes(ty: Element, values: impl Iterator<Item = i32>) -> Vec<u8> {
    values.flat_map(|value| (ty.bits)(value).to_le_bytes().into_iter().take(ty.bytes)).collect()
}

/// Writes the inputs of a turn, and over the outputs of the last.
pub fn fill(world: &mut World, ty: Element, count: usize, turn: usize) {
    for (rank, input) in world.inputs.iter_mut().enumerate() {
        input.write(&bytes(ty, (0..count).map(|i| value(rank + turn, i))));
    }
    for output in &mut world.outputs {
        output.write(&vec![0xA5; count * ty.bytes]);
    }
}

pub fn sums(ty: Element, count: usize, ranks: usize, turn: usize) -> Vec<u8> {
    bytes(ty, (0..count).map(|i| (0..ranks).map(|rank| value(rank + turn, i)).sum()))
}

fn sums_between_threads_of_the_host(program: &Program) {
    for (name, algorithm) in ALGORITHMS {
        for (ty, ranks, count, shape) in [
            (TYPES[2], 2, 64, (1, 32)),
            (TYPES[0], 2, 1000, (3, 64)),
            (TYPES[1], 3, 1000, (2, 512)),
            (TYPES[2], 8, 1024, (1, 128)),
        ] {
            let mut world = World::new(ranks, count * 4);
            let kernel = format!("{name}_{}_sum_w{ranks}", ty.name);
            for turn in 0..3 {
                fill(&mut world, ty, count, turn);
                let launch = |rank| world.launch_of(rank, algorithm, ty.code, count as u64);
                for result in world.run(program, &kernel, shape, launch) {
                    result.unwrap_or_else(|error| panic!("{error}"));
                }
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
