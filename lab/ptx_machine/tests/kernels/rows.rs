//! Rows that are normalised by teams of blocks, in worlds where other ranks have whole rows per block.

use fast_allreduce_ptx_machine::Program;

use crate::abi::*;
use crate::elements::{Element, BF16, F16, F32};
use crate::world::{World, MAILBOX};

tests! {
    crate::program => rows_by_teams, long_rows_by_teams, numbers_by_teams, long_numbers_by_teams,
        teams_that_wait_in_vain, blocks_that_wait_for_their_team_in_vain;
    crate::observed => nothing_races_in_teams, nothing_races_in_numbers;
}

/// One-shots and two-shots share the kernel `push_norm`.
const ALGORITHMS: [FaAlgorithm; 2] = [FA_ONE_SHOT_PUSH_NORM, FA_TWO_SHOT_PUSH_NORM];

/// Elements of a row, blocks of a team (one team per row), and the chunks of squares that each block has.
#[derive(Clone, Copy, Debug)]
struct Shape {
    rows: u32,
    row: u32,
    team: u32,
    each: u32,
    /// Blocks of the grid.
    blocks: u32,
    threads: u32,
}

const SHAPES: [Shape; 6] = [
    Shape { rows: 5, row: 64, team: 1, each: 1, blocks: 2, threads: 32 },
    Shape { rows: 2, row: 1096, team: 3, each: 1, blocks: 6, threads: 64 },
    // 11 groups of 128: columns of words have padding.
    Shape { rows: 3, row: 1408, team: 2, each: 2, blocks: 6, threads: 64 },
    Shape { rows: 4, row: 520, team: 2, each: 1, blocks: 9, threads: 32 },
    // 138 packs of 16-bit elements: the last round of a block has a part of a warp, with whole groups.
    Shape { rows: 3, row: 1104, team: 1, each: 3, blocks: 2, threads: 32 },
    // Each warp has the terms of one chunk, and gets those of the others.
    Shape { rows: 3, row: 1104, team: 1, each: 3, blocks: 2, threads: 96 },
];
/// Elements that no short row exceeds.
const SHORT: u32 = 2048;
/// Rows of more chunks than are added at once; and than a warp has lanes, by a team of more warps than that.
const LONG: [Shape; 2] = [
    Shape { rows: 1, row: 5128, team: 11, each: 1, blocks: 11, threads: 64 },
    Shape { rows: 1, row: 17_416, team: 18, each: 2, blocks: 18, threads: 64 },
];

/// A call of a world.
struct Call<'a> {
    program: &'a Program,
    kernel: String,
    algorithm: FaAlgorithm,
    ty: Element,
    ranks: usize,
    shape: Shape,
    /// Code of the norm. A LayerNorm without numbers has the weights as biases, too.
    norm: u32,
    /// Returns whether a rank has teams; it announces that by its addresses.
    in_teams: fn(usize) -> bool,
    /// Number format of normalised rows, if it is not the element type. The last element of each group then
    /// has a weight of 2, others of 1.
    numbers: Option<&'static Numbers>,
}

/// A number format with scales. The encodings of 1 and 2 are given for groups whose maximum is 1, and whose
/// maximum is 2.
#[derive(Debug)]
struct Numbers {
    scaling: FaScaling,
    rule: FaScaleRule,
    layout: FaScaleLayout,
    dtype: u32,
    bits: u32,
    /// Elements of a group with one scale, and bytes of the scale; 0 elements: a row.
    each: (u32, u32),
    of_one: [u8; 2],
    of_two: [u8; 2],
    scale_of_one: [u8; 4],
    scale_of_two: [u8; 4],
}

