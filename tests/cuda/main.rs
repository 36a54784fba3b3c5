//! The CUDA device, against the same oracle as the host: on a GPU, or with `lab/stand_in_driver` without one.
//!
//! Without a driver or a device every test is ignored. `FAST_ALLREDUCE_REQUIRE`, a list of `cuda`, `two-gpus`,
//! `stand-in` and `no-kernels`, names what must be there. `scripts/test-cuda-stand-in.sh` runs it all with the
//! stand-in.

// Before their macros are used.
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
