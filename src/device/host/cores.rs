//! Sets of cores: those that a process may use, the union over the ranks, and how the machine groups them.
//!
//! A core is a logical CPU, the unit that the operating system schedules on. A launcher may have given each rank
//! separate cores.

use std::collections::BTreeMap;
use std::path::Path;

use nix::errno::Errno;
use nix::sched::{sched_getaffinity, sched_setaffinity, CpuSet};
use nix::unistd::Pid;

/// Upper limit on core numbers, more than any machine has, so that a malformed list stays short.
const MAX_CORES: usize = 1 << 16;

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

/// How the machine groups its cores, according to sysfs files below `root`. Cores without information are one group.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// By core: the NUMA node.
    nodes: BTreeMap<usize, usize>,
    /// By core: all hardware threads of its physical core, ascending.
    siblings: BTreeMap<usize, Vec<usize>>,
    /// By core: the first core that shares its third-level cache.
    caches: BTreeMap<usize, usize>,
}

impl Groups {
    /// Reads the groups of these cores.
    pub fn read(root: &Path, cores: &[usize]) -> Self {
        let list = |path: String| {
            let text = std::fs::read_to_string(root.join(path)).unwrap_or_default();
            parse(text.trim()).unwrap_or_default()
        };
        let mut groups = Self::default();
        for node in list("devices/system/node/online".into()) {
            let members = list(format!("devices/system/node/node{node}/cpulist"));
            groups.nodes.extend(members.into_iter().map(|core| (core, node)));
        }
        for &core in cores {
            let of = format!("devices/system/cpu/cpu{core}");
            groups.siblings.insert(core, list(format!("{of}/topology/thread_siblings_list")));
            let sharers = list(format!("{of}/cache/index3/shared_cpu_list"));
            groups.caches.insert(core, sharers.first().copied().unwrap_or(0));
        }
        groups
    }

    /// Returns the NUMA node of a core.
    pub fn node(&self, core: usize) -> usize {
        self.nodes.get(&core).copied().unwrap_or(0)
    }

    /// Sorts these cores in the order in which threads take them: one of each physical core before any second
    /// hardware thread, with cores that are close to each other together.
    pub fn in_order(&self, cores: &[usize]) -> Vec<usize> {
        let mut ordered = cores.to_vec();
        ordered.sort_by_key(|&core| {
            let siblings = self.siblings.get(&core).map_or(&[][..], Vec::as_slice);
            // Only usable cores count: a second hardware thread alone is as good as a first.
            let index = siblings.iter().filter(|&&other| other < core && cores.contains(&other)).count();
            let cache = self.caches.get(&core).copied().unwrap_or(0);
            (index, self.node(core), cache, siblings.first().copied().unwrap_or(core), core)
        });
        ordered
    }
}

/// Parses a list of cores in the system's format, such as `"0-3,8"`, and sorts it. Returns `None` if it is malformed.
pub(super) fn parse(text: &str) -> Option<Vec<usize>> {
    let mut cores = Vec::new();
    for range in text.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= MAX_CORES || cores.len() > MAX_CORES {
            return None;
        }
        cores.extend(first..=last);
    }
    cores.sort_unstable();
    cores.dedup();
    Some(cores)
}

/// Formats a list of cores in the system's format, such as `"0-3,8"`.
pub(super) fn formatted(cores: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &core in cores {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == core => *last = core,
            _ => ranges.push((core, core)),
        }
    }
    let range = |&(first, last): &(usize, usize)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    ranges.iter().map(range).collect::<Vec<_>>().join(",")
}

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_core_list, |bytes| parse(&String::from_utf8_lossy(bytes)));

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::temporary::Folder;

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
        assert_eq!(bind_this_thread(&[MAX_CORES]), Err(Errno::EINVAL));
    }

    /// Two packages of two physical cores with two hardware threads each: cores 0 to 3 are the first threads, 4 to 7
    /// the second.
    fn two_packages() -> Groups {
        let folder = Folder::new();
        let write = |path: String, text: String| {
            folder.write(format!("devices/system/{path}"), text + "\n");
        };
        let of_node = |node: usize| format!("{},{},{},{}", node, node + 2, node + 4, node + 6);
        write("node/online".into(), "0-1".into());
        (0..2).for_each(|node| write(format!("node/node{node}/cpulist"), of_node(node)));
        for core in 0..8 {
            let first = core % 4;
            write(format!("cpu/cpu{core}/topology/thread_siblings_list"), format!("{first},{}", first + 4));
            write(format!("cpu/cpu{core}/cache/index3/shared_cpu_list"), of_node(core % 2));
        }
        Groups::read(folder.path(), &(0..8).collect::<Vec<_>>())
    }

    #[test]
    fn physical_cores_come_first_and_neighbours_together() {
        let groups = two_packages();
        assert_eq!(groups.in_order(&[0, 1, 2, 3, 4, 5, 6, 7]), [0, 2, 1, 3, 4, 6, 5, 7]);
        // The first thread of physical core 1 is not usable: its second is as good.
        assert_eq!(groups.in_order(&[0, 4, 5]), [0, 5, 4]);
        assert_eq!([0, 1, 2, 7].map(|core| groups.node(core)), [0, 1, 0, 1]);
    }

    #[test]
    fn a_machine_without_information_is_one_group() {
        let groups = Groups::read(Path::new("/nonexistent"), &[3, 1, 2]);
        assert_eq!(groups.in_order(&[3, 1, 2]), [1, 2, 3]);
        assert_eq!(groups.node(3), 0);
    }

    #[test]
    fn lists_have_the_systems_format() {
        assert_eq!(parse("0-3,8"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(parse(""), Some(vec![]));
        for text in ["-", "3-1", "x", "1-", "0-99999999", "18446744073709551616"] {
            assert_eq!(parse(text), None, "{text}");
        }
        assert_eq!(formatted(&[0, 1, 2, 3, 8]), "0-3,8");
    }

    proptest! {
        #[test]
        fn any_list_round_trips(cores in prop::collection::btree_set(0..MAX_CORES, 0..20)) {
            let cores: Vec<_> = cores.into_iter().collect();
            prop_assert_eq!(parse(&formatted(&cores)), Some(cores));
        }

        #[test]
        fn any_text_is_read_without_a_panic(text in "[0-9,\\-]{0,40}") {
            if let Some(cores) = parse(&text) {
                prop_assert!(cores.windows(2).all(|pair| pair[0] < pair[1]) && cores.len() <= MAX_CORES);
            }
        }
    }
}
