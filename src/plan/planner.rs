//! Makes the plan of a call: takes the table's choice and fits it to the device and the region.

use super::choice::Choice;
use super::limits::Limits;
use super::nvls::Nvls;
use super::table::{Steps, Table};
use super::team::Team;
use super::thresholds::{
    MESSAGE_THREADS, ONE_SHOT_ROWS_MOST_BYTES, SHARDED_ROWS_MOST_THREADS, TAGGED_PUSH_MOST_BYTES,
    TEAM_ROWS_MOST_BYTES,
};
use super::{grid, Algorithm, DeviceKind, Order, Plan};
use crate::abi::{FA_MAX_BLOCKS, FA_QUANTIZED_GROUP};
use crate::catalogue::PlannedCall;
use crate::catalogue::ReduceOp;
use crate::catalogue::{DType, Division};
use crate::error::{Error, Result};
use crate::topology::LinkClass;

/// Plans the calls of a world. All ranks make the same plans.
#[derive(Debug)]
pub(crate) struct Planner {
    /// Indexed by [`PlannedCall`].
    steps: [Steps; PlannedCall::ALL.len()],
    /// The algorithm that the user set. Never NVLS, which cannot do every call: see `nvls`.
    forced: Option<Algorithm>,
    nvls: Nvls,
    most_blocks: usize,
    pub limits: Limits,
}

impl Planner {
    /// Creates the planner of a world. `link` is its worst link. `most_blocks` is the number of blocks that can run at
    /// once on each rank.
    pub fn new(
        table: &Table,
        link: LinkClass,
        order: Order,
        forced: Option<Algorithm>,
        most_blocks: usize,
        limits: Limits,
    ) -> Self {
        let steps = |calls| Steps::new(table, calls, limits.world_size, link, order);
        let forced = forced.filter(|algorithm| !algorithm.is_nvls());
        Self { steps: PlannedCall::ALL.map(steps), forced, nvls: Nvls::Never, most_blocks, limits }
    }

    /// Returns the planner with in-switch reductions (NVLS) for the calls that can use them.
    pub fn with_nvls(self, nvls: Nvls) -> Self {
        Self { nvls, ..self }
    }

    /// Plans an allreduce. An algorithm that cannot do it is replaced, on all ranks by the same one.
    pub fn reduction(&self, count: usize, dtype: DType, op: ReduceOp) -> Plan {
        let bytes = count.saturating_mul(dtype.size());
        let plan = match self.nvls.choice(dtype, op, bytes) {
            Some(choice) => self.grid(&choice, bytes),
            None => self.all_reduce(bytes, !Self::is_untagged(dtype, op)),
        };
        let capacity = self.limits.capacity(plan.algorithm, dtype.size());
        match plan.algorithm.can_reduce(dtype, op, capacity) {
            true => self.cut(plan, capacity, dtype),
            false => {
                let plan = self.plan(bytes, Some(Algorithm::TwoShotPush));
                self.cut(plan, self.limits.capacity(plan.algorithm, dtype.size()), dtype)
            }
        }
    }

