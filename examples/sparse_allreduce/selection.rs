//! Which elements of a vector are kept: those of the largest magnitude, or all above a threshold.

use crate::sparse::{Part, Sparse};

/// The bits of |value|, which order magnitudes as numbers do; above all others those of a NaN.
pub fn magnitude(value: f32) -> u32 {
    value.to_bits() & 0x7FFF_FFFF
}

/// The positions of the `k` elements of the largest magnitude, in ascending order. Of equal ones the first are taken.
fn largest(values: &[f32], k: usize) -> Vec<u32> {
    // The key of an element: a larger one comes first.
    let key =
        |(position, &value): (usize, &f32)| u64::from(magnitude(value)) << 32 | u64::from(!(position as u32));
    let mut keys: Vec<u64> = values.iter().enumerate().map(key).collect();
    if k < keys.len() {
        keys.select_nth_unstable_by(k, |a, b| b.cmp(a));
        keys.truncate(k);
    }
    let mut positions: Vec<u32> = keys.into_iter().map(|key| !(key as u32)).collect();
    positions.sort_unstable();
    positions
}

/// The `k` elements of the largest magnitude.
pub fn top_k(values: &[f32], k: usize) -> Sparse {
    let indexes = largest(values, k);
    let values = indexes.iter().map(|&index| values[index as usize]).collect();
    Sparse { indexes, values }
}

/// The `k` entries of the largest magnitude.
pub fn top_k_of(entries: Part<'_>, k: usize) -> Sparse {
    let mut kept = Sparse::default();
    for position in largest(entries.values, k) {
        kept.push(entries.indexes[position as usize], entries.values[position as usize]);
    }
    kept
}

/// Every element whose magnitude is at least `threshold`.
pub fn at_least(values: &[f32], threshold: f32) -> Sparse {
    let mut kept = Sparse::default();
    for (index, &value) in values.iter().enumerate() {
        if value.abs() >= threshold {
            kept.push(index as u32, value);
        }
    }
    kept
}

/// About the `k` elements of the largest magnitude: all that reach the threshold that a sample of the vector has, as in
/// Lin et al., "Deep gradient compression", ICLR 2018. It passes over the vector once.
pub fn about_top_k(values: &[f32], k: usize) -> Sparse {
    const LEAST_SAMPLE: usize = 1 << 12;
    const LARGEST_STRIDE: usize = 64;
    let stride = (values.len() / LEAST_SAMPLE).clamp(1, LARGEST_STRIDE);
    let mut sample: Vec<u32> = values.iter().step_by(stride).map(|&value| magnitude(value)).collect();
    let share = k as f64 * sample.len() as f64 / values.len() as f64;
    let nth = (share.round() as usize).clamp(1, sample.len()) - 1;
    let (_, &mut threshold, _) = sample.select_nth_unstable_by(nth, |a, b| b.cmp(a));
    at_least(values, f32::from_bits(threshold))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::gradient;

    #[test]
    fn the_largest_are_taken_whatever_their_signs() {
        let kept = top_k(&[0.5, -3.0, 0.0, 2.0, -0.25, 1.0], 3);
        assert_eq!((kept.indexes, kept.values), (vec![1, 3, 5], vec![-3.0, 2.0, 1.0]));
    }

    #[test]
    fn of_equal_ones_the_first_are_taken() {
        let values = [1.0, -1.0, 2.0, 1.0, -1.0, 0.0];
        for (k, expected) in
            [&[][..], &[2], &[0, 2], &[0, 1, 2], &[0, 1, 2, 3], &[0, 1, 2, 3, 4]].iter().enumerate()
        {
            assert_eq!(top_k(&values, k).indexes, *expected);
        }
    }

    #[test]
    fn any_number_may_be_asked_for() {
        assert_eq!(top_k(&[], 3), Sparse::default());
        assert_eq!(top_k(&[1.0, -2.0], 9).indexes, [0, 1]);
        let entries = Sparse { indexes: vec![3, 8, 9], values: vec![1.0, -5.0, 2.0] };
        assert_eq!(top_k_of(entries.whole(), 2).indexes, [8, 9]);
        assert_eq!(top_k_of(entries.whole(), 4), entries);
        assert_eq!(top_k_of(entries.whole(), 0), Sparse::default());
    }

    #[test]
    fn quickselect_takes_what_sorting_does() {
        let values = gradient(7, 0, 5000);
        let mut order: Vec<u32> = (0..5000).collect();
        order.sort_by(|&a, &b| values[b as usize].abs().total_cmp(&values[a as usize].abs()).then(a.cmp(&b)));
        for k in [1, 49, 2500, 4999, 5000] {
            let mut expected = order[..k].to_vec();
            expected.sort_unstable();
            assert_eq!(top_k(&values, k).indexes, expected);
        }
    }

    #[test]
    fn a_sample_keeps_about_as_many() {
        let values = gradient(7, 1, 200_000);
        let kept = about_top_k(&values, 2000).len();
        assert!((1000..4000).contains(&kept), "{kept}");
        assert_eq!(about_top_k(&values[..1000], 10).len(), 10, "of a short vector all is the sample");
    }
}
