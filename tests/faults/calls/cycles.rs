//! Communicators built and closed in a loop: descriptors, threads, mappings and memory do not grow.

use std::process::{Command, Stdio};
use std::time::Instant;

use fast_allreduce::ReduceOp;

use crate::fixtures::world::{builder, threads};
use crate::tier::rounds;

/// Sets the number of cycles. If unset there are 2,000 in a full run, and 200 by default.
const CYCLES: &str = "FAST_ALLREDUCE_TEST_CYCLES";

/// Set in the process that runs the test alone.
const ALONE: &str = "FAST_ALLREDUCE_TEST_ALONE";

fn cycle() {
    threads(
        2,
        |_| builder().max_bytes(4096),
        |communicator| {
            let mut data = [communicator.rank() as u32; 50];
            communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [1; 50]);
        },
    );
}

/// Returns the numbers of descriptors, threads and mappings.
fn held() -> [usize; 3] {
    let entries = |folder: &str| std::fs::read_dir(folder).unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    [entries("/proc/self/fd"), entries("/proc/self/task"), maps.lines().count()]
}

fn resident_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse().unwrap()
}

#[test]
fn nothing_grows_in_thousands_of_cycles() {
    let cycles =
        std::env::var(CYCLES).map_or_else(|_| rounds("cycles", 2000, 200), |number| number.parse().unwrap());
    if std::env::var_os(ALONE).is_none() {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "calls::cycles::nothing_grows_in_thousands_of_cycles", "--nocapture"])
            .env(ALONE, "1")
            .env(CYCLES, cycles.to_string())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        println!("{text}");
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        return;
    }
    // The allocator and the runtime keep some memory from the first cycles.
    (0..200).for_each(|_| cycle());
    let (before, kib) = (held(), resident_kib());
    let started = Instant::now();
    (0..cycles).for_each(|_| cycle());
    println!(
        "{cycles} cycles in {:?}; {before:?} became {:?}, {kib} KiB {}",
        started.elapsed(),
        held(),
        resident_kib()
    );
    let after = held();
    assert_eq!(after[..2], before[..2], "descriptors and threads must not grow");
    assert!(after[2] < before[2] + 40, "mappings: {} became {}", before[2], after[2]);
    assert!(resident_kib() < kib + 4096, "resident memory: {kib} KiB became {}", resident_kib());
}