    /// Plans a fused allreduce: a residual is added, and rows of `row` elements are normalised. Without a norm `row`
    /// is `None`. Only direct algorithms have fused kernels. The caller has checked the row by
    /// [`Planner::check_row`].
    pub fn rows(&self, count: usize, dtype: DType, row: Option<usize>) -> Plan {
        let (size, pack) = (dtype.size(), self.limits.packing.pack_bytes);
        let bytes = count.saturating_mul(size);
        let is_cuda = self.limits.device == DeviceKind::Cuda;
        // Sums are sent without tags, as in an allreduce of the hot set.
        let mut plan = self.all_reduce(bytes, false);
        if plan.algorithm.norm_kernel().is_none() {
            plan = self.plan(bytes, Some(Algorithm::TwoShotPull));
        }
        let Some(row) = row else {
            return match self.limits.capacity(plan.algorithm, size) {
                0 => self.cut(
                    self.plan(bytes, Some(Algorithm::TwoShotPull)),
                    self.limits.capacity(Algorithm::TwoShotPull, size),
                    dtype,
                ),
                capacity => self.cut(plan, capacity, dtype),
            };
        };
        let row_bytes = row * size;
        let rows = (count / row).max(1);
        // A single row is one rank's slice: a two-shot would save no reads, and cost a barrier.
        if !is_cuda && self.forced.is_none() && rows == 1 && plan.algorithm == Algorithm::TwoShotPull {
            plan = self.plan(bytes, Some(Algorithm::OneShotPull));
        }
        if is_cuda && row_bytes % pack == 0 {
            if let Some(plan) = self.teams(plan, rows, row_bytes, size) {
                return plan;
            }
        }
        if is_cuda
            && self.forced.is_none()
            && bytes <= ONE_SHOT_ROWS_MOST_BYTES
            && self.limits.rows(Algorithm::OneShotPush, row_bytes, size, 1) != 0
        {
            plan = self.plan(bytes, Some(Algorithm::OneShotPush));
        }
        // A row belongs to one block. Rows that are not whole packs share packs with their neighbours, so one block
        // has all of them.
        plan.blocks = if row_bytes % pack == 0 { plan.blocks.min(rows) } else { 1 };
        if self.limits.rows(plan.algorithm, row_bytes, size, plan.blocks) == 0 {
            plan.blocks = 1;
        }
        if self.limits.rows(plan.algorithm, row_bytes, size, 1) == 0 {
            plan = Plan { blocks: 1, ..self.plan(bytes, Some(Algorithm::TwoShotPull)) };
        }
        if is_cuda {
            plan.threads = grid::threads_of_row(plan.threads, row_bytes, pack);
        }
        let most = self.limits.rows(plan.algorithm, row_bytes, size, plan.blocks).max(1);
        plan.piece_bytes = (plan.piece_bytes / row_bytes).clamp(1, most) * row_bytes;
        plan
    }

    /// Returns the plan for rows that are each shared by several blocks (a team), with as many blocks as the grid may
    /// have. Pushes keep their algorithm; pulls up to 8 MiB become pushes. Returns `None` if the algorithm has no
    /// teams, or if a block or the region has no room.
    fn teams(&self, plan: Plan, rows: usize, row_bytes: usize, size: usize) -> Option<Plan> {
        let bytes = rows.saturating_mul(row_bytes);
        let algorithm = match plan.algorithm {
            Algorithm::OneShotPush => Algorithm::OneShotPush,
            Algorithm::OneShotPull if self.forced.is_none() && bytes <= TEAM_ROWS_MOST_BYTES => {
                Algorithm::OneShotPush
            }
            Algorithm::TwoShotPull if self.forced.is_none() && bytes <= TEAM_ROWS_MOST_BYTES => {
                Algorithm::TwoShotPush
            }
            algorithm => algorithm,
        };
        let choice = self.steps[PlannedCall::AllReduce as usize].choice(bytes, Some(algorithm));
        let most = self.most_blocks.clamp(1, choice.blocks as usize);
        let team = Team::of(rows, row_bytes, size, most)?;
        let blocks = most.min(team.blocks.saturating_mul(rows));
        let most_rows = self.limits.rows(algorithm, row_bytes, size, blocks);
        (Team::takes(algorithm, blocks) && most_rows != 0).then(|| Plan {
            algorithm,
            blocks,
            threads: team.threads(row_bytes).max(grid::FEWEST_THREADS),
            piece_bytes: (plan.piece_bytes / row_bytes).clamp(1, most_rows) * row_bytes,
        })
    }

    /// Plans an allreduce with quantised transport, whose kernel is a two-shot. Pieces are whole groups. The grid is
    /// that of a two-shot of 2-byte elements. On a GPU each thread handles eight elements of any type, and the grid is
    /// the largest, because arithmetic takes part of the time.
    pub fn quantized(&self, count: usize, dtype: DType) -> Plan {
        const ON_GPUS: Choice =
            Choice::cuda(Algorithm::TwoShotPull, FA_MAX_BLOCKS, grid::MOST_THREADS as u32);
        let (group, bytes) = (FA_QUANTIZED_GROUP as usize, count.saturating_mul(2));
        let mut plan = match self.limits.device {
            DeviceKind::Host => self.plan(bytes, Some(Algorithm::TwoShotPull)),
            DeviceKind::Cuda => self.grid(&ON_GPUS, bytes),
        };
        let most =
            (plan.piece_bytes / dtype.size()).clamp(group, self.limits.quantized_capacity(dtype.size()));
        plan.piece_bytes = most / group * group * dtype.size();
        plan
    }

