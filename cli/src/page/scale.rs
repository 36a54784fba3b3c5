//! Logarithmic axes: positions of numbers, and which numbers have a label.

/// An axis from one number to another.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    from: f64,
    to: f64,
    start: f64,
    end: f64,
}

impl Scale {
    /// Makes an axis of numbers from `from` to `to`, both positive, at positions from `start` to `end`.
    pub fn new(from: f64, to: f64, start: f64, end: f64) -> Self {
        // A single number is in the middle.
        let (from, to) = if from < to { (from, to) } else { (from / 2.0, to * 2.0) };
        Self { from: from.ln(), to: to.ln(), start, end }
    }

    /// Returns the position of a number.
    pub fn at(&self, number: f64) -> f64 {
        let share = (number.ln() - self.from) / (self.to - self.from);
        self.start + share * (self.end - self.start)
    }

    /// Returns a few powers of two on the axis, at equal distances.
    pub fn sizes(&self) -> Vec<u64> {
        const MOST: u32 = 5;
        let (low, high) = (self.from / 2f64.ln(), self.to / 2f64.ln());
        let (low, high) =
            ((low - 1e-9).ceil().max(0.0) as u32, (high + 1e-9).floor().clamp(0.0, 63.0) as u32);
        let range = high.saturating_sub(low);
        let step = [1, 2, 4, 8, 16].into_iter().find(|step| range / step < MOST).unwrap_or(32);
        (low..=high).step_by(step as usize).map(|power| 1 << power).collect()
    }

    /// Returns the powers of ten on the axis; if there are few, also 2 and 5 times them.
    pub fn decades(&self) -> Vec<f64> {
        let (low, high) = (self.from / 10f64.ln(), self.to / 10f64.ln());
        let is_inside = |number: &f64| (self.from - 1e-9..=self.to + 1e-9).contains(&number.ln());
        let powers = low.floor() as i32..=high.ceil() as i32;
        let parts: &[f64] = if high - low < 2.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let numbers = powers.flat_map(|power| parts.iter().map(move |part| part * 10f64.powi(power)));
        numbers.filter(is_inside).collect()
    }
}

/// Formats a number of [`Scale::decades`].
pub fn plain(number: f64) -> String {
    let decimals = (-number.log10().floor()).clamp(0.0, 6.0) as usize;
    format!("{number:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_logarithmic() {
        let scale = Scale::new(1.0, 100.0, 0.0, 10.0);
        assert!((scale.at(10.0) - 5.0).abs() < 1e-9);
        assert!((Scale::new(8.0, 8.0, 0.0, 10.0).at(8.0) - 5.0).abs() < 1e-9);
    }

    #[test]
    fn labels_are_few_and_inside() {
        let sizes = |from: f64, to: f64| Scale::new(from, to, 0.0, 1.0).sizes();
        assert_eq!(sizes(1024.0, 16_777_216.0), [1 << 10, 1 << 14, 1 << 18, 1 << 22]);
        assert_eq!(sizes(1000.0, 5000.0), [1024, 2048, 4096]);
        assert_eq!(sizes(1024.0, 1024.0), [512, 1024, 2048]);
        assert!(sizes(1.0, 2f64.powi(50)).len() <= 5);
        let decades = |from: f64, to: f64| Scale::new(from, to, 0.0, 1.0).decades();
        assert_eq!(decades(0.1, 1000.0), [0.1, 1.0, 10.0, 100.0, 1000.0].map(|n: f64| n));
        assert_eq!(decades(3.0, 60.0), [5.0, 10.0, 20.0, 50.0]);
    }

    #[test]
    fn numbers_are_plain() {
        assert_eq!([0.01, 0.5, 1.0, 20.0, 10_000.0].map(plain), ["0.01", "0.5", "1", "20", "10000"]);
    }
}
