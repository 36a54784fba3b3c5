//! The cores that the ranks of a world have between them: a launcher may have given each its own.

use nix::sched::{sched_getaffinity, CpuSet};
use nix::unistd::Pid;

/// The cores that this process may run on, a bit for each. Empty where the system does not say.
pub(super) fn of_this_process() -> Vec<u8> {
    let Ok(set) = sched_getaffinity(Pid::from_raw(0)) else { return Vec::new() };
    let bit = |core| u8::from(set.is_set(core).unwrap_or(false)) << (core % 8);
    (0..CpuSet::count().div_ceil(8)).map(|byte| (8 * byte..8 * byte + 8).map(bit).sum()).collect()
}

/// How many cores the system gives this process time for, where that is less than its cores: the quota of a container.
pub(super) fn quota(own: &[u8]) -> usize {
    match std::thread::available_parallelism() {
        Ok(available) if available.get() < of_all(&[own.to_vec()]) => available.get(),
        _ => usize::MAX,
    }
}

/// How many cores there are in the union of the ranks' sets; one, where nothing is known.
pub(super) fn of_all(sets: &[Vec<u8>]) -> usize {
    let longest = sets.iter().map(Vec::len).max().unwrap_or(0);
    let of = |byte: usize| sets.iter().fold(0, |union, set| union | set.get(byte).copied().unwrap_or(0));
    (0..longest).map(|byte| of(byte).count_ones() as usize).sum::<usize>().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_union_counts_each_core_once() {
        assert_eq!(of_all(&[vec![0b101], vec![0b110]]), 3);
        assert_eq!(of_all(&[vec![1], vec![0, 0x80]]), 2);
        assert_eq!(of_all(&[vec![], vec![]]), 1);
    }

    #[test]
    fn this_process_has_its_cores() {
        let cores = std::thread::available_parallelism().unwrap().get();
        // A quota of a container may be less.
        assert!(of_all(&[of_this_process()]) >= cores);
    }
}
