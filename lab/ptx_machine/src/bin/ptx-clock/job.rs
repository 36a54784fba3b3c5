//! A call to predict: kernel, memory and grid.

use std::path::Path;

use fast_allreduce_ptx_machine::clock::{self, Chain, Machine, Timing};
use fast_allreduce_ptx_machine::{Launch, Program, Range};

use crate::abi::*;
use crate::export::{Expected, Export};
use crate::messages::{bytes_of, Pattern};
use crate::reference::Reference;
use crate::rows;
use crate::world::{value_of, word_of, Data, Reach, World};

/// Launch parameters of calls.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Maximum number of blocks of a launch, and of threads of a block.
    pub blocks: u32,
    pub threads: u32,
    /// Number of consecutive calls.
    pub turns: usize,
    /// Number of simulated blocks of each rank; 0: all.
    pub simulate: u32,
    /// Whether kernels follow each other in a stream instead of a graph.
    pub stream: bool,
    /// Whether launches have the attribute for programmatic dependent launch.
    pub programmatic: bool,
}

/// A call.
#[derive(Debug, Clone)]
pub struct Call {
    /// Algorithm: one_shot_pull and so on, with the suffix `+` for registered inputs; or a reference
    /// kernel.
    pub algorithm: String,
    pub dtype: Dtype,
    pub ranks: usize,
    pub bytes: usize,
    /// Elements of a normalised row.
    pub row: u32,
    /// The norm is LayerNorm with a bias, not RMSNorm.
    pub layer: bool,
    /// Elements that share a scale, if rows are quantised as well; 0: a row.
    pub group: Option<u32>,
    /// Experts of each row, from whose rows the input is computed; 0: none.
    pub experts: u32,
    /// Reduction, of calls that do not normalise.
    pub op: Op,
    /// Whether to use the kernel for any world size, as checked calls do.
    pub any: bool,
}

/// Element types: those of the hot set, and integers (which the hot set does not have).
#[derive(Debug, Clone, Copy)]
pub struct Dtype {
    pub name: &'static str,
    pub code: FaDtype,
    pub bytes: usize,
}

impl Dtype {
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "bf16" => Self { name: "bf16", code: FA_BF16, bytes: 2 },
            "f16" => Self { name: "f16", code: FA_F16, bytes: 2 },
            "f32" => Self { name: "f32", code: FA_F32, bytes: 4 },
            "i8" => Self { name: "i8", code: FA_I8, bytes: 1 },
            "i32" => Self { name: "i32", code: FA_I32, bytes: 4 },
            "i64" => Self { name: "i64", code: FA_I64, bytes: 8 },
            _ => return None,
        })
    }

    pub fn is_integer(self) -> bool {
        matches!(self.code, FA_I8 | FA_I32 | FA_I64)
    }

    /// Returns the type's name in kernels for any world size.
    fn any_kernel(self) -> &'static str {
        if self.is_integer() {
            "integers"
        } else {
            self.name
        }
    }
}

/// A reduction.
#[derive(Debug, Clone, Copy)]
pub struct Op {
    pub code: FaOp,
    /// Result of reducing 1, 2, ..., up to the number of ranks.
    result: fn(u32) -> u32,
}

impl Op {
    pub fn named(name: &str) -> Option<Self> {
        let (code, result): (_, fn(u32) -> u32) = match name {
            "sum" => (FA_SUM, |ranks| ranks * (ranks + 1) / 2),
            "prod" => (FA_PROD, |ranks| (1..=ranks).fold(1, u32::wrapping_mul)),
            "min" => (FA_MIN, |_| 1),
            "max" => (FA_MAX, |ranks| ranks),
            // The mean of the integers 1 to N is (N + 1) / 2, rounded toward zero.
            "avg" => (FA_AVG, |ranks| ranks.div_ceil(2)),
            _ => return None,
        };
        Some(Self { code, result })
    }
}

