//! Tests that communicators leave no resources behind.

use std::collections::BTreeMap;

use fast_allreduce::ReduceOp;

use crate::host::{wait_until, Build as _};
use crate::suite::launch::{this_test, threads, Process};
use crate::suite::scenario::Setup;

/// Environment variable of the child process that runs this test alone, as the test counts resources of the whole
/// process.
const ALONE: &str = "FAST_ALLREDUCE_TEST_ALONE";

fn entries(folder: &str) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

/// Returns the numbers of descriptors and threads of this process.
fn resources() -> [usize; 2] {
    ["/proc/self/fd", "/proc/self/task"].map(entries)
}

/// Returns the number of this crate's mappings in this process, and that of all others.
fn mappings() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let own = maps.lines().filter(|line| line.contains("fast-allreduce")).count();
    // The path of the test program may also contain the crate's name.
    let program =
        maps.lines().filter(|line| line.contains("fast-allreduce") && !line.contains("memfd:")).count();
    (own - program, maps.lines().count() - own)
}

/// Returns this user's files in all folders where shared memory or sockets could be left.
fn named_files() -> BTreeMap<String, usize> {
    let ours = |folder: &str| {
        let names = std::fs::read_dir(folder).into_iter().flatten().flatten();
        names.filter(|entry| entry.file_name().to_string_lossy().contains("allreduce")).count()
    };
    ["/dev/shm", "/tmp"].map(|folder| (folder.to_owned(), ours(folder))).into()
}

fn one_cycle() {
    threads(3, |rank| {
        let communicator = Setup { workers: 2, max_bytes: 4096, ..Setup::default() }.build(&rank);
        let mut buffer = communicator.alloc::<u32>(100).unwrap();
        communicator.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap();
        let dropped = communicator.alloc::<u8>(10_000).unwrap();
        drop(dropped);
        communicator.symmetric_memory::<u64>(700).unwrap().free().unwrap();
        let symmetric = communicator.symmetric_memory::<u32>(30).unwrap();
        drop(symmetric.register().unwrap().deregister().unwrap());
        // One rank in three drops its buffer last.
        if rank.rank() == 0 {
            drop((communicator, buffer));
        } else {
            drop((buffer, communicator));
        }
    });
}

#[test]
fn nothing_is_left_after_a_hundred_worlds() {
    if std::env::var_os(ALONE).is_none() {
        let mut command = this_test("leaks::nothing_is_left_after_a_hundred_worlds");
        Process::start(command.env(ALONE, "1")).finish().unwrap();
        return;
    }
    // Warm-up: the allocator and the runtime keep some memory.
    (0..5).for_each(|_| one_cycle());
    let files = named_files();
    let before = resources();
    let (_, others) = mappings();
    (0..100).for_each(|_| one_cycle());
    wait_until("descriptors and threads go", || resources() == before);
    let (own, others_after) = mappings();
    assert_eq!(own, 0, "mappings of shared memory were leaked");
    assert!(others_after < others + 50, "{others_after} mappings, before: {others}");
    assert_eq!(named_files(), files);
}
