//! Sums with a residual and a norm of their rows: expected results, from the formula and the order in `docs/fused.md`,
//! and a checked call.

use std::borrow::Cow;

use fast_allreduce::{Collective, DType, Norm, RawFused, ReduceOp, Result, Scaling};
use half::{bf16, f16};

use crate::message::poison;
use crate::oracle;
use crate::quantized_rows::Becomes;
use crate::random::{elements, Random, Values};

/// A message of rows with its expected results.
pub struct Rows {
    pub dtype: DType,
    pub count: usize,
    hidden: usize,
    kind: Norm,
    epsilon: f32,
    unit_offset: bool,
    /// Inputs of the ranks, as bytes.
    inputs: Vec<Vec<u8>>,
    residual: Vec<u8>,
    weight: Option<Vec<u8>>,
    bias: Option<Vec<u8>>,
    /// Sums of the inputs alone, and with the residual.
    plain_sum: Vec<u8>,
    sum: Vec<u8>,
    normed: Vec<u8>,
}

/// Memory and options of a call.
#[derive(Debug, Clone, Copy)]
pub struct Placement {
    /// Offset in elements from an aligned address.
    pub offset: usize,
    /// The input is in a registered buffer.
    pub registered: bool,
    /// The output replaces the residual.
    pub residual_in_place: bool,
    /// Normalised rows replace the input.
    pub normed_in_place: bool,
    /// The plain sum is requested as well.
    pub plain_sum: bool,
    /// The call ends after the residual, without a norm.
    pub stops: bool,
    /// Format of quantised rows, if requested.
    pub becomes: Option<Becomes>,
    /// Rows in the element type are requested next to quantised ones.
    pub also_rows: bool,
}

impl Placement {
    pub fn random(random: &mut Random) -> Self {
        Self {
            offset: random.pick(&[0, 0, 1, 3, 16]),
            registered: random.one_in(2),
            residual_in_place: random.one_in(2),
            normed_in_place: random.one_in(2),
            plain_sum: random.one_in(3),
            stops: random.one_in(4),
            also_rows: random.one_in(2),
            becomes: random.one_in(2).then(|| {
                let scaling = random.pick(&Scaling::ALL);
                let types: Vec<_> = DType::ALL.into_iter().filter(|&dtype| scaling.takes(dtype)).collect();
                Becomes(random.pick(&types), scaling)
            }),
        }
    }
}

impl Placement {
    /// Returns a copy with a rank's own placement of memory.
    pub fn of_rank(self, random: &Random, rank: usize) -> Self {
        let own = Self::random(&mut random.fork(rank));
        let Self { offset, registered, residual_in_place, normed_in_place, .. } = own;
        Self { offset, registered, residual_in_place, normed_in_place, ..self }
    }
}

/// A rank that allocates memory and makes calls.
pub trait Caller {
    fn rank(&self) -> usize;

    /// Allocates at least `bytes` at an aligned address, registered or not.
    fn room(&mut self, registered: bool, bytes: usize) -> u64;

    fn write(&mut self, address: u64, bytes: &[u8]);

    fn read(&mut self, address: u64, bytes: usize) -> Vec<u8>;

    /// Makes the call and waits until it has ended.
    fn call(
        &mut self,
        collective: Collective<'_>,
        input: u64,
        output: u64,
        count: usize,
        dtype: DType,
    ) -> Result<()>;
}

impl Rows {
    pub fn new(random: &mut Random, dtype: DType, (rows, hidden): (usize, usize), world: usize) -> Self {
        let count = rows * hidden;
        let values = random.pick(&[Values::Plain, Values::Plain, Values::Special, Values::Bits]);
        let inputs: Vec<_> = (0..world).map(|_| elements(random, dtype, count, values)).collect();
        let residual = elements(random, dtype, count, values);
        let weight = (!random.one_in(3)).then(|| elements(random, dtype, hidden, Values::Plain));
        let (epsilon, unit_offset) = (random.pick(&[0.0, 1e-6, 1e-5, 0.5]), random.one_in(2));
        // Every norm of the catalogue.
        let norms: Vec<_> = (1..).map_while(|code| Norm::of_code(code, epsilon, false).ok()).collect();
        let kind = random.pick(&norms);
        let kind = Norm::of_code(kind.code(), epsilon, unit_offset).unwrap_or(kind);
        let unit_offset = unit_offset && matches!(kind, Norm::Rms { .. });
        let has_bias = kind.takes_bias() && random.one_in(2);
        let bias = has_bias.then(|| elements(random, dtype, hidden, Values::Plain));
        let reduced = oracle::reduce(dtype, ReduceOp::Sum, &inputs);
        let added = values_of(dtype, &reduced).zip(values_of(dtype, &residual));
        let sum: Vec<u8> = added.flat_map(|(sum, residual)| bytes_of(dtype, sum + residual)).collect();
        let mut rows = Self {
            dtype,
            count,
            hidden,
            epsilon,
            unit_offset,
            kind,
            inputs,
            residual,
            weight,
            bias,
            plain_sum: reduced,
            sum,
            normed: Vec::new(),
        };
        rows.normed = rows.norm();
        if values == Values::Plain {
            rows.check_by_formula();
        }
        rows
    }

