//! The memory of a form on one rank, and its calls.

use std::hint::black_box;

use fast_allreduce::{
    Collective, Communicator, DType, Host, RawExperts, RawFused, RawGatheredRows, RawQuantizedRows,
    RawShardedRows, ReduceOp, Scaling,
};
use fast_allreduce_oracle::number::Number;

use super::quantise::{is_concatenation, quantise, Words, GIVEN, GLOBAL};
use super::steps::{add_and_norm, gather, scale, squares, By, Operands, TOP_K};
use crate::arguments::{Call, Form};
use crate::failure::Failure;
use crate::harness::inputs::{mix, Inputs};
use crate::harness::memory::{typed, typed_mut, Lines};
use crate::harness::norm::{Float, EPSILON};

/// Factor of inputs: so small that a residual stays finite in every type although each call adds the sum.
pub const SMALL: f64 = 1.0 / 4096.0;

fn inputs_of((seed, round): (u64, u64), world_size: usize) -> Inputs {
    Inputs::new(seed, round, world_size + 3, ReduceOp::Sum)
}

/// Returns entry i of a rank's table of experts, a number below `rows`.
pub fn entry((seed, round): (u64, u64), rank: usize, i: usize, rows: usize) -> i32 {
    (mix(mix(seed ^ round << 32) ^ (i << 8 | rank) as u64) % rows as u64) as i32
}

/// Returns the weight of an entry, from 0 to 1.
pub fn weight_of_entry(seed: (u64, u64), rank: usize, i: usize) -> f32 {
    entry(seed, rank, i, 1 << 24) as f32 * 2.0_f32.powi(-24)
}

/// Memory of a rank. What a form does not use is empty.
pub struct Buffers<'a, T> {
    pub form: &'a Form,
    /// Rows of the message and of this rank, and their length.
    pub rows: usize,
    pub own_rows: usize,
    pub hidden: usize,
    pub rank: usize,
    pub world_size: usize,
    pub seed: (u64, u64),
    pub input: Elements<T>,
    pub experts: Experts<T>,
    sum: Elements<T>,
    pub residual: Elements<T>,
    pub weight: Elements<T>,
    pub bias: Elements<T>,
    pub output: Elements<T>,
    pub numbers: Lines,
    pub scales: Lines,
    pub all_numbers: Lines,
    pub all_scales: Lines,
    /// Scales as rows of words, of this rank and of all.
    packed: [Lines; 2],
    /// A float for each row, of this rank and of all.
    squares: Elements<f32>,
    sums: Elements<f32>,
}

/// Experts' rows, with a table of [`TOP_K`] entries and weights for each row of the message.
pub struct Experts<T> {
    pub rows: Elements<T>,
    pub table: Vec<i32>,
    pub weights: Vec<f32>,
}

/// Aligned elements.
pub struct Elements<T>(Lines, std::marker::PhantomData<T>);

impl<T: Float> Elements<T> {
    fn new(count: usize) -> Result<Self, Failure> {
        Ok(Self(Lines::new(count * size_of::<T>())?, std::marker::PhantomData))
    }

    fn filled(inputs: &Inputs, rank: usize, count: usize, factor: f64) -> Result<Self, Failure> {
        let mut elements = Self::new(count)?;
        inputs.fill(rank, elements.get_mut());
        elements.get_mut().iter_mut().for_each(|x| *x = T::from_f64(x.to_f64() * factor));
        Ok(elements)
    }

    pub fn get(&self) -> &[T] {
        typed(&self.0)
    }

    pub fn get_mut(&mut self) -> &mut [T] {
        typed_mut(&mut self.0)
    }

    fn at(&self) -> u64 {
        if self.0.is_empty() {
            0
        } else {
            self.0.as_ptr() as u64
        }
    }
}

