//! Inputs that are computed from experts' rows: expected inputs, from the formula and the order in `docs/fused.md`.

use fast_allreduce::{DType, RawExperts};

use crate::random::{elements, Random, Values};
use crate::rows::{bytes_of, values_of};

/// A rank's experts and tables.
pub struct Experts {
    dtype: DType,
    hidden: usize,
    top_k: usize,
    /// Rows of the experts, as bytes.
    pub rows: Vec<u8>,
    pub table: Vec<u8>,
    weights_dtype: DType,
    pub weights: Option<Vec<u8>>,
    pub shared: Option<Vec<u8>>,
    routed_scale: f32,
}

impl Experts {
    /// Draws experts for `rows` rows of `hidden` elements.
    pub fn new(random: &mut Random, dtype: DType, (rows, hidden): (usize, usize), values: Values) -> Self {
        let top_k = random.pick(&[1, 2, 3, 8, 9]);
        let experts_rows = random.below(rows + 1);
        // Some rows are named several times, some never.
        let entry = |random: &mut Random| match random.below(experts_rows + 2) {
            0 => random.pick(&[-1, i32::MIN]),
            number => (number as i32 - 1).min(experts_rows as i32 - 1),
        };
        let table = (0..rows * top_k).flat_map(|_| entry(random).to_le_bytes()).collect();
        let weights_dtype = random.pick(&[dtype, DType::F32]);
        let weights = elements(random, weights_dtype, rows * top_k, Values::Plain);
        let shared = elements(random, dtype, rows * hidden, values);
        Self {
            dtype,
            hidden,
            top_k,
            rows: elements(random, dtype, experts_rows * hidden, values),
            table,
            weights_dtype,
            weights: (!random.one_in(4)).then_some(weights),
            shared: random.one_in(2).then_some(shared),
            routed_scale: random.pick(&[1.0, 1.0, 2.5, -0.375]),
        }
    }

    /// Returns the input, as bytes. With `checked` it is also computed in f64, and compared.
    pub fn input(&self, checked: bool) -> Vec<u8> {
        let &Self { dtype, hidden, top_k, routed_scale, .. } = self;
        let rows: Vec<f32> = values_of(dtype, &self.rows).collect();
        let table = self.table.chunks(4).map(|entry| i32::from_le_bytes(entry.try_into().unwrap()));
        let table: Vec<i32> = table.collect();
        let weights: Option<Vec<f32>> =
            self.weights.as_ref().map(|weights| values_of(self.weights_dtype, weights).collect());
        let shared: Option<Vec<f32>> = self.shared.as_ref().map(|shared| values_of(dtype, shared).collect());
        let mut input = Vec::new();
        for element in 0..table.len() / top_k * hidden {
            let (row, column) = (element / hidden, element % hidden);
            let terms = (row * top_k..(row + 1) * top_k).filter_map(|k| {
                let expert = usize::try_from(table[k]).ok()?;
                Some((rows[expert * hidden + column], weights.as_ref().map_or(1.0, |weights| weights[k])))
            });
            let mut sum = 0.0_f32;
            for (x, weight) in terms.clone() {
                sum += x * weight;
            }
            sum *= routed_scale;
            if let Some(shared) = &shared {
                sum += shared[element];
            }
            let rounded = bytes_of(dtype, sum);
            if checked {
                let shared = shared.as_ref().map_or(0.0, |shared| f64::from(shared[element]));
                let wide =
                    terms.map(|(x, weight)| f64::from(x) * f64::from(weight) * f64::from(routed_scale));
                let wide: Vec<f64> = wide.chain([shared]).collect();
                let (exact, magnitude) =
                    (wide.iter().sum::<f64>(), wide.iter().map(|x| x.abs()).sum::<f64>());
                let ulp = match dtype {
                    DType::F16 => 2.0_f64.powi(-11),
                    DType::Bf16 => 2.0_f64.powi(-8),
                    _ => 0.0,
                };
                // One error for each product, each addition and the scale, and that of the rounding.
                let bound = magnitude * (ulp + (2 * top_k + 3) as f64 * 2.0_f64.powi(-24));
                let is = values_of(dtype, &rounded).next().map_or(f64::NAN, f64::from);
                assert!((is - exact).abs() <= bound, "input [{element}]: {is} and not {exact}");
            }
            input.extend(rounded);
        }
        input
    }

    /// Returns the operands, with these addresses of the table, the weights and the shared expert's rows.
    pub fn at(&self, table: u64, weights: u64, shared: u64) -> RawExperts {
        let &Self { top_k, weights_dtype, routed_scale, .. } = self;
        RawExperts {
            table,
            top_k,
            rows: self.rows.len() / (self.hidden * self.dtype.size()).max(1),
            weights: if self.weights.is_some() { weights } else { 0 },
            weights_dtype,
            shared: if self.shared.is_some() { shared } else { 0 },
            routed_scale,
        }
    }
}
