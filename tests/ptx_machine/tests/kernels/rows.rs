//! Rows that blocks normalise in teams, and ranks beside them whose blocks have whole rows.

use fast_allreduce_ptx_machine::Program;

use crate::abi::*;
use crate::elements::{Element, BF16, F16, F32};
use crate::world::World;

tests! {
    crate::program => rows_by_teams, teams_that_wait_in_vain;
    crate::observed => nothing_races_in_teams;
}

const KERNELS: [(&str, FaAlgorithm); 2] =
    [("one_shot_push_norm", FA_ONE_SHOT_PUSH_NORM), ("two_shot_push_norm", FA_TWO_SHOT_PUSH_NORM)];

/// Rows of so many elements, a row for each team of so many blocks, and the chunks of squares that each of these has.
#[derive(Clone, Copy, Debug)]
struct Shape {
    rows: u32,
    row: u32,
    team: u32,
    each: u32,
    /// Of the grid.
    blocks: u32,
    threads: u32,
}

const SHAPES: [Shape; 4] = [
    Shape { rows: 5, row: 64, team: 1, each: 1, blocks: 2, threads: 32 },
    Shape { rows: 2, row: 1096, team: 3, each: 1, blocks: 6, threads: 64 },
    Shape { rows: 3, row: 1536, team: 2, each: 2, blocks: 6, threads: 64 },
    Shape { rows: 4, row: 520, team: 2, each: 1, blocks: 9, threads: 32 },
];

/// A call of a world.
struct Call<'a> {
    program: &'a Program,
    kernel: String,
    algorithm: FaAlgorithm,
    ty: Element,
    ranks: usize,
    shape: Shape,
    /// Whether a rank has teams: its addresses say so.
    in_teams: fn(usize) -> bool,
}

impl Call<'_> {
    fn count(&self) -> usize {
        (self.shape.rows * self.shape.row) as usize
    }

    /// The residual comes after the input, and normalised rows after the sums.
    fn world(&self) -> World {
        World::new(self.ranks, 2 * self.count() * self.ty.bytes)
    }

    /// The residual's sum at an index: by row a power of 2, of either sign. So all that a row is multiplied by is 1 over that.
    fn sum(&self, i: usize, turn: usize) -> i64 {
        let row = i / self.shape.row as usize;
        let magnitude = 1 << ((row + turn) % 3);
        if (i * 5 + i / 7 + turn).is_multiple_of(3) {
            -magnitude
        } else {
            magnitude
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
        }
        world.outputs.iter_mut().for_each(|output| output.fill(0xA5));
    }

    fn launches(&self, world: &World) -> Vec<(FaLaunch, FaRmsNorm)> {
        let Shape { rows, row, team, each, .. } = self.shape;
        let (bytes, chunks) = ((self.count() * self.ty.bytes) as u64, row.div_ceil(FA_SQUARES_CHUNK));
        let of_rank = |rank: usize| {
            let launch = world.launch_of(rank, self.algorithm, self.ty.code, self.count() as u64);
            // SAFETY: a struct of numbers.
            let mut norm: FaRmsNorm = unsafe { std::mem::zeroed() };
            (norm.residual, norm.normed) = (launch.input + bytes, launch.output + bytes);
            (norm.row, norm.rows, norm.dtype) = (row, rows, self.ty.code);
            if (self.in_teams)(rank) {
                (norm.team, norm.team_inverse) = (team, (1_u32 << 16).div_ceil(team));
                norm.share = each * FA_SQUARES_CHUNK * self.ty.bytes as u32 / FA_CUDA_PACK_BYTES;
                norm.chunks = chunks;
            }
            (launch, norm)
        };
        (0..self.ranks).map(of_rank).collect()
    }

    fn run(&self, world: &World, launches: &[(FaLaunch, FaRmsNorm)], seed: usize) {
        let grid = (self.shape.blocks, self.shape.threads);
        world
            .run_with(self.program, &self.kernel, launches, grid, seed as u64)
            .unwrap_or_else(|error| panic!("{}, {:?}: {error}", self.kernel, self.shape));
    }

    /// Some turns, so that both generations of mailboxes are used, and used again.
    fn play(&self) {
        let mut world = self.world();
        for turn in 0..4 {
            self.fill(&mut world, turn);
            self.run(&world, &self.launches(&world), turn * 7 + self.ranks);
            for (rank, output) in world.outputs.iter().enumerate() {
                let case = format!("{}, turn {turn}, rank {rank} of {}", self.kernel, self.ranks);
                assert_eq!(world.failure_of(rank), FA_OK, "{case}");
                let bytes = output.read();
                for i in 0..self.count() {
                    let sum = self.sum(i, turn);
                    for (number, at) in [(sum, i), (sum.signum(), self.count() + i)] {
                        let is = &bytes[at * self.ty.bytes..(at + 1) * self.ty.bytes];
                        assert_eq!(is, self.ty.number(number), "{case}: element {at}, {:?}", self.shape);
                    }
                }
            }
            let empty = world.sentinels().all(|bytes| bytes.iter().all(|&byte| byte == 0));
            assert!(empty, "{}, turn {turn}: a packet is left", self.kernel);
        }
    }

    /// Without a rank, and where ranks have given up before the first comes, which has their inputs.
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
            // A one-shot needs nothing but the inputs.
            let expected = if self.algorithm == FA_ONE_SHOT_PUSH_NORM { FA_OK } else { FA_TIMED_OUT };
            assert_eq!(world.failure_of(missing), expected, "{}: {missing} after the others", self.kernel);
        }
    }
}

fn for_each_call(program: &Program, ranks: &[usize], body: impl Fn(&Call<'_>)) {
    let all: fn(usize) -> bool = |_| true;
    for (name, algorithm) in KERNELS {
        for ty in [F16, BF16, F32] {
            let kernel = format!("{name}_{}", ty.name);
            if crate::is_left_out(program, &kernel) {
                continue;
            }
            for &ranks in ranks {
                for shape in SHAPES {
                    for in_teams in [all, |rank| rank % 2 == 1] {
                        let kernel = kernel.clone();
                        body(&Call { program, kernel, algorithm, ty, ranks, shape, in_teams });
                    }
                }
            }
        }
    }
}

fn rows_by_teams(program: &Program) {
    for_each_call(program, &[1, 2, 3, 8], |call| call.play());
}

fn nothing_races_in_teams(program: &Program) {
    for_each_call(program, &[2, 3], |call| call.play());
}

fn teams_that_wait_in_vain(program: &Program) {
    for_each_call(program, &[3], |call| call.gives_up());
}
