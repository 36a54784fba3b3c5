//! Checks the results of a form: every element has the documented bits.

use fast_allreduce::ReduceOp;
use fast_allreduce_oracle::norms::{norm_row, sum_in_order};
use fast_allreduce_oracle::quantized_rows::Becomes;

use super::buffers::{entry, weight_of_entry, Buffers, SMALL};
use super::steps::TOP_K;
use crate::arguments::Call;
use crate::harness::inputs::Inputs;
use crate::harness::memory::Lines;
use crate::harness::norm::{Float, EPSILON};

impl<T: Float> Buffers<'_, T> {
    /// Returns the number of wrong elements, numbers and bytes of scales after this crate's first call, for inputs that
    /// all ranks have made from `seed`.
    pub fn wrong(&self, seed: u64) -> u64 {
        let seed = (seed, self.seed.1);
        let all = Expected { of: self, seed, inputs: self.inputs_of(seed) };
        all.wrong()
    }
}

/// The expected results of a rank.
struct Expected<'a, 'b, T> {
    of: &'a Buffers<'b, T>,
    seed: (u64, u64),
    inputs: Inputs,
}

impl<'b, T> std::ops::Deref for Expected<'_, 'b, T> {
    type Target = Buffers<'b, T>;

    fn deref(&self) -> &Self::Target {
        self.of
    }
}

impl<T: Float> Expected<'_, '_, T> {
    fn wrong(&self) -> u64 {
        match self.form.call {
            Call::Gathered => {
                let own = self.own_rows * self.hidden;
                let ranks = 0..self.world_size;
                let rows: Vec<f32> = ranks
                    .flat_map(|rank| (0..own).map(move |index| (rank, index)))
                    .map(|(rank, index)| wide(self.inputs.value::<T>(rank, index)))
                    .collect();
                self.wrong_numbers(&rows, &self.all_numbers, &self.all_scales)
            }
            Call::Sharded => self.wrong_columns(),
            _ => self.wrong_rows(),
        }
    }

    /// Returns element `index` of a rank's input.
    fn input_of(&self, rank: usize, index: usize) -> T {
        let small = |index| T::from_f64(self.inputs.value::<T>(rank, index).to_f64() * SMALL);
        if self.form.call != Call::Experts {
            return small(index);
        }
        let (row, column) = (index / self.hidden, index % self.hidden);
        let entries = row * TOP_K..(row + 1) * TOP_K;
        let sum = entries.fold(0.0, |sum, i| {
            let entry = entry(self.seed, rank, i, self.rows * TOP_K) as usize;
            sum + wide(small(entry * self.hidden + column)) * weight_of_entry(self.seed, rank, i)
        });
        narrow(sum)
    }

    fn wrong_rows(&self) -> u64 {
        let first =
            if self.form.call == Call::Scattered { self.rank * self.own_rows * self.hidden } else { 0 };
        // -0 + 0 would be +0.
        let factor = |x: f32| if self.form.offset { x + 1.0 } else { x };
        let weight: Vec<f32> = self.weight.get().iter().map(|&x| factor(wide(x))).collect();
        let bias: Vec<f32> = self.bias.get().iter().map(|&x| wide(x)).collect();
        let residual = |index: usize| {
            let values: Vec<T> =
                (0..self.world_size).map(|rank| self.input_of(rank, first + index)).collect();
            let before: T = self.inputs.value(self.world_size, index);
            wide::<T>(narrow(wide(T::reduce(ReduceOp::Sum, &values)) + wide(before)))
        };
        let (mut wrong, mut normed) = (0, Vec::new());
        for (row, is) in self.residual.get().chunks(self.hidden).enumerate() {
            let residual: Vec<f32> = (0..self.hidden).map(|i| residual(row * self.hidden + i)).collect();
            wrong += differing(is, residual.iter().copied());
            let biases = (!bias.is_empty()).then_some(&bias[..]);
            let rows = norm_row(&residual, self.form.norm, Some(&weight), biases);
            normed.extend(rows.into_iter().map(|x| wide::<T>(narrow(x))));
        }
        wrong
            + match self.form.scaling {
                Some(_) => self.wrong_numbers(&normed, &self.numbers, &self.scales),
                None => differing(self.output.get(), normed.into_iter()),
            }
    }

    fn wrong_columns(&self) -> u64 {
        let columns = self.hidden / self.world_size;
        let weight: Vec<f32> = self.weight.get().iter().map(|&x| wide(x)).collect();
        let mut wrong = 0;
        for (row, output) in self.output.get().chunks(columns.max(1)).enumerate() {
            let element = |rank, i| wide(self.inputs.value::<T>(rank, row * columns + i));
            let square = |rank, i| element(rank, i) * element(rank, i);
            let squares = (0..self.world_size)
                .fold(0.0, |sum, rank| sum + sum_in_order((0..columns).map(|i| square(rank, i))));
            let scale = 1.0 / (squares / self.hidden as f32 + EPSILON).sqrt();
            let normed = (0..columns).map(|i| wide::<T>(narrow(element(self.rank, i) * scale * weight[i])));
            wrong += differing(output, normed);
        }
        wrong
    }

    fn wrong_numbers(&self, rows: &[f32], numbers: &Lines, scales: &Lines) -> u64 {
        let Some(scaling) = self.form.scaling else { return 0 };
        let expected = Becomes(self.form.numbers(), scaling).quantize(rows, self.hidden);
        let bytes = |is: &[u8], expected: &[u8]| {
            assert_eq!(is.len(), expected.len(), "{scaling}");
            is.iter().zip(expected).filter(|(is, expected)| is != expected).count() as u64
        };
        bytes(numbers, &expected.numbers) + bytes(scales, &expected.scales)
    }
}

fn wide<T: Float>(element: T) -> f32 {
    element.to_f64() as f32
}

fn narrow<T: Float>(value: f32) -> T {
    T::from_f64(value.into())
}

/// Returns the number of elements that differ in any bit from what is expected.
fn differing<T: Float>(elements: &[T], expected: impl Iterator<Item = f32>) -> u64 {
    elements.iter().zip(expected).filter(|(is, x)| is.bits() != narrow::<T>(*x).bits()).count() as u64
}
