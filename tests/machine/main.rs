//! Tests that need something a machine may lack. Each names its requirement and is ignored without it.

#[path = "../conformance/suite/launch.rs"]
#[allow(dead_code)]
mod launch;
#[macro_use]
#[path = "../runner/mod.rs"]
mod runner;
#[path = "../../src/testing/temporary.rs"]
mod temporary;
#[path = "../conformance/suite/tier.rs"]
#[allow(dead_code)]
mod tier;
#[path = "../faults/fixtures/world.rs"]
#[allow(dead_code)]
mod world;

mod checkpoint;
mod control_groups;
mod discovery;
mod large;
mod namespaces;
mod recorded;
mod stalled;
mod targets;
mod users;

use fast_allreduce_oracle::random;

fn main() -> std::process::ExitCode {
    let modules = [
        checkpoint::tests(),
        control_groups::tests(),
        discovery::tests(),
        large::tests(),
        namespaces::tests(),
        recorded::tests(),
        stalled::tests(),
        targets::tests(),
        users::tests(),
    ];
    runner::run(modules.into_iter().flatten().collect())
}