impl<'a, T: Float> Buffers<'a, T> {
    pub fn new(
        form: &'a Form,
        (rows, hidden): (usize, usize),
        (rank, world_size): (usize, usize),
        seed: (u64, u64),
    ) -> Result<Self, Failure> {
        let is_divided = matches!(form.call, Call::Scattered | Call::Gathered);
        let own_rows = if is_divided { rows / world_size } else { rows };
        let columns = if form.call == Call::Sharded { hidden / world_size } else { hidden };
        let inputs = inputs_of(seed, world_size);
        let (reduces, gathers) =
            (!matches!(form.call, Call::Gathered | Call::Sharded), form.call == Call::Gathered);
        let some = |used: bool, count: usize| if used { count } else { 0 };
        let scaling = form.scaling;
        let number_bytes = |rows: usize| scaling.map_or(0, |scaling| scaling.number_bytes(rows * hidden));
        let scale_bytes =
            |rows: usize| scaling.map_or(0, |one| one.scales(rows, hidden) * one.scale_type().size());
        let words = |rows: usize| {
            scaling.map_or(0, |scaling| some(gathers, 4 * rows * Words { scaling, rows, hidden }.of_row()))
        };
        let is_experts = form.call == Call::Experts;
        let entries = 0..some(is_experts, rows * TOP_K);
        let experts = Experts {
            rows: Elements::filled(&inputs, rank, entries.len() * hidden, SMALL)?,
            table: entries.clone().map(|i| entry(seed, rank, i, rows * TOP_K)).collect(),
            weights: entries.map(|i| weight_of_entry(seed, rank, i)).collect(),
        };
        let input = match form.call {
            Call::Sharded => Elements::filled(&inputs, rank, rows * columns, 1.0)?,
            Call::Gathered => Elements::filled(&inputs, rank, own_rows * hidden, 1.0)?,
            _ => Elements::filled(&inputs, rank, some(reduces, rows * hidden), SMALL)?,
        };
        let mut buffers = Self {
            form,
            rows,
            own_rows,
            hidden,
            rank,
            world_size,
            seed,
            input,
            experts,
            sum: Elements::new(if gathers { rows * hidden } else { some(reduces, own_rows * hidden) })?,
            residual: Elements::filled(&inputs, world_size, some(reduces, own_rows * hidden), 1.0)?,
            weight: Elements::filled(&inputs, world_size + 1, some(!gathers, columns), 1.0)?,
            bias: Elements::filled(&inputs, world_size + 2, some(form.norm.takes_bias(), hidden), 1.0)?,
            output: Elements::new(some(!gathers, own_rows * columns))?,
            numbers: Lines::new(number_bytes(own_rows))?,
            scales: Lines::new(scale_bytes(own_rows))?,
            all_numbers: Lines::new(some(gathers, number_bytes(rows)))?,
            all_scales: Lines::new(some(gathers, scale_bytes(rows)))?,
            packed: [Lines::new(words(own_rows))?, Lines::new(words(rows))?],
            squares: Elements::new(some(form.call == Call::Sharded, rows))?,
            sums: Elements::new(some(form.call == Call::Sharded, rows))?,
        };
        match scaling {
            Some(scaling) if scaling.is_given() => buffers.scales.copy_from_slice(&GIVEN.to_ne_bytes()),
            Some(scaling) if gathers => {
                let shape = (own_rows, hidden);
                quantise(buffers.input.get(), shape, scaling, &mut buffers.numbers, &mut buffers.scales);
            }
            _ => {}
        }
        Ok(buffers)
    }

    /// Returns the inputs of all ranks, made from a seed.
    pub fn inputs_of(&self, seed: (u64, u64)) -> Inputs {
        inputs_of(seed, self.world_size)
    }

    /// Makes the call, or the steps that it replaces.
    #[inline]
    pub fn run(&mut self, communicator: &Communicator<Host>, by: By) -> Result<(), Failure> {
        match by {
            By::Ours => self.ours(communicator),
            By::Steps => self.steps(communicator),
            By::Plain => self.plain(communicator),
        }
    }

    fn ours(&mut self, communicator: &Communicator<Host>) -> Result<(), Failure> {
        let Self { form, rows, own_rows, hidden, input, experts, residual, .. } = self;
        let Form { call, norm, scaling, .. } = **form;
        let (rows, own_rows, hidden) = (*rows, *own_rows, *hidden);
        if call == Call::Sharded {
            let columns = hidden / self.world_size;
            let part = RawShardedRows {
                input: input.at(),
                output: self.output.at(),
                input_stride: columns,
                output_stride: columns,
                columns,
                total: hidden,
                weight: self.weight.at(),
                epsilon: EPSILON,
                unit_offset: form.offset,
            };
            return collective(
                communicator,
                Collective::ShardedRmsNorm(&[part]),
                (0, 0),
                rows,
                <T as Number>::DTYPE,
            );
        }
        if let (Call::Gathered, Some(scaling)) = (call, scaling) {
            let rows = RawGatheredRows {
                scaling,
                hidden,
                scales: self.scales.as_ptr() as u64,
                all_scales: self.all_scales.as_mut_ptr() as u64,
            };
            let addresses = (self.numbers.as_ptr() as u64, self.all_numbers.as_mut_ptr() as u64);
            let count = scaling.number_bytes(own_rows * hidden);
            return collective(
                communicator,
                Collective::AllGatherRows(&rows),
                addresses,
                count,
                form.numbers(),
            );
        }
        let quantized = scaling.map(|scaling| RawQuantizedRows {
            scaling,
            dtype: form.numbers(),
            numbers: self.numbers.as_mut_ptr() as u64,
            scales: self.scales.as_mut_ptr() as u64,
            global: if scaling.has_global() { &raw const GLOBAL as u64 } else { 0 },
        });
        let is_experts = call == Call::Experts;
        let raw_experts = RawExperts {
            table: experts.table.as_ptr() as u64,
            top_k: TOP_K,
            rows: rows * TOP_K,
            weights: experts.weights.as_ptr() as u64,
            ..RawExperts::default()
        };
        let fused = RawFused {
            residual: residual.at(),
            residual_out: residual.at(),
            norm,
            hidden,
            weight: self.weight.at(),
            bias: self.bias.at(),
            // A form with numbers has no other rows.
            rows: if scaling.is_none() { self.output.at() } else { 0 },
            quantized,
            experts: is_experts.then_some(raw_experts),
            ..RawFused::default()
        };
        let from = if is_experts { experts.rows.at() } else { input.at() };
        let (what, count) = match call {
            Call::Scattered => (Collective::ReduceScatterFused(&fused), own_rows * hidden),
            _ => (Collective::AllReduceFused(&fused), rows * hidden),
        };
        collective(communicator, what, (from, 0), count, <T as Number>::DTYPE)
    }

