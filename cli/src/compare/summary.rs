//! The summary of a comparison: a line for each contender.

use serde::Serialize;

use super::row::Row;

/// The summary of one contender over all sizes, types and operations.
#[derive(Debug, Serialize)]
pub struct Summary {
    pub by: &'static str,
    /// `None` if nothing was checked.
    pub wrong: Option<u64>,
    pub max_error: Option<f64>,
    /// `None` for this crate.
    pub ratio: Option<Spread>,
}

/// Ratios of times, out of place and in place.
#[derive(Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The geometric mean.
    pub mean: f64,
    pub least: f64,
    pub most: f64,
}

impl Spread {
    /// Returns `None` without ratios.
    fn of(ratios: &[f64]) -> Option<Self> {
        let sum_of_logarithms: f64 = ratios.iter().map(|ratio| ratio.ln()).sum();
        let (least, most) = ratios
            .iter()
            .fold((f64::INFINITY, 0.0f64), |(least, most), &ratio| (least.min(ratio), most.max(ratio)));
        let mean = (sum_of_logarithms / ratios.len() as f64).exp();
        (!ratios.is_empty()).then_some(Self { mean, least, most })
    }
}

/// Makes a summary for each contender, in order of appearance.
pub fn summaries(rows: &[Row]) -> Vec<Summary> {
    let mut names = Vec::new();
    for row in rows {
        if !names.contains(&row.by) {
            names.push(row.by);
        }
    }
    let summary = |by| {
        let of_it = || rows.iter().filter(move |row| row.by == by);
        let is_checked = of_it().any(Row::is_checked);
        let ratios: Vec<_> = of_it()
            .filter(|row| !row.is_ours())
            .flat_map(|row| [row.ratio.out_of_place, row.ratio.in_place])
            .flatten()
            .collect();
        Summary {
            by,
            wrong: is_checked.then(|| of_it().map(Row::wrong).sum()),
            max_error: of_it().filter_map(Row::max_error).reduce(f64::max),
            ratio: Spread::of(&ratios),
        }
    };
    names.into_iter().map(summary).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_of_ratios_is_geometric() {
        let spread = Spread::of(&[0.5, 2.0, 8.0]).unwrap();
        assert!((spread.mean - 2.0).abs() < 1e-12, "{spread:?}");
        assert_eq!((spread.least, spread.most), (0.5, 8.0));
        assert_eq!(Spread::of(&[]), None);
    }
}
