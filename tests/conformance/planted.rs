//! Tests that the suite detects errors: each call of a single rank has an error planted in one place.

use std::ops::Range;

use fast_allreduce::{DType, Plan, ReduceOp, Result};

use crate::host::{Build as _, HostRank};
use crate::suite::launch::threads;
use crate::suite::message::{MemoryKind, Message, Place, Placement};
use crate::suite::random::{Random, Values};
use crate::suite::ranks::{check, room_for, Part, Ranks, Side};
use crate::suite::scenario::Setup;

/// A rank that flips a bit after its call, at an offset from the input or the output.
struct Planted {
    rank: HostRank,
    at: (Side, i64),
}

impl Ranks for Planted {
    const PACK_BYTES: usize = HostRank::PACK_BYTES;

    fn ranks(&self) -> Range<usize> {
        self.rank.ranks()
    }

    fn world_size(&self) -> usize {
        self.rank.world_size()
    }

    fn plan(&self, count: usize, dtype: DType) -> Plan {
        self.rank.plan(count, dtype)
    }

    fn make_room(&mut self, bytes: usize) {
        self.rank.make_room(bytes);
    }

    fn base(&mut self, rank: usize, kind: MemoryKind, side: Side) -> u64 {
        self.rank.base(rank, kind, side)
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        self.rank.write(address, bytes);
    }

    fn read(&mut self, address: u64, bytes: usize) -> Vec<u8> {
        self.rank.read(address, bytes)
    }

    fn call(&mut self, message: &Message, parts: &[Part]) -> Result<()> {
        self.rank.call(message, parts)?;
        let (side, offset) = self.at;
        let base = if side == Side::Input { parts[0].input } else { parts[0].output };
        let address = base.wrapping_add_signed(offset);
        let byte = self.rank.read(address, 1)[0];
        self.rank.write(address, &[byte ^ 4]);
        Ok(())
    }
}

#[test]
fn every_wrong_byte_is_found() {
    const BYTES: i64 = 37 * 4;
    let random = Random::new("every wrong byte is found");
    let separate = Placement { input: Place::registered(3), output: Some(Place::plain(1)) };
    let in_place = Placement { input: Place::plain(1), output: None };
    let inside = [0, 5, BYTES - 1].map(|at| (at, "is"));
    let outside = [-128, -1, BYTES, BYTES + 127].map(|at| (at, "outside of its bounds"));
    for (offset, finding) in inside.into_iter().chain(outside) {
        for (side, placement) in [(Side::Output, separate), (Side::Input, separate), (Side::Input, in_place)]
        {
            let found = threads(1, |rank| {
                let mut planted =
                    Planted { rank: HostRank::new(Setup::default().build(&rank)), at: (side, offset) };
                let kind = (DType::F32, ReduceOp::Sum);
                let message = Message::new(&mut random.fork(0), kind, 37, 1, Values::Plain);
                planted.make_room(room_for(message.bytes()));
                let checked = std::panic::AssertUnwindSafe(|| check(&mut planted, &message, &[placement]));
                *std::panic::catch_unwind(checked).expect_err("found").downcast::<String>().unwrap()
            });
            let what = if (side, placement.output) == (Side::Input, separate.output) {
                "the input"
            } else {
                "the output"
            };
            assert!(found[0].contains(what) && found[0].contains(finding), "{offset}: {}", found[0]);
        }
    }
}
