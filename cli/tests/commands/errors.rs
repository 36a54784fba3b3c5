//! Impossible options are refused with one line and exit status 2.

use crate::program::{run, text};

fn refused(arguments: &str, facts: &[&str]) {
    let output = run(arguments);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments}: {error}");
    assert_eq!(error.lines().count(), 1, "{arguments}: {error}");
    assert!(error.starts_with("error: "), "{arguments}: {error}");
    for fact in facts {
        assert!(error.contains(fact), "{arguments}: {error}");
    }
    assert_eq!(text(&output.stdout), "", "{arguments}");
}

#[test]
fn unknown_flags_and_values() {
    refused("bench --rank 3", &["--rank", "similar", "--ranks"]);
    refused("bench -d f9", &["f9", "bf16"]);
    refused("bench -d f16 -o bxor", &["bxor", "integers", "f16"]);
    refused("bench -d i8 -o premul_sum:2", &["premul_sum:2", "floats", "i8"]);
    refused("bench -o premul_sum", &["SCALE"]);
    refused("bench -o mean", &["mean", "avg"]);
    refused("bench --algo tree", &["tree", "two-shot-push", "halving-doubling"]);
    refused("bench --set order=random", &["--set", "order = random", "one of fixed, any"]);
    refused("compare --set order", &["--set", "a name, = and a value"]);
    refused("tune --set colour=red", &["setting = colour", "one of device, timeout", "order", "sharing"]);
    for (name, value, option) in [
        ("device", "cuda", "--device"),
        ("timeout", "1", "--timeout"),
        ("join_timeout", "1", "--join-timeout"),
        ("algorithm", "ring", "--algo"),
        ("bind", "none", "--bind"),
    ] {
        refused(&format!("bench --set {name}={value}"), &[name, "an option of its own", option]);
    }
    refused("bench --bind socket", &["--bind", "bind = socket", "one of none, core, numa"]);
    refused("bench --device tpu", &["tpu", "cuda"]);
    refused("bench --isa vax", &["vax", "baseline"]);
    refused("bench --format xml", &["xml", "json"]);
    refused("bench -n 0", &["--iters", "from 1"]);
    refused("bench --timeout 0", &["--timeout", "positive"]);
    refused("bench -i 4 -f 2", &["--stepbytes", "--stepfactor"]);
    refused("frobnicate", &["frobnicate"]);
    refused("--verbose", &["--version"]);
}

#[test]
fn collectives() {
    refused("bench --collective all_scatter", &["all_scatter", "all_gather_v", "send_recv"]);
    refused("bench --collective broadcast --root 4", &["--root 4", "0 to 3"]);
    refused("compare --collective gather -r 2 --ranks 2", &["--root 2", "0 to 1"]);
    refused("bench --collective all_gather -r 0", &["--root", "scatter", "all_gather"]);
    refused("bench -r 0", &["--root", "all_reduce"]);
    refused("bench --collective reduce --algo ring", &["--algo", "all_reduce", "reduce"]);
    refused("bench --collective all --algo auto", &["--algo", "all_reduce"]);
}

#[test]
fn nodes() {
    refused("compare --nodes 2", &["--nodes 2", "mpirun --host node0:2,node1:2"]);
    refused("bench --nodes 0", &["--nodes", "1 to 16"]);
    refused("bench --nodes 2 --registered", &["--nodes 2 has no --registered"]);
    refused("bench --nodes 2 --algo ring", &["--nodes 2 has no --algo"]);
    refused("bench --nodes 2 --suspend", &["--nodes 2 has no --suspend"]);
    refused("bench --nodes 2 --device cuda", &["--nodes 2 has no --device cuda"]);
    refused("bench --nodes 2 --collective all", &["--nodes 2 has no collectives other than all_reduce"]);
    refused("compare --vs gloo --collective all_reduce_fused", &["--vs gloo has no all_reduce_fused"]);
}

#[test]
fn sizes() {
    refused("bench -b 4K -e 1K", &["4096", "1024"]);
    refused("bench -b 3X", &["3X", "K, M, G or T"]);
    refused("bench -e 99999999999G", &["64 bits"]);
    refused("bench -i 0", &["--stepbytes 0"]);
    refused("bench -f 1", &["--stepfactor 1"]);
    refused("bench -b 0 -f 2", &["--minbytes 0", "--stepbytes"]);
    refused("bench -e 1000T", &["memory", "4 ranks"]);
}

#[test]
fn options_of_another_device() {
    refused("bench --device cuda --set workers=2", &["workers = 2", "a setting of CPUs"]);
    refused("bench --set sharing=ipc", &["sharing = ipc", "a setting of GPUs"]);
    refused("tune --device cuda --set wait=spin", &["wait = spin", "a setting of CPUs"]);
    refused("bench --device cuda --isa baseline", &["--isa", "host"]);
    refused("bench --eager", &["--eager", "cuda"]);
    refused("gpu-check --step nonsense", &["nonsense", "world"]);
}

#[test]
fn worlds() {
    refused("bench --ranks 17", &["17", "16"]);
    refused("bench --ranks 0", &["0", "16"]);
}

#[test]
fn more_memory_than_the_machine_has() {
    refused("bench --ranks 2 -e 1K --set max_bytes=1024G", &["cannot allocate", "available"]);
}

#[test]
fn refusals_of_the_library_are_printed_once() {
    refused("bench --set max_bytes=1 -e 1K", &["max_bytes = 1", "4 KiB"]);
    refused("bench --set workers=65 -e 1K", &["workers = 65", "64"]);
}
