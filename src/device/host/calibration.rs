//! Cost of transferring a cache line on this machine, measured by ranks 0 and 1 before the first call.
//!
//! Rank 0 leads. It stores a number to one line, rank 1 answers on another line, and rank 0 ends the measurement.
//! Each gives up after [`LIMIT`], so a rank that does not run costs the others no more than that. Rank 0 sends the
//! result to all ranks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::plan::Costs;

/// Time limit of each rank.
const LIMIT: Duration = Duration::from_millis(10);

/// Round trips in a batch.
const BATCH: u32 = 64;
/// Number of batches.
const BATCHES: usize = 16;

/// Number of batches that must take about as long as the fastest. In the others, rank 1 may have been late, or a rank
/// interrupted.
const MIN_SIMILAR_BATCHES: usize = 12;

/// Largest ratio to the fastest batch that counts as about as long.
const MAX_SIMILAR_RATIO: f64 = 1.25;

/// A transfer this long was interrupted: the ranks share a core, or other work uses their cores.
const MAX_LINE_NS: f64 = 2000.0;

/// Value on rank 0's line that ends the measurement. No round trip has this number.
pub(super) const DONE: u64 = u64::MAX;

/// One cache line for each of the two ranks, in memory that both map, initially 0.
pub(super) struct Lines<'a> {
    pub first: &'a AtomicU64,
    pub second: &'a AtomicU64,
}

/// Number of attempts of a process while measurements fail.
const ATTEMPTS: u32 = 3;

/// Result for this process. Cores do not change while it runs, and programs with many communicators should not wait
/// for a measurement in each.
#[derive(Clone, Copy)]
struct Cached {
    costs: Option<Costs>,
    attempts: u32,
}

static CACHED: Mutex<Cached> = Mutex::new(Cached { costs: None, attempts: 0 });

/// Measures as rank 0. Returns `None` if rank 1 did not answer in time, or other work used the cores, which makes the
/// times meaningless.
pub(super) fn lead(lines: &Lines<'_>) -> Option<Costs> {
    // Not waited for: in a forked child it may be locked forever.
    let costs = CACHED.try_lock().ok().and_then(|mut cached| {
        if cached.costs.is_none() && cached.attempts < ATTEMPTS {
            cached.attempts += 1;
            cached.costs = undisturbed(time(lines, Instant::now())).map(|line_ns| Costs { line_ns });
        }
        cached.costs
    });
    lines.first.store(DONE, Ordering::Release);
    costs
}

/// Answers as rank 1.
pub(super) fn follow(lines: &Lines<'_>) {
    let start = Instant::now();
    let mut answered = 0;
    loop {
        // Acquire and release on both sides, as for the kernels' flags, because their cost is measured. They order
        // nothing else.
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

/// Returns the time of one transfer in each batch, in nanoseconds; fewer batches if the limit was reached.
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

/// Returns the time of one transfer in the fastest batch; `None` if too few batches took about as long.
fn undisturbed(mut batches: Vec<f64>) -> Option<f64> {
    batches.sort_by(f64::total_cmp);
    let (fastest, last) = (*batches.first()?, *batches.get(MIN_SIMILAR_BATCHES - 1)?);
    (batches.len() == BATCHES && last <= MAX_SIMILAR_RATIO * fastest && fastest < MAX_LINE_NS)
        .then_some(fastest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_threads_measure_plausible_times() {
        let (first, second) = (AtomicU64::new(0), AtomicU64::new(0));
        let lines = || Lines { first: &first, second: &second };
        let start = Instant::now();
        let measured = std::thread::scope(|scope| {
            scope.spawn(|| follow(&lines()));
            let measured = time(&lines(), start);
            first.store(DONE, Ordering::Release);
            measured
        });
        // On a busy machine there may be no answer, but no long wait either.
        assert!(measured.iter().all(|&ns| ns > 0.5), "{measured:?}");
        assert!(start.elapsed() < 100 * LIMIT);
    }

    #[test]
    fn the_wait_for_an_absent_rank_is_bounded() {
        let (first, second) = (AtomicU64::new(0), AtomicU64::new(0));
        let lines = Lines { first: &first, second: &second };
        let start = Instant::now();
        assert_eq!(undisturbed(time(&lines, start)), None);
        first.store(0, Ordering::Relaxed);
        follow(&lines);
        assert!(start.elapsed() >= 2 * LIMIT && start.elapsed() < 200 * LIMIT);
    }

    /// Recorded on a virtual machine with 2 cores of an Intel Xeon that other work sometimes kept busy: in quiet
    /// moments; in two of them, rank 1 was late for the first batch.
    #[rustfmt::skip]
    const QUIET: [[f64; BATCHES]; 3] = [
        [132.0, 126.0, 122.0, 119.0, 120.0, 123.0, 126.0, 122.0,
         123.0, 127.0, 124.0, 129.0, 127.0, 130.0, 168.0, 130.0],
        [654.0, 193.0, 193.0, 189.0, 193.0, 233.0, 201.0, 194.0,
         202.0, 196.0, 196.0, 185.0, 191.0, 193.0, 190.0, 193.0],
        [30793.0, 125.0, 125.0, 123.0, 124.0, 123.0, 125.0, 124.0,
         119.0, 125.0, 124.0, 123.0, 124.0, 162.0, 124.0, 125.0],
    ];

    /// Recorded while other work used one or both cores.
    #[rustfmt::skip]
    const DISTURBED: [&[f64]; 4] = [
        &[21275.0, 138.0, 133.0, 168.0, 133.0, 315.0, 164.0, 135.0,
          321.0, 154.0, 134.0, 132.0, 157.0, 326.0, 145.0, 128.0],
        &[211.0, 128.0, 149.0, 124.0, 281.0, 114.0, 126.0, 128.0,
          128.0, 131.0, 125.0, 365.0, 119.0, 159.0, 124.0, 128.0],
        // The time limit was reached.
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
        // Ranks that share a core alternate on it, so all batches are alike.
        assert_eq!(undisturbed(vec![5000.0; BATCHES]), None);
    }
}
