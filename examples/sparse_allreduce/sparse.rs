//! Sparse vectors: entries as indexes and values, in two arrays, as collectives take them.

use std::ops::Range;

/// Entries of a vector. In ascending order of their indexes, but for what several ranks' entries were concatenated to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sparse {
    pub indexes: Vec<u32>,
    pub values: Vec<f32>,
}

/// Some entries in a row.
#[derive(Debug, Clone, Copy)]
pub struct Part<'a> {
    pub indexes: &'a [u32],
    pub values: &'a [f32],
}

impl Sparse {
    /// Room for entries that a peer sends.
    pub fn zeros(len: usize) -> Self {
        Self { indexes: vec![0; len], values: vec![0.0; len] }
    }

    pub fn len(&self) -> usize {
        self.indexes.len()
    }

    pub fn push(&mut self, index: u32, value: f32) {
        self.indexes.push(index);
        self.values.push(value);
    }

    pub fn whole(&self) -> Part<'_> {
        self.part(0..self.len())
    }

    pub fn part(&self, entries: Range<usize>) -> Part<'_> {
        Part { indexes: &self.indexes[entries.clone()], values: &self.values[entries] }
    }

    /// Adds the entries to a dense vector, one after the other.
    pub fn add_to(&self, dense: &mut [f32]) {
        for (&index, &value) in self.indexes.iter().zip(&self.values) {
            dense[index as usize] += value;
        }
    }
}

/// The sum of two vectors, in ascending order as both are.
pub fn merge(left: Part<'_>, right: Part<'_>) -> Sparse {
    let longest = left.indexes.len() + right.indexes.len();
    let mut sum = Sparse { indexes: Vec::with_capacity(longest), values: Vec::with_capacity(longest) };
    let (mut at, mut other) = (0, 0);
    // What only one side has is added to the other's +0, as in a dense sum: -0 becomes +0.
    while at < left.indexes.len() || other < right.indexes.len() {
        match (left.indexes.get(at), right.indexes.get(other)) {
            (Some(&index), Some(&same)) if index == same => {
                sum.push(index, left.values[at] + right.values[other]);
                (at, other) = (at + 1, other + 1);
            }
            (Some(&index), next) if next.is_none_or(|&next| index < next) => {
                sum.push(index, left.values[at] + 0.0);
                at += 1;
            }
            (_, Some(&index)) => {
                sum.push(index, 0.0 + right.values[other]);
                other += 1;
            }
            // A left entry is below the right one, equal to it, or above it.
            (_, None) => break,
        }
    }
    sum
}

/// The sum of the ranks' vectors, added in their order: the same bits as a dense sum from +0 in that order.
pub fn sum<'a>(parts: impl IntoIterator<Item = Part<'a>>) -> Sparse {
    parts.into_iter().fold(Sparse::default(), |sum, part| merge(sum.whole(), part))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sparse(entries: &[(u32, f32)]) -> Sparse {
        let (indexes, values) = entries.iter().copied().unzip();
        Sparse { indexes, values }
    }

    #[test]
    fn merging_adds_what_both_have_and_keeps_the_rest() {
        let left = sparse(&[(0, 1.0), (4, -2.0), (9, 3.0)]);
        let right = sparse(&[(1, 0.5), (4, 2.0), (10, 7.0)]);
        let expected = sparse(&[(0, 1.0), (1, 0.5), (4, 0.0), (9, 3.0), (10, 7.0)]);
        assert_eq!(merge(left.whole(), right.whole()), expected);
        assert_eq!(merge(right.whole(), left.whole()), expected);
        let none = Sparse::default();
        assert_eq!(merge(left.whole(), none.whole()), left);
        assert_eq!(merge(none.whole(), left.whole()), left);
        assert_eq!(merge(none.whole(), none.whole()), none);
    }

    #[test]
    fn a_sum_has_the_bits_of_the_dense_one() {
        // Values whose sum depends on the order.
        let ranks = [
            sparse(&[(0, 1e8), (2, -0.0), (3, 0.1)]),
            sparse(&[(0, 1.0), (3, 0.2), (5, -4.0)]),
            sparse(&[(0, -1e8), (3, 0.3), (5, 4.0)]),
        ];
        let mut dense = vec![0.0; 6];
        for rank in &ranks {
            rank.add_to(&mut dense);
        }
        let summed = sum(ranks.iter().map(Sparse::whole));
        assert_eq!(summed.indexes, [0, 2, 3, 5]);
        for (&index, value) in summed.indexes.iter().zip(&summed.values) {
            assert_eq!(value.to_bits(), dense[index as usize].to_bits(), "at {index}");
        }
    }
}
