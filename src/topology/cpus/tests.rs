use proptest::prelude::*;

use super::*;
use crate::testing::machines::{self, Machine};

fn read(machine: &Machine) -> Cpus {
    Cpus::read(machine.write().path(), None)
}

/// Returns the CPUs of each rank, in the kernel's notation.
fn divided(cpus: &Cpus, ranks: usize, threads: usize) -> String {
    let ranks = cpus.divide(&cpus.all(), ranks, threads).unwrap_or_default();
    let ranks = ranks.into_iter().map(|mut rank| {
        rank.sort_unstable();
        formatted(&rank)
    });
    ranks.collect::<Vec<_>>().join(" ")
}

#[test]
fn two_sockets_of_an_epyc() {
    let cpus = read(&machines::EPYC);
    assert_eq!(divided(&cpus, 3, 1), "0 1 2");
    // A rank's threads share a third-level cache, then a node, then nothing.
    assert_eq!(divided(&cpus, 3, 5), "0-4 8-12 16-20");
    assert_eq!(divided(&cpus, 4, 48), "0-47 48-95 96-143 144-191");
    assert_eq!(divided(&cpus, 3, 60), "0-59 60-119 120-179");
    assert_eq!(divided(&cpus, 4, 96), "0-95 192-287 96-191 288-383");
    assert_eq!(divided(&cpus, 5, 96), "");
    assert_eq!(cpus.divide(&cpus.all(), 2, 0), None, "no threads");
    let sockets =
        |ranks: usize, threads| cpus.ranks_of_socket(&cpus.divide(&cpus.all(), ranks, threads).unwrap());
    assert_eq!(
        [sockets(4, 48), sockets(2, 96), sockets(4, 8), sockets(3, 60)],
        [Some(2), Some(1), None, None]
    );
    assert_eq!(cpus.ranks_of_socket(&[vec![0], vec![100], vec![1], vec![101]]), None, "not consecutive");
    assert_eq!(cpus.ranks_of_socket(&[vec![0], vec![1], vec![100]]), None, "not equally many");
    assert_eq!(
        [cpus.memory_of(&[0, 95]), cpus.memory_of(&[300]), cpus.memory_of(&[0, 96])],
        [Some(0), Some(1), None]
    );
}

#[test]
fn sub_numa_clusters_are_kept_whole() {
    let whole = read(&machines::XEON);
    assert_eq!(divided(&whole, 4, 14), "0-13 14-27 28-41 42-55");
    assert_eq!(divided(&whole, 4, 28), "0-27 28-55 56-83 84-111");
    let clusters = read(&machines::XEON_CLUSTERS);
    assert_eq!(divided(&clusters, 2, 14), "0-3,7-9,14-17,21-23 4-6,10-13,18-20,24-27");
    assert_eq!(divided(&clusters, 2, 15), "0-4,7-9,14-17,21-23 28-32,35-37,42-45,49-51", "a socket each");
    assert_eq!(clusters.memory_of(&[21, 77]), Some(0));
    assert_eq!(clusters.memory_of(&[21, 24]), None);
}

#[test]
fn fast_cores_come_first() {
    let hybrid = read(&machines::HYBRID);
    assert_eq!(hybrid.in_order(&hybrid.all())[..10], [0, 2, 4, 6, 8, 10, 12, 14, 16, 17]);
    assert_eq!(divided(&hybrid, 2, 4), "0,2,4,6 8,10,12,14");
    assert_eq!(hybrid.in_order(&hybrid.all())[24], 1, "second hardware threads come last");
    let arm = read(&machines::BIG_LITTLE);
    assert_eq!(arm.in_order(&arm.all()), [4, 5, 6, 7, 0, 1, 2, 3]);
}

#[test]
fn a_node_without_memory_uses_the_nearest() {
    let cpus = read(&machines::WITHOUT_MEMORY);
    assert_eq!([cpus.memory_of(&[3]), cpus.memory_of(&[16, 17])], [Some(0), Some(2)]);
    assert_eq!(divided(&cpus, 2, 16), "0-15 16-31");
}

