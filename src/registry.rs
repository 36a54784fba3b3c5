//! This rank's record of which rows of the table of registered buffers are in use.

use crate::error::{Error, Result};
use crate::region::{source_word, FIRST_GRAPH_ROW};

/// This rank's part of the table of registered buffers. Row i has id i + 1.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    /// Rows 0..[`FIRST_GRAPH_ROW`]. A row has the same buffer on all ranks.
    rows: Vec<Row>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Row {
    Free,
    /// The row of a registered buffer.
    Used(Range),
    /// The row of a buffer that is gone, while kernels may still read the row.
    Retired,
}

/// This rank's memory of one registered buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Range {
    pub base: u64,
    pub bytes: u64,
}

impl Range {
    fn holds(&self, address: u64, bytes: u64) -> bool {
        address >= self.base
            && address - self.base <= self.bytes
            && bytes <= self.bytes - (address - self.base)
    }
}

impl Registry {
    /// Returns the source word of `bytes` bytes at `address`, or 0 if they are not all in one registered buffer.
    #[inline]
    pub fn source(&self, address: u64, bytes: u64) -> u64 {
        let holding = self.rows.iter().enumerate().find_map(|(row, entry)| match entry {
            Row::Used(range) if range.holds(address, bytes) => Some(source_word(row, address - range.base)),
            _ => None,
        });
        holding.unwrap_or(0)
    }

    /// Returns the rows that were used and are free now, encoded for the other ranks.
    pub fn free_rows(&self) -> Vec<u8> {
        let free = self.rows.iter().zip(0u16..).filter(|(row, _)| matches!(row, Row::Free));
        free.flat_map(|(_, row)| row.to_le_bytes()).collect()
    }

    /// Returns the row that all ranks use next: the lowest that is free on all, or else a new one.
    pub fn next_row(&self, free_rows: &[Vec<u8>]) -> Result<usize> {
        let mut free_on = vec![0; self.rows.len()];
        for (rank, bytes) in free_rows.iter().enumerate() {
            let mut last = None;
            for row in bytes.chunks(2) {
                // In ascending order, so that no rank counts a row twice.
                let row = row.try_into().map(u16::from_le_bytes).ok().filter(|&row| Some(row) > last);
                last = row;
                let count = row.and_then(|row| free_on.get_mut(usize::from(row)));
                *count.ok_or_else(|| Error::Malformed {
                    rank,
                    reason: "its list of free rows has a row that does not exist, or a row twice".into(),
                })? += 1;
            }
        }
        let row = free_on.iter().position(|&count| count == free_rows.len()).unwrap_or(self.rows.len());
        if row >= FIRST_GRAPH_ROW {
            let reason = format!("{FIRST_GRAPH_ROW} are registered");
            return Err(Error::Unavailable { what: "another registered buffer".into(), reason });
        }
        Ok(row)
    }

    pub fn set(&mut self, row: usize, entry: Row) {
        if row == self.rows.len() {
            self.rows.push(entry);
        } else {
            self.rows[row] = entry;
        }
    }
}

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_free_rows, |bytes| {
    let mine = Registry { rows: vec![Row::Free; 3] };
    mine.next_row(&[mine.free_rows(), bytes.to_vec()])
});

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::abi::FA_SOURCE_ID_SHIFT;
    use crate::testing::damaged::damaged;

    fn registry(rows: &[Option<(u64, u64)>]) -> Registry {
        let row = |row: &Option<(u64, u64)>| match *row {
            None => Row::Free,
            Some((base, bytes)) => Row::Used(Range { base, bytes }),
        };
        Registry { rows: rows.iter().map(row).collect() }
    }

    #[test]
    fn a_view_is_found_with_its_offset_and_nothing_beyond_the_end_is() {
        let registry = registry(&[None, Some((1000, 100)), Some((1100, 50))]);
        let id = |row: u64| (row + 1) << FA_SOURCE_ID_SHIFT;
        assert_eq!(registry.source(1000, 100), id(1));
        assert_eq!(registry.source(1010, 90), id(1) + 10);
        assert_eq!(registry.source(1010, 91), 0, "crosses into the next buffer");
        assert_eq!(registry.source(1100, 50), id(2));
        assert_eq!(registry.source(999, 1), 0);
        assert_eq!(registry.source(u64::MAX, u64::MAX), 0);
    }

    #[test]
    fn the_next_row_is_free_on_all_ranks() {
        let mine = registry(&[None, Some((1, 1)), None]);
        let theirs = registry(&[Some((1, 1)), Some((2, 1)), None]);
        let free = [mine.free_rows(), theirs.free_rows()];
        assert_eq!(mine.next_row(&free), Ok(2));
        assert_eq!(theirs.next_row(&free), Ok(2));
        assert_eq!(mine.next_row(&[mine.free_rows(), vec![]]), Ok(3));
    }

    #[test]
    fn a_retired_row_is_neither_found_nor_free() {
        let mut registry = registry(&[Some((1000, 100)), Some((2000, 100))]);
        registry.set(0, Row::Retired);
        assert_eq!(registry.source(1000, 100), 0, "other memory may have its address now");
        assert_eq!(registry.free_rows(), []);
        registry.set(0, Row::Free);
        assert_eq!(registry.free_rows(), [0, 0]);
    }

    #[test]
    fn an_impossible_list_of_free_rows_is_refused() {
        let registry = registry(&[None]);
        for bytes in [vec![1, 0], vec![0], vec![0, 0, 0], vec![0, 0, 0, 0]] {
            let error = registry.next_row(&[vec![], bytes]).unwrap_err();
            assert!(matches!(error, Error::Malformed { rank: 1, .. }), "{error}");
        }
    }

    proptest! {
        // Rows 1 to 3 are free here. Whatever the other rank sends, no other row is taken.
        #[test]
        fn any_list_is_refused_or_of_free_rows(
            theirs in damaged(vec![vec![1, 0, 2, 0, 3, 0], vec![0, 0, 4, 0], vec![]])
        ) {
            let mine = registry(&[Some((1, 1)), None, None, None, Some((2, 1))]);
            match mine.next_row(&[mine.free_rows(), theirs]) {
                Ok(row) => prop_assert!((1..=3).contains(&row) || row == 5, "row {}", row),
                Err(error) => prop_assert!(matches!(error, Error::Malformed { rank: 1, .. }), "{}", error),
            }
        }
    }
}
