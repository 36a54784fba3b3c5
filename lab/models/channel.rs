//! Models of channels: `csrc/core/channel.cuh` and the chunks of `csrc/algorithms/transfer.cuh`, in one
//! direction between two ranks.

use std::rc::Rc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU32;
use loom::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};
use loom::thread;

use super::explore::{exhaustively, found, RACE};

const SLOTS: u32 = 4;
/// The number of chunks for which the receiver gives credit at once.
const EACH: u32 = 2;
/// The panic of a receiver that finds an unexpected tag.
const TAG: &str = "an unexpected tag";

/// The rules of a channel; each test of a planted bug changes one.
#[derive(Debug, Clone, Copy)]
struct Rules {
    number_store: Ordering,
    number_load: Ordering,
    credit_store: Ordering,
    credit_load: Ordering,
    /// The most chunks in flight at once.
    most: u32,
    /// Planted: the receiver gives credit for chunks before it has read the last of them.
    credit_first: bool,
    /// Planted: the number is stored before the tag.
    number_first: bool,
}

const KERNELS: Rules = Rules {
    number_store: Release,
    number_load: Acquire,
    credit_store: Release,
    credit_load: Acquire,
    most: SLOTS,
    credit_first: false,
    number_first: false,
};

#[derive(Default)]
struct Slot {
    chunk: UnsafeCell<u32>,
    tag: AtomicU32,
    number: AtomicU32,
}

/// In the receiver's region, except the credit, which is in the sender's.
#[derive(Default)]
struct Channel {
    slots: [Slot; SLOTS as usize],
    taken: AtomicU32,
}

impl Channel {
    fn slot(&self, number: u32) -> &Slot {
        &self.slots[(number % SLOTS) as usize]
    }

    /// `credited` is what the sender has seen before; it is checked first.
    fn send(&self, number: u32, credited: &mut u32, rules: Rules) {
        wait_until(|| {
            if number - *credited >= rules.most {
                *credited = self.taken.load(rules.credit_load);
            }
            number - *credited < rules.most
        });
        let slot = self.slot(number);
        // SAFETY: loom's cell panics on an access that nothing orders, which is what is tested.
        slot.chunk.with_mut(|chunk| unsafe { *chunk = 100 + number });
        if rules.number_first {
            slot.number.store(number + 1, rules.number_store);
            slot.tag.store(7 + number, Relaxed);
        } else {
            slot.tag.store(7 + number, Relaxed);
            slot.number.store(number + 1, rules.number_store);
        }
    }

    fn receive(&self, number: u32, rules: Rules) {
        let slot = self.slot(number);
        wait_until(|| slot.number.load(rules.number_load) == number + 1);
        assert_eq!(slot.tag.load(Relaxed), 7 + number, "{TAG}");
        let give = || {
            if (number + 1) % EACH == 0 {
                self.taken.store(number + 1, rules.credit_store);
            }
        };
        if rules.credit_first {
            give();
        }
        // SAFETY: as in `send`.
        assert_eq!(slot.chunk.with(|chunk| unsafe { *chunk }), 100 + number, "an unexpected chunk");
        if !rules.credit_first {
            give();
        }
    }
}

fn wait_until(mut ready: impl FnMut() -> bool) {
    while !ready() {
        thread::yield_now();
    }
}

/// Sends `count` chunks, more than the slots hold at a time.
fn chunks(count: u32, rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        // All loom threads run on one system thread.
        let channel = Rc::new(Channel::default());
        let receiver = {
            let channel = Rc::clone(&channel);
            thread::spawn(move || (0..count).for_each(|number| channel.receive(number, rules)))
        };
        let mut credited = 0;
        (0..count).for_each(|number| channel.send(number, &mut credited, rules));
        receiver.join().unwrap();
    }
}

/// Two ranks that both send a chunk first, then receive.
fn both_ways(rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        let channels = Rc::new([Channel::default(), Channel::default()]);
        let exchange = move |channels: &[Channel; 2], rank: usize| {
            channels[rank].send(0, &mut 0, rules);
            channels[1 - rank].receive(0, rules);
        };
        let peer = {
            let channels = Rc::clone(&channels);
            thread::spawn(move || exchange(&channels, 1))
        };
        exchange(&channels, 0);
        peer.join().unwrap();
    }
}

#[test]
fn chunks_through_a_ring() {
    exhaustively(chunks(2, KERNELS));
    exhaustively(chunks(SLOTS + 1, KERNELS));
    exhaustively(both_ways(KERNELS));
}

#[test]
fn relaxed_numbers_are_found() {
    found(&[RACE, TAG], None, chunks(1, Rules { number_store: Relaxed, ..KERNELS }));
    found(&[RACE, TAG], None, chunks(1, Rules { number_load: Relaxed, ..KERNELS }));
}

#[test]
fn relaxed_credits_are_found() {
    found(&[RACE], None, chunks(SLOTS + 1, Rules { credit_store: Relaxed, ..KERNELS }));
    found(&[RACE], None, chunks(SLOTS + 1, Rules { credit_load: Relaxed, ..KERNELS }));
}

#[test]
fn a_chunk_without_credit_is_found() {
    found(&[RACE], None, chunks(SLOTS + 1, Rules { most: SLOTS + 1, ..KERNELS }));
}

#[test]
fn credit_before_the_last_read_is_found() {
    found(&[RACE], None, chunks(SLOTS + EACH, Rules { credit_first: true, ..KERNELS }));
}

#[test]
fn a_number_before_its_tag_is_found() {
    found(&[TAG], None, chunks(1, Rules { number_first: true, ..KERNELS }));
}
