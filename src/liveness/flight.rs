//! The flight record of a rank, in shared memory: its latest calls, and for some of them how long they took.
//!
//! Only its owner writes it. Others read it at any time, also while the owner hangs and after its process has ended.

use std::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};

use super::totals::Totals;
use crate::abi::{FaCall, MAX_RANKS};

/// Number of calls that a flight record keeps.
pub(super) const KEPT: usize = 256;

/// Bit of the first word of a call that was captured into a graph: the words of [`FaCall`] leave it free.
pub(super) const CAPTURED: u64 = 1 << 32;

/// Ring of the latest entries, with one writer. All zeros is an empty ring.
#[repr(C)]
pub(super) struct Ring<const WORDS: usize> {
    /// Number of entries so far. Entry `n`, from 1, is in `entries[n % KEPT]`.
    count: AtomicU64,
    entries: [[AtomicU64; WORDS]; KEPT],
}

impl<const WORDS: usize> Ring<WORDS> {
    /// Adds an entry, and returns its number. Called by one thread at a time.
    pub fn push(&self, words: [u64; WORDS]) -> u64 {
        let number = self.count().wrapping_add(1);
        self.put(number, words);
        number
    }

    /// Adds the entry with the next number.
    fn put(&self, number: u64, words: [u64; WORDS]) {
        // Release: a reader that gets a word of this entry in place of an older one also sees the count before it.
        fence(Ordering::Release);
        self.entry(number).iter().zip(words).for_each(|(entry, word)| entry.store(word, Ordering::Relaxed));
        // Release: a reader that sees the number sees the whole entry.
        self.count.store(number, Ordering::Release);
    }

    /// Returns the number of entries so far.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns the latest entry that is whole, with its number; `None` if there is none.
    pub fn latest(&self) -> Option<(u64, [u64; WORDS])> {
        /// The owner makes as many calls during one attempt before an attempt fails.
        const ATTEMPTS: usize = 3;
        (0..ATTEMPTS).find_map(|_| {
            let number = self.count();
            Some((number, self.get(number)?))
        })
    }

    /// Returns an entry, unless it is not written yet or may be overwritten. Any numbers are valid input.
    pub fn get(&self, number: u64) -> Option<[u64; WORDS]> {
        // Acquire: pairs with the store of the count after the entry.
        let written = self.count.load(Ordering::Acquire);
        if number == 0 || number > written {
            return None;
        }
        let entry = self.entry(number);
        let words = std::array::from_fn(|index| entry[index].load(Ordering::Relaxed));
        // Acquire: pairs with the fence in `push`. If one of the words is of the entry that overwrites this one, then
        // the count below is at least that of the entry before it.
        fence(Ordering::Acquire);
        (self.count().wrapping_sub(number) < KEPT as u64 - 1).then_some(words)
    }

    /// Returns the entries of a copy of the ring, in order, with their numbers. `later` is the number of entries when
    /// the copy was complete.
    pub fn copied(&self, later: u64) -> impl Iterator<Item = (u64, [u64; WORDS])> + '_ {
        // Acquire: as in `get`, for a ring that its owner still writes.
        let last = self.count.load(Ordering::Acquire);
        let later = later.max(last);
        // As in `get`: the owner may be overwriting the entry before the first of these.
        let first = later.saturating_add(2).saturating_sub(KEPT as u64).max(1);
        // Any numbers are valid input: none of the entries of the copy may be left.
        let is_valid = later - last < KEPT as u64;
        (first..=if is_valid { last } else { 0 }).map(|number| {
            (number, std::array::from_fn(|index| self.entry(number)[index].load(Ordering::Relaxed)))
        })
    }

    fn entry(&self, number: u64) -> &[AtomicU64; WORDS] {
        &self.entries[(number % KEPT as u64) as usize]
    }
}

/// Layout in shared memory; all zeros is the state before the first call.
#[repr(C, align(64))]
pub(super) struct FlightPage {
    /// Number of calls that have ended.
    ended: AtomicU64,
    /// The calls that have begun: the words of [`FaCall`].
    pub calls: Ring<3>,
    /// Calls whose times are known: the words of [`Times`].
    pub times: Ring<5>,
    /// The rank that the latest call waits for, a bit; 0 if it has not waited for long.
    waiting: AtomicU32,
    /// Number of calls that had begun when the watching thread last looked, and the time at which it first saw that
    /// number, in ns of CLOCK_MONOTONIC.
    seen: AtomicU64,
    seen_at: AtomicU64,
    /// By rank: number of waits that outlasted the first polls, and ns spent in them.
    waits: [AtomicU64; MAX_RANKS],
    waited: [AtomicU64; MAX_RANKS],
    pub totals: Totals,
}

