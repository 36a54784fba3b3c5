//! Detects rows whose calls are from two populations, where means and medians describe neither.

use std::collections::BTreeMap;

/// The ratio of p99 to p50 above which there are two populations. On an idle machine it is 1.2 to 3.
const APART: f64 = 4.0;

/// The number of calls below which p99 is that of a single call.
const ENOUGH: usize = 50;

/// Returns what a reader of a row must know, if anything. `calls` is the number of single calls, and `cores` are
/// the cores of each rank in each sample.
pub fn remark(calls: usize, p50_us: f64, p99_us: f64, cores: &[Vec<u16>]) -> Option<String> {
    let together = together(cores).map(|(first, second, share)| {
        format!("ranks {first} and {second} were on one core in {:.0} % of the samples", share * 100.0)
    });
    let apart = (calls >= ENOUGH && p50_us > 0.0 && p99_us > APART * p50_us)
        .then(|| format!("p99 is {:.0} x p50: not one population", p99_us / p50_us));
    let remarks: Vec<_> = together.into_iter().chain(apart).collect();
    (!remarks.is_empty()).then(|| remarks.join("; "))
}

/// Returns the two ranks that were most often on one core, and in which share of the samples.
fn together(cores: &[Vec<u16>]) -> Option<(usize, usize, f64)> {
    let samples = cores.iter().map(Vec::len).min()?;
    let mut pairs = BTreeMap::<(usize, usize), usize>::new();
    for sample in 0..samples {
        for second in 1..cores.len() {
            for first in 0..second {
                if cores[first][sample] == cores[second][sample] {
                    *pairs.entry((first, second)).or_default() += 1;
                }
            }
        }
    }
    let ((first, second), count) = pairs.into_iter().max_by_key(|(_, count)| *count)?;
    Some((first, second, count as f64 / samples as f64))
}

/// Returns the core of this thread. If the system does not report it, returns a number that no other rank uses.
pub fn core(rank: usize) -> u16 {
    let unknown = u16::MAX - rank as u16;
    nix::sched::sched_getcpu().ok().and_then(|core| u16::try_from(core).ok()).unwrap_or(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quiet_row_has_nothing_to_say() {
        assert_eq!(remark(99, 1.0, 3.9, &[vec![0; 5], vec![1; 5]]), None);
        assert_eq!(remark(99, 0.0, 1.0, &[]), None);
        assert_eq!(remark(99, 1.0, 1.0, &[vec![3; 5]]), None);
    }

    #[test]
    fn ranks_on_one_core_are_reported() {
        let cores = [vec![0, 0, 1, 1], vec![1, 1, 1, 1], vec![2, 2, 2, 1]];
        let said = remark(9, 27.0, 30.0, &cores).unwrap();
        assert_eq!(said, "ranks 0 and 1 were on one core in 50 % of the samples");
    }

    #[test]
    fn a_long_tail_is_reported() {
        assert_eq!(remark(99, 1.0, 27.0, &[]).unwrap(), "p99 is 27 x p50: not one population");
        assert_eq!(remark(9, 1.0, 27.0, &[]), None, "one call in nine");
        let both = remark(99, 1.0, 27.0, &[vec![0], vec![0]]).unwrap();
        assert!(both.contains("100 %") && both.contains("27 x"), "{both}");
    }

    #[test]
    fn this_thread_is_somewhere() {
        assert!(usize::from(core(0)) < 1 << 15);
    }
}