    pub fn is_rms(&self) -> bool {
        matches!(self.kind, Norm::Rms { .. })
    }

    fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.size()
    }

    fn weights(&self) -> Option<Vec<f32>> {
        let offset = if self.unit_offset { 1.0 } else { 0.0 };
        let weight = self.weight.as_ref()?;
        Some(values_of(self.dtype, weight).map(|weight| weight + offset).collect())
    }

    fn biases(&self) -> Option<Vec<f32>> {
        Some(values_of(self.dtype, self.bias.as_ref()?).collect())
    }

    fn norm(&self) -> Vec<u8> {
        let (weights, bias) = (self.weights(), self.biases());
        let row = |row: &[u8]| -> Vec<u8> {
            let row: Vec<f32> = values_of(self.dtype, row).collect();
            let normed = norm_row(&row, self.kind, weights.as_deref(), bias.as_deref());
            normed.into_iter().flat_map(|x| bytes_of(self.dtype, x)).collect()
        };
        self.sum.chunks(self.row_bytes().max(1)).flat_map(row).collect()
    }

    /// Computes the rows from the formula in f64 and asserts that results are within rounding errors of it.
    fn check_by_formula(&self) {
        let wide = |bytes: &[u8]| values_of(self.dtype, bytes).map(f64::from).collect::<Vec<_>>();
        let ulp = match self.dtype {
            DType::F16 => 2.0_f64.powi(-11),
            DType::Bf16 => 2.0_f64.powi(-8),
            _ => 2.0_f64.powi(-24),
        };
        let (inputs, residual): (Vec<_>, _) =
            (self.inputs.iter().map(|input| wide(input)).collect(), wide(&self.residual));
        let (sum, normed, weights) = (wide(&self.sum), wide(&self.normed), self.weights());
        for i in 0..self.count {
            let all = || inputs.iter().map(|input| input[i]).chain([residual[i]]);
            // One error for each addition in f32, and one for each of two roundings.
            let bound = all().map(f64::abs).sum::<f64>() * (2.0 * ulp + 17.0 * 2.0_f64.powi(-24));
            let exact: f64 = all().sum();
            assert!((sum[i] - exact).abs() <= bound, "residual [{i}]: {} and not {exact}", sum[i]);
        }
        let bias = self.biases();
        for (row, normed) in sum.chunks(self.hidden).zip(normed.chunks(self.hidden)) {
            let mean_of =
                |term: &dyn Fn(f64) -> f64| row.iter().map(|&x| term(x)).sum::<f64>() / self.hidden as f64;
            let is_layer = matches!(self.kind, Norm::Layer { .. });
            let mean = if is_layer { mean_of(&|x| x) } else { 0.0 };
            let scale = match self.kind {
                Norm::Rms { .. } | Norm::Layer { .. } => {
                    1.0 / (mean_of(&|x| (x - mean) * (x - mean)) + f64::from(self.epsilon)).sqrt()
                }
                other => unreachable!("a norm that the oracle does not know: {other:?}"),
            };
            let largest = row.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
            for (i, (x, y)) in row.iter().zip(normed).enumerate() {
                let weight = weights.as_ref().map_or(1.0, |weights| f64::from(weights[i]));
                let scaled = (x - mean) * scale * weight;
                let bias = bias.as_ref().map_or(0.0, |bias| f64::from(bias[i]));
                let exact = scaled + bias;
                // Each of at most 8 + 6 + 128 additions is off by less than 2^-24 of the largest element, and so is
                // the mean, and with it all differences from the mean.
                let unit = 2.0_f64.powi(-24);
                let of_mean = if is_layer { 160.0 * unit * largest * scale * weight.abs() } else { 0.0 };
                let bound = exact.abs() * ulp + (scaled.abs() + bias.abs()) * 80.0 * unit + of_mean + unit;
                // Differences of nearly equal elements are rounding errors.
                let finite =
                    exact.abs() < 60_000.0 && scale.is_finite() && (!is_layer || scale * largest < 1e3);
                assert!(!finite || (y - exact).abs() <= bound, "norm [{i}]: {y} and not {exact}");
            }
        }
    }

    /// Makes the call of a rank, and checks everything that the call may have written.
    pub fn check(&self, caller: &mut dyn Caller, placement: Placement) {
        let call = self.prepare(caller, placement);
        caller.call(Collective::AllReduceFused(&call.fused), call.input, 0, self.count, self.dtype).unwrap();
        self.compare(caller, &call);
    }

    /// Writes a rank's operands, poison in the place of results, and canaries around both.
    pub fn prepare(&self, caller: &mut dyn Caller, placement: Placement) -> Prepared<'_> {
        let Placement {
            offset,
            registered,
            residual_in_place,
            normed_in_place,
            plain_sum,
            stops,
            becomes,
            also_rows,
        } = placement;
        let becomes = becomes.filter(|becomes| !stops && becomes.takes(self.hidden));
        // Rows in the element type are requested.
        let has_rows = !stops && (becomes.is_none() || also_rows);
        let normed_in_place = normed_in_place && has_rows;
        let becomes = becomes.map(|becomes| {
            let normed: Vec<f32> = values_of(self.dtype, &self.normed).collect();
            (becomes, becomes.quantize(&normed, self.hidden))
        });
        let scales_of = becomes.as_ref().map_or(0, |(_, after)| after.scales.len());
        let bytes = (self.count * self.dtype.size()).max(scales_of);
        let own = &self.inputs[caller.rank()][..];
        let place = |which: usize| {
            let section = (bytes.max(self.row_bytes()) + 2 * GUARD + 16 * 8).next_multiple_of(64);
            which * section + GUARD + offset * self.dtype.size()
        };
        let rest = caller.room(false, place(10) + GUARD);
        let input = caller.room(registered, place(1) + GUARD) + place(0) as u64;
        let [residual, output, normed, weights, scales, plain, global, biases, separate_rows] =
            [1, 2, 3, 4, 5, 6, 7, 8, 9].map(|which| rest + place(which) as u64);
        // For any alignment of the type.
        let (scales, global) = (scales.next_multiple_of(4), global.next_multiple_of(4));
        let output = if residual_in_place { residual } else { output };
        let rows = if normed_in_place { input } else { separate_rows };
        // Address, content before the call, content after.
        let mut memory = vec![
            (input, own.to_vec(), Cow::from(own)),
            (residual, self.residual.clone(), Cow::from(&self.residual)),
        ];
        match residual_in_place {
            true => memory[1].2 = Cow::from(&self.sum),
            false => memory.push((output, poison(&self.sum), Cow::from(&self.sum))),
        }
        if plain_sum {
            memory.push((plain, poison(&self.plain_sum), Cow::from(&self.plain_sum)));
        }
        let mut quantized = None;
        if let Some((becomes, after)) = becomes {
            quantized = Some(becomes.at(normed, scales, global));
            memory.push((normed, poison(&after.numbers), Cow::from(after.numbers)));
            memory.push((scales, after.scales_before, Cow::from(after.scales)));
            memory.extend(after.global.map(|value| (global, value.clone(), Cow::from(value))));
        }
        match (has_rows, normed_in_place) {
            (false, _) => {}
            (_, true) => memory[0].2 = Cow::from(&self.normed),
            (_, false) => memory.push((rows, poison(&self.normed), Cow::from(&self.normed))),
        }
        memory.extend(self.weight.iter().map(|weight| (weights, weight.clone(), Cow::from(weight))));
        memory.extend(self.bias.iter().map(|bias| (biases, bias.clone(), Cow::from(bias))));
        for (address, before, _) in &memory {
            caller.write(address - GUARD as u64, &framed(before));
        }
        let maybe = |is_there: bool, address| if is_there { address } else { 0 };
        let fused = RawFused {
            residual,
            residual_out: output,
            sum: maybe(plain_sum, plain),
            norm: if stops { Norm::None } else { self.kind },
            hidden: self.hidden,
            weight: maybe(!stops && self.weight.is_some(), weights),
            bias: maybe(!stops && self.bias.is_some(), biases),
            rows: maybe(has_rows, rows),
            quantized,
        };
        let after = memory.into_iter().map(|(address, _, after)| (address, after)).collect();
        Prepared { input, fused, placement, after }
    }

    /// Checks everything that the call of a rank may have written.
    pub fn compare(&self, caller: &mut dyn Caller, call: &Prepared<'_>) {
        for (number, (address, after)) in call.after.iter().enumerate() {
            let is = caller.read(address - GUARD as u64, after.len() + 2 * GUARD);
            let Some(at) = is.iter().zip(framed(after)).position(|(is, after)| *is != after) else {
                continue;
            };
            let Self { dtype, count, hidden, .. } = self;
            let element = (at as isize - GUARD as isize) / dtype.size() as isize;
            panic!(
                "rank {} of {}: memory {number} differs at element {element}: \
                 {count} x {dtype}, rows of {hidden}, {:?}",
                caller.rank(),
                self.inputs.len(),
                call.placement
            );
        }
    }
}

