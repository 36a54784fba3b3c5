//! Teams: several blocks of a GPU that share a row, in a push that normalises rows (`csrc/cuda/team_rows.cuh`).

use super::grid::{MOST_THREADS, WARP};
use super::{Algorithm, Plan};
use crate::abi::{
    self, FaFused, FaLaunch, FaRowTurns, FA_CUDA_PACK_BYTES, FA_SQUARES_CHUNK, FA_TEAM_BLOCK_PACKS,
};

/// Blocks that share a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Team {
    pub blocks: usize,
    /// Packs of a row that belong to one block: whole chunks of squares.
    block_packs: usize,
    /// Number of chunks of a row.
    chunks: usize,
}

impl Team {
    /// Returns whether an algorithm has teams on a grid of `blocks` blocks. With a single block the slices of a
    /// two-shot begin at any pack, not at rows.
    pub fn takes(algorithm: Algorithm, blocks: usize) -> bool {
        match algorithm {
            Algorithm::OneShotPush => true,
            Algorithm::TwoShotPush => blocks > 1,
            _ => false,
        }
    }

    /// Returns the team for `rows` rows on at most `blocks` blocks: the blocks are divided among the rows, and a row
    /// has at most one for each of its chunks. Returns `None` if rows are not whole packs, or if a block has no room
    /// for its part.
    pub fn of(rows: usize, row_bytes: usize, element_size: usize, blocks: usize) -> Option<Self> {
        let pack = FA_CUDA_PACK_BYTES as usize;
        let chunk = FA_SQUARES_CHUNK as usize * element_size / pack;
        let chunks = (row_bytes / pack).div_ceil(chunk);
        let each = chunks.div_ceil((blocks / rows.max(1)).max(1)).max(1);
        let team = Self { blocks: chunks.div_ceil(each), block_packs: each * chunk, chunks };
        (row_bytes % pack == 0 && team.block_packs <= FA_TEAM_BLOCK_PACKS as usize).then_some(team)
    }

    /// Returns the number of threads of a block: one for each of its packs, up to the limit.
    pub fn threads(&self, row_bytes: usize) -> usize {
        let packs = self.block_packs.min(row_bytes / FA_CUDA_PACK_BYTES as usize);
        packs.next_multiple_of(WARP).min(MOST_THREADS)
    }
}

