//! Sums with quantised transport: expected elements, computed from the format in `docs/quantized.md`; the bound on
//! their distance from the exact sum; and a checked call.

use fast_allreduce::{Collective, DType, QuantizedTransport, ReduceOp, Transport};

use crate::message::poison;
use crate::number::e4m3;
use crate::oracle;
use crate::random::{elements, Random, Values};
use crate::rows::{bytes_of, framed, values_of, Caller, GUARD};

const GROUP: usize = 32;

/// A message with its expected result.
pub struct QuantizedSum {
    pub dtype: DType,
    pub count: usize,
    pub quantized: QuantizedTransport,
    /// Inputs of the ranks, as bytes.
    pub inputs: Vec<Vec<u8>>,
    pub expected: Vec<u8>,
}

/// Memory of a call.
#[derive(Debug, Clone, Copy)]
pub struct Placement {
    /// Offsets in elements of the input and the output from an aligned address.
    pub offsets: [usize; 2],
    /// The input is in a registered buffer.
    pub registered: bool,
    pub in_place: bool,
}

impl Placement {
    pub fn random(random: &mut Random) -> Self {
        let offsets = [0; 2].map(|_| random.pick(&[0, 0, 1, 3, 8, 16]));
        Self { offsets, registered: random.one_in(2), in_place: random.one_in(3) }
    }
}

impl QuantizedSum {
    pub fn new(random: &mut Random, dtype: DType, transport: Transport, count: usize, world: usize) -> Self {
        let bound = transport.error_bound(dtype).unwrap();
        let tolerance = random.pick(&[bound, 0.5]);
        let kind = random.below(4);
        let input = |_| match kind {
            0 => elements(random, dtype, count, Values::Bits),
            1 => spread(random, dtype, count, 50),
            _ => spread(random, dtype, count, usize::MAX),
        };
        let inputs: Vec<_> = (0..world).map(input).collect();
        let expected = match world {
            1 => oracle::reduce(dtype, ReduceOp::Sum, &inputs),
            _ => sum(dtype, transport, &inputs),
        };
        let message =
            Self { dtype, count, quantized: QuantizedTransport { transport, tolerance }, inputs, expected };
        if kind > 1 {
            message.check_bound(bound);
        }
        message
    }

    /// Returns the largest error as a fraction of the guaranteed bound, and asserts that it is at most 1.
    pub fn check_bound(&self, bound: f32) -> f64 {
        let wide = |bytes: &[u8]| values_of(self.dtype, bytes).map(f64::from).collect::<Vec<_>>();
        let inputs: Vec<_> = self.inputs.iter().map(|input| wide(input)).collect();
        let result = wide(&self.expected);
        let mut most = 0.0_f64;
        for i in 0..self.count {
            let group = i / GROUP * GROUP..(i / GROUP * GROUP + GROUP).min(self.count);
            let largest = |input: &Vec<f64>| input[group.clone()].iter().fold(0.0_f64, |a, x| a.max(x.abs()));
            let accepted = f64::from(bound) * inputs.iter().map(largest).sum::<f64>();
            let error = (result[i] - inputs.iter().map(|input| input[i]).sum::<f64>()).abs();
            assert!(error <= accepted, "[{i}] is off by {error:e}, and not at most {accepted:e}");
            most = most.max(error / accepted);
        }
        most
    }

    /// Makes the call of a rank, and checks everything that the call may have written.
    pub fn check(&self, caller: &mut dyn Caller, placement: Placement) {
        let (input, output) = self.prepare(caller, placement);
        let collective = Collective::AllReduceQuantized(self.quantized);
        caller.call(collective, input, output, self.count, self.dtype).unwrap();
        self.compare(caller, placement, (input, output));
    }

    /// Writes a rank's input, poison in the place of the result, and canaries around both.
    pub fn prepare(&self, caller: &mut dyn Caller, placement: Placement) -> (u64, u64) {
        let Placement { offsets, registered, in_place } = placement;
        let own = &self.inputs[caller.rank()][..];
        let [input, output] = offsets.map(|offset| GUARD + offset * self.dtype.size());
        let section = (own.len() + 2 * GUARD + 16 * 8).next_multiple_of(64);
        let input = caller.room(registered, 2 * section) + input as u64;
        caller.write(input - GUARD as u64, &framed(own));
        if in_place {
            return (input, input);
        }
        let output = caller.room(false, 2 * section) + (section + output) as u64;
        caller.write(output - GUARD as u64, &framed(&poison(&self.expected)));
        (input, output)
    }