fn code_of(algorithm: &str) -> Option<FaAlgorithm> {
    Some(match algorithm {
        "one_shot_pull" => FA_ONE_SHOT_PULL,
        "two_shot_pull" => FA_TWO_SHOT_PULL,
        "one_shot_push" => FA_ONE_SHOT_PUSH,
        "two_shot_push" => FA_TWO_SHOT_PUSH,
        "ring" => FA_RING,
        "halving_doubling" => FA_HALVING_DOUBLING,
        "two_shot_quantized" => FA_TWO_SHOT_QUANTIZED,
        "one_shot_pull_norm" => FA_ONE_SHOT_PULL_NORM,
        "two_shot_pull_norm" => FA_TWO_SHOT_PULL_NORM,
        "one_shot_push_norm" => FA_ONE_SHOT_PUSH_NORM,
        "two_shot_push_norm" => FA_TWO_SHOT_PUSH_NORM,
        "reduce_scatter" => FA_REDUCE_SCATTER,
        "reduce_scatter_norm" => FA_REDUCE_SCATTER_NORM,
        "all_gather" => FA_ALL_GATHER,
        "all_gather_rows" => FA_ALL_GATHER_ROWS,
        "sharded_rms_norm" => FA_SHARDED_RMS_NORM,
        "one_shot_nvls" => FA_ONE_SHOT_NVLS,
        "two_shot_nvls" => FA_TWO_SHOT_NVLS,
        name if Pattern::named(name).is_some() => FA_TRANSFER,
        _ => return None,
    })
}

/// Memory of our kernels, or of the reference kernels.
enum Memory {
    Ours(Box<World>),
    Reference(Reference),
}

impl Memory {
    fn reach(&self) -> Reach {
        match self {
            Self::Ours(world) => world.reach(),
            Self::Reference(reference) => reference.reach(),
        }
    }

    /// Returns whether a call has the right result.
    fn is_right(&self, call: &Call) -> bool {
        let data = self.data();
        let Self::Ours(world) = self else { return data.is_right(call.op.result) };
        match code_of(call.base()) {
            Some(FA_TRANSFER) => {
                Pattern::named(call.base()).is_some_and(|pattern| pattern.is_right(world, call.bytes))
            }
            Some(FA_ALL_GATHER | FA_ALL_GATHER_ROWS) => rows::is_gathered(world, call),
            Some(FA_TWO_SHOT_QUANTIZED) => data.is_near(value_of(call.dtype.code)),
            Some(FA_SHARDED_RMS_NORM) => data.are_normed_together(value_of(call.dtype.code)),
            _ => data.is_right(call.op.result) && (!call.norms() || world.is_normed()),
        }
    }

    /// Returns the results of a sum on a GPU; none for calls that one GPU cannot do, or with inexact results.
    fn expected(&self, call: &Call) -> Vec<Expected> {
        let moves = matches!(code_of(call.base()), Some(FA_TRANSFER | FA_TWO_SHOT_QUANTIZED));
        if moves || call.is_nvls() || call.has_shares() || call.is_sharded() {
            return Vec::new();
        }
        let all = match self {
            Self::Ours(world) if call.norms() => world.expected_norm(),
            _ => self.data().expected(call.op.result),
        };
        let bytes = call.bytes as u64;
        all.into_iter().map(|one| Expected { range: Range { bytes, ..one.range }, ..one }).collect()
    }

    fn data(&self) -> &Data {
        match self {
            Self::Ours(world) => &world.data,
            Self::Reference(reference) => &reference.data,
        }
    }
}

/// A team: blocks that share a row, as in FaFused.
#[derive(Clone, Copy)]
pub struct Team {
    pub blocks: u32,
    pub share: u32,
    pub chunks: u32,
    pub turns: FaRowTurns,
}

impl Team {
    /// Each row belongs to one block.
    const NONE: Self = Self {
        blocks: 0,
        share: 0,
        chunks: 0,
        turns: FaRowTurns { slice_rows: 0, divisor: 0, inverse: 0, by_slice: 0 },
    };