/// Returns a normalised row, computed element by element in the documented order.
pub fn norm_row(row: &[f32], norm: Norm, weights: Option<&[f32]>, bias: Option<&[f32]>) -> Vec<f32> {
    let mean = |terms: &mut dyn Iterator<Item = f32>| {
        let (mut sum, terms) = (0.0_f32, terms.collect::<Vec<_>>());
        for chunk in terms.chunks(512) {
            let mut partials = [0.0_f32; 64];
            chunk.iter().enumerate().for_each(|(i, term)| partials[i % 64] += term);
            for half in [32, 16, 8, 4, 2, 1] {
                (0..half).for_each(|p| partials[p] += partials[p + half]);
            }
            sum += partials[0];
        }
        sum / row.len() as f32
    };
    let scale_of = |row: &[f32], epsilon: f32| 1.0 / (mean(&mut row.iter().map(|x| x * x)) + epsilon).sqrt();
    let (centred, scale): (Vec<f32>, f32) = match norm {
        Norm::Rms { epsilon, .. } => (row.to_vec(), scale_of(row, epsilon)),
        Norm::Layer { epsilon } => {
            let mean = mean(&mut row.iter().copied());
            let centred: Vec<_> = row.iter().map(|x| x - mean).collect();
            let scale = scale_of(&centred, epsilon);
            (centred, scale)
        }
        other => unreachable!("a norm that the oracle does not know: {other:?}"),
    };
    let element = |(i, x): (usize, &f32)| {
        let weighted = weights.map_or(x * scale, |weights| x * scale * weights[i]);
        bias.map_or(weighted, |bias| weighted + bias[i])
    };
    centred.iter().enumerate().map(element).collect()
}

