//! Sets of cores: those that a thread may use, the quota on them, and which threads may have to share theirs.
//!
//! A core is a logical CPU, the unit that the operating system schedules on. A launcher may have given each rank
//! separate cores.

use std::collections::BTreeMap;

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
        Ok(available) if available.get() < listed(&of_this_thread()).len() => available.get(),
        _ => usize::MAX,
    }
}

/// Returns, for each thread's set of cores, whether the thread may have to share its core: whether an assignment that
/// gives a separate core to as many threads as possible may leave this thread without one.
///
/// These are the threads that outnumber all cores that any of them may use, and no others: a maximum matching, and what
/// alternating paths reach from the threads that it leaves (Dulmage and Mendelsohn, "Coverings of bipartite graphs",
/// 1958).
pub(super) fn shared(threads: &[&[usize]]) -> Vec<bool> {
    let mut holders = BTreeMap::new();
    let mut shares = vec![false; threads.len()];
    for thread in 0..threads.len() {
        if thread > 0 && shares[thread - 1] && threads[thread - 1] == threads[thread] {
            shares[thread] = true;
        } else if let Err(rivals) = give_core(thread, threads, &mut holders) {
            rivals.into_iter().for_each(|rival| shares[rival] = true);
        }
    }
    shares
}

/// Gives a thread a core, and moves other holders to other cores where that is necessary. If no core is left, returns
/// this thread and those that hold the cores which any of them may use. Nothing changes their cores later. `holders`
/// has, by core, the thread that it was given to.
fn give_core(
    thread: usize,
    threads: &[&[usize]],
    holders: &mut BTreeMap<usize, usize>,
) -> Result<(), Vec<usize>> {
    // By core: the thread that takes it if its holder takes another one.
    let mut takers = BTreeMap::new();
    let mut rivals = vec![thread];
    for next in 0.. {
        let Some(&taker) = rivals.get(next) else { break };
        for &core in threads[taker] {
            if takers.contains_key(&core) {
                continue;
            }
            takers.insert(core, taker);
            let Some(&holder) = holders.get(&core) else {
                let mut left = Some(core);
                while let Some((core, taker)) = left.and_then(|core| Some((core, *takers.get(&core)?))) {
                    left = holders.iter().find(|&(_, holder)| *holder == taker).map(|(&core, _)| core);
                    holders.insert(core, taker);
                }
                return Ok(());
            };
            rivals.push(holder);
        }
    }
    Err(rivals)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_listed() {
        assert_eq!(listed(&[0b101, 0x80]), [0, 2, 15]);
        assert_eq!(listed(&[]), []);
    }

    /// Returns which threads share their core, one character each.
    fn sharing(threads: &[&[usize]]) -> String {
        shared(threads).into_iter().map(|shares| if shares { 's' } else { '.' }).collect()
    }

    #[test]
    fn threads_that_outnumber_their_cores_share_them() {
        assert_eq!(sharing(&[&[0, 1], &[0, 1]]), "..");
        assert_eq!(sharing(&[&[0, 1], &[0, 1], &[0, 1]]), "sss");
        assert_eq!(sharing(&[&[3], &[5], &[3]]), "s.s");
        // Two on core 0, and others that can avoid it, together or alone.
        assert_eq!(sharing(&[&[0], &[0], &[0, 1, 2], &[0, 1, 2]]), "ss..");
        assert_eq!(sharing(&[&[0, 1], &[0], &[0]]), ".ss");
        assert_eq!(sharing(&[&[0, 1], &[0], &[0], &[1]]), "ssss");
        // The first threads have taken cores that the later ones need.
        assert_eq!(sharing(&[&[0, 1, 2], &[0, 1], &[0]]), "...");
        assert_eq!(sharing(&[&[0, 1, 2, 3], &[0, 1, 2], &[0, 1], &[1]]), "....");
        // A thread whose cores the system does not say counts as one that shares.
        assert_eq!(sharing(&[&[], &[0]]), "s.");
        assert_eq!(sharing(&[]), "");
    }

    #[test]
    fn threads_share_if_some_assignment_leaves_them_without_a_core() {
        /// Returns how many of these threads can have a separate core.
        fn most(threads: &[&[usize]], taken: u32) -> usize {
            let Some((first, rest)) = threads.split_first() else { return 0 };
            let free = first.iter().filter(|&&core| taken & 1 << core == 0);
            free.map(|core| 1 + most(rest, taken | 1 << core)).max().unwrap_or(0).max(most(rest, taken))
        }
        let mut state = 37u64;
        for round in 0..300 {
            let masks: Vec<_> = (0..5)
                .map(|_| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    listed(&[(state >> 40) as u8 & (state >> 50) as u8 & 0x1F])
                })
                .collect();
            let threads: Vec<_> = masks.iter().map(Vec::as_slice).collect();
            let expected: Vec<_> = (0..threads.len())
                .map(|thread| {
                    let others = [&threads[..thread], &threads[thread + 1..]].concat();
                    most(&others, 0) == most(&threads, 0)
                })
                .collect();
            assert_eq!(shared(&threads), expected, "round {round}: {masks:?}");
        }
    }

    #[test]
    fn this_thread_has_its_cores() {
        let cores = std::thread::available_parallelism().unwrap().get();
        // A container's quota may be less.
        assert!(listed(&of_this_thread()).len() >= cores);
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
