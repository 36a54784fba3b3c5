//! RMSNorm of rows whose elements are divided among the ranks: expected results, from the formula and the order in
//! `docs/fused.md`, and a checked call.

use fast_allreduce::{Collective, DType, RawShardedRows};

use crate::norms::sum_in_order;
use crate::random::{elements, Random, Values};
use crate::rows::{bytes_of, framed, values_of, Caller, GUARD};

/// Rows in one or two parts, with their expected results.
pub struct ShardedRows {
    pub dtype: DType,
    pub rows: usize,
    parts: Vec<Part>,
}

/// A part of the rows of all ranks.
struct Part {
    total: usize,
    epsilon: f32,
    unit_offset: bool,
    /// By rank.
    shares: Vec<Share>,
}

/// A rank's columns of a part, as bytes, row by row.
struct Share {
    columns: usize,
    input: Vec<u8>,
    weight: Option<Vec<u8>>,
    normed: Vec<u8>,
}

impl ShardedRows {
    /// Creates rows of about `columns` elements on each rank.
    pub fn new(random: &mut Random, dtype: DType, (rows, columns): (usize, usize), world: usize) -> Self {
        let parts = 1 + random.below(2);
        let parts = (0..parts).map(|number| {
            let columns = if number == 0 {
                columns
            } else {
                random.pick(&[columns, 1, 7, 128.min(4096 / rows.max(1))])
            };
            Part::new(random, dtype, (rows, columns), world)
        });
        Self { dtype, rows, parts: parts.collect() }
    }

    /// Makes the call of a rank, and checks everything that the call may have written.
    pub fn check(&self, caller: &mut dyn Caller, random: &mut Random) {
        let call = self.prepare(caller, random);
        caller.call(Collective::ShardedRmsNorm(&call.parts), 0, 0, self.rows, self.dtype).unwrap();
        self.compare(caller, &call);
    }

    /// Writes a rank's operands. Each rank has other addresses and strides. Parts are columns of the same rows, or they
    /// are separate; results are in place or elsewhere.
    pub fn prepare(&self, caller: &mut dyn Caller, random: &mut Random) -> PreparedShards {
        let (rank, size) = (caller.rank(), self.dtype.size());
        let shares: Vec<_> = self.parts.iter().map(|part| &part.shares[rank]).collect();
        let columns: Vec<_> = shares.iter().map(|share| share.columns).collect();
        let layouts = [(); 2].map(|()| Layout::random(random, &columns, self.rows));
        let offset = random.pick(&[0, 0, 1, 3, 16]) * size;
        let in_place = random.one_in(2);
        // Address, content before the call, content after.
        let mut memory: Vec<(u64, Vec<u8>, Vec<u8>)> = Vec::new();
        let room = layouts.iter().map(|layout| layout.elements * size + 2 * GUARD + 256).sum::<usize>();
        let weights: usize = columns.iter().map(|columns| columns * size + 2 * GUARD + 256).sum();
        let mut next = caller.room(false, room + weights);
        let mut place = |bytes: usize| {
            let address = next + (GUARD + offset) as u64;
            next = (address + (bytes + GUARD) as u64).next_multiple_of(64);
            address
        };
        for (number, layout) in layouts.iter().enumerate() {
            let (mut before, mut after) =
                (vec![0xC3; layout.elements * size], vec![0xC3; layout.elements * size]);
            for (share, &(base, stride)) in shares.iter().zip(&layout.parts) {
                let row_bytes = share.columns * size;
                for row in 0..self.rows {
                    let at = (base + row * stride) * size;
                    let [input, normed] =
                        [&share.input, &share.normed].map(|all| &all[row * row_bytes..][..row_bytes]);
                    if number == 0 {
                        before[at..][..row_bytes].copy_from_slice(input);
                    }
                    let is_output = (number == 0) == in_place;
                    match (is_output, number) {
                        (true, _) => after[at..][..row_bytes].copy_from_slice(normed),
                        (false, 0) => after[at..][..row_bytes].copy_from_slice(input),
                        (false, _) => {}
                    }
                }
            }
            memory.push((place(before.len()), before, after));
        }
        let (input, output) = (memory[0].0, memory[usize::from(!in_place)].0);
        let mut parts = Vec::new();
        for (number, (part, share)) in self.parts.iter().zip(&shares).enumerate() {
            let (from, from_stride) = layouts[0].parts[number];
            let (to, to_stride) = layouts[usize::from(!in_place)].parts[number];
            let weight = share.weight.as_ref().map_or(0, |weight| {
                let address = place(weight.len());
                memory.push((address, weight.clone(), weight.clone()));
                address
            });
            parts.push(RawShardedRows {
                input: input + (from * size) as u64,
                output: output + (to * size) as u64,
                input_stride: from_stride,
                output_stride: to_stride,
                columns: share.columns,
                total: part.total,
                weight,
                epsilon: part.epsilon,
                unit_offset: part.unit_offset,
            });
        }
        for (address, before, _) in &memory {
            caller.write(address - GUARD as u64, &framed(before));
        }
        let after = memory.into_iter().map(|(address, _, after)| (address, after)).collect();
        PreparedShards { parts, after }
    }

