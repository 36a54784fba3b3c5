//! The CPUs of this machine as `/sys/devices/system` describes them: cores, shared caches, NUMA nodes and packages.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use fast_allreduce::device::host::{Bind, Binding};
use fast_allreduce::topology::Cpus;

/// A kind of unit, such as a cache of level 2, with the CPUs that share each one.
struct Units {
    /// Units are printed from the smallest to the largest.
    order: u32,
    name: String,
    size: String,
    /// In the kernel's notation: `0-3,8`.
    cpus: Vec<String>,
}

/// Describes the files below `root`, which is `/sys/devices/system`. Files that do not exist are skipped.
pub fn describe(root: &Path) -> io::Result<String> {
    let online = std::fs::read_to_string(root.join("cpu/online"))?;
    let mut all: Vec<Units> = Vec::new();
    let mut add = |order: u32, name: String, size: String, cpus: Option<String>| {
        let Some(cpus) = cpus else { return };
        match all.iter_mut().find(|units| units.name == name && units.size == size) {
            Some(units) if units.cpus.contains(&cpus) => {}
            Some(units) => units.cpus.push(cpus),
            None => all.push(Units { order, name, size, cpus: vec![cpus] }),
        }
    };
    for folder in folders(&root.join("cpu"), "cpu") {
        let read = |file: &str| read(&folder.join(file));
        // Kernels before 5.3 have the second names only.
        let core = read("topology/core_cpus_list").or_else(|| read("topology/thread_siblings_list"));
        add(0, "core".into(), String::new(), core);
        for cache in folders(&folder.join("cache"), "index") {
            let read = |file: &str| self::read(&cache.join(file));
            let Some(level) = read("level").and_then(|level| level.parse().ok()) else { continue };
            let kind = match read("type").as_deref() {
                Some("Data") => "d",
                Some("Instruction") => "i",
                _ => "",
            };
            add(level, format!("L{level}{kind}"), read("size").unwrap_or_default(), read("shared_cpu_list"));
        }
        let package = read("topology/package_cpus_list").or_else(|| read("topology/core_siblings_list"));
        add(u32::MAX, "package".into(), String::new(), package);
    }
    for node in folders(&root.join("node"), "node") {
        add(u32::MAX - 1, "NUMA node".into(), String::new(), read(&node.join("cpulist")));
    }
    all.sort_by_key(|units| units.order);
    let mut text = format!(
        "CPUs {}: shared cores, caches, NUMA nodes and packages\n\n{:<10} {:>8}  CPUs\n",
        online.trim(),
        "",
        "size"
    );
    for Units { name, size, cpus, .. } in all {
        let _ = writeln!(text, "{name:<10} {size:>8}  {}", sharers(&cpus));
    }
    Ok(text)
}

/// Describes where ranks would run on a machine that nothing else uses, by the setting `bind`: with one thread each,
/// and with all physical cores, if they may have that many threads.
pub fn placements(cpus: &Cpus) -> String {
    let mut text = String::from(
        "Ranks as `bind` places them: CPUs of each rank, NUMA nodes of their memory, ranks of each socket\n\n",
    );
    let _ = writeln!(
        text,
        "{:>5} {:>7}  {:<5} {:<6} {:<14} CPUs",
        "ranks", "threads", "bind", "socket", "memory"
    );
    for ranks in [2, 4, 8, 16] {
        // More than 64 workers are refused.
        let most = (cpus.physical() / ranks).min(64);
        for threads in if most > 1 { vec![1, most] } else { vec![1] } {
            for bind in [Bind::Core, Bind::Numa] {
                let binding = Binding::planned(cpus, bind, ranks, threads);
                let Some(of_rank) = binding.cores() else { continue };
                let nodes: Vec<_> = of_rank.iter().map(|cpus_of| cpus.memory_of(cpus_of)).collect();
                let memory = nodes.iter().map(|node| node.map_or("-".into(), |node| node.to_string()));
                let memory = memory.collect::<Vec<_>>().join(",");
                let socket = cpus.ranks_of_socket(of_rank).map_or("-".into(), |count| count.to_string());
                let name = bind.name();
                let _ =
                    writeln!(text, "{ranks:>5} {threads:>7}  {name:<5} {socket:<6} {memory:<14} {binding}");
            }
        }
    }
    text
}

