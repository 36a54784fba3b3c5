//! In which turn a team of a two-shot has a row.

use crate::abi::FaRowTurns;

impl FaRowTurns {
    /// Of rows between so many ranks, on a grid of so many blocks. Where blocks have several rows, these are of one slice after
    /// another, so that all ranks are sent to at the same time, and what comes last of each slice is not all the same blocks'.
    pub(crate) fn of(rows: u32, world: u32, blocks: u32) -> Self {
        let slice_rows = rows.div_ceil(world).max(1);
        let by_slice = rows > blocks;
        let divisor = if by_slice { rows.div_ceil(slice_rows) } else { slice_rows };
        // Exact for turns of which divisor times are less than 2^32: a rank's rows are at most 2^26, a grid's 2^6.
        let inverse = if divisor > 1 { (1u64 << 32).div_ceil(u64::from(divisor)) as u32 } else { 0 };
        Self { slice_rows, divisor, inverse, by_slice: u32::from(by_slice) }
    }
}
