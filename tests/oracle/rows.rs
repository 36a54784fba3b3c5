//! Sums with a residual and a norm of their rows: expected results, from the formula and the order in `docs/fused.md`,
//! and a checked call. In a reduce-scatter each rank has some of the rows.

use std::borrow::Cow;
use std::ops::Range;

use fast_allreduce::{Collective, DType, Norm, RawFused, RawGatheredRows, ReduceOp, Result, Scaling};
use half::{bf16, f16};

use crate::experts::Experts;
use crate::message::poison;
use crate::norms::{check_by_formula, norm_row};
use crate::oracle;
use crate::quantized_rows::Becomes;
use crate::random::{elements, Random, Values};

/// A message of rows with its expected results.
pub struct Rows {
    pub dtype: DType,
    pub count: usize,
    hidden: usize,
    /// Number of elements of each rank's share in a reduce-scatter: whole rows, possibly none.
    counts: Vec<usize>,
    kind: Norm,
    epsilon: f32,
    unit_offset: bool,
    /// Inputs of the ranks, as bytes.
    inputs: Vec<Vec<u8>>,
    /// The ranks' experts, if inputs are computed from their rows; else empty.
    experts: Vec<Experts>,
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
    /// The call is a reduce-scatter, if the region has room for it.
    pub scatters: bool,
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
            scatters: random.one_in(4),
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
    /// Returns rows for each norm of the catalogue. Of long rows only those of [`Values::Plain`] say much: a single NaN
    /// makes all of a row NaN.
    pub fn of_every_norm(
        random: &mut Random,
        values: &'static [Values],
        dtype: DType,
        shape: (usize, usize),
        world: usize,
    ) -> impl Iterator<Item = Self> {
        let mut random = random.fork(world);
        norms(0.0).into_iter().map(move |norm| {
            let values = random.pick(values);
            Self::of_norm(&mut random, values, norm, dtype, shape, world)
        })
    }

    pub fn new(random: &mut Random, dtype: DType, shape: (usize, usize), world: usize) -> Self {
        let values = random.pick(&[Values::Plain, Values::Plain, Values::Special, Values::Bits]);
        let norm = random.pick(&norms(0.0));
        Self::of_norm(random, values, norm, dtype, shape, world)
    }

