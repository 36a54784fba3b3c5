//! Selection by the threshold that k elements would reach if all were normally distributed.
//!
//! Shi et al., "Understanding top-k sparsification in distributed deep learning", arXiv 1911.08772, algorithm 1. It
//! passes over the vector a few times and copies nothing. What is selected is exchanged as in `top_k_a_opt`,
//! `gaussian_k_concat` or `top_k_sa`.

use crate::normal::upper_quantile;
use crate::selection::at_least;
use crate::sparse::Sparse;

/// Times that a threshold is moved which keeps too many or too few: gradients are not normal.
const CORRECTIONS: usize = 3;

/// About `k` elements: within a third of it, where the corrections get there.
pub fn select(values: &[f32], k: usize) -> Sparse {
    let mut threshold = threshold(values, k);
    for _ in 0..CORRECTIONS {
        let reaching = values.iter().filter(|value| value.abs() >= threshold).count();
        if 3 * reaching < 2 * k {
            threshold *= 0.5;
        } else if 3 * reaching > 4 * k {
            threshold *= 1.5;
        } else {
            break;
        }
    }
    at_least(values, threshold)
}

/// The mean and as many standard deviations as `k` of the elements are away from it, on either side. (The paper takes
/// the probability of one side, which finds twice as many at first.)
fn threshold(values: &[f32], k: usize) -> f32 {
    let count = values.len() as f64;
    let mean = values.iter().map(|&value| f64::from(value)).sum::<f64>() / count;
    let variance = values.iter().map(|&value| (f64::from(value) - mean).powi(2)).sum::<f64>() / count;
    let tail = k as f64 / count / 2.0;
    (mean.abs() + variance.sqrt() * upper_quantile(tail)) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_normal_values_about_k_are_kept() {
        // The normal quantiles of evenly spaced probabilities.
        let half: Vec<f32> =
            (0..5000).map(|n| upper_quantile((f64::from(n) + 0.5) / 10_000.0) as f32).collect();
        let values: Vec<f32> = half.iter().map(|value| -value).chain(half.iter().copied()).collect();
        for k in [10, 100, 1000, 5000, 10_000] {
            let kept = select(&values, k).len();
            assert!(kept.abs_diff(k) <= 2 + k / 100, "{kept} of {k}");
        }
    }

    #[test]
    fn of_others_the_threshold_is_moved() {
        // The quantiles of a Laplace distribution, whose tails are longer.
        let half = (0..50_000).map(|n| -(2.0 * (f64::from(n) + 0.5) / 100_000.0).ln() as f32);
        let values: Vec<f32> = half.flat_map(|value| [value, -value]).collect();
        let first = at_least(&values, threshold(&values, 200)).len();
        let kept = select(&values, 200).len();
        assert!(first > 1000, "{first}: no correction is tested");
        assert!((133..=267).contains(&kept), "{kept}");
    }

    #[test]
    fn constant_vectors_are_kept_whole_or_not_at_all() {
        assert_eq!(select(&[0.5; 10], 10).len(), 10);
        assert_eq!(select(&[0.0; 10], 1).len(), 10);
    }
}
