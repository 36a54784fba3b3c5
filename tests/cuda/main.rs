//! The CUDA device, against the same oracle as the host: on a GPU, or with `lab/stand_in_driver` without one.
//!
//! Without a driver or a device every test is ignored. `FAST_ALLREDUCE_REQUIRE`, a list of `cuda`, `two-gpus`, `stand-in` and
//! `no-kernels`, names what must be there. `scripts/test-cuda-stand-in.sh` runs it all with the stand-in.

// Before their macros are used.
#[macro_use]
#[path = "../conformance/suite/mod.rs"]
#[allow(dead_code)]
mod suite;
#[macro_use]
#[path = "../runner/mod.rs"]
mod runner;

mod closing;
mod collectives;
mod concurrency;
mod conformance;
mod cost;
mod driver_errors;
mod errors;
mod fixture;
mod fused;
mod gpu;
mod graphs;
mod hierarchical;
mod hot;
mod in_order;
mod injection;
mod injection_scenario;
mod injection_sweep;
mod lost_context;
mod mixed;
mod modules;
mod nvls;
mod one_launch;
mod pointers;
mod processes;
mod programmatic;
mod quantized;
mod raw;
mod registration;
mod residency;
mod settings;
mod streams;
mod symmetric;
#[path = "../../src/testing/temporary.rs"]
mod temporary;
mod threads;
mod typed;
mod world;

use suite::{oracle, random};

fn main() -> std::process::ExitCode {
    random::say_seed();
    let modules = [
        closing::tests(),
        collectives::tests(),
        concurrency::tests(),
        conformance::tests(),
        cost::tests(),
        driver_errors::tests(),
        errors::tests(),
        graphs::tests(),
        hierarchical::tests(),
        hot::tests(),
        in_order::tests(),
        injection::tests(),
        injection_sweep::tests(),
        lost_context::tests(),
        mixed::tests(),
        modules::tests(),
        nvls::tests(),
        pointers::tests(),
        processes::tests(),
        programmatic::tests(),
        quantized::tests(),
        raw::tests(),
        registration::tests(),
        residency::tests(),
        fused::tests(),
        settings::tests(),
        streams::tests(),
        symmetric::tests(),
        threads::tests(),
        typed::tests(),
        world::tests(),
    ];
    runner::run(modules.into_iter().flatten().collect())
}