    /// Returns rows with this norm, with any epsilon and unit offset.
    fn of_norm(
        random: &mut Random,
        values: Values,
        norm: Norm,
        dtype: DType,
        (rows, hidden): (usize, usize),
        world: usize,
    ) -> Self {
        let count = rows * hidden;
        // In small messages, because experts need memory as well.
        let has_experts = random.one_in(3) && count * dtype.size() <= MOST_BYTES_OF_EXPERTS;
        let expert = |_| Experts::new(random, dtype, (rows, hidden), values);
        let experts: Vec<_> = (0..if has_experts { world } else { 0 }).map(expert).collect();
        let inputs: Vec<_> = match has_experts {
            true => experts.iter().map(|experts| experts.input(values == Values::Plain)).collect(),
            false => (0..world).map(|_| elements(random, dtype, count, values)).collect(),
        };
        let residual = elements(random, dtype, count, values);
        let weight = (!random.one_in(3)).then(|| elements(random, dtype, hidden, Values::Plain));
        let (epsilon, unit_offset) = (random.pick(&[0.0, 1e-6, 1e-5, 0.5]), random.one_in(2));
        let with_offset = Norm::of_code(norm.code(), epsilon, true).ok().filter(|_| unit_offset);
        let unit_offset = with_offset.is_some();
        let kind = with_offset.unwrap_or_else(|| Norm::of_code(norm.code(), epsilon, false).unwrap());
        let counts = shares(random, rows, world).into_iter().map(|rows| rows * hidden).collect();
        let has_bias = kind.takes_bias() && random.one_in(2);
        let bias = has_bias.then(|| elements(random, dtype, hidden, Values::Plain));
        let reduced = oracle::reduce(dtype, ReduceOp::Sum, &inputs);
        let added = values_of(dtype, &reduced).zip(values_of(dtype, &residual));
        let sum: Vec<u8> = added.flat_map(|(sum, residual)| bytes_of(dtype, sum + residual)).collect();
        let mut rows = Self {
            dtype,
            count,
            hidden,
            counts,
            epsilon,
            unit_offset,
            kind,
            inputs,
            experts,
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
        let (weights, bias) = (weights.as_deref(), self.biases());
        for (row, normed) in sum.chunks(self.hidden).zip(normed.chunks(self.hidden)) {
            check_by_formula(row, normed, self.kind, self.epsilon, (weights, bias.as_deref()), ulp);
        }
    }

    /// Makes the call of a rank, and checks everything that the call may have written.
    pub fn check(&self, caller: &mut dyn Caller, placement: Placement) {
        let call = self.prepare(caller, placement);
        caller.call(call.collective(), call.input, 0, call.count, self.dtype).unwrap();
        self.compare(caller, &call);
        if let Some(gather) = &call.gather {
            caller
                .call(gather.collective(), gather.input, gather.output, gather.count, gather.dtype)
                .unwrap();
            self.compare_gathered(caller, &call);
        }
    }

    /// Returns the elements of a rank's results, and whether they are a share of the message.
    fn own(&self, rank: usize, placement: Placement) -> (Range<usize>, bool) {
        // A reduce-scatter stages a row for each rank. Without a norm, rows do not matter.
        let fits = self.row_bytes().next_multiple_of(64) * self.counts.len() <= LEAST_REGION;
        if !placement.scatters || !fits {
            return (0..self.count, false);
        }
        let first = self.counts[..rank].iter().sum();
        (first..first + self.counts[rank], true)
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
            scatters: _,
        } = placement;
        let (own, is_scattered) = self.own(caller.rank(), placement);
        let own_bytes = own.start * self.dtype.size()..own.end * self.dtype.size();
        // The results of this rank: in a reduce-scatter those of the allreduce, for its rows.
        let all = [&self.residual, &self.plain_sum, &self.sum, &self.normed];
        let [own_residual, own_plain, own_sum, own_normed] = all.map(|bytes| &bytes[own_bytes.clone()]);
        let plain_sum = plain_sum && !is_scattered;
        let becomes = becomes.filter(|becomes| !stops && becomes.takes(self.hidden));
        // Rows in the element type are requested.
        let has_rows = !stops && (becomes.is_none() || also_rows);
        let experts = self.experts.get(caller.rank()).filter(|_| !stops && !is_scattered);
        let normed_in_place = normed_in_place && has_rows && experts.is_none();
        let becomes = becomes.map(|becomes| {
            let normed: Vec<f32> = values_of(self.dtype, own_normed).collect();
            (becomes, becomes.quantize(&normed, self.hidden))
        });
        // After a reduce-scatter all ranks gather the quantised rows: the bits of the allreduce.
        let gathered =
            becomes.as_ref().filter(|(Becomes(_, scaling), _)| is_scattered && !scaling.is_given());
        let gathered = gathered.map(|(becomes, _)| {
            let normed: Vec<f32> = values_of(self.dtype, &self.normed).collect();
            (*becomes, becomes.quantize(&normed, self.hidden))
        });
        let most = gathered.as_ref().or(becomes.as_ref());
        let scales_of = most.map_or(0, |(_, after)| after.scales.len());
        let table_of = experts.map_or(0, |experts| experts.table.len());
        let bytes = (self.count * self.dtype.size()).max(scales_of).max(table_of);
        let inputs = experts.map_or(&self.inputs[caller.rank()], |experts| &experts.rows);
        let place = |which: usize| {
            let section = (bytes.max(self.row_bytes()) + 2 * GUARD + 16 * 8).next_multiple_of(64);
            which * section + GUARD + offset * self.dtype.size()
        };
        let sections = if experts.is_some() {
            15
        } else if gathered.is_some() {
            12
        } else {
            10
        };
        let rest = caller.room(false, place(sections) + GUARD);
        let input = caller.room(registered, place(1) + GUARD) + place(0) as u64;
        let [residual, output, normed, weights, scales, plain, global, biases, separate_rows, all, all_scales] =
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11].map(|which| rest + place(which) as u64);
        let [table, expert_weights, shared] = [12, 13, 14].map(|which| rest + place(which) as u64);
        // For any alignment of the type.
        let [scales, global, all_scales, table, expert_weights] =
            [scales, global, all_scales, table, expert_weights].map(|at| at.next_multiple_of(4));
        let output = if residual_in_place { residual } else { output };
        let rows = if normed_in_place { input + own_bytes.start as u64 } else { separate_rows };
        // Address, content before the call, content after.
        let mut memory = vec![
            (input, inputs.clone(), Cow::from(inputs)),
            (residual, own_residual.to_vec(), Cow::from(own_residual)),
        ];
        match residual_in_place {
            true => memory[1].2 = Cow::from(own_sum),
            false => memory.push((output, poison(own_sum), Cow::from(own_sum))),
        }
        if plain_sum {
            memory.push((plain, poison(own_plain), Cow::from(own_plain)));
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
            (_, true) => memory[0].2.to_mut()[own_bytes].copy_from_slice(own_normed),
            (_, false) => memory.push((rows, poison(own_normed), Cow::from(own_normed))),
        }
        memory.extend(self.weight.iter().map(|weight| (weights, weight.clone(), Cow::from(weight))));
        memory.extend(self.bias.iter().map(|bias| (biases, bias.clone(), Cow::from(bias))));
        let gather = gathered.map(|(becomes, after)| {
            for (address, before) in [(all, &poison(&after.numbers)), (all_scales, &after.scales_before)] {
                caller.write(address - GUARD as u64, &framed(before));
            }
            let Becomes(dtype, scaling) = becomes;
            let rows = RawGatheredRows { scaling, hidden: self.hidden, scales, all_scales };
            let counts = self.counts.iter().map(|&count| scaling.number_bytes(count)).collect();
            let (input, output, count) = (normed, all, scaling.number_bytes(own.len()));
            let after = vec![(all, Cow::from(after.numbers)), (all_scales, Cow::from(after.scales))];
            Gather { rows, dtype, input, output, count, counts, after }
        });
        if let Some(experts) = experts {
            let read = [(table, Some(&experts.table)), (expert_weights, experts.weights.as_ref())];
            let read = read.into_iter().chain([(shared, experts.shared.as_ref())]);
            memory.extend(read.filter_map(|(at, bytes)| Some((at, bytes?.clone(), Cow::from(bytes?)))));
        }
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
            experts: experts.map(|experts| experts.at(table, expert_weights, shared)),
        };
        let after = memory.into_iter().map(|(address, _, after)| (address, after)).collect();
        let counts = if is_scattered { &self.counts[..] } else { &[] };
        Prepared { input, fused, count: own.len(), counts, gather, placement, after }
    }

    /// Checks everything that the call of a rank may have written.
    pub fn compare(&self, caller: &mut dyn Caller, call: &Prepared<'_>) {
        self.compare_memory(caller, call.placement, &call.after);
    }

    /// Checks what the gather after a call may have written.
    pub fn compare_gathered(&self, caller: &mut dyn Caller, call: &Prepared<'_>) {
        let after = call.gather.as_ref().map_or(&[][..], |gather| &gather.after);
        self.compare_memory(caller, call.placement, after);
    }

    fn compare_memory(&self, caller: &mut dyn Caller, placement: Placement, memory: &[(u64, Cow<'_, [u8]>)]) {
        for (number, (address, after)) in memory.iter().enumerate() {
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
                placement
            );
        }
    }
}

