//! Totals of a rank's calls, by collective and algorithm, in its flight record.

use std::sync::atomic::{AtomicU64, Ordering};

/// Number of buckets of durations: powers of two from 250 ns to 8 s, and all longer ones.
pub(super) const BUCKETS: usize = 27;

/// Number of codes of collectives, and of algorithms: a code of an algorithm is moved by 1, and 0 is none.
const KINDS: usize = 32;
const ALGORITHMS: usize = 32;

/// Counts since the communicator was made; all zeros at the start. One thread at a time writes them.
#[repr(C)]
pub(super) struct Totals {
    calls: [[AtomicU64; ALGORITHMS]; KINDS],
    bytes: [AtomicU64; KINDS],
    durations: [[AtomicU64; BUCKETS]; KINDS],
    durations_ns: [AtomicU64; KINDS],
}

/// Returns the places of a call: by its first word, as in `CallId`.
fn places(what: u64) -> (usize, usize) {
    let [kind, _, algorithm, ..] = what.to_le_bytes();
    (kind as usize % KINDS, algorithm.wrapping_add(1) as usize % ALGORITHMS)
}

/// Returns the longest duration in a bucket, in ns.
pub(super) fn upper_bound(bucket: usize) -> u64 {
    250 << bucket
}

fn add(to: &AtomicU64, value: u64) {
    // Not a read-modify-write: there is one writer.
    to.store(to.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
}

impl Totals {
    /// Counts a call.
    pub fn count(&self, what: u64, bytes: u64) {
        let (kind, algorithm) = places(what);
        add(&self.calls[kind][algorithm], 1);
        add(&self.bytes[kind], bytes);
    }

    /// Counts the duration of a call of the sample.
    pub fn time(&self, what: u64, ns: u64) {
        let (kind, _) = places(what);
        let bucket = (0..BUCKETS - 1).find(|&bucket| ns <= upper_bound(bucket)).unwrap_or(BUCKETS - 1);
        add(&self.durations[kind][bucket], 1);
        add(&self.durations_ns[kind], ns);
    }

    /// Returns the numbers of calls of a collective, by the codes of their algorithms; 255 is none.
    pub fn calls(&self, kind: u8) -> impl Iterator<Item = (u8, u64)> + '_ {
        let calls = &self.calls[kind as usize % KINDS];
        (0..).zip(calls).map(|(code, calls): (u8, _)| (code.wrapping_sub(1), calls.load(Ordering::Relaxed)))
    }

    /// Returns the bytes of a collective, the numbers of its timed calls by bucket, and their time in ns.
    pub fn of(&self, kind: u8) -> (u64, [u64; BUCKETS], u64) {
        let kind = kind as usize % KINDS;
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let durations = std::array::from_fn(|bucket| load(&self.durations[kind][bucket]));
        (load(&self.bytes[kind]), durations, load(&self.durations_ns[kind]))
    }
}
