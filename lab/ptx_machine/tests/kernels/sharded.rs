//! Rows whose elements are divided among the ranks: one packet for each row and rank.

use fast_allreduce_ptx_machine::Program;

use crate::abi::*;
use crate::elements::{Element, BF16, F16, F32};
use crate::world::World;

tests! {
    crate::program => sharded_rows, sharded_rows_that_wait_in_vain;
    crate::observed => nothing_races_in_sharded_rows;
}

/// Elements of a rank's parts of a row (0: there is no second part), and the grid.
#[derive(Clone, Copy, Debug)]
struct Shape {
    rows: u32,
    columns: [u32; 2],
    /// Elements between the parts.
    gap: u32,
    grid: (u32, u32),
}

const SHAPES: [Shape; 5] = [
    Shape { rows: 3, columns: [64, 0], gap: 0, grid: (2, 32) },
    Shape { rows: 5, columns: [520, 16], gap: 8, grid: (2, 64) },
    Shape { rows: 2, columns: [1096, 512], gap: 0, grid: (1, 64) },
    Shape { rows: 3, columns: [7, 33], gap: 1, grid: (4, 32) },
    Shape { rows: 1, columns: [1, 2], gap: 4, grid: (1, 32) },
];

/// A call of a world.
struct Call<'a> {
    program: &'a Program,
    kernel: String,
    ty: Element,
    ranks: usize,
    shape: Shape,
}

impl Call<'_> {
    /// Returns the number of elements from a row to the next.
    fn stride(&self) -> usize {
        (self.shape.columns[0] + self.shape.gap + self.shape.columns[1]) as usize
    }

    /// Returns the number of elements before a part in its row.
    fn first(&self, part: usize) -> usize {
        part * (self.shape.columns[0] + self.shape.gap) as usize
    }

    /// Creates the memory: after the rows of the input come the weights.
    fn world(&self) -> World {
        World::new(self.ranks, (self.shape.rows as usize + 1) * self.stride() * self.ty.bytes)
    }

    /// Returns an element: in each part a power of 2, of either sign. So the factor of a part is its inverse.
    fn element(&self, (rank, row, part, i): (usize, usize, usize, usize), turn: usize) -> i64 {
        let magnitude = 1 << ((row + part + turn) % 3);
        if (i * 5 + i / 7 + turn + rank).is_multiple_of(3) {
            -magnitude
        } else {
            magnitude
        }
    }

    /// Calls `body` with each row, part and element, and its index in a rank's rows.
    fn for_each(&self, mut body: impl FnMut((usize, usize, usize), usize)) {
        for row in 0..self.shape.rows as usize {
            for (part, &columns) in self.shape.columns.iter().enumerate() {
                for i in 0..columns as usize {
                    body((row, part, i), row * self.stride() + self.first(part) + i);
                }
            }
        }
    }

    fn weight(&self, part: usize, i: usize) -> i64 {
        if i + 1 == self.shape.columns[part] as usize {
            2
        } else {
            1
        }
    }

    fn fill(&self, world: &mut World, turn: usize) {
        let bytes = self.ty.bytes;
        for (rank, input) in world.inputs.iter_mut().enumerate() {
            self.for_each(|(row, part, i), at| {
                input.write(at * bytes, &self.ty.number(self.element((rank, row, part, i), turn)));
            });
            for (part, &columns) in self.shape.columns.iter().enumerate() {
                for i in 0..columns as usize {
                    let at = self.shape.rows as usize * self.stride() + self.first(part) + i;
                    input.write(at * bytes, &self.ty.number(self.weight(part, i)));
                }
            }
        }
        world.outputs.iter_mut().for_each(|output| output.fill(0xA5));
    }

    fn launches(&self, world: &World) -> Vec<(FaLaunch, FaShardedNorm)> {
        let Shape { rows, columns, .. } = self.shape;
        let size = self.ty.bytes as u64;
        let of_rank = |rank: usize| {
            let launch = world.launch_of(rank, FA_SHARDED_RMS_NORM, self.ty.code, rows.into());
            let part = |number: usize| {
                let skipped = self.first(number) as u64 * size;
                let weights = u64::from(rows) * self.stride() as u64 * size;
                FaShardedRows {
                    from: launch.input + skipped,
                    to: launch.output + skipped,
                    weight: launch.input + weights + skipped,
                    from_stride: self.stride() as u64 * size,
                    to_stride: self.stride() as u64 * size,
                    row: columns[number],
                    total: columns[number] * self.ranks as u32,
                    epsilon: 0.0,
                    unit_offset: 0,
                }
            };
            let parts = if columns[1] == 0 { 1 } else { 2 };
            (launch, FaShardedNorm { part: [part(0), part(1)], parts, rows })
        };
        (0..self.ranks).map(of_rank).collect()
    }

    fn run(&self, world: &World, launches: &[(FaLaunch, FaShardedNorm)], seed: usize) {
        world
            .run_with(self.program, &self.kernel, launches, self.shape.grid, seed as u64)
            .unwrap_or_else(|error| panic!("{}, {:?}: {error}", self.kernel, self.shape));
    }

    /// Makes three calls, which use both generations of mailboxes, and one again.
    fn play(&self) {
        let mut world = self.world();
        for turn in 0..3 {
            self.fill(&mut world, turn);
            self.run(&world, &self.launches(&world), turn * 7 + self.ranks);
            for (rank, output) in world.outputs.iter().enumerate() {
                let case = format!("{}, turn {turn}, rank {rank} of {}", self.kernel, self.ranks);
                assert_eq!(world.failure_of(rank), FA_OK, "{case}");
                let (bytes, size) = (output.read(), self.ty.bytes);
                let mut expected = vec![0xA5; bytes.len()];
                self.for_each(|(row, part, i), at| {
                    let element = self.element((rank, row, part, i), turn).signum() * self.weight(part, i);
                    expected[at * size..][..size].copy_from_slice(&self.ty.number(element));
                });
                let wrong = (0..bytes.len()).find(|&at| bytes[at] != expected[at]);
                assert_eq!(wrong.map(|at| at / size), None, "{case}: {:?}", self.shape);
            }
        }
    }

    /// Gives up without one rank, and completes when that rank arrives after the others have given up: it has
    /// their sums.
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
            assert_eq!(world.failure_of(missing), FA_OK, "{}: {missing} after the others", self.kernel);
        }
    }
}

fn for_each_call(program: &Program, ranks: &[usize], body: impl Fn(&Call<'_>)) {
    for ty in [F16, BF16, F32] {
        let kernel = format!("sharded_rms_norm_{}", ty.name);
        if crate::is_left_out(program, &kernel) {
            continue;
        }
        for &ranks in ranks {
            for shape in SHAPES {
                body(&Call { program, kernel: kernel.clone(), ty, ranks, shape });
            }
        }
    }
}

fn sharded_rows(program: &Program) {
    for_each_call(program, &[1, 2, 3, 8], |call| call.play());
}

fn nothing_races_in_sharded_rows(program: &Program) {
    for_each_call(program, &[2, 3], |call| call.play());
}

fn sharded_rows_that_wait_in_vain(program: &Program) {
    for_each_call(program, &[3], |call| call.gives_up());
}
