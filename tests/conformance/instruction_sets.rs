//! Tests that every instruction set gives the expected bits, also in worlds whose ranks use different ones.

use fast_allreduce::device::host::Isa;

use crate::host::HostDevice;
use crate::suite::cases::product;
use crate::suite::launch::InThreads;
use crate::suite::message::{Place, Placement};
use crate::suite::random::Random;
use crate::suite::scenario::{Scenario, Sequence, Setup};
use crate::suite::world::{Launched, World};

#[test]
fn every_instruction_set() {
    const PLAIN: Placement = Placement { input: Place::registered(0), output: Some(Place::plain(0)) };
    let supported = Vec::from_iter(Isa::supported());
    for size in [3, 2, 9] {
        let random = Random::new(&format!("instruction sets in a world of {size}"));
        let scenario = || {
            Scenario::new([Setup::default()], |_| {
                let messages = product(&mut random.fork(size), size, |_, _| 301);
                Sequence::each_on_each(11 * 6 * 3, messages, 1, || vec![PLAIN; size])
            })
        };
        let alone = supported.iter().map(|&isa| vec![isa]);
        for isas in alone.chain([supported.clone()]) {
            Launched::new(InThreads, HostDevice(isas)).run(size, &[scenario()]);
        }
    }
}