    fn steps(&mut self, communicator: &Communicator<Host>) -> Result<(), Failure> {
        let (shape, form) = ((self.own_rows, self.hidden), self.form);
        match (form.call, form.scaling) {
            (Call::Sharded, _) => {
                let columns = self.hidden / self.world_size;
                squares(self.input.get(), columns, self.squares.get_mut());
                self.plain(communicator)?;
                let output = black_box(self.output.get_mut());
                scale(self.input.get(), self.weight.get(), self.hidden, self.sums.get(), output);
                return Ok(());
            }
            (Call::Gathered, Some(scaling)) => {
                let (from, to) = (self.numbers.as_ptr() as u64, self.all_numbers.as_mut_ptr() as u64);
                let count = scaling.number_bytes(self.own_rows * self.hidden);
                collective(communicator, Collective::AllGather, (from, to), count, DType::U8)?;
                return self.gather_scales(communicator, scaling);
            }
            (Call::Experts, _) => {
                let Experts { rows, table, weights } = &self.experts;
                gather(rows.get(), table, weights, self.hidden, black_box(self.input.get_mut()));
            }
            _ => {}
        }
        self.plain(communicator)?;
        let Self { sum, residual, output, weight, bias, .. } = self;
        let operands =
            Operands { norm: form.norm, offset: form.offset, weight: weight.get(), bias: bias.get() };
        add_and_norm(sum.get(), residual.get_mut(), black_box(output.get_mut()), &operands);
        if let Some(scaling) = form.scaling {
            quantise(output.get(), shape, scaling, black_box(&mut self.numbers), &mut self.scales);
        }
        Ok(())
    }

    /// Gathers scales by themselves. Columns and tiles of the ranks have to be joined.
    fn gather_scales(&mut self, communicator: &Communicator<Host>, scaling: Scaling) -> Result<(), Failure> {
        let bytes = DType::U8;
        if is_concatenation(scaling, self.own_rows) {
            let (from, to) = (self.scales.as_ptr() as u64, self.all_scales.as_mut_ptr() as u64);
            return collective(communicator, Collective::AllGather, (from, to), self.scales.len(), bytes);
        }
        let Self { own_rows, rows, hidden, .. } = *self;
        let own = Words { scaling, rows: own_rows, hidden };
        let [packed, all_packed] = &mut self.packed;
        own.pack(&self.scales, packed);
        let (from, to) = (packed.as_ptr() as u64, all_packed.as_mut_ptr() as u64);
        collective(communicator, Collective::AllGather, (from, to), packed.len(), bytes)?;
        Words { scaling, rows, hidden }.unpack(all_packed, black_box(&mut self.all_scales));
        Ok(())
    }

    fn plain(&mut self, communicator: &Communicator<Host>) -> Result<(), Failure> {
        let all = Collective::AllReduce(ReduceOp::Sum);
        let (addresses, count) = ((self.input.at(), self.sum.at()), self.rows * self.hidden);
        match self.form.call {
            Call::Sharded => {
                let addresses = (self.squares.at(), self.sums.at());
                collective(communicator, all, addresses, self.rows, DType::F32)
            }
            Call::Scattered => {
                let scatter = Collective::ReduceScatter(ReduceOp::Sum);
                collective(
                    communicator,
                    scatter,
                    addresses,
                    self.own_rows * self.hidden,
                    <T as Number>::DTYPE,
                )
            }
            Call::Gathered => collective(
                communicator,
                Collective::AllGather,
                addresses,
                self.own_rows * self.hidden,
                <T as Number>::DTYPE,
            ),
            _ => collective(communicator, all, addresses, count, <T as Number>::DTYPE),
        }
    }
}

fn collective(
    communicator: &Communicator<Host>,
    collective: Collective<'_>,
    (input, output): (u64, u64),
    count: usize,
    dtype: DType,
) -> Result<(), Failure> {
    // SAFETY: the addresses are of buffers of the form, as long as the collective reads and writes.
    Ok(unsafe { communicator.collective_raw(collective, input as *const _, output as *mut _, count, dtype) }?)
}
