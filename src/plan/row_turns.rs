//! Order in which the teams of a two-shot take rows: the turns.

use crate::abi::FaRowTurns;

impl FaRowTurns {
    /// Returns the order of a one-shot, which has no slices: turn t is row t.
    pub(crate) fn of_one_shot() -> Self {
        Self { slice_rows: 0, divisor: 1, inverse: 0, by_slice: 1 }
    }

    /// Computes the order for `rows` rows between `world` ranks, on a grid of `blocks` blocks.
    ///
    /// If there are more rows than blocks, consecutive turns belong to different slices: row 0 of each slice, then row
    /// 1 of each slice, and so on. So all ranks receive at the same time, and the last rows of the slices are spread
    /// over blocks.
    pub(crate) fn of(rows: u32, world: u32, blocks: u32) -> Self {
        let slice_rows = rows.div_ceil(world).max(1);
        let by_slice = rows > blocks;
        let divisor = if by_slice { rows.div_ceil(slice_rows) } else { slice_rows };
        // The quotient by the inverse is exact while turn * divisor < 2^32: a rank has at most 2^26 rows, a grid 2^6
        // blocks.
        let inverse = if divisor > 1 { (1u64 << 32).div_ceil(u64::from(divisor)) as u32 } else { 0 };
        Self { slice_rows, divisor, inverse, by_slice: u32::from(by_slice) }
    }
}
