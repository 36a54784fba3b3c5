//! What a line's transfer costs here, measured by the first two ranks of a world before its first call.
//!
//! Rank 0 leads: it stores a number to a line, on which rank 1 answers on another, and says when it is done. Either gives up after
//! [`LIMIT`], so that a rank that does not run costs the others no more. What was measured is rank 0's to tell all.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::plan::Costs;

/// The longest that either rank takes.
const LIMIT: Duration = Duration::from_millis(10);

/// Transfers from one rank to the other and back, in a batch and in all.
const BATCH: u32 = 64;
const BATCHES: u32 = 16;

/// A transfer that takes as long was interrupted: the ranks share a core, or other work has theirs.
const MOST_LINE_NS: f64 = 2000.0;

/// On the line of rank 0: there is nothing more to come. No number of a batch.
pub(super) const DONE: u64 = u64::MAX;

/// Where the two ranks meet: a line each, in memory that both map, which is 0 at first.
pub(super) struct Lines<'a> {
    pub first: &'a AtomicU64,
    pub second: &'a AtomicU64,
}

/// How often a process tries, where nothing comes of it.
const ATTEMPTS: u32 = 3;

/// Of this process: cores do not change while it runs, and who makes many communicators is not to wait for each.
#[derive(Clone, Copy)]
struct Memory {
    costs: Option<Costs>,
    attempts: u32,
}

static MEMORY: Mutex<Memory> = Mutex::new(Memory { costs: None, attempts: 0 });

/// As rank 0. `None` if rank 1 did not answer in time, or so late that the answer says nothing.
pub(super) fn lead(lines: &Lines<'_>) -> Option<Costs> {
    // Not waited for: a fork may have it locked for ever.
    let costs = MEMORY.try_lock().ok().and_then(|mut memory| {
        if memory.costs.is_none() && memory.attempts < ATTEMPTS {
            memory.attempts += 1;
            let line_ns = line_ns(lines, Instant::now()).filter(|line_ns| *line_ns < MOST_LINE_NS);
            memory.costs = line_ns.map(|line_ns| Costs { line_ns });
        }
        memory.costs
    });
    lines.first.store(DONE, Ordering::Release);
    costs
}

/// As rank 1.
pub(super) fn follow(lines: &Lines<'_>) {
    let start = Instant::now();
    let mut answered = 0;
    loop {
        // Acquire and release on both sides, as the kernels' flags have them: their cost is asked for. Nothing else is ordered.
        match lines.first.load(Ordering::Acquire) {
            DONE => return,
            number if number != answered => {
                answered = number;
                lines.second.store(number, Ordering::Release);
            }
            _ if start.elapsed() >= LIMIT => return,
            _ => {}
        }
    }
}

/// Of the fastest batch: others were interrupted, or waited for rank 1 to come.
fn line_ns(lines: &Lines<'_>, start: Instant) -> Option<f64> {
    let mut number = 0;
    let mut best = None;
    for _ in 0..BATCHES {
        let batch = Instant::now();
        for _ in 0..BATCH {
            number += 1;
            lines.first.store(number, Ordering::Release);
            while lines.second.load(Ordering::Acquire) != number {
                if start.elapsed() >= LIMIT {
                    return best;
                }
            }
        }
        let ns = batch.elapsed().as_nanos() as f64 / f64::from(2 * BATCH);
        best = Some(best.map_or(ns, |best: f64| best.min(ns)));
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_threads_measure_what_is_plausible() {
        let (first, second) = (AtomicU64::new(0), AtomicU64::new(0));
        let lines = || Lines { first: &first, second: &second };
        let start = Instant::now();
        let measured = std::thread::scope(|scope| {
            scope.spawn(|| follow(&lines()));
            line_ns(&lines(), start).inspect(|_| first.store(DONE, Ordering::Release))
        });
        // On a machine that is busy with other things there may be no answer, but no long wait either.
        assert!(measured.is_none_or(|ns| ns > 0.5), "{measured:?}");
        assert!(start.elapsed() < 100 * LIMIT);
    }

    #[test]
    fn a_rank_that_does_not_come_is_not_waited_for() {
        let (first, second) = (AtomicU64::new(0), AtomicU64::new(0));
        let lines = Lines { first: &first, second: &second };
        let start = Instant::now();
        assert_eq!(line_ns(&lines, start), None);
        first.store(0, Ordering::Relaxed);
        follow(&lines);
        assert!(start.elapsed() >= 2 * LIMIT && start.elapsed() < 200 * LIMIT);
    }
}
