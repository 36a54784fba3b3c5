//! The CPUs of this machine as `/sys/devices/system` describes them: cores, shared caches, NUMA nodes and their memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::path::Path;

/// Numbers of CPUs: the kernel's numbers of hardware threads.
type Set = BTreeSet<usize>;

/// The CPUs that are online.
#[derive(Debug, PartialEq, Eq)]
pub struct Cpus {
    online: Set,
    /// The threads of each core.
    cores: BTreeSet<Set>,
    packages: BTreeSet<Set>,
    caches: BTreeMap<Cache, BTreeSet<Set>>,
    nodes: Vec<Node>,
}

/// A kind of cache.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Cache {
    level: u32,
    /// `Data`, `Instruction` or `Unified`.
    content: String,
    /// In the kernel's notation: `"32K"`.
    size: String,
}

/// A NUMA node.
#[derive(Debug, PartialEq, Eq)]
struct Node {
    number: usize,
    cpus: Set,
    bytes: Option<u64>,
    /// Distances to each node, as the firmware reports them: 10 to itself.
    distances: Vec<u32>,
}

/// More than Linux supports: a list with a higher number is malformed.
const MOST_CPUS: usize = 1 << 16;

impl Cpus {
    /// Reads the files below `root`, which is `/sys/devices/system`. Files that do not exist are skipped.
    ///
    /// # Errors
    ///
    /// The list of online CPUs cannot be read.
    pub fn read(root: &Path) -> io::Result<Self> {
        let online = list(&std::fs::read_to_string(root.join("cpu/online"))?)
            .ok_or_else(|| io::Error::other("the list of online CPUs is malformed"))?;
        let (mut cores, mut packages) = (BTreeSet::new(), BTreeSet::new());
        let mut caches: BTreeMap<Cache, BTreeSet<Set>> = BTreeMap::new();
        for &cpu in &online {
            let folder = root.join(format!("cpu/cpu{cpu}"));
            let set = |name: &str| read(&folder.join("topology").join(name)).and_then(|text| list(&text));
            // Kernels before 5.3 have the second names only.
            cores.extend(set("core_cpus_list").or_else(|| set("thread_siblings_list")));
            packages.extend(set("package_cpus_list").or_else(|| set("core_siblings_list")));
            for index in 0.. {
                let file = |name: &str| read(&folder.join(format!("cache/index{index}")).join(name));
                let Some(level) = file("level").and_then(|level| level.parse().ok()) else { break };
                let (content, size) = (file("type").unwrap_or_default(), file("size").unwrap_or_default());
                let shared = file("shared_cpu_list").and_then(|text| list(&text));
                caches.entry(Cache { level, content, size }).or_default().extend(shared);
            }
        }
        Ok(Self { nodes: nodes(root), online, cores, packages, caches })
    }
}

fn nodes(root: &Path) -> Vec<Node> {
    let numbers = read(&root.join("node/online")).and_then(|text| list(&text)).unwrap_or_default();
    let node = |number| {
        let folder = root.join(format!("node/node{number}"));
        let total = read(&folder.join("meminfo")).and_then(|text| {
            let line = text.lines().find_map(|line| Some(line.split_once("MemTotal:")?.1.to_owned()))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
        });
        let distances = read(&folder.join("distance")).unwrap_or_default();
        let cpus = read(&folder.join("cpulist")).and_then(|text| list(&text)).unwrap_or_default();
        let distances = distances.split_whitespace().filter_map(|distance| distance.parse().ok()).collect();
        Node { number, cpus, bytes: total, distances }
    };
    numbers.into_iter().map(node).collect()
}