    /// Plans a norm of rows that are divided among the ranks, with `totals` elements of each row on all of them. A row
    /// belongs to one block, of the same number on all ranks: the plan does not depend on what a rank has of a row.
    /// Bytes of a piece are counted as one element for each row.
    pub fn sharded_rows(&self, rows: usize, totals: usize, dtype: DType) -> Plan {
        let own = totals.div_ceil(self.limits.world_size);
        let bytes = rows.saturating_mul(own).saturating_mul(dtype.size());
        let mut plan = self.plan(bytes, Some(Algorithm::OneShotPush));
        let most = self.limits.sharded_rows().max(1);
        if self.limits.device == DeviceKind::Cuda {
            plan.blocks = self.most_blocks.min(FA_MAX_BLOCKS as usize).max(1);
            // A warp for each chunk of squares, and a pack for each thread.
            let packs = (own * dtype.size()).div_ceil(self.limits.packing.pack_bytes);
            plan.threads =
                packs.next_multiple_of(grid::WARP).clamp(grid::FEWEST_THREADS, SHARDED_ROWS_MOST_THREADS);
        }
        let blocks = plan.blocks.min(rows.min(most)).max(1);
        Plan { blocks, piece_bytes: most * dtype.size(), ..plan }
    }

    /// Plans a fused reduce-scatter, by pulls. The largest share has `count` elements, in rows of `row` elements;
    /// without a norm `row` is `None`. The caller has checked the row by [`Planner::check_row`].
    pub fn row_shares(&self, count: usize, dtype: DType, row: Option<usize>) -> Plan {
        let (size, pack) = (dtype.size(), self.limits.packing.pack_bytes);
        let bytes = count.saturating_mul(size);
        let mut plan = self.shares(PlannedCall::ReduceScatter, bytes, self.limits.world_size);
        let Some(row) = row else { return plan };
        let row_bytes = row * size;
        // As in an allreduce, a row belongs to one block, and so do all rows that are not whole packs.
        let most_blocks = if row_bytes % pack == 0 { (count / row).max(1) } else { 1 };
        plan.blocks = plan.blocks.min(most_blocks);
        if self.limits.device == DeviceKind::Cuda {
            plan.threads = grid::threads_of_row(plan.threads, row_bytes, pack);
        }
        plan.piece_bytes = (plan.piece_bytes / row_bytes).max(1) * row_bytes;
        plan
    }

    /// Plans an all-gather of quantised rows. The largest share has `bytes` bytes of numbers. A row has `row_bytes` of
    /// them, and takes `staged_row` bytes of staging with its scales.
    pub fn gathered_rows(&self, bytes: usize, row_bytes: usize, staged_row: usize) -> Plan {
        let mut plan = self.shares(PlannedCall::AllGather, bytes, 1);
        let most = self.limits.staged_rows(staged_row);
        plan.piece_bytes = (plan.piece_bytes / staged_row).clamp(1, most.max(1)) * row_bytes;
        plan
    }

    /// Refuses gathered rows that do not fit into the region.
    pub fn check_gathered_row(&self, hidden: usize, staged_row: usize) -> Result<()> {
        match self.limits.staged_rows(staged_row) {
            0 => Err(Error::InvalidSetting {
                name: "hidden",
                value: format!("{hidden} elements, which take {staged_row} bytes with their scales"),
                expected: "rows that fit the communicator's max_bytes",
            }),
            _ => Ok(()),
        }
    }

