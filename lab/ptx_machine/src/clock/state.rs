//! State of blocks, warps and threads between two events.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};

use super::calendar::{Pipe, Slots};
use super::constants::Machine;
use super::fabric::Who;
use super::path::{After, Cause, Log};
use super::recorder::Note;
use super::Counts;
use crate::launch::block::Block;

/// A time that can be ordered.
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
    /// It can run.
    Run,
    /// It can run once its warp has replayed its notes.
    Again,
    /// Stopped before a look at this address.
    Look(u64),
    /// Arrived at a barrier or warp instruction; the warp's replay has not reached it.
    Meet,
    /// Arrived there in simulated time too, and waits for others.
    Waits,
    /// Waits for the end of the previous launch.
    Depends,
    Ended,
}

pub(crate) struct Lane {
    pub notes: VecDeque<Note>,
    /// Number of notes that begin a block.
    pub blocks: u32,
    /// Start of its next region, within a block that has begun.
    pub at: Option<u32>,
    /// Instruction of its last block before which it has stopped.
    pub reached: u32,
    pub stop: Stop,
}

impl Lane {
    fn new() -> Self {
        Self { notes: VecDeque::new(), blocks: 0, at: None, reached: 0, stop: Stop::Run }
    }

    /// Returns whether it may run now.
    pub fn may_run(&self) -> bool {
        self.stop == Stop::Run || (self.stop == Stop::Again && self.front().is_none())
    }

    /// Returns the start of the next region to replay.
    pub fn front(&self) -> Option<u32> {
        if matches!(self.stop, Stop::Waits | Stop::Depends) {
            return None;
        }
        self.at.or(match self.notes.front() {
            Some(&Note::Block(first)) => Some(first),
            _ => None,
        })
    }

    /// Returns whether it has run the whole region that ends at `last`.
    pub fn is_through(&self, last: u32) -> bool {
        self.blocks > u32::from(self.at.is_none()) || last <= self.reached
    }
}

/// Content of a register: when it is available, and which event it depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Value {
    pub ready: f64,
    pub cause: Cause,
    pub queue: f64,
    /// When the look was issued, if it is the result of one.
    pub looked: Option<f64>,
}

impl Value {
    pub const NONE: Self = Self { ready: 0.0, cause: Cause::Arithmetic, queue: 0.0, looked: None };
}

pub(crate) struct Warp {
    pub now: f64,
    pub lanes: Vec<Lane>,
    pub values: Vec<Value>,
    /// Accesses after an acquire wait until this time.
    pub ordered: f64,
    /// Time of the look that its threads have stopped before.
    pub look: Option<f64>,
    /// For each address: arrival time of the store that the last look has seen.
    pub looked: HashMap<u64, f64>,
    /// Events that its looks waited for, each with the look's time of issue.
    pub waited: Vec<(f64, After)>,
    pub log: Log,
    pub counts: Counts,
    pub ended: bool,
    /// Instruction at which it waits for the previous launch.
    pub depends: u32,
    /// Time of its next event; events at other times are obsolete.
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
    /// Returns the last event that looks issued at `looked` or later waited for.
    pub fn last_waited(&mut self, looked: f64) -> Option<After> {
        let waited = self.waited.drain(..).filter(|&(at, _)| at >= looked).map(|(_, after)| after);
        waited.max_by(|a, b| a.arrived.total_cmp(&b.arrived))
    }
}

/// State of a multiprocessor.
pub(crate) struct Sm {
    pub slots: [Slots; 4],
    pub store: Pipe,
    pub remote: Pipe,
    pub load: Pipe,
    /// Sectors in its first-level cache, with the time when they are available.
    pub l1: HashMap<u64, f64>,
    /// Lines of parameters in its constant cache.
    pub lines: HashSet<u64>,
    /// Pending loads: time of completion, and bytes.
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

    /// Returns when there is room for a load that would begin at `at`.
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

/// Threads that have arrived at a barrier.
#[derive(Clone, Copy)]
pub(crate) struct Meeting {
    pub last: f64,
    pub by: usize,
}

/// The barrier of a cluster.
#[derive(Default)]
pub(crate) struct ClusterMeeting {
    /// Indices of the cluster's blocks.
    pub blocks: Vec<usize>,
    /// When the last thread has arrived, and its warp.
    pub last: f64,
    pub by: Who,
    /// When threads that have waited for the last complete phase go on, and what they have waited for.
    pub over: f64,
    pub after: Option<After>,
}

pub(crate) struct SimBlock {
    pub block: Block,
    pub rank: usize,
    pub turn: usize,
    /// Index among its rank's multiprocessors.
    pub sm: usize,
    pub warps: Vec<Warp>,
    pub meetings: [Option<Meeting>; 16],
    /// Whether each thread's end has been told to the cluster.
    pub gone: Vec<bool>,
    /// When the last of its stores is acknowledged.
    pub acks: f64,
    /// Its stores to its own GPU that have not arrived. Threads of the block already see them.
    pub pending: Vec<usize>,
    pub left: usize,
    /// Whether it has allowed the next launch to begin.
    pub told: bool,
    pub end: f64,
    pub last: usize,
}

/// A warp's store to one device.
pub(crate) struct Store {
    pub parts: Vec<(u64, u32, [u64; 4])>,
    pub strong: bool,
    pub by: Who,
    pub issued: f64,
    pub arrives: f64,
    pub queue: f64,
}