fn read(path: &Path) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Parses a list in the kernel's notation: `"0-3,8"`.
fn list(text: &str) -> Option<Set> {
    let mut numbers = Set::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        if first > last || last >= MOST_CPUS {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

/// Formats a list in the kernel's notation.
fn written(set: &Set) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &number in set {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let one = |&(first, last): &(usize, usize)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    ranges.iter().map(one).collect::<Vec<_>>().join(",")
}

/// Formats the first sets, and the number of all.
fn some(sets: &BTreeSet<Set>) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<_> = sets.iter().take(SHOWN).map(written).collect();
    let rest = if sets.len() > SHOWN { format!(" | ... ({} in all)", sets.len()) } else { String::new() };
    shown.join(" | ") + &rest
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { online, cores, packages, caches, nodes } = self;
        let count =
            |number: usize, what: &str| format!("{number} {what}{}", if number == 1 { "" } else { "s" });
        let threads = online.len();
        let (cores, packages) = (count(cores.len(), "core"), count(packages.len(), "package"));
        writeln!(f, "CPUs {}: {}, {cores}, {packages}", written(online), count(threads, "hardware thread"))?;
        writeln!(f, "\n{:<10} {:>8}  shared by", "cache", "size")?;
        for (Cache { level, content, size }, sets) in caches {
            let name = match content.as_str() {
                "Data" => format!("L{level}d"),
                "Instruction" => format!("L{level}i"),
                _ => format!("L{level}"),
            };
            let sharers = match sets.iter().all(|set| set.len() == 1) {
                true => "none: each CPU has its own".to_owned(),
                false => some(sets),
            };
            writeln!(f, "{name:<10} {size:>8}  {sharers}")?;
        }
        if !nodes.is_empty() {
            writeln!(f, "\n{:<10} {:>8}  {:<16} distances", "NUMA node", "memory", "CPUs")?;
        }
        for Node { number, cpus, bytes, distances } in nodes {
            let memory =
                bytes.map_or("-".into(), |bytes| format!("{:.1}G", bytes as f64 / f64::from(1 << 30)));
            let distances = distances.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
            writeln!(f, "{number:<10} {memory:>8}  {:<16} {distances}", written(cpus))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::temporary::Folder;

    fn set(numbers: &[usize]) -> Set {
        numbers.iter().copied().collect()
    }

    /// Files of a machine of two packages with two cores of two threads each.
    struct Machine(Folder);

    impl Machine {
        fn new() -> Self {
            let machine = Self(Folder::new());
            machine.write("cpu/online", "0-7\n");
            machine.write("node/online", "0-1\n");
            for cpu in 0..8 {
                // Package 0 has the CPUs 0, 1, 4 and 5.
                let (package, core) = (cpu / 2 % 2, cpu % 4);
                let threads = format!("{core},{}\n", core + 4);
                let of_package = ["0-1,4-5\n", "2-3,6-7\n"][package];
                let folder = format!("cpu/cpu{cpu}");
                machine.write(&format!("{folder}/topology/core_cpus_list"), &threads);
                machine.write(&format!("{folder}/topology/package_cpus_list"), of_package);
                let caches = [("1", "Data", "32K", threads.as_str()), ("3", "Unified", "16384K", of_package)];
                for (index, (level, content, size, shared)) in caches.into_iter().enumerate() {
                    for (file, text) in
                        [("level", level), ("type", content), ("size", size), ("shared_cpu_list", shared)]
                    {
                        machine.write(&format!("{folder}/cache/index{index}/{file}"), text);
                    }
                }
            }
            for (node, cpus, distances) in [(0, "0-1,4-5\n", "10 21\n"), (1, "2-3,6-7\n", "21 10\n")] {
                machine.write(&format!("node/node{node}/cpulist"), cpus);
                machine.write(&format!("node/node{node}/distance"), distances);
                machine.write(
                    &format!("node/node{node}/meminfo"),
                    &format!("Node {node} MemTotal:  2097152 kB\n"),
                );
            }
            machine
        }

        fn write(&self, path: &str, text: &str) {
            self.0.write(path, text);
        }
    }

    #[test]
    fn a_machine_of_two_packages_is_read() {
        let machine = Machine::new();
        let cpus = Cpus::read(machine.0.path()).unwrap();
        assert_eq!((cpus.cores.len(), cpus.packages.len(), cpus.nodes.len()), (4, 2, 2));
        assert_eq!(cpus.nodes[1].bytes, Some(2 << 30));
        let text = cpus.to_string();
        for fact in [
            "CPUs 0-7: 8 hardware threads, 4 cores, 2 packages",
            "L1d             32K  0,4 | 1,5 | 2,6 | 3,7",
            "L3           16384K  0-1,4-5 | 2-3,6-7",
            "1              2.0G  2-3,6-7          21 10",
        ] {
            assert!(text.contains(fact), "{fact}\n{text}");
        }
    }

    #[test]
    fn missing_files_are_skipped() {
        let machine = Machine::new();
        for folder in ["node", "cpu/cpu0/cache", "cpu/cpu0/topology"] {
            std::fs::remove_dir_all(machine.0.path().join(folder)).unwrap();
        }
        let cpus = Cpus::read(machine.0.path()).unwrap();
        assert!(cpus.nodes.is_empty() && !cpus.to_string().contains("NUMA node  "), "{cpus}");
        machine.write("cpu/online", "0-");
        assert!(Cpus::read(machine.0.path()).is_err());
    }

    #[test]
    fn lists_are_parsed() {
        assert_eq!(list("0-3,8\n"), Some(set(&[0, 1, 2, 3, 8])));
        assert_eq!(list("\n"), Some(set(&[])));
        for damaged in ["x", "1-", "-", "3-1", "0-4294967295", "0-99999999999999999999"] {
            assert_eq!(list(damaged), None, "{damaged}");
        }
    }

    proptest! {
        #[test]
        fn any_list_is_parsed_or_refused_and_formatted(
            text in "[0-9,-]{0,20}",
            numbers in prop::collection::btree_set(0..200_usize, 0..20),
        ) {
            let _ = list(&text);
            prop_assert_eq!(list(&written(&numbers)), Some(numbers));
        }
    }
}
