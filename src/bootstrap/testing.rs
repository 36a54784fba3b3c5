//! What the tests of several bootstraps need.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A limit that no test reaches unless something hangs.
pub(super) const LIMIT: Duration = Duration::from_secs(60);

/// What `rank` gives to gather `round`: of a length, and with contents, that tell both.
pub(super) fn contribution(rank: usize, round: usize) -> Vec<u8> {
    let length = (rank * 37 + round * 101) % 1500 * usize::from(round % 7 != 3);
    (0..length).map(|index| (rank * 59 + round * 31 + index) as u8).collect()
}

/// A command that runs the one test `name` of the module `module_path!()` in a process of its own: also one that is ignored
/// elsewhere, as it is a process of other tests.
pub(super) fn process(module: &str, name: &str) -> Command {
    let (_crate_name, module) = module.split_once("::").unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    let test = format!("{module}::{name}");
    command
        .args(["--exact", &test, "--include-ignored", "--test-threads=1", "--nocapture"])
        .stdin(Stdio::null());
    command
}

/// Runs the test `name` again, alone in a process, since what it counts belongs to the whole process.
/// True in that process.
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

/// Descriptors and threads of this process.
pub(super) fn resources() -> [usize; 2] {
    ["/proc/self/fd", "/proc/self/task"].map(|folder| std::fs::read_dir(folder).unwrap().count())
}

/// Asserts that this process comes back to `resources`; threads may take a moment to end.
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