    /// Refuses rows that do not fit into the region. In a reduce-scatter a row for each rank is staged.
    pub fn check_row(&self, row: usize, dtype: DType, division: Division) -> Result<()> {
        let most = match division {
            Division::Shares => self.limits.share_bytes(self.limits.world_size, usize::MAX) / dtype.size(),
            _ => self.limits.capacity(Algorithm::TwoShotPull, dtype.size()),
        };
        match row <= most {
            true => Ok(()),
            false => Err(Error::InvalidSetting {
                name: "hidden",
                value: format!("{row} elements of {dtype}, where the region takes rows of at most {most}"),
                expected: "rows that fit the communicator's max_bytes",
            }),
        }
    }

    /// Plans a collective other than an allreduce. Each rank's share has at most `bytes`; `shares` shares are staged at
    /// once. The plan's `piece_bytes` are those of a share in one launch.
    #[inline(always)]
    pub fn shares(&self, calls: PlannedCall, bytes: usize, shares: usize) -> Plan {
        let mut plan = match self.steps[calls as usize].choice_if_any(bytes) {
            Some(choice) => self.grid(&choice, bytes),
            None => self.plan(bytes, Some(Algorithm::OneShotPull)),
        };
        plan.piece_bytes = self.limits.share_bytes(shares, plan.piece_bytes);
        plan
    }

    /// Plans messages between pairs of ranks. `stripes` is the number of stripes that the channels use. Each stripe
    /// belongs to one block; stripes beyond the grid are distributed over its blocks. On GPUs the grids of ranks may
    /// differ.
    pub fn messages(&self, plan: Plan, stripes: usize) -> Plan {
        let stripes = stripes.max(1);
        match self.limits.device {
            DeviceKind::Host => Plan { blocks: plan.blocks.min(stripes), ..plan },
            DeviceKind::Cuda => {
                let most = self.most_blocks.min(FA_MAX_BLOCKS as usize).max(1);
                Plan { blocks: stripes.min(most), threads: MESSAGE_THREADS, ..plan }
            }
        }
    }

    /// Returns whether the packets of a call have no tags on GPUs. This holds for calls that the hot set has kernels
    /// for.
    const fn is_untagged(dtype: DType, op: ReduceOp) -> bool {
        matches!(op, ReduceOp::Sum) && dtype.is_hot()
    }

    /// Plans an allreduce by the table. The table's rows hold for packets without tags.
    #[inline(always)]
    fn all_reduce(&self, bytes: usize, tagged: bool) -> Plan {
        if tagged
            && bytes > TAGGED_PUSH_MOST_BYTES
            && self.limits.world_size == 2
            && self.limits.device == DeviceKind::Cuda
            && self.forced.is_none()
        {
            let largest = self.steps[PlannedCall::AllReduce as usize].choice(usize::MAX, None);
            if matches!(largest.algorithm, Algorithm::OneShotPull | Algorithm::TwoShotPull) {
                return self.grid(&largest, bytes);
            }
        }
        self.plan(bytes, self.forced)
    }

    #[inline(always)]
    fn plan(&self, bytes: usize, algorithm: Option<Algorithm>) -> Plan {
        self.grid(&self.steps[PlannedCall::AllReduce as usize].choice(bytes, algorithm), bytes)
    }

    #[inline(always)]
    fn grid(&self, choice: &Choice, bytes: usize) -> Plan {
        // Field by field: copying a plan through memory costs a small call several nanoseconds.
        let (blocks, threads, piece_bytes) = match self.limits.device {
            DeviceKind::Host => {
                let (blocks, piece_bytes) = grid::host(choice, bytes, self.most_blocks);
                (blocks, 1, piece_bytes)
            }
            // Pieces are as large as the region permits.
            DeviceKind::Cuda => {
                let (blocks, threads) = grid::cuda(choice, bytes, self.limits.world_size, self.most_blocks);
                (blocks, threads, usize::MAX)
            }
        };
        Plan { algorithm: choice.algorithm, blocks, threads, piece_bytes }
    }

    /// Rounds pieces to whole packs, so that every piece is aligned as the message is.
    fn cut(&self, mut plan: Plan, capacity: usize, dtype: DType) -> Plan {
        let pack = self.limits.packing.pack_bytes;
        let piece = plan.piece_bytes / pack * pack;
        plan.piece_bytes = piece.clamp(pack, capacity * dtype.size());
        plan
    }
}