/// From a column of scales to the next.
const STRIDE: usize = 8;
/// The given scale, or the scale of all scales.
const GIVEN: [u8; 4] = 0.5f32.to_le_bytes();
const GLOBAL: [u8; 4] = 4.0f32.to_le_bytes();
const NUMBERS: [Numbers; 11] = [
    Numbers {
        scaling: FA_SCALE_GIVEN,
        dtype: FA_F8E4M3,
        each: (0, 0),
        of_one: [0x40, 0x48],
        of_two: [0x40, 0x48],
        scale_of_one: [0; 4],
        scale_of_two: [0; 4],
        ..WITH_FLOATS
    },
    Numbers {
        scaling: FA_SCALE_PER_ROW,
        dtype: FA_F8E4M3,
        each: (0, 4),
        of_one: [0x7E, 0x7E],
        of_two: [0x76, 0x7E],
        scale_of_one: (1.0f32 / 448.0).to_le_bytes(),
        scale_of_two: (2.0f32 / 448.0).to_le_bytes(),
        ..WITH_FLOATS
    },
    Numbers {
        scaling: FA_SCALE_PER_GROUP,
        dtype: FA_F8E5M2,
        each: (128, 4),
        of_one: [0x7B, 0x7B],
        of_two: [0x77, 0x7B],
        scale_of_one: (1.0f32 / 57344.0).to_le_bytes(),
        scale_of_two: (2.0f32 / 57344.0).to_le_bytes(),
        ..WITH_FLOATS
    },
    NVFP4,
    MXFP4,
    Numbers { scaling: FA_SCALE_NVFP4_TILED, layout: FA_LAYOUT_128X4, ..NVFP4 },
    Numbers { scaling: FA_SCALE_NVFP4_8X4, layout: FA_LAYOUT_8X4, ..NVFP4 },
    // Greatest magnitudes of 1 and 2 become 2^8.
    Numbers {
        scaling: FA_SCALE_MXFP8,
        dtype: FA_F8E4M3,
        bits: 8,
        of_one: [0x78, 0x78],
        of_two: [0x70, 0x78],
        scale_of_one: [119, 0, 0, 0],
        scale_of_two: [120, 0, 0, 0],
        ..MXFP4
    },
    // 1 / 57344 is rounded up to 2^-15.
    Numbers {
        scaling: FA_SCALE_PER_GROUP_UE8M0,
        rule: FA_RULE_E8M0_UP,
        layout: FA_LAYOUT_COLUMNS,
        dtype: FA_F8E5M2,
        bits: 8,
        each: (128, 1),
        of_one: [0x78, 0x78],
        of_two: [0x74, 0x78],
        scale_of_one: [112, 0, 0, 0],
        scale_of_two: [113, 0, 0, 0],
    },
    // 1 / 448 is rounded up to 2^-8.
    Numbers {
        scaling: FA_SCALE_PER_32_UE8M0,
        rule: FA_RULE_E8M0_UP,
        layout: FA_LAYOUT_COLUMNS,
        dtype: FA_F8E4M3,
        bits: 8,
        each: (32, 1),
        of_one: [0x78, 0x78],
        of_two: [0x70, 0x78],
        scale_of_one: [119, 0, 0, 0],
        scale_of_two: [120, 0, 0, 0],
    },
    Numbers {
        scaling: FA_SCALE_PER_GROUP_COLUMNS,
        layout: FA_LAYOUT_COLUMNS,
        dtype: FA_F8E5M2,
        each: (128, 4),
        of_one: [0x7B, 0x7B],
        of_two: [0x77, 0x7B],
        scale_of_one: (1.0f32 / 57344.0).to_le_bytes(),
        scale_of_two: (2.0f32 / 57344.0).to_le_bytes(),
        ..WITH_FLOATS
    },
];
/// Greatest magnitudes of 1 and 2 become 4.
const MXFP4: Numbers = Numbers {
    scaling: FA_SCALE_MXFP4,
    rule: FA_RULE_E8M0_FLOOR,
    each: (32, 1),
    of_one: [6, 6],
    of_two: [4, 6],
    scale_of_one: [125, 0, 0, 0],
    scale_of_two: [126, 0, 0, 0],
    ..NVFP4
};
/// What formats of 8 bits with scales that are floats have in common.
const WITH_FLOATS: Numbers = Numbers { rule: FA_RULE_F32, bits: 8, ..NVFP4 };
/// 4 / 6 is rounded to 0.6875, and 8 / 6 to 1.375; divided by these, 1 becomes 5.8 and 2.9.
const NVFP4: Numbers = Numbers {
    scaling: FA_SCALE_NVFP4,
    rule: FA_RULE_E4M3,
    layout: FA_LAYOUT_ROWS,
    dtype: FA_U8,
    bits: 4,
    each: (16, 1),
    of_one: [7, 7],
    of_two: [5, 7],
    scale_of_one: [0x33, 0, 0, 0],
    scale_of_two: [0x3B, 0, 0, 0],
};

