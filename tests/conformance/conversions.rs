//! Tests the conversions of 8-bit floats with every instruction set: each pair of numbers, and values around each tie.

use fast_allreduce::device::host::Isa;
use fast_allreduce::{DType, ReduceOp};

use crate::host::HostDevice;
use crate::suite::launch::InThreads;
use crate::suite::message::{Message, Place, Placement};
use crate::suite::number::{Number, F8E4M3, F8E5M2};
use crate::suite::order::Order;
use crate::suite::scenario::{Expected, Scenario, Sequence, Setup};
use crate::suite::world::{Launched, World};

const PLAIN: Placement = Placement { input: Place::plain(0), output: Some(Place::plain(0)) };

/// Tests sums and products of all pairs of codes, which include each number, each midpoint between two, and each
/// overflow. Then the smallest numbers are added, which decide ties.
#[test]
fn all_pairs_of_8_bit_floats() {
    let pairs = || (0..=u8::MAX).flat_map(|first| (0..=u8::MAX).map(move |second| (first, second)));
    let pair = [pairs().map(|pair| pair.0).collect(), pairs().map(|pair| pair.1).collect()];
    for isa in Isa::supported() {
        for smallest in [None, Some(0x01), Some(0x81)] {
            let inputs: Vec<Vec<u8>> =
                pair.iter().cloned().chain(smallest.map(|code| vec![code; 1 << 16])).collect();
            let ranks = inputs.len();
            let scenario = Scenario::new([Setup::default()], |_| {
                let kinds = [DType::F8E4M3, DType::F8E5M2]
                    .into_iter()
                    .flat_map(|dtype| [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Avg].map(|op| (dtype, op)));
                let message = |kind| Message::of_inputs(kind, inputs.clone(), Order::Ranks);
                let messages: Vec<_> = kinds.map(message).collect();
                Sequence::each_on_each(2 * 3, messages, 1, || vec![PLAIN; ranks])
            });
            Launched::new(InThreads, HostDevice(vec![isa])).run(ranks, &[scenario]);
        }
    }
}

/// Tests the rounding of accumulator values to both formats: every number, the midpoint between each two, and the
/// values next to these, each as a product of 1 and a scale.
#[test]
fn every_boundary_of_8_bit_floats() {
    for isa in Isa::supported() {
        let formats = [
            (DType::F8E4M3, magnitudes::<F8E4M3>(480.0), 0x38_u8),
            (DType::F8E5M2, magnitudes::<F8E5M2>(65536.0), 0x3C),
        ];
        for (dtype, magnitudes, one) in formats {
            let mut scales = vec![f32::MIN_POSITIVE, f32::MAX, f32::INFINITY, f32::NAN, f32::from_bits(1)];
            let mut below = 0.0;
            for number in magnitudes {
                for edge in [number as f32, ((number + below) / 2.0) as f32] {
                    let bits = edge.to_bits();
                    scales.extend([bits.saturating_sub(1), bits, bits + 1].map(f32::from_bits));
                }
                below = number;
            }
            let scales = scales.into_iter().flat_map(|scale| [scale, -scale]);
            let scenario = Scenario::new([Setup::default()], |_| {
                let message = |scale: f32| {
                    let op = ReduceOp::PreMulSum(f64::from(scale).into());
                    Message::of_inputs((dtype, op), vec![vec![one; 70]], Order::Ranks)
                };
                let messages: Vec<_> = scales.clone().map(message).collect();
                Sequence::each_on_each(Expected::AtLeast(1400), messages, 1, || vec![PLAIN])
            });
            Launched::new(InThreads, HostDevice(vec![isa])).run(1, &[scenario]);
        }
    }
}

/// Returns the magnitudes of a format, and the next one that would follow without the limit of the format.
fn magnitudes<T: Number>(next: f64) -> Vec<f64> {
    let numbers = (0..0x80).map(|code| T::of_bits(code).to_f64());
    numbers.filter(|number| number.is_finite()).chain([next]).collect()
}