#[test]
fn nodes_that_share_cpus_are_not_believed() {
    let folder = machines::SMALL.write();
    folder.write("devices/system/node/node0/cpulist", "0-7");
    let cpus = Cpus::read(folder.path(), None);
    assert_eq!((cpus.node(1), cpus.node(5), cpus.memory_of(&[1])), (0, 0, None));
    assert_eq!(divided(&cpus, 2, 4), "0-3 4-7", "caches and sockets are");
}

#[test]
fn the_third_level_may_have_another_index() {
    let folder = machines::EPYC.write();
    for cpu in 0..machines::EPYC.cpus {
        let cache = folder.path().join(format!("devices/system/cpu/cpu{cpu}/cache"));
        std::fs::rename(cache.join("index3"), cache.join("index2")).unwrap();
    }
    assert_eq!(divided(&Cpus::read(folder.path(), None), 3, 5), "0-4 8-12 16-20");
}

#[test]
fn sockets_may_have_any_number() {
    let cpus = read(&machines::ALTRA);
    assert_eq!(divided(&cpus, 4, 40), "0-39 40-79 80-119 120-159");
    assert_eq!(cpus.ranks_of_socket(&cpus.divide(&cpus.all(), 4, 40).unwrap()), Some(2));
}

#[test]
fn physical_cores_come_first_and_neighbours_together() {
    let cpus = Cpus::read(machines::XEON.write().path(), Some(&[0, 56, 112, 168, 113]));
    assert_eq!(cpus.in_order(&[0, 56, 112, 168]), [0, 56, 112, 168]);
    // The first thread of physical core 1 is not usable: its second is as good.
    assert_eq!(cpus.in_order(&[0, 112, 113]), [0, 113, 112]);
}

#[test]
fn a_machine_without_information_is_one_group() {
    let cpus = Cpus::read(Path::new("/nonexistent"), Some(&[3, 1, 2]));
    assert_eq!(cpus.in_order(&[3, 1, 2]), [1, 2, 3]);
    assert_eq!((cpus.node(3), cpus.socket(9), cpus.memory_of(&[1])), (0, 0, None));
    assert_eq!(Cpus::read(Path::new("/nonexistent"), None), Cpus::default());
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
    fn any_list_round_trips(cpus in prop::collection::btree_set(0..MAX_CPUS, 0..20)) {
        let cpus: Vec<_> = cpus.into_iter().collect();
        prop_assert_eq!(parse(&formatted(&cpus)), Some(cpus));
    }

    #[test]
    fn any_text_is_read_without_a_panic(text in "[0-9,\\-]{0,40}") {
        if let Some(cpus) = parse(&text) {
            prop_assert!(cpus.windows(2).all(|pair| pair[0] < pair[1]) && cpus.len() <= MAX_CPUS);
        }
    }

}

proptest! {
    // Each case writes a machine's files.
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Whatever a file says, each rank has CPUs of its own among those that are usable.
    #[test]
    fn damaged_files_are_survived(
        file in prop::sample::select(vec![
            "system/node/online", "system/node/node1/cpulist", "system/node/node0/distance",
            "system/node/has_memory", "system/cpu/online", "system/cpu/cpu5/topology/thread_siblings_list",
            "system/cpu/cpu5/topology/physical_package_id", "system/cpu/cpu5/cpu_capacity",
        ]),
        text in "[0-9, x\\-]{0,12}", ranks in 1..5_usize, threads in 1..9_usize,
    ) {
        let folder = machines::SMALL.write();
        folder.write(format!("devices/{file}"), text);
        let cpus = Cpus::read(folder.path(), Some(&(0..8).collect::<Vec<_>>()));
        let divided = cpus.divide(&cpus.all(), ranks, threads);
        prop_assert_eq!(divided.is_some(), ranks * threads <= 8);
        let mut all = divided.unwrap_or_default().concat();
        let _ = (cpus.memory_of(&all), cpus.ranks_of_socket(&[all.clone()]));
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        prop_assert!(all.len() == count && all.iter().all(|&cpu| cpu < 8));
    }
}
