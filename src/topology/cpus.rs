//! How a machine groups its CPUs: hardware threads, caches, NUMA nodes and sockets, as sysfs describes them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Upper limit on CPU numbers, more than any machine has, so that a malformed list stays short.
const MAX_CPUS: usize = 1 << 16;

/// The kernel has at most this number of NUMA nodes.
const MAX_NODES: usize = 1 << 10;

/// The CPUs of a machine and their groups. A CPU is a hardware thread, the unit that the operating system schedules
/// on. CPUs without information are one group.
///
/// ```
/// use fast_allreduce::topology::Cpus;
///
/// let cpus = Cpus::read("/sys".as_ref(), None);
/// assert!(!cpus.in_order(&[0]).is_empty());
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cpus {
    cpus: BTreeMap<usize, Cpu>,
    /// By CPU, of all that are online.
    nodes: BTreeMap<usize, usize>,
    /// Nodes that have memory, by node nearest first.
    memory: BTreeMap<usize, Vec<usize>>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Cpu {
    package: usize,
    /// The first CPU that shares its third-level cache.
    cache: usize,
    /// All hardware threads of its physical core, ascending.
    siblings: Vec<usize>,
    /// 0 for the fastest kind of core.
    slower: usize,
}

impl Cpus {
    /// Reads the files below `root`, which is `/sys` or a copy of it: NUMA nodes, and the groups of these CPUs or of
    /// all that are online.
    pub fn read(root: &Path, cpus: Option<&[usize]>) -> Self {
        let text = |path: &str| std::fs::read_to_string(root.join("devices").join(path)).unwrap_or_default();
        let list = |path: &str| parse(text(path).trim()).unwrap_or_default();
        let online = cpus.map_or_else(|| list("system/cpu/online"), <[usize]>::to_vec);
        let mut nodes = BTreeMap::new();
        let mut memory = BTreeMap::new();
        let mut numbers = list("system/node/online");
        numbers.retain(|&node| node < MAX_NODES);
        let with_memory: BTreeSet<_> = match list("system/node/has_memory") {
            known if known.is_empty() => numbers.iter().copied().collect(),
            known => known.into_iter().collect(),
        };
        // A firmware's tables may put CPUs on several nodes. Then nothing is known of nodes.
        let mut is_sound = true;
        for &node in &numbers {
            for cpu in list(&format!("system/node/node{node}/cpulist")) {
                is_sound &= nodes.insert(cpu, node).is_none();
            }
            let distances = text(&format!("system/node/node{node}/distance"));
            let mut distances = distances.split_whitespace().map(|word| word.parse().unwrap_or(u32::MAX));
            let mut nearest: Vec<(u32, usize)> =
                numbers.iter().map(|&other| (distances.next().unwrap_or(u32::MAX), other)).collect();
            nearest.retain(|(_, other)| with_memory.contains(other));
            // Without distances a node is still nearest to itself.
            nearest.sort_by_key(|&(distance, other)| (distance, other != node, other));
            memory.insert(node, nearest.into_iter().map(|(_, other)| other).collect());
        }
        if !is_sound {
            (nodes, memory) = Default::default();
        }
        let efficient = list("cpu_atom/cpus");
        let mut capacities: Vec<usize> = Vec::new();
        let mut known = BTreeMap::new();
        for &cpu in &online {
            let of = format!("system/cpu/cpu{cpu}");
            let number = |path: &str| text(&format!("{of}/{path}")).trim().parse().ok();
            // Its index is 3, unless a core's first level is one cache.
            let is_third = |index: &u32| text(&format!("{of}/cache/index{index}/level")).trim() == "3";
            let third_level = [3, 2, 4].into_iter().find(is_third).unwrap_or(3);
            let capacity = number("cpu_capacity").unwrap_or(usize::from(!efficient.contains(&cpu)));
            capacities.push(capacity);
            let of_cpu = Cpu {
                package: number("topology/physical_package_id").unwrap_or(0),
                cache: list(&format!("{of}/cache/index{third_level}/shared_cpu_list"))
                    .first()
                    .copied()
                    .unwrap_or(0),
                siblings: list(&format!("{of}/topology/thread_siblings_list")),
                slower: capacity,
            };
            known.insert(cpu, of_cpu);
        }
        capacities.sort_unstable();
        capacities.dedup();
        for cpu in known.values_mut() {
            cpu.slower = capacities.iter().filter(|&&capacity| capacity > cpu.slower).count();
        }
        Self { cpus: known, nodes, memory }
    }

    /// Returns the CPUs, ascending.
    pub fn all(&self) -> Vec<usize> {
        self.cpus.keys().copied().collect()
    }

    /// Returns the number of physical cores.
    pub fn physical(&self) -> usize {
        let all = self.all();
        all.iter().filter(|&&cpu| self.index(cpu, &all) == 0).count()
    }

    /// Returns the NUMA node of a CPU.
    pub fn node(&self, cpu: usize) -> usize {
        self.nodes.get(&cpu).copied().unwrap_or(0)
    }

    /// Returns the socket of a CPU: the number of its package.
    pub fn socket(&self, cpu: usize) -> usize {
        self.cpus.get(&cpu).map_or(0, |cpu| cpu.package)
    }

    /// Returns the NUMA node whose memory is nearest to these CPUs; `None` if they are on several nodes, or if the
    /// machine has one node.
    pub fn memory_of(&self, cpus: &[usize]) -> Option<usize> {
        let node = self.node(*cpus.first()?);
        let is_one = self.memory.len() > 1 && cpus.iter().all(|&cpu| self.node(cpu) == node);
        self.memory.get(&node).filter(|_| is_one)?.first().copied()
    }

    /// Sorts these CPUs in the order in which threads take them: one of each physical core before any second hardware
    /// thread, fast cores before slower ones, with CPUs that are close to each other together.
    pub fn in_order(&self, cpus: &[usize]) -> Vec<usize> {
        let mut ordered = cpus.to_vec();
        let unknown = Cpu::default();
        ordered.sort_by_cached_key(|&cpu| {
            let Cpu { package, cache, siblings, slower } = self.cpus.get(&cpu).unwrap_or(&unknown);
            let first = siblings.first().copied().unwrap_or(cpu);
            (self.index(cpu, cpus), *slower, *package, self.node(cpu), *cache, first, cpu)
        });
        ordered
    }

    /// Returns how many of `cpus` are earlier hardware threads of the same physical core. Only usable ones count: a
    /// second hardware thread alone is as good as a first.
    fn index(&self, cpu: usize, cpus: &[usize]) -> usize {
        let siblings = self.cpus.get(&cpu).map_or(&[][..], |cpu| &cpu.siblings);
        siblings.iter().filter(|&&other| other < cpu && cpus.contains(&other)).count()
    }

    /// Gives each of `ranks` ranks `threads` of these CPUs, in order. No rank is divided among caches if that is
    /// possible, else among nodes, else among sockets; physical cores are used up first. Returns `None` if there are
    /// too few, and for no threads.
    pub fn divide(&self, cpus: &[usize], ranks: usize, threads: usize) -> Option<Vec<Vec<usize>>> {
        let ordered = self.in_order(cpus);
        let needed = ranks.checked_mul(threads).filter(|_| threads > 0)?;
        let physical = ordered.iter().take_while(|&&cpu| self.index(cpu, cpus) == 0).count();
        let usable = &ordered[..if needed <= physical { physical } else { ordered.len() }];
        (0..4).find_map(|level| {
            let group_of = |cpu: usize| {
                let cache = self.cpus.get(&cpu).map_or(0, |cpu| cpu.cache);
                [self.socket(cpu), self.node(cpu), cache].into_iter().take(3 - level).collect::<Vec<_>>()
            };
            let mut groups: Vec<(Vec<usize>, Vec<usize>)> = Vec::new();
            for &cpu in usable {
                let group = group_of(cpu);
                match groups.iter_mut().find(|(other, _)| *other == group) {
                    Some((_, members)) => members.push(cpu),
                    None => groups.push((group, vec![cpu])),
                }
            }
            let parts = groups.iter().flat_map(|(_, members)| members.chunks_exact(threads));
            let parts: Vec<_> = parts.take(ranks).map(<[usize]>::to_vec).collect();
            (parts.len() == ranks).then_some(parts)
        })
    }

    /// Returns the number of ranks in each socket, by the CPUs of each rank: if there is more than one socket, each has
    /// the same number of consecutive ranks, and no rank is on two.
    pub fn ranks_of_socket(&self, ranks: &[Vec<usize>]) -> Option<usize> {
        let socket = |cpus: &Vec<usize>| {
            let socket = self.socket(*cpus.first()?);
            cpus.iter().all(|&cpu| self.socket(cpu) == socket).then_some(socket)
        };
        let sockets: Vec<_> = ranks.iter().map(socket).collect::<Option<_>>()?;
        let each = sockets.iter().take_while(|&socket| Some(socket) == sockets.first()).count();
        let parts: Vec<_> = sockets.chunks(each.max(1)).collect();
        let is_even = parts.iter().all(|part| part.len() == each && part.iter().all(|s| s == &part[0]));
        let mut firsts: Vec<_> = parts.iter().map(|part| part[0]).collect();
        firsts.sort_unstable();
        firsts.dedup();
        (is_even && firsts.len() > 1 && firsts.len() == parts.len()).then_some(each)
    }
}

/// Parses a list of CPUs in the system's format, such as `"0-3,8"`, and sorts it. Returns `None` if it is malformed.
pub(crate) fn parse(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for range in text.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= MAX_CPUS || cpus.len() > MAX_CPUS {
            return None;
        }
        cpus.extend(first..=last);
    }
    cpus.sort_unstable();
    cpus.dedup();
    Some(cpus)
}

/// Formats a list of CPUs in the system's format, such as `"0-3,8"`.
pub(crate) fn formatted(cpus: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &cpu in cpus {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => ranges.push((cpu, cpu)),
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
mod tests;