    pub fn inverse(self) -> u32 {
        match self.blocks {
            0 => 0,
            blocks => (1u32 << 16).div_ceil(blocks),
        }
    }
}

impl Call {
    fn base(&self) -> &str {
        self.algorithm.trim_end_matches('+')
    }

    fn norms(&self) -> bool {
        self.base().ends_with("_norm") && !self.is_sharded()
    }

    /// Returns whether ranks have parts of the rows.
    fn is_sharded(&self) -> bool {
        code_of(self.base()) == Some(FA_SHARDED_RMS_NORM)
    }

    pub fn gathers_rows(&self) -> bool {
        code_of(self.base()) == Some(FA_ALL_GATHER_ROWS)
    }

    /// Returns whether the message consists of a share for each rank.
    pub fn has_shares(&self) -> bool {
        let gathers = matches!(code_of(self.base()), Some(FA_ALL_GATHER | FA_ALL_GATHER_ROWS));
        gathers || matches!(code_of(self.base()), Some(FA_REDUCE_SCATTER | FA_REDUCE_SCATTER_NORM))
    }

    /// Returns the bytes of a share, or of the message.
    pub fn share(&self) -> usize {
        self.bytes / if self.has_shares() { self.ranks } else { 1 }
    }

    /// Returns the number that the bytes must be a multiple of: a row for each share.
    fn unit(&self) -> usize {
        let shares = if self.has_shares() { self.ranks } else { 1 };
        shares
            * match () {
                () if self.norms() || self.is_sharded() => self.row as usize * self.dtype.bytes,
                () if self.gathers_rows() => self.row as usize,
                () => FA_CUDA_PACK_BYTES as usize,
            }
    }

    fn is_nvls(&self) -> bool {
        self.base().ends_with("_nvls")
    }

    /// Returns the name of the call's kernel.
    pub fn kernel(&self) -> String {
        match code_of(self.base()) {
            Some(FA_TWO_SHOT_QUANTIZED | FA_ALL_GATHER | FA_ALL_GATHER_ROWS) => self.base().to_owned(),
            Some(FA_ONE_SHOT_PUSH_NORM | FA_TWO_SHOT_PUSH_NORM) => format!("push_norm_{}", self.dtype.name),
            Some(_) if self.norms() => format!("{}_{}", self.base(), self.dtype.name),
            Some(FA_TRANSFER) => "transfer".to_owned(),
            Some(code) if self.any || code > FA_TWO_SHOT_PUSH => {
                format!("{}_{}", self.base(), self.dtype.any_kernel())
            }
            Some(_) => format!("{}_{}_sum_w{}", self.base(), self.dtype.name, self.ranks),
            None => format!("{}_w{}", self.base(), self.ranks),
        }
    }