    /// Checks everything that the call of a rank may have written.
    pub fn compare(&self, caller: &mut dyn Caller, call: &PreparedShards) {
        for (number, (address, after)) in call.after.iter().enumerate() {
            let is = caller.read(address - GUARD as u64, after.len() + 2 * GUARD);
            let Some(at) = is.iter().zip(framed(after)).position(|(is, after)| *is != after) else {
                continue;
            };
            let element = (at as isize - GUARD as isize) / self.dtype.size() as isize;
            panic!(
                "rank {}: memory {number} differs at element {element}: {} rows of {}, {:?}",
                caller.rank(),
                self.rows,
                self.dtype,
                call.parts
            );
        }
    }
}

impl Part {
    fn new(random: &mut Random, dtype: DType, (rows, columns): (usize, usize), world: usize) -> Self {
        let values = random.pick(&[Values::Plain, Values::Plain, Values::Special, Values::Bits]);
        let (is_uneven, is_weighted) = (random.one_in(3), !random.one_in(3));
        let shares = (0..world).map(|_| {
            let columns = if is_uneven { random.below(columns + 2) } else { columns };
            let input = elements(random, dtype, rows * columns, values);
            let weight = is_weighted.then(|| elements(random, dtype, columns, Values::Plain));
            Share { columns, input, weight, normed: Vec::new() }
        });
        let shares: Vec<_> = shares.collect();
        let all: usize = shares.iter().map(|share| share.columns).sum();
        // More than all columns: as if some elements counted several times.
        let total = (all + if random.one_in(4) { random.below(100) } else { 0 }).max(1);
        let (epsilon, unit_offset) = (random.pick(&[0.0, 1e-6, 1e-5, 0.5]), random.one_in(2));
        let mut part = Self { total, epsilon, unit_offset, shares };
        for row in 0..rows {
            part.norm(dtype, row, values == Values::Plain);
        }
        part
    }

    /// Computes a row on all ranks, and compares it with the formula in f64.
    fn norm(&mut self, dtype: DType, row: usize, is_plain: bool) {
        let Self { total, epsilon, unit_offset, ref mut shares } = *self;
        let elements_of = |share: &Share| -> Vec<f32> {
            let bytes = share.columns * dtype.size();
            values_of(dtype, &share.input[row * bytes..][..bytes]).collect()
        };
        let rows: Vec<_> = shares.iter().map(elements_of).collect();
        let mut squares = 0.0_f32;
        for row in &rows {
            squares += sum_in_order(row.iter().map(|x| x * x));
        }
        let scale = 1.0 / (squares / total as f32 + epsilon).sqrt();
        let wide = rows.iter().flatten().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>();
        let exact_scale = 1.0 / (wide / total as f64 + f64::from(epsilon)).sqrt();
        let longest = rows.iter().map(Vec::len).max().unwrap_or(0);
        for (share, row) in shares.iter_mut().zip(&rows) {
            let weights: Option<Vec<f32>> =
                share.weight.as_ref().map(|weight| values_of(dtype, weight).collect());
            for (i, x) in row.iter().enumerate() {
                let weight = weights.as_ref().map(|all| if unit_offset { all[i] + 1.0 } else { all[i] });
                let scaled = x * scale;
                let y = bytes_of(dtype, weight.map_or(scaled, |weight| scaled * weight));
                if is_plain {
                    let exact = f64::from(*x) * exact_scale * weight.map_or(1.0, f64::from);
                    let rounding = match dtype {
                        DType::F16 => 2.0_f64.powi(-11),
                        DType::Bf16 => 2.0_f64.powi(-8),
                        _ => 2.0_f64.powi(-24),
                    };
                    // Additions of a rank and of all ranks; then a square root, divisions and products.
                    let additions = (longest / 64 + 16 + rows.len()) as f64;
                    let bound = exact.abs() * (rounding + additions * 2.0_f64.powi(-24)) + 2.0_f64.powi(-24);
                    let is = f64::from(values_of(dtype, &y).next().unwrap_or(f32::NAN));
                    assert!((is - exact).abs() <= bound, "element {i} of row {row:?}: {is} and not {exact}");
                }
                share.normed.extend(y);
            }
        }
    }
}

/// Places of parts in a buffer: the first element and the stride of each.
struct Layout {
    parts: Vec<(usize, usize)>,
    elements: usize,
}

impl Layout {
    fn random(random: &mut Random, columns: &[usize], rows: usize) -> Self {
        let mut gap = || random.pick(&[0, 0, 8, 1, 5]);
        let mut parts = Vec::new();
        if gap() == 0 {
            let mut width = gap();
            for columns in columns {
                parts.push((width, 0));
                width += columns + gap();
            }
            parts.iter_mut().for_each(|part| part.1 = width);
            return Self { parts, elements: rows * width };
        }
        let mut elements = 0;
        for columns in columns {
            let stride = columns + gap();
            parts.push((elements, stride));
            elements += rows * stride;
        }
        Self { parts, elements }
    }
}

/// A rank's call, with its memory prepared.
pub struct PreparedShards {
    pub parts: Vec<RawShardedRows>,
    /// Addresses and their expected contents after the call.
    after: Vec<(u64, Vec<u8>)>,
}
