//! The conversions of 8-bit floats, by every instruction set: whatever two numbers come to, and what tips it.

use fast_allreduce::device::host::Isa;
use fast_allreduce::{DType, ReduceOp};

use crate::host::HostDevice;
use crate::suite::launch::InThreads;
use crate::suite::message::{Message, Place, Placement};
use crate::suite::order::Order;
use crate::suite::scenario::{Scenario, Sequence, Setup};
use crate::suite::world::{Launched, World};

const PLAIN: Placement = Placement { input: Place::plain(0), output: Some(Place::plain(0)) };

/// Sums and products of all pairs of codes: among them each number, each middle between two and each overflow. Then with the
/// smallest numbers added, which decide ties.
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