    pub fn compare(&self, caller: &mut dyn Caller, placement: Placement, (input, output): (u64, u64)) {
        let rank = caller.rank();
        let mut places = vec![("output", output, &self.expected)];
        if input != output {
            places.push(("input", input, &self.inputs[rank]));
        }
        for (what, address, after) in places {
            let is = caller.read(address - GUARD as u64, after.len() + 2 * GUARD);
            let Some(at) = is.iter().zip(framed(after)).position(|(is, after)| *is != after) else {
                continue;
            };
            let Self { dtype, count, quantized, inputs, .. } = self;
            let element = (at as isize - GUARD as isize) / dtype.size() as isize;
            panic!(
                "rank {rank} of {}: the {what} differs at element {element}: \
                 {count} x {dtype}, {quantized:?}, {placement:?}",
                inputs.len()
            );
        }
    }
}

/// Returns elements of very different magnitudes, with some special values.
fn spread(random: &mut Random, dtype: DType, count: usize, special: usize) -> Vec<u8> {
    let plain = elements(random, dtype, count, Values::Plain);
    let value = |(i, x): (usize, f32), random: &mut Random| match random.one_in(special) {
        true => elements(random, dtype, 1, Values::Special),
        false => bytes_of(dtype, x * 2.0_f32.powi(-(random.below(1 + i % 16) as i32))),
    };
    values_of(dtype, &plain).enumerate().flat_map(|x| value(x, random)).collect()
}

/// Quantises each input, then sums.
fn sum(dtype: DType, transport: Transport, inputs: &[Vec<u8>]) -> Vec<u8> {
    let parts: Vec<Vec<f32>> = inputs
        .iter()
        .map(|input| quantized(transport, &values_of(dtype, input).collect::<Vec<_>>()))
        .collect();
    let sums: Vec<f32> =
        (0..parts[0].len()).map(|i| parts.iter().fold(0.0, |sum, part| sum + part[i])).collect();
    quantized(transport, &sums).into_iter().flat_map(|x| bytes_of(dtype, x)).collect()
}

/// Returns the values of elements after quantisation.
fn quantized(transport: Transport, elements: &[f32]) -> Vec<f32> {
    let group = |group: &[f32]| {
        let scale = scale(transport, group);
        let inverse = 1.0 / scale;
        let value = |x: &f32| match transport {
            Transport::Int8 => (x * inverse).round_ties_even(),
            _ => e4m3(x * inverse).to_f32(),
        };
        // Zeros have no sign.
        group.iter().map(|x| value(x) * scale + 0.0).collect::<Vec<_>>()
    };
    elements.chunks(GROUP).flat_map(group).collect()
}

/// Returns the least normal f32 with 8 bits that is no less than the largest magnitude divided by the format's largest
/// number.
fn scale(transport: Transport, group: &[f32]) -> f32 {
    if !group.iter().all(|x| x.is_finite()) {
        return f32::NAN;
    }
    let most = if transport == Transport::Int8 { 127.0 } else { 448.0 };
    let quotient = group.iter().fold(0.0_f32, |most, x| most.max(x.abs())) / most;
    let mut scale = half::bf16::from_f32(quotient).to_f32();
    if scale < quotient {
        scale = half::bf16::from_bits(half::bf16::from_f32(scale).to_bits() + 1).to_f32();
    }
    scale.max(f32::MIN_POSITIVE)
}

/// Returns the largest error found, as a fraction of the guaranteed bound, for inputs with errors close to the bound.
/// A result close to 1 shows that the bound is tight.
pub fn closest_to_the_bound(transport: Transport, dtype: DType) -> f64 {
    let random = Random::new("quantized::closest_to_the_bound");
    let most = (0..200).map(|number| {
        let mut random = random.fork(number);
        // The largest is just beyond what an 8-bit scale can represent; all others are midway between two values.
        let largest = 1.0 + random.below(128) as f32 / 128.0 + 1.0 / 1024.0;
        let input = |random: &mut Random| -> Vec<u8> {
            let rest = (0..31).map(|_| largest * (0.55 + 0.45 * random.below(1000) as f32 / 1000.0));
            std::iter::once(largest).chain(rest).flat_map(|x| bytes_of(dtype, x)).collect()
        };
        let inputs = vec![input(&mut random), input(&mut random)];
        let expected = sum(dtype, transport, &inputs);
        let bound = transport.error_bound(dtype).unwrap();
        let quantized = QuantizedTransport { transport, tolerance: bound };
        QuantizedSum { dtype, count: GROUP, quantized, inputs, expected }.check_bound(bound)
    });
    most.fold(0.0, f64::max)
}
