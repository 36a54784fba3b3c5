//! Whether a path has kept its promise: its output beside one that is computed here, by one thread and other means.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::path::Promise;
use crate::selection::magnitude;
use crate::sparse::Sparse;

/// What one rank has of a path.
pub struct Outcome {
    /// What it kept of its vector.
    pub kept: Sparse,
    pub output: Vec<f32>,
    /// The dense allreduce of what the ranks kept.
    pub dense: Vec<f32>,
    /// Medians.
    pub selecting: Duration,
    pub reducing: Duration,
    /// Bytes.
    pub sent: usize,
}

#[derive(Debug, PartialEq)]
pub struct Verdict {
    /// Elements of any rank's output that are not what is promised.
    pub wrong: usize,
    /// Elements of any rank's dense allreduce that are not the sum in rank order.
    pub wrong_dense: usize,
    /// Of the output against the dense allreduce: the norm of the difference over that of the latter.
    pub relative_error: f64,
}

impl Verdict {
    pub fn is_right(&self) -> bool {
        self.wrong == 0 && self.wrong_dense == 0
    }
}

pub fn judge(promise: Promise, outcomes: &[Outcome], k: usize) -> Verdict {
    let kept: Vec<&Sparse> = outcomes.iter().map(|outcome| &outcome.kept).collect();
    let count = outcomes[0].output.len();
    let mut sum = vec![0.0; count];
    for entries in &kept {
        entries.add_to(&mut sum);
    }
    let wrong_dense = outcomes.iter().map(|outcome| differing(&outcome.dense, &sum)).sum();
    let expected = match promise {
        Promise::Sum => sum,
        Promise::TopKOfSum => top_k_of_sum(&sum, k),
        Promise::TopKOfTree => top_k_of_tree(&kept, k, count),
    };
    let wrong = outcomes.iter().map(|outcome| differing(&outcome.output, &expected)).sum();
    Verdict { wrong, wrong_dense, relative_error: relative_error(&outcomes[0].output, &outcomes[0].dense) }
}

fn differing(output: &[f32], expected: &[f32]) -> usize {
    output.iter().zip(expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count()
}

/// The larger magnitude first, of equal ones the smaller index.
fn sort(entries: &mut [(u32, f32)]) {
    entries.sort_by(|a, b| magnitude(b.1).cmp(&magnitude(a.1)).then(a.0.cmp(&b.0)));
}

fn top_k_of_sum(sum: &[f32], k: usize) -> Vec<f32> {
    let numbered = sum.iter().enumerate().filter(|(_, value)| **value != 0.0);
    let mut entries: Vec<_> = numbered.map(|(index, &value)| (index as u32, value)).collect();
    sort(&mut entries);
    entries.truncate(k);
    spread(entries, sum.len())
}

fn top_k_of_tree(kept: &[&Sparse], k: usize, count: usize) -> Vec<f32> {
    let entries =
        |sparse: &&Sparse| sparse.indexes.iter().copied().zip(sparse.values.iter().copied()).collect();
    let mut level: Vec<BTreeMap<u32, f32>> = kept.iter().map(entries).collect();
    while level.len() > 1 {
        let pairs = level.chunks(2).map(|pair| {
            let [left, right] = pair else { return pair[0].clone() };
            let mut sum = left.clone();
            for (&index, &value) in right {
                *sum.entry(index).or_insert(0.0) += value;
            }
            let mut entries: Vec<_> = sum.into_iter().collect();
            sort(&mut entries);
            entries.truncate(k);
            entries.into_iter().collect()
        });
        level = pairs.collect();
    }
    spread(level.swap_remove(0), count)
}

fn spread(entries: impl IntoIterator<Item = (u32, f32)>, count: usize) -> Vec<f32> {
    let mut dense = vec![0.0; count];
    entries.into_iter().for_each(|(index, value)| dense[index as usize] += value);
    dense
}

fn relative_error(output: &[f32], dense: &[f32]) -> f64 {
    let square = |value: f64| value * value;
    let difference: f64 = output.iter().zip(dense).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    let norm: f64 = dense.iter().map(|&value| square(f64::from(value))).sum();
    match difference {
        0.0 => 0.0,
        difference => (difference / norm).sqrt(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(kept: &[(u32, f32)], output: &[f32], dense: &[f32]) -> Outcome {
        let (indexes, values) = kept.iter().copied().unzip();
        let (selecting, reducing) = (Duration::ZERO, Duration::ZERO);
        let (output, dense) = (output.to_vec(), dense.to_vec());
        Outcome { kept: Sparse { indexes, values }, output, dense, selecting, reducing, sent: 0 }
    }

    #[test]
    fn what_is_promised_is_right_and_anything_else_is_not() {
        let dense = [4.0, 0.0, -3.0, 1.0];
        let ranks = |first: [f32; 4], second: [f32; 4]| {
            [
                outcome(&[(0, 4.0), (2, -1.0)], &first, &dense),
                outcome(&[(2, -2.0), (3, 1.0)], &second, &dense),
            ]
        };
        assert!(judge(Promise::Sum, &ranks(dense, dense), 2).is_right());
        let top = [4.0, 0.0, -3.0, 0.0];
        let verdict = judge(Promise::TopKOfSum, &ranks(top, top), 2);
        assert!(verdict.is_right() && (verdict.relative_error - (1.0f64 / 26.0).sqrt()).abs() < 1e-15);
        assert!(judge(Promise::TopKOfTree, &ranks(top, top), 2).is_right());
        assert_eq!(judge(Promise::Sum, &ranks(top, top), 2).wrong, 2);
        assert_eq!(judge(Promise::Sum, &ranks(dense, top), 2).wrong, 1, "the ranks differ");
        let mut others = ranks(dense, dense);
        others[1].dense[1] = 1.0;
        let verdict = judge(Promise::Sum, &others, 2);
        assert!(verdict.wrong_dense == 1 && !verdict.is_right());
    }

    #[test]
    fn the_tree_drops_what_the_sum_would_keep() {
        // Index 1 has the largest sum, but no two ranks in a row keep it.
        let kept = [[(0, 3.0), (1, 2.0)], [(0, 3.0), (2, 5.0)], [(1, 2.0), (3, 9.0)]];
        let kept: Vec<Sparse> = kept
            .iter()
            .map(|entries| {
                let (indexes, values) = entries.iter().copied().unzip();
                Sparse { indexes, values }
            })
            .collect();
        let kept: Vec<&Sparse> = kept.iter().collect();
        assert_eq!(top_k_of_tree(&kept, 2, 4), [6.0, 0.0, 0.0, 9.0]);
        assert_eq!(top_k_of_tree(&kept[..1], 2, 4), [3.0, 2.0, 0.0, 0.0]);
    }
}
