//! Steps of unfused sequences, in Rust that the compiler vectorises.

use fast_allreduce::Norm;

#[cfg(target_arch = "x86_64")]
use crate::harness::norm::has_avx2;
use crate::harness::norm::{Float, EPSILON};

/// Experts of a row, and the ratio of experts' rows to rows of the message.
pub const TOP_K: usize = 4;

/// Who computes a form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    Ours,
    Steps,
    /// The plain call: an allreduce, a reduce-scatter or an all-gather of the elements; of a sharded norm, an allreduce
    /// of a float for each row.
    Plain,
}

impl By {
    pub const ALL: [Self; 3] = [Self::Ours, Self::Steps, Self::Plain];
}

/// Elements of a chunk. That many partial sums hide the latency of additions.
const LANES: usize = 64;

/// A loop over elements of a type, which is compiled for the best instructions of this machine.
pub(super) trait Step<T> {
    /// `widen` and `narrow` convert slices of equal length. Implementations are inlined.
    fn run(self, widen: &impl Fn(&[T], &mut [f32]), narrow: &impl Fn(&[f32], &mut [T]));
}

pub(super) fn run<T: Float>(step: impl Step<T>) {
    #[cfg(target_arch = "x86_64")]
    if has_avx2() {
        // SAFETY: this CPU has the instructions.
        return unsafe { run_avx2(step) };
    }
    step.run(&T::widen, &T::narrow);
}

/// # Safety
///
/// The CPU has AVX2 and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn run_avx2<T: Float>(step: impl Step<T>) {
    // SAFETY: guaranteed by the caller.
    let widen = |from: &[T], to: &mut [f32]| unsafe { T::widen_avx2(from, to) };
    // SAFETY: guaranteed by the caller.
    let narrow = |from: &[f32], to: &mut [T]| unsafe { T::narrow_avx2(from, to) };
    step.run(&widen, &narrow);
}

/// Returns the sum of a term of each element.
#[inline(always)]
fn sum_of(elements: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let mut sums = [0.0_f32; LANES];
    let chunks = elements.chunks_exact(LANES);
    let rest: f32 = chunks.remainder().iter().map(|&x| term(x)).sum();
    chunks.for_each(|chunk| sums.iter_mut().zip(chunk).for_each(|(sum, &x)| *sum += term(x)));
    sums.iter().sum::<f32>() + rest
}

/// Operands of a norm. An empty bias is none.
pub(super) struct Operands<'a, T> {
    pub norm: Norm,
    pub offset: bool,
    pub weight: &'a [T],
    pub bias: &'a [T],
}

struct AddAndNorm<'a, T> {
    sum: &'a [T],
    residual: &'a mut [T],
    output: &'a mut [T],
    operands: &'a Operands<'a, T>,
}

/// Computes `residual += sum`, then normalises the rows of the residual.
pub(super) fn add_and_norm<T: Float>(
    sum: &[T],
    residual: &mut [T],
    output: &mut [T],
    operands: &Operands<'_, T>,
) {
    run(AddAndNorm { sum, residual, output, operands });
}

impl<T: Float> Step<T> for AddAndNorm<'_, T> {
    #[inline(always)]
    fn run(self, widen: &impl Fn(&[T], &mut [f32]), narrow: &impl Fn(&[f32], &mut [T])) {
        let Self { sum, residual, output, operands: &Operands { norm, offset, weight, bias } } = self;
        let hidden = weight.len();
        let (is_layer, offset) = (matches!(norm, Norm::Layer { .. }), if offset { 1.0_f32 } else { 0.0 });
        let (mut row, mut factors, mut biases) = (vec![0.0; hidden], vec![0.0; hidden], vec![0.0; hidden]);
        widen(weight, &mut factors);
        factors.iter_mut().for_each(|factor| *factor += offset);
        if !bias.is_empty() {
            widen(bias, &mut biases);
        }
        let rows = sum.chunks_exact(hidden).zip(residual.chunks_exact_mut(hidden));
        for ((sum, residual), output) in rows.zip(output.chunks_exact_mut(hidden)) {
            for ((sum, residual), row) in
                sum.chunks(LANES).zip(residual.chunks_mut(LANES)).zip(row.chunks_mut(LANES))
            {
                let mut before = [0.0_f32; LANES];
                widen(sum, row);
                widen(residual, &mut before[..row.len()]);
                row.iter_mut().zip(&before).for_each(|(x, before)| *x += before);
                narrow(row, residual);
                widen(residual, row);
            }
            let mean = if is_layer { sum_of(&row, |x| x) / hidden as f32 } else { 0.0 };
            let squares = sum_of(&row, |x| (x - mean) * (x - mean));
            let scale = 1.0 / (squares / hidden as f32 + EPSILON).sqrt();
            let chunks = row.chunks_mut(LANES).zip(factors.chunks(LANES)).zip(biases.chunks(LANES));
            for (((row, factors), biases), output) in chunks.zip(output.chunks_mut(LANES)) {
                let each = row.iter_mut().zip(factors).zip(biases);
                each.for_each(|((x, factor), bias)| *x = (*x - mean) * scale * factor + bias);
                narrow(row, output);
            }
        }
    }
}