/// Formats the first sets of CPUs, and the number of all.
fn sharers(cpus: &[String]) -> String {
    const SHOWN: usize = 8;
    if cpus.iter().all(|set| set.parse::<u32>().is_ok()) {
        return "each CPU has its own".into();
    }
    let rest = if cpus.len() > SHOWN { format!(" | ... ({} in all)", cpus.len()) } else { String::new() };
    cpus[..cpus.len().min(SHOWN)].join(" | ") + &rest
}

/// Returns the folders that are called `prefix` and a number, sorted by it.
fn folders(parent: &Path, prefix: &str) -> Vec<PathBuf> {
    let number = |path: &Path| path.file_name()?.to_str()?.strip_prefix(prefix)?.parse::<u32>().ok();
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let mut folders: Vec<_> =
        entries.filter_map(|entry| Some((number(&entry.path())?, entry.path()))).collect();
    folders.sort_unstable();
    folders.into_iter().map(|(_, folder)| folder).collect()
}

fn read(path: &Path) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines;
    use crate::temporary::Folder;

    /// Makes the files of a machine of two packages with two cores of two threads each.
    fn machine() -> Folder {
        let machine = Folder::new();
        machine.write("cpu/online", "0-7\n");
        for cpu in 0..8 {
            // Package 0 has the CPUs 0, 1, 4 and 5.
            let (package, core) = (cpu / 2 % 2, cpu % 4);
            let threads = format!("{core},{}\n", core + 4);
            let of_package = ["0-1,4-5\n", "2-3,6-7\n"][package];
            let folder = format!("cpu/cpu{cpu}");
            machine.write(format!("{folder}/topology/core_cpus_list"), &threads);
            machine.write(format!("{folder}/topology/package_cpus_list"), of_package);
            let caches = [("1", "Data", "32K", threads.as_str()), ("3", "Unified", "16384K", of_package)];
            for (index, (level, content, size, shared)) in caches.into_iter().enumerate() {
                for (file, text) in
                    [("level", level), ("type", content), ("size", size), ("shared_cpu_list", shared)]
                {
                    machine.write(format!("{folder}/cache/index{index}/{file}"), text);
                }
            }
        }
        machine.write("node/node0/cpulist", "0-1,4-5\n");
        machine.write("node/node1/cpulist", "2-3,6-7\n");
        machine
    }

    #[test]
    fn a_machine_of_two_packages_is_described() {
        let machine = machine();
        let text = describe(machine.path()).unwrap();
        for line in [
            "CPUs 0-7: shared cores, caches, NUMA nodes and packages",
            "core                 0,4 | 1,5 | 2,6 | 3,7",
            "L1d             32K  0,4 | 1,5 | 2,6 | 3,7",
            "L3           16384K  0-1,4-5 | 2-3,6-7",
            "NUMA node            0-1,4-5 | 2-3,6-7",
            "package              0-1,4-5 | 2-3,6-7",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        for folder in ["node", "cpu/cpu0/cache", "cpu/cpu0/topology"] {
            std::fs::remove_dir_all(machine.path().join(folder)).unwrap();
        }
        let text = describe(machine.path()).unwrap();
        assert!(!text.contains("NUMA node ") && text.contains("1,5 | 2,6 | 3,7 | 0,4"), "{text}");
        std::fs::remove_dir_all(machine.path().join("cpu")).unwrap();
        assert!(describe(machine.path()).is_err());
    }

    #[test]
    fn placements_of_two_sockets() {
        let text = placements(&Cpus::read(machines::EPYC.write().path(), None));
        for line in [
            "    2       1  core  -      0,0            core (0, 1)",
            "    2       1  numa  1      0,1            numa ([0-95,192-287], [96-191,288-383])",
            "    4      48  core  2      0,0,1,1        core (0-47, 48-95, 96-143, 144-191)",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        let text = placements(&Cpus::read(machines::WITHOUT_MEMORY.write().path(), None));
        assert!(text.contains("    2      16  core  1      0,2            core (0-15, 16-31)\n"), "{text}");
    }

    #[test]
    fn sets_are_abbreviated() {
        let sets =
            |count: usize, cpus: fn(usize) -> String| sharers(&(0..count).map(cpus).collect::<Vec<_>>());
        assert_eq!(sets(3, |cpu| cpu.to_string()), "each CPU has its own");
        assert_eq!(sets(2, |cpu| format!("{cpu},{}", cpu + 2)), "0,2 | 1,3");
        assert!(sets(9, |cpu| format!("{cpu},{}", cpu + 9)).ends_with("7,16 | ... (9 in all)"));
    }
}
