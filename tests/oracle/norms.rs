//! Norms of rows: in the order of `docs/fused.md`, and from the formula.

use fast_allreduce::Norm;

/// Adds the terms of a row in the documented order.
pub fn sum_in_order(terms: impl Iterator<Item = f32>) -> f32 {
    let (mut sum, terms) = (0.0_f32, terms.collect::<Vec<_>>());
    for chunk in terms.chunks(512) {
        let mut partials = [0.0_f32; 64];
        chunk.iter().enumerate().for_each(|(i, term)| partials[i % 64] += term);
        for half in [32, 16, 8, 4, 2, 1] {
            (0..half).for_each(|p| partials[p] += partials[p + half]);
        }
        sum += partials[0];
    }
    sum
}

/// Returns the mean of a row and the sum of the squares of the differences from it, in the documented order: those of
/// each chunk, then of all.
fn centred_in_order(row: &[f32]) -> (f32, f32) {
    let terms_of = |chunk: &[f32]| {
        let length = chunk.len() as f32;
        let mean = sum_in_order(chunk.iter().copied()) / length;
        (length, mean, sum_in_order(chunk.iter().map(|x| (x - mean) * (x - mean))))
    };
    let chunks: Vec<_> = row.chunks(512).map(terms_of).collect();
    let mean = chunks.iter().fold(0.0, |sum, (length, mean, _)| sum + length * mean) / row.len() as f32;
    let squares = chunks.iter().fold(0.0, |sum, (length, of_chunk, squares)| {
        let distance = of_chunk - mean;
        sum + (squares + length * (distance * distance))
    });
    (mean, squares)
}

/// Returns a normalised row, computed element by element in the documented order.
pub fn norm_row(row: &[f32], norm: Norm, weights: Option<&[f32]>, bias: Option<&[f32]>) -> Vec<f32> {
    let mean = |terms: &mut dyn Iterator<Item = f32>| sum_in_order(terms) / row.len() as f32;
    let scale_of = |row: &[f32], epsilon: f32| 1.0 / (mean(&mut row.iter().map(|x| x * x)) + epsilon).sqrt();
    let (centred, scale): (Vec<f32>, f32) = match norm {
        Norm::Rms { epsilon, .. } => (row.to_vec(), scale_of(row, epsilon)),
        Norm::Layer { epsilon, .. } => {
            let (mean, squares) = centred_in_order(row);
            (row.iter().map(|x| x - mean).collect(), 1.0 / (squares / row.len() as f32 + epsilon).sqrt())
        }
        other => unreachable!("a norm that the oracle does not know: {other:?}"),
    };
    let element = |(i, x): (usize, &f32)| {
        let weighted = weights.map_or(x * scale, |weights| x * scale * weights[i]);
        bias.map_or(weighted, |bias| weighted + bias[i])
    };
    centred.iter().enumerate().map(element).collect()
}

/// Computes a normalised row from the formula in f64, and asserts that the results are within rounding errors of it:
/// `ulp` is that of the type. Weights and biases are optional.
pub(crate) fn check_by_formula(
    row: &[f64],
    normed: &[f64],
    norm: Norm,
    epsilon: f32,
    (weights, bias): (Option<&[f32]>, Option<&[f32]>),
    ulp: f64,
) {
    let mean_of = |term: &dyn Fn(f64) -> f64| row.iter().map(|&x| term(x)).sum::<f64>() / row.len() as f64;
    let is_layer = matches!(norm, Norm::Layer { .. });
    let mean = if is_layer { mean_of(&|x| x) } else { 0.0 };
    let scale = match norm {
        Norm::Rms { .. } | Norm::Layer { .. } => {
            1.0 / (mean_of(&|x| (x - mean) * (x - mean)) + f64::from(epsilon)).sqrt()
        }
        other => unreachable!("a norm that the oracle does not know: {other:?}"),
    };
    let largest = row.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    for (i, (x, y)) in row.iter().zip(normed).enumerate() {
        let weight = weights.map_or(1.0, |weights| f64::from(weights[i]));
        let scaled = (x - mean) * scale * weight;
        let bias = bias.map_or(0.0, |bias| f64::from(bias[i]));
        let exact = scaled + bias;
        // Each of at most 8 + 6 + 128 additions is off by less than 2^-24 of the largest element, and so is the mean,
        // and with it all differences from the mean.
        let unit = 2.0_f64.powi(-24);
        let of_mean = if is_layer { 160.0 * unit * largest * scale * weight.abs() } else { 0.0 };
        let bound = exact.abs() * ulp + (scaled.abs() + bias.abs()) * 80.0 * unit + of_mean + unit;
        // Differences of nearly equal elements are rounding errors.
        let finite = exact.abs() < 60_000.0 && scale.is_finite() && (!is_layer || scale * largest < 1e3);
        assert!(!finite || (y - exact).abs() <= bound, "norm [{i}]: {y} and not {exact}");
    }
}
