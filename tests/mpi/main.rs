//! Tests under `mpirun`, which starts each rank as a process: the conformance suite (`mpirun`), and the properties of
//! the MPI bootstrap (`parts`). `scripts/test-mpi.sh` runs both; without `mpirun` all tests are ignored.
//!
//! An argument that names a part runs that part. Other arguments are for the runner: with `--test-threads=1` every
//! process runs the same tests in the same order.

#[path = "../hierarchical/calls.rs"]
mod calls;
#[path = "../conformance/fused.rs"]
#[allow(dead_code, unused_imports)]
mod fused;
#[path = "../conformance/host.rs"]
#[allow(dead_code)]
mod host;
#[path = "../hierarchical/reference.rs"]
mod reference;
#[macro_use]
#[path = "../runner/mod.rs"]
mod runner;
#[path = "../conformance/sharded.rs"]
#[allow(dead_code, unused_imports)]
mod sharded;
#[macro_use]
#[path = "../conformance/suite/mod.rs"]
#[allow(dead_code)]
mod suite;

mod mpirun;
mod parts;

use std::process::ExitCode;

use fast_allreduce::bootstrap::Mpi;

fn main() -> ExitCode {
    if parts::run(&std::env::args().nth(1).unwrap_or_default()) {
        return ExitCode::SUCCESS;
    }
    suite::random::say_seed();
    runner::run([mpirun::tests(), mpirun::rows::tests(), parts::tests()].into_iter().flatten().collect())
}

/// Makes a panic end all ranks, which would otherwise wait for this one.
fn end_all_with_this_rank() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        Mpi::abort(101);
    }));
}
