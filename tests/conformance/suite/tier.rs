//! How much of a test is run: a part by default, and all of it in CI. What is left out is said.

use std::io::Write as _;

/// 1 for all of each test.
const FULL: &str = "FAST_ALLREDUCE_TEST_FULL";

pub fn is_full() -> bool {
    std::env::var_os(FULL).is_some_and(|value| value == "1")
}

/// Says what a test leaves out, past the runner, which keeps what a test that passes prints.
pub fn left_out(what: &str) {
    // A test does not fail for want of a terminal.
    let _ = std::io::stderr().write_all(format!("{what}; all with {FULL}=1\n").as_bytes());
}

/// How many rounds `test` is to run: `all`, or by default `quick` of them.
pub fn rounds(test: &str, all: usize, quick: usize) -> usize {
    if is_full() {
        return all;
    }
    left_out(&format!("{test}: {quick} of {all} rounds"));
    quick
}
