//! The regions of a world, in loom's atomics and cells, and the rules of their use, in which tests plant
//! bugs.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::Ordering::{self, Acquire, Release};
use loom::sync::atomic::{AtomicU32, AtomicU64};

/// The rules of the protocols. [`KERNELS`] is what the kernels do; each test of a planted bug changes one.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// Orderings of flags: signals, the host's packet tags, announcements.
    pub flag_store: Ordering,
    pub flag_load: Ordering,
    /// Ordering of signals of the second barrier.
    pub second_store: Ordering,
    pub signal_generations: u32,
    pub staging_generations: u32,
    pub staging_by: Count,
    /// Two ranks write staging where they last read it, as on the host.
    pub swap_staging: bool,
    pub mailbox_generations: u32,
    pub announcement_generations: u32,
    /// The source is stored before the epoch that releases it.
    pub source_first: bool,
    /// Ranks compare the call in a start signal before they read inputs.
    pub compares_calls: bool,
    /// A pull that reads a registered buffer ends in a barrier.
    pub end_barrier: bool,
    pub packets: Packets,
    /// Waits check their limits. Off in models without failures, since each check adds executions to explore.
    pub limits: bool,
    pub gone_store: Ordering,
    pub gone_load: Ordering,
    /// A rank that sees the mark polls once more.
    pub last_poll: bool,
    /// The mark of a rank only affects waits for that rank.
    pub gone_by_rank: bool,
    /// Waits check for failures of the rank's other blocks.
    pub failure_ends_waits: bool,
    pub first_failure_stands: bool,
}

/// What selects a generation.
#[derive(Debug, Clone, Copy)]
pub enum Count {
    Pulls,
    Epochs,
}

/// The form of packets.
#[derive(Debug, Clone, Copy)]
pub enum Packets {
    /// Host: data, then a tag that is released after it.
    Lines,
    /// GPU: data and tag in one relaxed word.
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
    swap_staging: true,
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

/// The state of one rank. `[..; 2]` is by generation, a `Vec` by rank.
pub struct Head {
    pub inbox: [[Vec<Signal>; 2]; 2],
    pub announced: [Vec<Announcement>; 2],
    /// By sender, then by section.
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
    // loom's threads are coroutines of one thread, so its cells are not `Sync`.
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
    // SAFETY: as in `read`.
    cell.with_mut(|old| unsafe { *old = value });
}