/// What a rank was doing.
#[derive(Debug, Clone, Copy)]
pub(super) struct Activity {
    pub begun: u64,
    pub ended: u64,
    /// The latest call was captured into a graph, and was not executed.
    pub captured: bool,
    pub call: FaCall,
    /// Mask of the rank that the call waits for, as the watching thread last saw it.
    pub waiting: u32,
}

/// Times of a call, in ns of CLOCK_MONOTONIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Times {
    pub number: u64,
    /// 0 if it is not known: the call was timed only because it waited.
    pub begin: u64,
    pub end: u64,
    /// Time in waits for `rank`, for which the call waited longest.
    pub waited: u64,
    pub rank: u64,
}

/// Waits of a rank for each other rank, so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Waits {
    /// Mask of the rank that the call waits for.
    pub waiting: u32,
    /// Number of waits that outlasted the first polls.
    pub counts: [u64; MAX_RANKS],
    /// Time in them, in ns; 0 on GPUs.
    pub ns: [u64; MAX_RANKS],
}

impl FlightPage {
    /// Records the start of a call and returns its number, from 1. A rank makes one call at a time.
    pub fn begin(&self, FaCall { what, count, digest }: FaCall) -> u64 {
        self.calls.push([what, count, digest])
    }

    /// Records that the latest call has ended, and returns its number.
    pub fn end(&self) -> u64 {
        let number = self.calls.count();
        self.ended.store(number, Ordering::Relaxed);
        number
    }

    /// Records that the latest call was captured into a graph.
    pub fn capture(&self) {
        let what = &self.calls.entry(self.calls.count())[0];
        what.store(what.load(Ordering::Relaxed) | CAPTURED, Ordering::Relaxed);
    }

    /// Records the times of a call.
    pub fn set_times(&self, Times { number, begin, end, waited, rank }: Times) {
        self.times.push([number, begin, end, waited, rank]);
    }

    /// Records the waits so far. Two threads may do so at the same time.
    pub fn set_waits(&self, waits: &Waits) {
        self.waiting.store(waits.waiting, Ordering::Relaxed);
        let each = |to: &[AtomicU64; MAX_RANKS], from: &[u64; MAX_RANKS]| {
            to.iter().zip(from).for_each(|(to, &from)| {
                to.fetch_max(from, Ordering::Relaxed);
            });
        };
        each(&self.waits, &waits.counts);
        each(&self.waited, &waits.ns);
    }

    /// Records when the latest call was seen, for its age.
    pub fn look(&self, now: u64) {
        let begun = self.calls.count();
        if self.seen.swap(begun, Ordering::Relaxed) != begun || self.seen_at.load(Ordering::Relaxed) == 0 {
            self.seen_at.store(now, Ordering::Relaxed);
        }
    }

    /// Returns the number of calls that have begun.
    pub fn begun(&self) -> u64 {
        self.calls.count()
    }

    /// Returns the waits so far, and when the watching thread first saw the latest call.
    pub fn waits(&self) -> (Waits, Option<u64>) {
        let all =
            |from: &[AtomicU64; MAX_RANKS]| std::array::from_fn(|rank| from[rank].load(Ordering::Relaxed));
        let waiting = self.waiting.load(Ordering::Relaxed);
        let is_seen = self.seen.load(Ordering::Relaxed) == self.begun();
        let seen_at = Some(self.seen_at.load(Ordering::Relaxed)).filter(|&at| is_seen && at != 0);
        (Waits { waiting, counts: all(&self.waits), ns: all(&self.waited) }, seen_at)
    }

    /// Returns what the rank is doing.
    pub fn activity(&self) -> Activity {
        let (begun, [what, count, digest]) = self.calls.latest().unwrap_or_default();
        let ended = self.ended.load(Ordering::Relaxed);
        let waiting = if ended < begun { self.waiting.load(Ordering::Relaxed) } else { 0 };
        let call = FaCall { what: what & !CAPTURED, count, digest };
        Activity { begun, ended, captured: what & CAPTURED != 0, call, waiting }
    }
}

impl Times {
    /// Reads the words of an entry.
    pub fn of([number, begin, end, waited, rank]: [u64; 5]) -> Self {
        Self { number, begin, end, waited, rank }
    }
}