impl Numbers {
    /// Returns whether the format has rows of this shape.
    fn takes(&self, shape: Shape) -> bool {
        self.rule == FA_RULE_F32 || shape.row.is_multiple_of(self.each.0)
    }

    /// Returns the index of the scale of a group, of several in each of at most 8 rows.
    fn scale_index(&self, row: usize, group: usize, groups: usize) -> usize {
        match self.layout {
            FA_LAYOUT_ROWS => row * groups + group,
            FA_LAYOUT_COLUMNS if self.each.1 == 4 => group * STRIDE + row,
            FA_LAYOUT_COLUMNS => (group / 4 * STRIDE + row) * 4 + group % 4,
            FA_LAYOUT_128X4 => group / 4 * 512 + row * 16 + group % 4,
            _ => group / 4 * 32 + row * 4 + group % 4,
        }
    }

    /// Checks a row's numbers, which have magnitude 1 except for the last of magnitude 2; and its scales.
    fn check(
        &self,
        normed: &[u8],
        scales: &[u8],
        row: usize,
        number: usize,
        signum: impl Fn(usize) -> i64,
        case: &str,
    ) {
        let each = if self.each.0 == 0 { row } else { self.each.0 as usize };
        for i in 0..row {
            let has_last = i / each == (row - 1) / each;
            let codes = if has_last { self.of_two } else { self.of_one };
            let code = codes[usize::from(i + 1 == row)];
            let expected = code | if signum(i) < 0 { 1 << (self.bits - 1) } else { 0 };
            let at = number * row + i;
            let is = if self.bits == 4 { normed[at / 2] >> (4 * (at % 2)) & 15 } else { normed[at] };
            assert_eq!(is, expected, "{case}: element {i} of row {number} of {row}, {self:?}");
            if self.each.1 == 0 || i % each != 0 {
                continue;
            }
            let (bytes, group) = (self.each.1 as usize, i / each);
            let at = self.scale_index(number, group, row.div_ceil(each)) * bytes;
            let scale = if has_last { self.scale_of_two } else { self.scale_of_one };
            // The last word of a row in a column is complete.
            let has_word = has_last && bytes == 1 && self.layout == FA_LAYOUT_COLUMNS;
            let padding = if has_word { 3 - group % 4 } else { 0 };
            assert_eq!(
                scales[at..at + bytes + padding],
                [&scale[..bytes], &[0; 3][..padding]].concat(),
                "{case}: scale {group} of row {number} of {row}, {self:?}"
            );
        }
    }
}

