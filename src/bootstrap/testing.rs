//! Fixtures for the tests of several bootstraps: limits, contributions to gathers, child processes, leak checks.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A limit that no test reaches unless something hangs.
pub(super) const LIMIT: Duration = Duration::from_secs(60);

/// Returns the contribution of `rank` to gather number `round`. Length and contents depend on both.
pub(super) fn contribution(rank: usize, round: usize) -> Vec<u8> {
    let length = (rank * 37 + round * 101) % 1500 * usize::from(round % 7 != 3);
    (0..length).map(|index| (rank * 59 + round * 31 + index) as u8).collect()
}

/// Returns a command that runs only the test `name` of the module `module_path!()` in a separate process. It may be an
/// ignored test: those are the bodies of other tests' child processes.
pub(crate) fn process(module: &str, name: &str) -> Command {
    let (_crate_name, module) = module.split_once("::").unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    let test = format!("{module}::{name}");
    command
        .args(["--exact", &test, "--include-ignored", "--test-threads=1", "--nocapture"])
        .stdin(Stdio::null());
    command
}

/// Runs the test `name` again, alone in a separate process, since it counts resources of the whole process. Returns
/// true in that process.
pub(super) fn is_alone(module: &str, name: &str) -> bool {
    const ALONE: &str = "FAST_ALLREDUCE_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let output = process(module, name).env(ALONE, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "{name} did not run: {text}");
    false
}

/// Returns the numbers of descriptors and of threads of this process.
pub(super) fn resources() -> [usize; 2] {
    ["/proc/self/fd", "/proc/self/task"].map(|folder| std::fs::read_dir(folder).unwrap().count())
}

/// Asserts that this process returns to `resources_before`; threads may take a moment to end.
pub(super) fn assert_released(resources_before: [usize; 2]) {
    let started = Instant::now();
    while resources() != resources_before {
        assert!(
            started.elapsed() < LIMIT,
            "descriptors and threads: {:?}, before: {resources_before:?}",
            resources()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}