/// Sets the teams of a launch, if it can have teams: they need a norm and addresses that are aligned to packs.
///
/// Ranks may differ in the alignment of their addresses. The receiver of a packet does not depend on which block sent
/// it.
pub(crate) fn set_teams(norm: &mut FaFused, launch: &FaLaunch, element_size: usize, plan: &Plan) {
    let &Plan { algorithm, blocks, .. } = plan;
    let FaFused { residual, residual_out, normed, weight, bias, row, rows, .. } = *norm;
    let normalises = norm.norm != abi::FA_NO_NORM;
    let addresses = launch.input | launch.output | residual | residual_out | normed | weight | bias;
    if !Team::takes(algorithm, blocks) || !normalises || addresses % u64::from(FA_CUDA_PACK_BYTES) != 0 {
        return;
    }
    let row_bytes = row as usize * element_size;
    let Some(team) = Team::of(rows as usize, row_bytes, element_size, blocks) else { return };
    norm.checked = launch.checked;
    norm.team = team.blocks as u32;
    // The quotient by the inverse is exact for block numbers below 2^8.
    norm.team_inverse = (1u32 << 16).div_ceil(norm.team);
    norm.block_packs = team.block_packs as u32;
    norm.chunks = team.chunks as u32;
    norm.turns = match algorithm {
        Algorithm::TwoShotPush => FaRowTurns::of(rows, launch.world, blocks as u32),
        _ => FaRowTurns::of_one_shot(),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For any grid and rows, each pack of each row belongs to one block, in whole chunks, and each block finds its
    /// team.
    #[test]
    fn teams_have_all_of_their_rows() {
        let pack = FA_CUDA_PACK_BYTES as usize;
        for (row, size) in
            [(8, 2), (64, 2), (5120, 2), (5128, 2), (8192, 2), (8192, 4), (16_384, 4), (65_536, 2)]
        {
            let row_bytes = row * size;
            for (rows, blocks) in (1..=70).flat_map(|rows| (1..=64).map(move |blocks| (rows, blocks))) {
                let Some(team) = Team::of(rows, row_bytes, size, blocks) else {
                    // A block has room for at most 16 KiB of a row.
                    assert!(
                        row_bytes > (blocks / rows).max(1) * (8 << 10),
                        "{rows} rows of {row}, {blocks} blocks"
                    );
                    continue;
                };
                let packs = row_bytes / pack;
                assert!(
                    team.blocks == 1 || team.blocks * rows <= blocks,
                    "{rows} rows, {blocks} blocks: {team:?}"
                );
                assert!(
                    team.block_packs * team.blocks >= packs && team.block_packs * (team.blocks - 1) < packs,
                    "{team:?}"
                );
                assert_eq!(team.block_packs * pack % (FA_SQUARES_CHUNK as usize * size), 0, "{team:?}");
                let inverse = (1usize << 16).div_ceil(team.blocks);
                assert!((0..64).all(|block| (block * inverse) >> 16 == block / team.blocks), "{team:?}");
            }
        }
        assert_eq!(Team::of(1, 10, 2, 64), None, "a row that is not whole packs");
    }

    /// Rows at unaligned addresses have no teams: each belongs to one block.
    #[test]
    fn teams_are_of_aligned_rows() {
        // SAFETY: both structs have only integers and floats, for which all zeros are valid.
        let (mut norm, launch): (FaFused, FaLaunch) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        (norm.norm, norm.normed, norm.row, norm.rows) = (abi::FA_NORM_RMS, 4096, 5120, 8);
        let launch = FaLaunch { world: 8, ..launch };
        let team_on = |algorithm, blocks, change: fn(&mut FaFused, &mut FaLaunch)| {
            let (mut norm, mut launch) = (norm, launch);
            change(&mut norm, &mut launch);
            let plan = Plan { algorithm, blocks, threads: 128, piece_bytes: 1 << 20 };
            set_teams(&mut norm, &launch, 2, &plan);
            (norm.team, norm.block_packs, norm.chunks)
        };
        let team = |change| team_on(Algorithm::OneShotPush, 64, change);
        assert_eq!(team(|_, _| ()), (5, 128, 10));
        assert_eq!(team_on(Algorithm::TwoShotPush, 64, |_, _| ()), (5, 128, 10));
        assert_eq!(team_on(Algorithm::TwoShotPush, 1, |_, _| ()), (0, 0, 0));
        assert_eq!(team_on(Algorithm::TwoShotPull, 64, |_, _| ()), (0, 0, 0));
        assert_eq!(team(|_, launch| launch.input += 2), (0, 0, 0));
        assert_eq!(team(|norm, _| norm.weight += 8), (0, 0, 0));
        assert_eq!(team(|norm, _| norm.bias += 8), (0, 0, 0));
        assert_eq!(team(|norm, _| norm.norm = abi::FA_NO_NORM), (0, 0, 0));
        assert_eq!(team(|norm, _| norm.norm = abi::FA_NORM_LAYER), (5, 128, 10));
        assert_eq!(team(|norm, _| norm.scaling = abi::FA_SCALE_PER_ROW), (5, 128, 10));
    }

    /// Each row has one turn.
    #[test]
    fn rows_have_a_turn_each() {
        for (world, blocks) in [(1, 1), (2, 64), (3, 2), (8, 64), (16, 5)] {
            for rows in (1..200).chain([4095, 65_536]) {
                let FaRowTurns { slice_rows, divisor, inverse, by_slice } =
                    FaRowTurns::of(rows, world, blocks);
                let mut seen = vec![false; rows as usize];
                let turns = if by_slice == 0 { rows } else { divisor * slice_rows };
                for turn in 0..turns {
                    let quotient = if inverse == 0 {
                        turn
                    } else {
                        ((u64::from(turn) * u64::from(inverse)) >> 32) as u32
                    };
                    assert_eq!(quotient, turn / divisor);
                    let rest = turn - quotient * divisor;
                    let (slice, in_slice) = if by_slice == 0 { (quotient, rest) } else { (rest, quotient) };
                    assert!(slice < world && in_slice < slice_rows);
                    let row = (slice * slice_rows + in_slice) as usize;
                    assert!(row >= rows as usize || !std::mem::replace(&mut seen[row], true));
                }
                assert!(seen.into_iter().all(|seen| seen), "{rows} rows, {world} ranks, {blocks} blocks");
            }
        }
    }
}
