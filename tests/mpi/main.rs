//! Tests of processes that `mpirun` has started, each of which is a rank: the conformance suite (`mpirun`), and what is
//! particular to the MPI bootstrap (`parts`). `scripts/test-mpi.sh` goes through both; elsewhere all of it is ignored.
//!
//! An argument that is the name of a part runs that. Others are for the runner: with `--test-threads=1` every process
//! runs the same tests in the same order.

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

/// From now on a panic ends all ranks, which would wait for this one.
fn end_all_with_this_rank() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        Mpi::abort(101);
    }));
}
