//! Regions of the index space, one for each rank, and the cuts that they make in a sparse vector.

use std::ops::Range;

/// The first index of each of `regions` regions of as many elements, and the end of the last.
pub fn even(count: usize, regions: usize) -> Vec<u32> {
    (0..=regions).map(|region| (region as u64 * count as u64 / regions as u64) as u32).collect()
}

/// Where the regions but the first begin if each is to hold as many of these entries.
pub fn balanced(indexes: &[u32], count: usize, regions: usize) -> Vec<u32> {
    match indexes.len() {
        0 => even(count, regions)[1..regions].to_vec(),
        len => (1..regions).map(|region| indexes[region * len / regions]).collect(),
    }
}

/// The entries of each region: their positions among `indexes`, which ascend as `bounds` do.
pub fn cuts(indexes: &[u32], bounds: &[u32]) -> Vec<Range<usize>> {
    let at = |bound: u32| indexes.partition_point(|&index| index < bound);
    bounds.windows(2).map(|pair| at(pair[0])..at(pair[1])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_regions_cover_everything_and_differ_by_one_at_most() {
        for (count, regions) in [(10, 1), (10, 3), (2, 5), (1, 8), (u32::MAX as usize, 7)] {
            let bounds = even(count, regions);
            assert_eq!((bounds[0], bounds[regions]), (0, count as u32));
            let lengths: Vec<_> = bounds.windows(2).map(|pair| pair[1] - pair[0]).collect();
            assert!(lengths.iter().max().unwrap() - lengths.iter().min().unwrap() <= 1, "{lengths:?}");
        }
    }

    #[test]
    fn balanced_regions_hold_as_many_entries() {
        let indexes: Vec<u32> = (0..90).map(|index| index * index).collect();
        let inner = balanced(&indexes, 9000, 4);
        let bounds = [&[0], &inner[..], &[9000]].concat();
        let lengths: Vec<_> = cuts(&indexes, &bounds).into_iter().map(|cut| cut.len()).collect();
        assert_eq!(lengths, [22, 23, 22, 23]);
        assert_eq!(balanced(&indexes, 9000, 1), []);
        assert_eq!(balanced(&[], 8, 4), [2, 4, 6]);
        assert_eq!(balanced(&[5], 8, 4), [5, 5, 5]);
    }

    #[test]
    fn cuts_are_in_a_row_and_take_all() {
        let indexes = [0, 3, 4, 7];
        assert_eq!(cuts(&indexes, &[0, 3, 3, 8]), [0..1, 1..1, 1..4]);
        assert_eq!(cuts(&[], &[0, 5, 8]), [0..0, 0..0]);
    }
}