/// A rank's call, with its memory prepared.
pub struct Prepared<'a> {
    pub input: u64,
    pub fused: RawFused,
    placement: Placement,
    /// Addresses and their expected contents after the call.
    after: Vec<(u64, Cow<'a, [u8]>)>,
}

pub(crate) const GUARD: usize = 64;

pub(crate) fn framed(bytes: &[u8]) -> Vec<u8> {
    [&[0xC3; GUARD], bytes, &[0xC3; GUARD]].concat()
}

pub(crate) fn values_of(dtype: DType, bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.chunks(dtype.size()).map(move |element| match dtype {
        DType::F16 => f16::from_le_bytes([element[0], element[1]]).to_f32(),
        DType::Bf16 => bf16::from_le_bytes([element[0], element[1]]).to_f32(),
        _ => f32::from_le_bytes([element[0], element[1], element[2], element[3]]),
    })
}

/// Rounds a value to the type, and returns its bytes. A NaN becomes the canonical one.
pub(crate) fn bytes_of(dtype: DType, value: f32) -> Vec<u8> {
    match dtype {
        DType::F16 if value.is_nan() => vec![0xFF, 0x7F],
        DType::Bf16 if value.is_nan() => vec![0xFF, 0x7F],
        _ if value.is_nan() => vec![0xFF, 0xFF, 0xFF, 0x7F],
        DType::F16 => f16::from_f32(value).to_le_bytes().into(),
        DType::Bf16 => bf16::from_f32(value).to_le_bytes().into(),
        _ => value.to_le_bytes().into(),
    }
}