struct Gather<'a, T> {
    rows: &'a [T],
    table: &'a [i32],
    weights: &'a [f32],
    hidden: usize,
    output: &'a mut [T],
}

/// Computes each row of the output as the weighted sum of the rows that its part of the table names.
pub(super) fn gather<T: Float>(rows: &[T], table: &[i32], weights: &[f32], hidden: usize, output: &mut [T]) {
    run(Gather { rows, table, weights, hidden, output });
}

impl<T: Float> Step<T> for Gather<'_, T> {
    #[inline(always)]
    fn run(self, widen: &impl Fn(&[T], &mut [f32]), narrow: &impl Fn(&[f32], &mut [T])) {
        let Self { rows, table, weights, hidden, output } = self;
        let top_k = table.len() / (output.len() / hidden).max(1);
        for (row, output) in output.chunks_exact_mut(hidden).enumerate() {
            let own = row * top_k..(row + 1) * top_k;
            for (number, output) in output.chunks_mut(LANES).enumerate() {
                let (mut sum, mut wide) = ([0.0_f32; LANES], [0.0_f32; LANES]);
                for (&entry, &weight) in table[own.clone()].iter().zip(&weights[own.clone()]) {
                    let first = entry as usize * hidden + number * LANES;
                    widen(&rows[first..first + output.len()], &mut wide[..output.len()]);
                    sum.iter_mut().zip(&wide).for_each(|(sum, x)| *sum += x * weight);
                }
                narrow(&sum[..output.len()], output);
            }
        }
    }
}

struct Squares<'a, T> {
    input: &'a [T],
    columns: usize,
    sums: &'a mut [f32],
}

/// Computes the sum of the squares of each row.
pub(super) fn squares<T: Float>(input: &[T], columns: usize, sums: &mut [f32]) {
    run(Squares { input, columns, sums });
}

impl<T: Float> Step<T> for Squares<'_, T> {
    #[inline(always)]
    fn run(self, widen: &impl Fn(&[T], &mut [f32]), _: &impl Fn(&[f32], &mut [T])) {
        for (row, sum) in self.input.chunks_exact(self.columns).zip(self.sums) {
            let mut squares = [0.0_f32; LANES];
            for chunk in row.chunks(LANES) {
                let mut wide = [0.0_f32; LANES];
                widen(chunk, &mut wide[..chunk.len()]);
                squares.iter_mut().zip(&wide).for_each(|(square, x)| *square += x * x);
            }
            *sum = squares.iter().sum();
        }
    }
}

struct Scale<'a, T> {
    input: &'a [T],
    weight: &'a [T],
    total: usize,
    squares: &'a [f32],
    output: &'a mut [T],
}

/// Normalises this rank's columns of rows of `total` elements, given the squares of whole rows.
pub(super) fn scale<T: Float>(input: &[T], weight: &[T], total: usize, squares: &[f32], output: &mut [T]) {
    run(Scale { input, weight, total, squares, output });
}

impl<T: Float> Step<T> for Scale<'_, T> {
    #[inline(always)]
    fn run(self, widen: &impl Fn(&[T], &mut [f32]), narrow: &impl Fn(&[f32], &mut [T])) {
        let Self { input, weight, total, squares, output } = self;
        let columns = weight.len();
        let mut factors = vec![0.0; columns];
        widen(weight, &mut factors);
        let rows = input.chunks_exact(columns).zip(output.chunks_exact_mut(columns));
        for ((row, output), squares) in rows.zip(squares) {
            let scale = 1.0 / (squares / total as f32 + EPSILON).sqrt();
            let chunks = row.chunks(LANES).zip(output.chunks_mut(LANES)).zip(factors.chunks(LANES));
            for ((row, output), factors) in chunks {
                let mut wide = [0.0_f32; LANES];
                widen(row, &mut wide[..row.len()]);
                wide.iter_mut().zip(factors).for_each(|(x, factor)| *x = *x * scale * factor);
                narrow(&wide[..row.len()], output);
            }
        }
    }
}
