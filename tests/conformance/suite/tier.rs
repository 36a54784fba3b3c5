//! How much of a test runs: a part by default, and all of it in scripts/nightly.sh. Tests report what they skip.

use std::io::Write as _;

/// Environment variable: 1 runs all of each test.
const FULL: &str = "FAST_ALLREDUCE_TEST_FULL";

pub fn is_full() -> bool {
    std::env::var_os(FULL).is_some_and(|value| value == "1")
}

/// Reports what a test skips. Writes to stderr directly, as the runner captures the output of tests that pass.
pub fn left_out(what: &str) {
    // A test does not fail if stderr is closed.
    let _ = std::io::stderr().write_all(format!("{what}; all with {FULL}=1\n").as_bytes());
}

/// Returns the number of rounds of `test`: `quick` by default.
pub fn rounds(test: &str, all: usize, quick: usize) -> usize {
    if is_full() {
        return all;
    }
    left_out(&format!("{test}: {quick} of {all} rounds"));
    quick
}