    /// Returns blocks and threads. Our kernels follow src/plan/grid.rs: no more blocks than there is work
    /// for. Published kernels fill blocks with the maximum number of threads first.
    pub fn grid(&self, shape: &Shape, machine: &Machine) -> (u32, u32) {
        // A thread quantises the same number of elements for every type.
        let bytes = match code_of(self.base()) {
            Some(FA_TWO_SHOT_QUANTIZED) => self.bytes / self.dtype.bytes * 2,
            _ => self.share(),
        };
        if Pattern::named(self.base()).is_some() {
            // Messages follow src/plan/planner.rs: blocks beyond the number of stripes are idle.
            return (64.min(machine.sms as u32), 256);
        }
        let row_bytes = self.row * self.dtype.bytes as u32;
        let rows = (bytes as u32 / row_bytes).max(1);
        if self.is_sharded() {
            // src/plan/planner.rs: a row belongs to one block.
            let packs = (row_bytes / self.ranks as u32).div_ceil(FA_CUDA_PACK_BYTES).next_multiple_of(32);
            return (FA_MAX_BLOCKS.min(machine.sms as u32).min(rows), packs.clamp(64, 256));
        }
        let packs = bytes.div_ceil(FA_CUDA_PACK_BYTES as usize) as u32;
        let is_two_shot = self.algorithm.contains("two_shot");
        let work = if is_two_shot { packs.div_ceil(self.ranks as u32) } else { packs };
        // src/plan/nvls.rs limits launches to 16384 threads.
        let most = if self.is_nvls() { (16 << 10) / shape.threads } else { shape.blocks };
        let most = most.min(machine.sms as u32).max(1);
        let fewest = match code_of(self.base()) {
            Some(FA_ONE_SHOT_PUSH | FA_TWO_SHOT_PUSH) => 32,
            Some(_) => shape.threads.min(64),
            None => shape.threads,
        };
        let blocks = work.div_ceil(fewest).clamp(1, most);
        let threads = work.div_ceil(blocks).next_multiple_of(32).clamp(32, shape.threads);
        if !self.norms() {
            return (blocks, threads);
        }
        // src/plan/planner.rs: a row belongs to one block (or, in a push, to a team of blocks), and all
        // their threads work on it.
        let packs = row_bytes.div_ceil(FA_CUDA_PACK_BYTES).next_multiple_of(32);
        if let Some(team) = self.team(most) {
            let own = (team.share).min(packs).next_multiple_of(32);
            return (most.min(rows * team.blocks), own.min(shape.threads));
        }
        (blocks.min(rows), threads.max(packs.min(shape.threads)))
    }

    /// Returns how rows are divided among blocks, if teams of blocks share rows.
    fn team(&self, most: u32) -> Option<Team> {
        if !matches!(code_of(self.base()), Some(FA_ONE_SHOT_PUSH_NORM | FA_TWO_SHOT_PUSH_NORM)) {
            return None;
        }
        let row_bytes = self.row * self.dtype.bytes as u32;
        let chunk = FA_SQUARES_CHUNK * self.dtype.bytes as u32 / FA_CUDA_PACK_BYTES;
        let chunks = (row_bytes / FA_CUDA_PACK_BYTES).div_ceil(chunk);
        let each = chunks.div_ceil((most / (self.bytes as u32 / row_bytes).max(1)).max(1));
        let rows = self.bytes as u32 / row_bytes;
        let blocks = chunks.div_ceil(each);
        let turns = match code_of(self.base()) {
            Some(FA_TWO_SHOT_PUSH_NORM) => FaRowTurns::of(rows, self.ranks as u32, most.min(rows * blocks)),
            _ => FaRowTurns::of_one_shot(),
        };
        Some(Team { blocks, share: each * chunk, chunks, turns })
    }

    /// Returns the bytes of its memory that a rank touches in every call. Messages touch input, output and
    /// two generations of staging, or of packets of all ranks.
    fn footprint(&self) -> usize {
        let messages = match self.base().trim_end_matches("_norm") {
            "one_shot_push" | "words_one_shot" => 2 + 4 * self.ranks,
            "sentinel_one_shot" => 2 + 3 * self.ranks,
            "two_shot_push" => 2 + 2 * 4,
            _ => 4,
        };
        messages + self.experts as usize
    }

    /// Predicts how long the call takes in a chain of such calls. If the simulated blocks turn out not to stand
    /// for the others, all are simulated. `export`: the program's file, and the file to export the call to.
    pub fn predict(
        &self,
        program: &Program,
        machine: &Machine,
        shape: &Shape,
        export: Option<(&Path, &Path)>,
    ) -> Result<Timing, String> {
        let timing = self.predict_from(program, machine, shape, export)?;
        if timing.evenness >= clock::EVEN || shape.simulate == 0 {
            return Ok(timing);
        }
        self.predict_from(program, machine, &Shape { simulate: 0, ..*shape }, export)
    }

