//! The output of `topology` for a recorded matrix, and on a machine without GPUs.

mod program;
#[macro_use]
#[path = "../../tests/runner/mod.rs"]
mod runner;

use std::process::{ExitCode, Output};

use program::{results, run, text};
use runner::{always, Found, Missing};

tests! {
    always => a_recorded_matrix_is_printed_with_the_plan_of_each_world, a_file_without_a_matrix_is_refused,
        a_copy_of_sysfs_is_described;
    without_nvml => without_gpus_the_cpus_are_shown;
}

fn main() -> ExitCode {
    runner::run(tests())
}

const EIGHT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recorded/h100-8-nvswitch.txt");

fn a_recorded_matrix_is_printed_with_the_plan_of_each_world() {
    let printed = results(&format!("topology --parse {EIGHT}"));
    let first = printed.lines().next().unwrap();
    assert_eq!(first.split_whitespace().filter(|word| word.starts_with("GPU")).count(), 8, "{first}");
    let row = printed.lines().find(|line| line.starts_with("GPU7")).unwrap();
    assert_eq!(row.matches("NV18").count(), 7, "{row}");
    for world_size in 2..=8 {
        let heading = format!("\n{world_size} ranks on GPUs 0 to {} (nvswitch):\n  up to ", world_size - 1);
        assert!(printed.contains(&heading), "{heading}{printed}");
    }
    assert!(!printed.contains("9 ranks"), "{printed}");
    assert_eq!(printed.matches("any larger size: ").count(), 7, "{printed}");
}

fn a_file_without_a_matrix_is_refused() {
    let manifest = env!("CARGO_MANIFEST_PATH");
    for (file, fact) in [("/nonexistent", "/nonexistent"), (manifest, "topolog"), ("/dev/zero", "16 MiB")] {
        let output = run(&format!("topology --parse {file}"));
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(error.starts_with("error: ") && error.contains(fact), "{error}");
    }
}

fn a_copy_of_sysfs_is_described() {
    let printed = results("topology --sys /sys");
    let ranks =
        "Ranks as `bind` places them: CPUs of each rank, NUMA nodes of their memory, ranks of each socket";
    assert!(printed.starts_with("CPUs ") && printed.contains(ranks), "{printed}");
    let output = run("topology --sys /nonexistent");
    let error = text(&output.stderr);
    assert!(!output.status.success() && error.starts_with("error: reading devices/system/cpu"), "{error}");
}

fn without_nvml() -> Found<Output> {
    let output = run("topology");
    match text(&output.stdout).starts_with("no GPUs: ") {
        true => Ok(output),
        false => Err(Missing::new("no-nvml", "this machine has NVML")),
    }
}

fn without_gpus_the_cpus_are_shown(output: Output) {
    let printed = text(&output.stdout);
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""));
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    assert!(printed.contains(&format!("\nCPUs {}: ", online.trim())), "{printed}");
    let first_level = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index0/size");
    if let Ok(size) = first_level {
        let row = printed.lines().find(|line| line.starts_with("L1")).unwrap();
        assert_eq!(row.split_whitespace().nth(1), Some(size.trim()), "{printed}");
    }
}
