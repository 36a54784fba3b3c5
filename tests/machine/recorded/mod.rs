//! Recorded machines: how this crate groups their CPUs by their files of sysfs, against how hwloc does.
//!
//! `scripts/debian-packages.sh hwloc-machines` fetches the recordings of hwloc's tests. `linux` has files of sysfs and
//! hwloc's view of each; `x86` and `xml` have views alone, of which files are made here.

mod hwloc;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fast_allreduce::topology::Cpus;

use crate::runner::{Found, Missing};
use crate::temporary::Folder;
use hwloc::{Recorded, Set};

tests! {
    recordings => files_of_recorded_machines, views_of_recorded_machines;
}

fn recordings() -> Found<PathBuf> {
    let folder = std::env::var_os("FAST_ALLREDUCE_TEST_MACHINES").map(PathBuf::from);
    folder.ok_or_else(|| {
        let reason =
            "FAST_ALLREDUCE_TEST_MACHINES is not the folder of scripts/debian-packages.sh hwloc-machines";
        Missing::new("machines", reason)
    })
}

/// Recordings on which hwloc says something else than the kernel, and why.
const UNUSABLE: [(&str, &str); 4] = [
    ("16amd64-8n2c-cpusets", "hwloc leaves out what the process may not use"),
    ("32amd64-4s2n4c-cgroup2", "the same"),
    ("64amd64-4s2n4ca2co", "the two cores of a Bulldozer module are threads for the kernel"),
    ("20s390-2g6s4c", "not an architecture of this crate: the kernel has other words for packages"),
];

/// Returns whether the files have lists of CPUs. Kernels before 2.6.26 wrote bit sets alone.
fn has_lists(sys: &Path, recorded: &Recorded) -> bool {
    let system = sys.join("devices/system");
    let of_cpu = |cpu: &usize, file: &str| system.join(format!("cpu/cpu{cpu}/{file}")).exists();
    let has_caches = |cpu| recorded.caches.is_empty() || of_cpu(cpu, "cache/index3/shared_cpu_list");
    let has_lists = |cpu| of_cpu(cpu, "topology/thread_siblings_list") && has_caches(cpu);
    system.join("cpu/online").exists() && recorded.all.iter().all(has_lists)
}

/// Returns the recordings in a folder: hwloc's views, by name.
fn views(folder: &Path) -> Vec<(String, Recorded)> {
    let mut views = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "output") {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            views.push((name, Recorded::parse(&std::fs::read_to_string(&path).unwrap())));
        }
    }
    views.sort_by(|(name, _), (other, _)| name.cmp(other));
    views
}

fn files_of_recorded_machines(folder: PathBuf) {
    let folder = folder.join("linux");
    let mut compared = Vec::new();
    for (name, recorded) in views(&folder) {
        let sys = folder.join(&name).join("sys");
        if UNUSABLE.iter().all(|(unusable, _)| *unusable != name) && has_lists(&sys, &recorded) {
            check(&name, &sys, &recorded);
            compared.push(name);
        }
    }
    assert!(compared.len() >= 12, "{compared:?}");
}

fn views_of_recorded_machines(folder: PathBuf) {
    let mut compared = Vec::new();
    for (name, recorded) in ["x86", "xml"].iter().flat_map(|kind| views(&folder.join(kind))) {
        let files = Folder::new();
        recorded.write(&files);
        check(&name, files.path(), &recorded);
        compared.push(name);
    }
    assert!(compared.len() >= 40, "{compared:?}");
}

/// Compares what `Cpus` finds in files with what hwloc found.
fn check(name: &str, sys: &Path, recorded: &Recorded) {
    let all: Vec<usize> = recorded.all.iter().copied().collect();
    let cpus = Cpus::read(sys, Some(&all));
    assert!(
        recorded.all.is_subset(&Cpus::read(sys, None).all().into_iter().collect()),
        "{name}: CPUs are missing"
    );
    let mut sockets = BTreeMap::new();
    for &cpu in &all {
        let package = *sockets.entry(cpus.socket(cpu)).or_insert_with(|| recorded.package(cpu));
        assert_eq!(recorded.package(cpu), package, "{name}: CPU {cpu} is on socket {}", cpus.socket(cpu));
        // hwloc knows no node of CPUs whose node is offline, or if it does not believe the firmware.
        let (node, nodes) = (cpus.node(cpu), recorded.nodes(cpu));
        assert!(nodes.is_empty() || nodes.contains(&node), "{name}: CPU {cpu} is on {nodes:?}, not {node}");
    }
    assert_eq!(sockets.len(), recorded.packages.len().max(1), "{name}: sockets");
    if recorded.cores.is_empty() {
        return;
    }
    assert_eq!(cpus.physical(), recorded.cores.len(), "{name}: physical cores");
    // A rank's threads have a core each, in the smallest kind of unit that has enough of them. Numbers of threads at
    // which that changes.
    let nodes = recorded.node_sets();
    let units = recorded.caches.iter().chain(&nodes).chain(&recorded.packages);
    let full = units.map(|unit| recorded.cores_of(unit).len()).chain([1, recorded.cores.len()]);
    let numbers: Set =
        full.flat_map(|cores| [cores, cores + 1]).filter(|&n| n <= recorded.cores.len()).collect();
    for threads in numbers {
        let rank: Set = cpus.divide(&all, 1, threads).unwrap().concat().into_iter().collect();
        assert_eq!(recorded.cores_of(&rank).len(), threads, "{name}: {threads} threads on {rank:?}");
        for units in [&recorded.caches, &nodes, &recorded.packages] {
            let holds = |unit: &&Set| recorded.cores_of(unit).len() >= threads;
            if units.iter().any(|unit| holds(&unit)) {
                assert!(
                    units.iter().any(|unit| rank.is_subset(unit)),
                    "{name}: {threads} threads on {rank:?}"
                );
                break;
            }
        }
    }
}