    fn predict_from(
        &self,
        program: &Program,
        machine: &Machine,
        shape: &Shape,
        export: Option<(&Path, &Path)>,
    ) -> Result<Timing, String> {
        let kernel = self.kernel();
        let registered = self.algorithm.ends_with('+');
        if !self.bytes.is_multiple_of(self.unit()) {
            return Err(format!("{} bytes are not a multiple of {}", self.bytes, self.unit()));
        }
        if self.experts != 0 && (registered || !self.norms() || self.has_shares()) {
            return Err(format!("{} has no experts", self.algorithm));
        }
        // Gathered numbers have a byte each.
        let (dtype, size) = match self.gathers_rows() {
            true => (FA_I8, 1),
            false => (self.dtype.code, self.dtype.bytes),
        };
        let memory = match code_of(self.base()) {
            Some(_) => Memory::Ours(Box::new(World::new(self, word_of(dtype)))),
            None => Memory::Reference(Reference::new(self.base(), self.ranks, self.bytes)),
        };
        let team = self.team(shape.blocks.min(machine.sms as u32)).unwrap_or(Team::NONE);
        let moves = matches!(code_of(self.base()), Some(FA_TRANSFER | FA_ALL_GATHER | FA_ALL_GATHER_ROWS));
        let in_slices = team.blocks > 0 && code_of(self.base()) == Some(FA_TWO_SHOT_PUSH_NORM);
        let params = |rank| match (&memory, code_of(self.base())) {
            (Memory::Ours(world), Some(algorithm)) => {
                let count = (self.share() / size) as u64;
                let mut params = world.params(rank, self, (algorithm, dtype), count, registered);
                if self.norms() {
                    params.extend(world.norm(rank, self, count, team));
                }
                if self.gathers_rows() {
                    params.extend(rows::gathered(world, self, rank));
                }
                if self.is_sharded() {
                    params.extend(rows::sharded(world, self, rank));
                }
                if let Some(pattern) = Pattern::named(self.base()) {
                    params.extend(bytes_of(&pattern.transfers(world, rank, self.bytes, registered)));
                }
                params
            }
            (Memory::Reference(reference), _) => reference.params(rank),
            _ => Vec::new(),
        };
        let params: Vec<Vec<u8>> = (0..self.ranks).map(params).collect();
        let reach = memory.reach();
        let (blocks, threads) = self.grid(shape, machine);
        let launch = |params| Launch {
            kernel: &kernel,
            cluster: [1; 3],
            dynamic_shared: 0,
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            params,
            memory: &reach,
        };
        let calls: Vec<Launch> = params.iter().map(|params| launch(params)).collect();
        let chain = Chain {
            calls: &calls,
            homes: &reach.homes,
            turns: shape.turns,
            // The sample relies on equal block indices of all ranks talking only to each other. That does
            // not hold for messages, for rows shared by several blocks, and for rows within slices that all
            // ranks exchange. All blocks are simulated then, and in gathers, so that all bytes are checked.
            blocks: match moves || team.blocks > 1 || in_slices {
                true => 0,
                false => shape.simulate,
            },
            gap_ns: if shape.stream { machine.launch_ns } else { machine.node_ns },
            programmatic: shape.programmatic,
            resident: (self.bytes * self.footprint()) as f64 <= machine.l2_bytes,
        };
        let expected = memory.expected(self);
        if export.is_some() && expected.is_empty() {
            return Err(format!("{kernel} cannot be exported"));
        }
        // SAFETY: the ranges are those of the memory's own buffers, and no kernel runs.
        let export = export.map(|(ptx, to)| (unsafe { Export::of(ptx, program, &calls, &reach.homes) }, to));
        let timing = clock::time(program, machine, &chain).map_err(|error| error.to_string())?;
        if !memory.is_right(self) {
            return Err(format!("{kernel}, {} bytes: the result is wrong", self.bytes));
        }
        if let Some((export, to)) = export {
            export.write(to, shape.programmatic, &timing, &expected)?;
        }
        Ok(timing)
    }
}
