//! Tests the CUDA device against the oracle that the host is tested with: on a GPU, or without one on
//! `lab/stand_in_driver`.
//!
//! Without a driver or a device every test is ignored. `FAST_ALLREDUCE_REQUIRE` is a list of `cuda`, `two-gpus`,
//! `stand-in` and `no-kernels`: tests fail instead of being ignored if one of these is missing. With `selected`, a
//! filter that selects no test fails.
//! `scripts/test-cuda-stand-in.sh` runs all tests with the stand-in driver.

// These modules come first, as their macros are used below.
#[macro_use]
#[path = "../conformance/suite/mod.rs"]
#[allow(dead_code)]
mod suite;
#[macro_use]
#[path = "../runner/mod.rs"]
mod runner;

mod calls;
mod faults;
mod fixtures;
mod launches;
mod memory;
#[path = "../../src/testing/temporary.rs"]
mod temporary;

use suite::{oracle, random};

fn main() -> std::process::ExitCode {
    random::say_seed();
    let rooms = [calls::tests(), faults::tests(), fixtures::tests(), launches::tests(), memory::tests()];
    runner::run(rooms.into_iter().flatten().collect())
}
