//! Sets of cores: those that a process may use, and the union over the ranks.
//!
//! A core is a logical CPU, the unit that the operating system schedules on. A launcher may have given each rank
//! separate cores.

use nix::errno::Errno;
use nix::sched::{sched_getaffinity, sched_setaffinity, CpuSet};
use nix::unistd::Pid;

/// Returns the cores that this thread may run on, one bit each; empty if the system does not say.
pub(super) fn of_this_thread() -> Vec<u8> {
    let Ok(set) = sched_getaffinity(Pid::from_raw(0)) else { return Vec::new() };
    let bit = |core| u8::from(set.is_set(core).unwrap_or(false)) << (core % 8);
    (0..CpuSet::count().div_ceil(8)).map(|byte| (8 * byte..8 * byte + 8).map(bit).sum()).collect()
}

/// Binds this thread, and threads that it starts later, to these cores.
pub(super) fn bind_this_thread(cores: &[usize]) -> nix::Result<()> {
    sched_setaffinity(Pid::from_raw(0), &cpu_set(cores)?)
}

/// Converts a list of cores to the system's type.
pub(super) fn cpu_set(cores: &[usize]) -> nix::Result<CpuSet> {
    if cores.is_empty() {
        return Err(Errno::EINVAL);
    }
    let mut set = CpuSet::new();
    cores.iter().try_for_each(|&core| set.set(core))?;
    Ok(set)
}

/// Returns the cores of a bit set.
pub(super) fn listed(bits: &[u8]) -> Vec<usize> {
    (0..8 * bits.len()).filter(|core| bits[core / 8] >> (core % 8) & 1 == 1).collect()
}

/// Returns the number of cores that a container's CPU quota allows, if that is less than the number of this thread's
/// cores.
pub(super) fn quota() -> usize {
    match std::thread::available_parallelism() {
        Ok(available) if available.get() < of_all(&[of_this_thread()]) => available.get(),
        _ => usize::MAX,
    }
}

/// Returns the number of cores in the union of the ranks' sets; 1 if none is known.
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
        assert_eq!(listed(&[0b101, 0x80]), [0, 2, 15]);
    }

    #[test]
    fn this_thread_has_its_cores() {
        let cores = std::thread::available_parallelism().unwrap().get();
        // A container's quota may be less.
        assert!(of_all(&[of_this_thread()]) >= cores);
    }

    #[test]
    fn a_thread_is_bound_to_its_cores() {
        let all = listed(&of_this_thread());
        let last = *all.last().unwrap();
        std::thread::scope(|scope| {
            let bound = scope.spawn(|| {
                bind_this_thread(&[last]).unwrap();
                let child = std::thread::spawn(|| listed(&of_this_thread()));
                (listed(&of_this_thread()), child.join().unwrap())
            });
            assert_eq!(bound.join().unwrap(), (vec![last], vec![last]), "a thread and its child");
        });
        assert_eq!(listed(&of_this_thread()), all, "no other thread is");
        assert_eq!(bind_this_thread(&[]), Err(Errno::EINVAL));
        assert_eq!(bind_this_thread(&[CpuSet::count()]), Err(Errno::EINVAL));
    }
}