impl Call<'_> {
    fn count(&self) -> usize {
        (self.shape.rows * self.shape.row) as usize
    }

    /// Creates the memory: after the input come the residual, the weight and the given scale; after the
    /// sums come normalised rows, then their scales.
    fn world(&self) -> World {
        const SCALES: usize = 16 << 10;
        let bytes = self.weight() + (self.shape.row as usize * self.ty.bytes).max(SCALES) + 4;
        // In a two-shot half of a sender's slots are for inputs, those of a slice of the rows.
        let slice = (self.shape.rows as usize).div_ceil(self.ranks) * self.shape.row as usize * self.ty.bytes;
        let slots = (2 * slice).max(self.count() * self.ty.bytes) / FA_CUDA_PACK_BYTES as usize;
        let mailbox = (self.ranks * slots * FA_CUDA_SLOT_BYTES as usize).next_multiple_of(MAILBOX);
        World::with_mailbox(self.ranks, bytes, mailbox)
    }

    /// Returns the offset of the weight, or of the scales.
    fn weight(&self) -> usize {
        2 * self.count() * self.ty.bytes
    }

    /// Returns the sum with the residual at an index: in each row a power of 2, of either sign. So the
    /// factor of a row is its inverse. For LayerNorm the signs of two neighbours differ, and 8 is added: so the
    /// mean is 8.
    fn sum(&self, i: usize, turn: usize) -> i64 {
        let row = i / self.shape.row as usize;
        let (mean, magnitude) = (self.mean(), 1 << ((row + turn) % 3));
        let pair = if mean == 0 { i } else { i / 2 };
        let is_negative = (pair * 5 + pair / 7 + turn).is_multiple_of(3) != (mean != 0 && i % 2 == 1);
        mean + if is_negative { -magnitude } else { magnitude }
    }

    fn mean(&self) -> i64 {
        if self.norm == FA_NORM_LAYER {
            8
        } else {
            0
        }
    }

    fn sign(&self, i: usize, turn: usize) -> i64 {
        (self.sum(i, turn) - self.mean()).signum()
    }

    /// Returns the normalised element at an index.
    fn normed(&self, i: usize, turn: usize) -> i64 {
        let row = self.shape.row as usize;
        let weight = if i % row + 1 < row { 1 } else { 2 };
        match self.norm {
            FA_NORM_LAYER => (self.sign(i, turn) + 1) * weight,
            _ => self.sign(i, turn),
        }
    }

    fn fill(&self, world: &mut World, turn: usize) {
        let (ranks, bytes) = (self.ranks, self.ty.bytes);
        let term = |rank: usize, i: usize| ((i * 3 + i / 11 + rank * 5 + turn) % 7) as i64 - 3;
        for (rank, input) in world.inputs.iter_mut().enumerate() {
            for i in 0..self.count() {
                input.write(i * bytes, &self.ty.number(term(rank, i)));
                let rest = self.sum(i, turn) - (0..ranks).map(|rank| term(rank, i)).sum::<i64>();
                input.write((self.count() + i) * bytes, &self.ty.number(rest));
            }
            let row = self.shape.row as usize;
            for i in 0..row {
                input.write(self.weight() + i * bytes, &self.ty.number(if i + 1 < row { 1 } else { 2 }));
            }
            let is_global = self.numbers.is_some_and(|numbers| numbers.rule == FA_RULE_E4M3);
            input.write(self.weight() + row * bytes, if is_global { &GLOBAL } else { &GIVEN });
        }
        world.outputs.iter_mut().for_each(|output| output.fill(0xA5));
    }

    fn launches(&self, world: &World) -> Vec<(FaLaunch, FaFused)> {
        let Shape { rows, row, team, each, .. } = self.shape;
        let (bytes, chunks) = ((self.count() * self.ty.bytes) as u64, row.div_ceil(FA_SQUARES_CHUNK));
        let of_rank = |rank: usize| {
            let mut launch = world.launch_of(rank, self.algorithm, self.ty.code, self.count() as u64);
            // A busy machine may take seconds for a long row.
            launch.timeout_ns = 100_000_000_000;
            // SAFETY: `FaFused` has only number fields, for which zero is valid.
            let mut norm: FaFused = unsafe { std::mem::zeroed() };
            (norm.norm, norm.residual, norm.normed) =
                (self.norm, launch.input + bytes, launch.output + bytes);
            (norm.row, norm.rows, norm.total, norm.dtype) = (row, rows, row, self.ty.code);
            norm.checked = launch.checked;
            if self.norm == FA_NORM_LAYER {
                norm.weight = launch.input + self.weight() as u64;
                norm.bias = if self.numbers.is_none() { norm.weight } else { 0 };
            }
            if let Some(numbers) = self.numbers {
                (norm.scaling, norm.dtype) = (numbers.scaling, numbers.dtype);
                norm.number_bits = numbers.bits;
                (norm.numbers, norm.normed) = (norm.normed, 0);
                norm.weight = launch.input + self.weight() as u64;
                let given = norm.weight + u64::from(row) * self.ty.bytes as u64;
                norm.global_scale = given;
                let is_given = numbers.scaling == FA_SCALE_GIVEN;
                let (group, rule, layout) = (numbers.each.0, numbers.rule, numbers.layout);
                norm.scales = FaScales {
                    scales: if is_given { given } else { launch.output + self.weight() as u64 },
                    stride: STRIDE as u64,
                    first_row: 0,
                    group,
                    groups: if group == 0 { 1 } else { row.div_ceil(group) },
                    rule,
                    layout,
                };
            }
            if (self.in_teams)(rank) {
                (norm.team, norm.team_inverse) = (team, (1_u32 << 16).div_ceil(team));
                norm.block_packs = each * FA_SQUARES_CHUNK * self.ty.bytes as u32 / FA_CUDA_PACK_BYTES;
                norm.chunks = chunks;
                norm.turns = match self.algorithm {
                    FA_TWO_SHOT_PUSH_NORM => FaRowTurns::of(rows, self.ranks as u32, self.shape.blocks),
                    _ => FaRowTurns::of_one_shot(),
                };
            }
            (launch, norm)
        };
        (0..self.ranks).map(of_rank).collect()
    }

    fn run(&self, world: &World, launches: &[(FaLaunch, FaFused)], seed: usize) {
        let grid = (self.shape.blocks, self.shape.threads);
        world
            .run_with(self.program, &self.kernel, launches, grid, seed as u64)
            .unwrap_or_else(|error| panic!("{}, {:?}: {error}", self.kernel, self.shape));
    }

    /// Makes four calls, which use and reuse both generations of mailboxes. For number formats and for long rows
    /// two calls suffice, as their packets are the same.
    fn play(&self) {
        let mut world = self.world();
        let is_long = self.shape.row > SHORT;
        for turn in 0..if self.numbers.is_some() || is_long { 2 } else { 4 } {
            self.fill(&mut world, turn);
            self.run(&world, &self.launches(&world), turn * 7 + self.ranks);
            for (rank, output) in world.outputs.iter().enumerate() {
                let case = format!("{}, turn {turn}, rank {rank} of {}", self.kernel, self.ranks);
                assert_eq!(world.failure_of(rank), FA_OK, "{case}");
                let bytes = output.read();
                for i in 0..self.count() {
                    let sum = self.sum(i, turn);
                    for (number, at) in [(sum, i), (self.normed(i, turn), self.count() + i)] {
                        if at > i && self.numbers.is_some() {
                            continue;
                        }
                        let is = &bytes[at * self.ty.bytes..(at + 1) * self.ty.bytes];
                        assert_eq!(is, self.ty.number(number), "{case}: element {at}, {:?}", self.shape);
                    }
                }
                let row = self.shape.row as usize;
                let (normed, scales) = bytes[self.weight() / 2..].split_at(self.weight() / 2);
                for (numbers, number) in
                    self.numbers.iter().flat_map(|&n| (0..self.count() / row).map(move |row| (n, row)))
                {
                    numbers.check(normed, scales, row, number, |i| self.sign(number * row + i, turn), &case);
                }
            }
            let empty = world.sentinels().all(|bytes| bytes.iter().all(|&byte| byte == 0));
            assert!(empty, "{}, turn {turn}: a packet is left", self.kernel);
        }
    }

    /// Gives up without one rank, and if other ranks have given up before the first rank, which has their
    /// inputs, arrives.
    fn gives_up(&self) {
        for missing in [self.ranks - 1, 0] {
            let mut world = self.world();
            self.fill(&mut world, 0);
            let mut launches = self.launches(&world);
            launches.iter_mut().for_each(|(launch, _)| launch.timeout_ns = 200_000);
            let last = launches.remove(missing);
            self.run(&world, &launches, missing);
            for (launch, _) in &launches {
                let rank = launch.rank as usize;
                assert_eq!(world.failure_of(rank), FA_TIMED_OUT, "{}: without {missing}", self.kernel);
            }
            self.run(&world, &[last], 1);
            // A one-shot needs only the inputs.
            let expected = if self.algorithm == FA_ONE_SHOT_PUSH_NORM { FA_OK } else { FA_TIMED_OUT };
            assert_eq!(world.failure_of(missing), expected, "{}: {missing} after the others", self.kernel);
        }
    }

    /// Gives up after one rank has sent only what its first block sends. So the first block of a peer's first team
    /// has its sums, or some of them, and waits for the others, which wait for packets.
    fn gives_up_in_part(&self) {
        const LATE: usize = 1;
        // Within the first limit the other ranks have sent everything, unless this machine does something else.
        let named = [100_000_000, 1_000_000_000, 10_000_000_000].iter().find_map(|&limit| {
            let missing = self.missing_without(LATE, limit);
            let is_named = |&missing: &u32| {
                // In a two-shot others wait for sums of a rank that waits for the late one.
                missing == 1 << LATE || self.algorithm == FA_TWO_SHOT_PUSH_NORM && missing != 0
            };
            let all = missing.iter().fold(0, |all, missing| all | missing);
            (missing.iter().all(is_named) && all & 1 << LATE != 0).then_some(())
        });
        assert!(named.is_some(), "{}, {:?}: others are named", self.kernel, self.shape);
    }

    /// Returns the ranks that each rank but `late` names when it gives up, after `limit` nanoseconds.
    fn missing_without(&self, late: usize, limit: u64) -> Vec<u32> {
        let mut world = self.world();
        self.fill(&mut world, 0);
        let mut launches = self.launches(&world);
        launches.iter_mut().for_each(|(launch, _)| launch.timeout_ns = limit);
        let mut late = launches.remove(late);
        late.0.timeout_ns = 200_000;
        let one_block =
            Call { shape: Shape { blocks: 1, ..self.shape }, kernel: self.kernel.clone(), ..*self };
        one_block.run(&world, &[late], 2);
        self.run(&world, &launches, 3);
        let missing = launches.iter().map(|(launch, _)| {
            let rank = launch.rank as usize;
            let case = format!("{}, {:?}: rank {rank}", self.kernel, self.shape);
            assert_eq!(world.failure_of(rank), FA_TIMED_OUT, "{case}");
            let missing = world.missing_of(rank);
            // A wait for a block of the same rank is none for a peer.
            assert!(missing & 1 << rank == 0, "{case}: without {missing:#b}");
            assert_eq!(world.waits_of(rank, rank), 0, "{case}: waits for itself");
            missing
        });
        missing.collect()
    }
}