/// A rank's call, with its memory prepared.
pub struct Prepared<'a> {
    pub input: u64,
    pub fused: RawFused,
    /// Number of elements of the message, or of the rank's share.
    pub count: usize,
    /// Number of elements of each rank's share; empty if the call is an allreduce.
    counts: &'a [usize],
    /// The gather of the quantised rows of a reduce-scatter.
    pub gather: Option<Gather<'a>>,
    placement: Placement,
    /// Addresses and their expected contents after the call.
    after: Vec<(u64, Cow<'a, [u8]>)>,
}

impl Prepared<'_> {
    /// Returns the collective. Equal shares need no counts.
    pub fn collective(&self) -> Collective<'_> {
        match self.counts {
            [] => Collective::AllReduceFused(&self.fused),
            counts if counts.iter().all(|&count| count == counts[0]) => {
                Collective::ReduceScatterFused(&self.fused)
            }
            counts => Collective::ReduceScatterFusedV(&self.fused, counts),
        }
    }
}

/// An all-gather of quantised rows, with its memory prepared.
pub struct Gather<'a> {
    rows: RawGatheredRows,
    pub dtype: DType,
    pub input: u64,
    pub output: u64,
    /// Bytes of this rank's numbers, and of each rank's.
    pub count: usize,
    counts: Vec<usize>,
    after: Vec<(u64, Cow<'a, [u8]>)>,
}

impl Gather<'_> {
    /// Returns the collective. Equal shares need no counts.
    pub fn collective(&self) -> Collective<'_> {
        match self.counts.iter().all(|&count| count == self.count) {
            true => Collective::AllGatherRows(&self.rows),
            false => Collective::AllGatherRowsV(&self.rows, &self.counts),
        }
    }
}

/// The smallest region that callers have, in bytes.
const LEAST_REGION: usize = 16 << 10;

/// Returns every norm of the catalogue.
fn norms(epsilon: f32) -> Vec<Norm> {
    (1..).map_while(|code| Norm::of_code(code, epsilon, false).ok()).collect()
}

/// Divides rows among ranks, some of which may have none.
fn shares(random: &mut Random, rows: usize, world: usize) -> Vec<usize> {
    if rows % world == 0 && random.one_in(2) {
        return vec![rows / world; world];
    }
    let mut shares = vec![0; world];
    // The ranks that may have rows.
    let (first, some) = (random.below(world), 1 + random.below(world));
    (0..rows).for_each(|_| shares[(first + random.below(some)) % world] += 1);
    shares
}

pub(crate) const GUARD: usize = 64;

/// Largest message whose inputs are computed from experts' rows.
const MOST_BYTES_OF_EXPERTS: usize = 16 << 10;

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
