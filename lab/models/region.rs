//! The regions of a world, in loom's atomics and cells, and what may be planted wrong in their use.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::Ordering::{self, Acquire, Release};
use loom::sync::atomic::{AtomicU32, AtomicU64};

/// How the protocols work. The default is what the kernels do; a test plants a bug by changing one of it.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// Of flags: signals, the tags of packets of the host, announcements.
    pub flag_store: Ordering,
    pub flag_load: Ordering,
    /// Of the second barrier's signals.
    pub second_store: Ordering,
    pub signal_generations: u32,
    pub staging_generations: u32,
    pub staging_by: Count,
    /// Two ranks write staging where they last read it, as on the host.
    pub two_trade_lines: bool,
    pub mailbox_generations: u32,
    pub announcement_generations: u32,
    /// The source is stored before the epoch that releases it.
    pub source_first: bool,
    /// The call that comes with a start signal is compared, before the inputs are read.
    pub compares_calls: bool,
    /// A pull from somebody's own buffer ends in a barrier.
    pub end_barrier: bool,
    pub packets: Packets,
    /// Waiting looks at the limits. Off where nobody fails: each look is a choice more to explore.
    pub limits: bool,
    pub gone_store: Ordering,
    pub gone_load: Ordering,
    /// Who sees the mark polls once more.
    pub last_poll: bool,
    /// The mark of a rank is for those who wait for that rank.
    pub gone_by_rank: bool,
    /// Waiting looks at the failures of the rank's other blocks.
    pub failure_ends_waits: bool,
    pub first_failure_stands: bool,
}

/// What a generation is counted by.
#[derive(Debug, Clone, Copy)]
pub enum Count {
    Pulls,
    Epochs,
}

/// The form of packets.
#[derive(Debug, Clone, Copy)]
pub enum Packets {
    /// Of the host: data, then a tag that is released after it.
    Lines,
    /// Of GPUs: data and tag in one relaxed word.
    Words,
    /// Planted: data and tag in two relaxed words.
    TornWords,
}

pub const KERNELS: Rules = Rules {
    flag_store: Release,
    flag_load: Acquire,
    second_store: Release,
    signal_generations: 2,
    staging_generations: 2,
    staging_by: Count::Pulls,
    two_trade_lines: true,
    mailbox_generations: 2,
    announcement_generations: 2,
    source_first: true,
    compares_calls: true,
    end_barrier: true,
    packets: Packets::Lines,
    limits: false,
    gone_store: Release,
    gone_load: Acquire,
    last_poll: true,
    gone_by_rank: true,
    failure_ends_waits: true,
    first_failure_stands: true,
};

#[derive(Default)]
pub struct Signal {
    pub epoch: AtomicU32,
    pub source: AtomicU64,
    pub call: AtomicU64,
}

#[derive(Default)]
pub struct Announcement {
    pub epoch: AtomicU32,
    pub what: AtomicU64,
}

#[derive(Default)]
pub struct Slot {
    pub line: UnsafeCell<u32>,
    pub tag: AtomicU32,
    pub word: AtomicU64,
}

#[derive(Default)]
pub struct Status {
    pub abort: AtomicU32,
    pub gone: AtomicU32,
    pub failure: AtomicU32,
    pub missing: AtomicU32,
}

/// What one rank owns. `[..; 2]` is generations, a `Vec` has an entry for each rank.
pub struct Head {
    pub inbox: [[Vec<Signal>; 2]; 2],
    pub announced: [Vec<Announcement>; 2],
    /// By sender, then by part of the algorithm.
    pub mailbox: [Vec<[Slot; 2]>; 2],
    /// By slice.
    pub staging: [Vec<UnsafeCell<u32>>; 2],
    /// A registered buffer.
    pub buffer: UnsafeCell<u32>,
    pub status: Status,
}

pub struct World {
    pub rules: Rules,
    pub heads: Vec<Head>,
}

fn each<T: Default>(size: usize) -> Vec<T> {
    (0..size).map(|_| T::default()).collect()
}

impl World {
    // Loom's threads are coroutines of one thread, and its cells say so.
    #[allow(clippy::arc_with_non_send_sync)]
    pub fn new(size: usize, rules: Rules) -> Arc<Self> {
        let head = |_| Head {
            inbox: [[each(size), each(size)], [each(size), each(size)]],
            announced: [each(size), each(size)],
            mailbox: [each(size), each(size)],
            staging: [each(size), each(size)],
            buffer: UnsafeCell::default(),
            status: Status::default(),
        };
        Arc::new(Self { rules, heads: (0..size).map(head).collect() })
    }
}

/// A plain load, which races with every write that is not ordered with it.
pub fn read(cell: &UnsafeCell<u32>) -> u32 {
    // SAFETY: loom ends the execution where another access is not ordered with this one.
    cell.with(|value| unsafe { *value })
}

/// A plain store.
pub fn write(cell: &UnsafeCell<u32>, value: u32) {
    // SAFETY: as above.
    cell.with_mut(|old| unsafe { *old = value });
}