fn for_each_call(program: &Program, shapes: &[Shape], ranks: &[usize], body: impl Fn(&Call<'_>)) {
    let all: fn(usize) -> bool = |_| true;
    for algorithm in ALGORITHMS {
        for ty in [F16, BF16, F32] {
            let kernel = format!("push_norm_{}", ty.name);
            if crate::is_left_out(program, &kernel) {
                continue;
            }
            let norms = |ranks| [(ranks, FA_NORM_RMS), (ranks, FA_NORM_LAYER)];
            for (ranks, norm) in ranks.iter().flat_map(|&ranks| norms(ranks)) {
                // One world is enough for other norms.
                if norm != FA_NORM_RMS && ranks != 3 {
                    continue;
                }
                for &shape in shapes {
                    // Long rows take long. Their types and their ranks without teams differ no more than short rows'.
                    let is_long = shape.row > SHORT;
                    if is_long && ty.code != BF16.code {
                        continue;
                    }
                    for in_teams in [all, |rank| rank % 2 == 1].into_iter().take(if is_long { 1 } else { 2 })
                    {
                        let kernel = kernel.clone();
                        let numbers = None;
                        body(&Call { program, kernel, algorithm, ty, ranks, shape, norm, in_teams, numbers });
                    }
                }
            }
        }
    }
}

fn rows_by_teams(program: &Program) {
    for_each_call(program, &SHAPES, &[1, 2, 3, 8], |call| call.play());
}

fn long_rows_by_teams(program: &Program) {
    for_each_call(program, &LONG, &[3], |call| call.play());
}

/// Runs each number format in its possible shapes; ranks without teams must give the same result.
fn for_each_kind(
    program: &Program,
    kinds: &'static [Numbers],
    shapes: &[Shape],
    ranks: usize,
    body: impl Fn(&Call<'_>),
) {
    for numbers in kinds {
        for_each_call(program, shapes, &[ranks], |call| {
            if numbers.takes(call.shape) {
                body(&Call { numbers: Some(numbers), kernel: call.kernel.clone(), ..*call });
            }
        });
    }
}

fn numbers_by_teams(program: &Program) {
    for_each_kind(program, &NUMBERS, &SHAPES, 3, |call| call.play());
}

/// Formats with a scale for each row, and for each 128 elements.
fn long_numbers_by_teams(program: &Program) {
    for_each_kind(program, &NUMBERS[1..3], &LONG, 2, |call| call.play());
}

fn nothing_races_in_numbers(program: &Program) {
    for_each_kind(program, &NUMBERS[1..4], &SHAPES, 2, |call| call.play());
}

fn nothing_races_in_teams(program: &Program) {
    for_each_call(program, &SHAPES, &[2, 3], |call| call.play());
}

fn teams_that_wait_in_vain(program: &Program) {
    for_each_call(program, &SHAPES, &[3], |call| call.gives_up());
}

fn blocks_that_wait_for_their_team_in_vain(program: &Program) {
    let gives_up = |call: &Call<'_>| {
        if call.shape.team > 2 && call.ty.code == BF16.code && (call.in_teams)(0) {
            call.gives_up_in_part();
        }
    };
    for_each_call(program, &SHAPES, &[3], gives_up);
    for_each_kind(program, &NUMBERS[1..2], &SHAPES, 3, gives_up);
}
