//! What `topology` prints of a recorded matrix, and that it says so where there is none to ask for.

mod program;
#[macro_use]
#[path = "../../tests/runner/mod.rs"]
mod runner;

use std::process::{ExitCode, Output};

use program::{results, run, text};
use runner::{always, Found, Missing};

tests! {
    always => a_recorded_matrix_is_printed_with_the_plan_of_each_world, a_file_that_is_none_is_refused;
    refusal => without_nvml_there_is_an_error;
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

fn a_file_that_is_none_is_refused() {
    for (file, fact) in [("/nonexistent", "/nonexistent"), (env!("CARGO_MANIFEST_PATH"), "topolog")] {
        let output = run(&format!("topology --parse {file}"));
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(error.starts_with("error: ") && error.contains(fact), "{error}");
    }
}

fn refusal() -> Found<Output> {
    let output = run("topology");
    match output.status.success() {
        true => Err(Missing::new("no-nvml", "this machine has NVML")),
        false => Ok(output),
    }
}

fn without_nvml_there_is_an_error(output: Output) {
    let error = text(&output.stderr);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""));
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.starts_with("error: ") && error.contains("NVML"), "{error}");
}
