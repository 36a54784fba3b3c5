//! Blocks, warps and threads between two events.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};

use super::calendar::{Pipe, Slots};
use super::constants::Machine;
use super::fabric::Who;
use super::path::{After, Cause, Log};
use super::recorder::Note;
use super::Counts;
use crate::block::Block;

/// A time as a key.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Time(pub f64);

impl Eq for Time {}

impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Time {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// Why a thread does not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// It may.
    Run,
    /// It may, once its warp has gone through what it did.
    Again,
    /// Before a look at this address.
    Look(u64),
    /// It has come to others, in its own time.
    Meet,
    /// In that of the simulation.
    Waits,
    /// For the end of the launch before.
    Depends,
    Ended,
}

pub(crate) struct Lane {
    pub notes: VecDeque<Note>,
    /// Of the notes, those that begin a block.
    pub blocks: u32,
    /// Where its next region begins, in a block that has been begun.
    pub at: Option<u32>,
    /// Before which instruction of its last block it has stopped.
    pub reached: u32,
    pub stop: Stop,
}

impl Lane {
    fn new() -> Self {
        Self { notes: VecDeque::new(), blocks: 0, at: None, reached: 0, stop: Stop::Run }
    }

    /// Whether it may run now.
    pub fn may_run(&self) -> bool {
        self.stop == Stop::Run || (self.stop == Stop::Again && self.front().is_none())
    }

    /// Where the next region begins that it has to go through.
    pub fn front(&self) -> Option<u32> {
        if matches!(self.stop, Stop::Waits | Stop::Depends) {
            return None;
        }
        self.at.or(match self.notes.front() {
            Some(&Note::Block(first)) => Some(first),
            _ => None,
        })
    }

    /// Whether it has run through the region that ends there.
    pub fn is_through(&self, last: u32) -> bool {
        self.blocks > u32::from(self.at.is_none()) || last <= self.reached
    }
}

/// What is in a register: from when on, and what it came of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Value {
    pub ready: f64,
    pub cause: Cause,
    pub queue: f64,
    /// Of a look: when it was issued.
    pub looked: Option<f64>,
}

impl Value {
    pub const NONE: Self = Self { ready: 0.0, cause: Cause::Arithmetic, queue: 0.0, looked: None };
}

pub(crate) struct Warp {
    pub now: f64,
    pub lanes: Vec<Lane>,
    pub values: Vec<Value>,
    /// Accesses that come after an acquire wait until then.
    pub ordered: f64,
    /// When the look that its threads stopped before is.
    pub look: Option<f64>,
    /// By address: when the store had arrived that the last look has seen.
    pub looked: HashMap<u64, f64>,
    /// What its looks have waited for, each with when it was issued.
    pub waited: Vec<(f64, After)>,
    pub log: Log,
    pub counts: Counts,
    pub ended: bool,
    /// The instruction at which it waits for the launch before.
    pub depends: u32,
    /// Of its next event: others are of no concern any more.
    pub next: Option<f64>,
}

impl Warp {
    pub fn new(now: f64, lanes: usize, registers: usize, is_logged: bool) -> Self {
        Self {
            now,
            lanes: (0..lanes).map(|_| Lane::new()).collect(),
            values: vec![Value::NONE; registers],
            ordered: 0.0,
            look: None,
            looked: HashMap::new(),
            waited: Vec::new(),
            log: Log::new(is_logged),
            counts: Counts::default(),
            ended: false,
            depends: 0,
            next: Some(now),
        }
    }
}

impl Warp {
    /// Of what looks waited for that were issued at `looked` or later: the last.
    pub fn last_waited(&mut self, looked: f64) -> Option<After> {
        let waited = self.waited.drain(..).filter(|&(at, _)| at >= looked).map(|(_, after)| after);
        waited.max_by(|a, b| a.arrived.total_cmp(&b.arrived))
    }
}

/// A multiprocessor.
pub(crate) struct Sm {
    pub slots: [Slots; 4],
    pub store: Pipe,
    pub remote: Pipe,
    pub load: Pipe,
    /// Sectors in its first-level cache: from when on.
    pub l1: HashMap<u64, f64>,
    /// Lines of parameters.
    pub lines: HashSet<u64>,
    /// Loads on their way: when they come, and their bytes.
    pub waits: BinaryHeap<(Reverse<Time>, u32)>,
    pub in_flight: f64,
}

impl Sm {
    pub fn new(machine: &Machine) -> Self {
        Self {
            slots: Default::default(),
            store: Pipe::new(machine.sm_store_bytes),
            remote: Pipe::new(machine.sm_remote_bytes),
            load: Pipe::new(machine.sm_load_bytes),
            l1: HashMap::new(),
            lines: HashSet::new(),
            waits: BinaryHeap::new(),
            in_flight: 0.0,
        }
    }

    /// When there is room for a load that would begin at `at`.
    pub fn room(&mut self, at: f64, bytes: f64, most: f64) -> f64 {
        let mut at = at;
        while let Some(&(Reverse(Time(comes)), size)) = self.waits.peek() {
            if comes > at && self.in_flight + bytes <= most {
                break;
            }
            self.waits.pop();
            self.in_flight -= f64::from(size);
            at = at.max(if self.in_flight + f64::from(size) + bytes > most { comes } else { at });
        }
        at
    }
}

/// Threads that have come to a barrier.
#[derive(Clone, Copy)]
pub(crate) struct Meeting {
    pub last: f64,
    pub by: usize,
}

pub(crate) struct SimBlock {
    pub block: Block,
    pub rank: usize,
    pub turn: usize,
    /// Of its rank's.
    pub sm: usize,
    pub warps: Vec<Warp>,
    pub meetings: [Option<Meeting>; 16],
    /// When the last of its stores is known to have arrived.
    pub acks: f64,
    /// Its stores to its own GPU that have not arrived: whoever is in the block sees them.
    pub pending: Vec<usize>,
    pub left: usize,
    /// Whether it has said that the next launch may begin.
    pub told: bool,
    pub end: f64,
    pub last: usize,
}

/// A store of a warp, to one device.
pub(crate) struct Store {
    pub parts: Vec<(u64, u32, [u64; 4])>,
    pub strong: bool,
    pub by: Who,
    pub issued: f64,
    pub arrives: f64,
    pub queue: f64,
}
