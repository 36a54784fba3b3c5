//! Binding of ranks, which the header reports, and directories in which ranks meet.

use std::process::Command;

use crate::program::temporary::Folder;
use crate::program::{program, text};
use nix::sched::{sched_getaffinity, sched_setaffinity, CpuSet};
use nix::unistd::Pid;

fn config(command: &mut Command) -> serde_json::Value {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["wrong"], 0);
    document["config"].clone()
}

fn bind_of(arguments: &str) -> String {
    let config = config(&mut program(&format!("{arguments} -b 1K -e 1K -n 20 --format json")));
    config["bind"].as_str().unwrap().to_owned()
}

/// Returns the cores that this process may use.
fn cores() -> Vec<usize> {
    let set = sched_getaffinity(Pid::from_raw(0)).unwrap();
    (0..CpuSet::count()).filter(|&core| set.is_set(core).unwrap()).collect()
}

#[test]
fn ranks_are_bound_to_cores() {
    // A container's quota may be smaller.
    let has_two = std::thread::available_parallelism().unwrap().get() >= 2;
    let bound = bind_of("bench --ranks 2");
    match has_two {
        true => assert!(bound.starts_with("core ("), "{bound}"),
        false => assert!(bound.starts_with("none (2 threads"), "{bound}"),
    }
    assert!(!has_two || bind_of("bench --ranks 2 --bind numa").starts_with("numa ("));
    assert_eq!(bind_of("bench --ranks 2 --bind none"), "none (not asked for)");
    // Ranks share cores if there are fewer.
    let bound = bind_of("bench --ranks 16");
    assert!(bound.starts_with("core (") || bound.contains("a quota of"), "{bound}");
}

#[test]
fn a_mask_is_kept() {
    let all = sched_getaffinity(Pid::from_raw(0)).unwrap();
    let last = *cores().last().unwrap();
    // The program inherits the mask of this thread.
    let mut one = CpuSet::new();
    one.set(last).unwrap();
    sched_setaffinity(Pid::from_raw(0), &one).unwrap();
    let bound = bind_of("bench --ranks 2");
    sched_setaffinity(Pid::from_raw(0), &all).unwrap();
    assert_eq!(bound, format!("core ({last}, {last})"));
}

#[test]
fn the_header_reports_binding_and_plan() {
    let output = program("bench --ranks 2 -b 1K -e 1K -n 20").output().unwrap();
    let printed = text(&output.stdout);
    let header: Vec<_> = printed.lines().take_while(|line| line.starts_with("# ")).collect();
    assert!(header.iter().any(|line| line.contains(" workers 1 bind ")), "{printed}");
    assert!(header.iter().any(|line| line.starts_with("# plan built-in for ")), "{printed}");
}

#[test]
fn a_launchers_ranks_meet_in_a_directory() {
    let folder = Folder::new();
    let path = folder.path().to_str().unwrap();
    let of_option =
        config(&mut program(&format!("bench --ranks 3 -b 1K -e 1K -n 20 --format json --socket-dir {path}")));
    let mut command = program("bench --ranks 2 -b 1K -e 1K -n 20 --format json");
    let of_environment = config(command.env("FAST_ALLREDUCE_SOCKET_DIR", path));
    assert_eq!((&of_option["ranks"], &of_environment["ranks"]), (&3.into(), &2.into()));
    assert_eq!(folder.names(), [""; 0], "nothing is left");
    std::fs::remove_dir(path).unwrap();
    let output = program(&format!("bench --ranks 2 --socket-dir {path}")).output().unwrap();
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(error.contains("socket directory") && error.contains(path), "{error}");
}

/// A single rank that another launcher started waits for its peer.
#[test]
fn ranks_wait_for_each_other_until_the_join_timeout() {
    let folder = Folder::new();
    let refused = |command: &mut Command, limit: &str| {
        command.env("FAST_ALLREDUCE_SOCKET_DIR", folder.path());
        let output =
            command.env("FAST_ALLREDUCE_RANK", "1").env("FAST_ALLREDUCE_WORLD_SIZE", "2").output().unwrap();
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(&format!("timed out after {limit} waiting for rank 0")), "{error}");
        assert!(error.contains("FAST_ALLREDUCE_JOIN_TIMEOUT"), "{error}");
    };
    refused(&mut program("bench --join-timeout 0.25"), "250ms");
    refused(program("bench").env("FAST_ALLREDUCE_JOIN_TIMEOUT", "0.125"), "125ms");
    refused(program("bench --join-timeout 0.25").env("FAST_ALLREDUCE_JOIN_TIMEOUT", "9"), "250ms");
    refused(program("soak").env("FAST_ALLREDUCE_JOIN_TIMEOUT", "0.125"), "125ms");
}
