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

/// Transfers from one rank to the other and back, in a batch, and batches in all.
const BATCH: u32 = 64;
const BATCHES: usize = 16;

/// So many batches must take about as long as the fastest. Of some others rank 1 was late for the first, or a rank was interrupted.
const MOST_ALIKE: usize = 12;

/// About as long.
const ALIKE: f64 = 1.25;

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

/// As rank 0. `None` if rank 1 did not answer in time, or other work had the cores, so that the answers say nothing.
pub(super) fn lead(lines: &Lines<'_>) -> Option<Costs> {
    // Not waited for: a fork may have it locked for ever.
    let costs = MEMORY.try_lock().ok().and_then(|mut memory| {
        if memory.costs.is_none() && memory.attempts < ATTEMPTS {
            memory.attempts += 1;
            memory.costs = undisturbed(time(lines, Instant::now())).map(|line_ns| Costs { line_ns });
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

/// What a transfer took in each batch, in nanoseconds: of all of them, or of those before the limit.
fn time(lines: &Lines<'_>, start: Instant) -> Vec<f64> {
    let (mut number, mut batches) = (0, Vec::with_capacity(BATCHES));
    for _ in 0..BATCHES {
        let batch = Instant::now();
        for _ in 0..BATCH {
            number += 1;
            lines.first.store(number, Ordering::Release);
            while lines.second.load(Ordering::Acquire) != number {
                if start.elapsed() >= LIMIT {
                    return batches;
                }
            }
        }
        batches.push(batch.elapsed().as_nanos() as f64 / f64::from(2 * BATCH));
    }
    batches
}

/// What a transfer takes, by the fastest batch; `None` if too few took about as long.
fn undisturbed(mut batches: Vec<f64>) -> Option<f64> {
    batches.sort_by(f64::total_cmp);
    let (fastest, last) = (*batches.first()?, *batches.get(MOST_ALIKE - 1)?);
    (batches.len() == BATCHES && last <= ALIKE * fastest && fastest < MOST_LINE_NS).then_some(fastest)
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
            let measured = time(&lines(), start);
            first.store(DONE, Ordering::Release);
            measured
        });
        // On a machine that is busy with other things there may be no answer, but no long wait either.
        assert!(measured.iter().all(|&ns| ns > 0.5), "{measured:?}");
        assert!(start.elapsed() < 100 * LIMIT);
    }

    #[test]
    fn a_rank_that_does_not_come_is_not_waited_for() {
        let (first, second) = (AtomicU64::new(0), AtomicU64::new(0));
        let lines = Lines { first: &first, second: &second };
        let start = Instant::now();
        assert_eq!(undisturbed(time(&lines, start)), None);
        first.store(0, Ordering::Relaxed);
        follow(&lines);
        assert!(start.elapsed() >= 2 * LIMIT && start.elapsed() < 200 * LIMIT);
    }

    /// Recorded on a virtual machine with 2 cores of an Intel Xeon that other work kept busy now and then: in quiet moments, with rank 1
    /// late for the first batch in two of them.
    #[rustfmt::skip]
    const QUIET: [[f64; BATCHES]; 3] = [
        [132.0, 126.0, 122.0, 119.0, 120.0, 123.0, 126.0, 122.0, 123.0, 127.0, 124.0, 129.0, 127.0, 130.0, 168.0, 130.0],
        [654.0, 193.0, 193.0, 189.0, 193.0, 233.0, 201.0, 194.0, 202.0, 196.0, 196.0, 185.0, 191.0, 193.0, 190.0, 193.0],
        [30793.0, 125.0, 125.0, 123.0, 124.0, 123.0, 125.0, 124.0, 119.0, 125.0, 124.0, 123.0, 124.0, 162.0, 124.0, 125.0],
    ];

    /// As above, while other work had a core, or both.
    #[rustfmt::skip]
    const DISTURBED: [&[f64]; 4] = [
        &[21275.0, 138.0, 133.0, 168.0, 133.0, 315.0, 164.0, 135.0, 321.0, 154.0, 134.0, 132.0, 157.0, 326.0, 145.0, 128.0],
        &[211.0, 128.0, 149.0, 124.0, 281.0, 114.0, 126.0, 128.0, 128.0, 131.0, 125.0, 365.0, 119.0, 159.0, 124.0, 128.0],
        // The limit came first.
        &[28061.0, 152.0, 156.0, 153.0, 150.0, 158.0, 153.0, 149.0],
        &[],
    ];

    #[test]
    fn an_undisturbed_measurement_is_used() {
        let used = QUIET.map(|batches| undisturbed(batches.to_vec()));
        assert_eq!(used, [Some(119.0), Some(185.0), Some(119.0)]);
    }

    #[test]
    fn a_disturbed_measurement_is_not() {
        for batches in DISTURBED {
            assert_eq!(undisturbed(batches.to_vec()), None, "{batches:?}");
        }
        // Ranks that share a core take turns on it: all batches are alike.
        assert_eq!(undisturbed(vec![5000.0; BATCHES]), None);
    }
}
