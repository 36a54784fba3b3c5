//! Kernels of `csrc/`, launched directly: the smallest form of what the suites do through the driver.
//!
//! `FAST_ALLREDUCE_PTX` names the PTX of `csrc/cuda/kernels.cu`; without it every test is ignored.

#[path = "../../../../src/abi/bindings.rs"]
#[allow(dead_code, missing_docs, clippy::all)]
mod abi;
#[path = "../../../../src/plan/row_turns.rs"]
mod row_turns;
#[macro_use]
#[path = "../../../../tests/runner/mod.rs"]
mod runner;

mod broadcasts;
mod elements;
mod faults;
mod giving_up;
mod hot;
mod nvls;
mod rows;
mod sharded;
mod world;

use std::process::ExitCode;
use std::sync::OnceLock;

use fast_allreduce_ptx_machine::Program;

use runner::{Found, Missing};

/// Returns the kernels, loaded once.
pub(crate) fn program() -> Found<&'static Program> {
    static PROGRAM: OnceLock<Result<Program, String>> = OnceLock::new();
    found(&PROGRAM, false)
}

/// Returns the kernels, compiled for race detection.
pub(crate) fn observed() -> Found<&'static Program> {
    static PROGRAM: OnceLock<Result<Program, String>> = OnceLock::new();
    found(&PROGRAM, true)
}

fn found(program: &'static OnceLock<Result<Program, String>>, observed: bool) -> Found<&'static Program> {
    let load = || {
        let path =
            std::env::var("FAST_ALLREDUCE_PTX").map_err(|_| "FAST_ALLREDUCE_PTX is not set".to_owned())?;
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        Ok(Program::load(&text, observed).unwrap_or_else(|error| panic!("{path}: {error}")))
    };
    program.get_or_init(load).as_ref().map_err(|reason| Missing::new("ptx", reason))
}

/// Returns whether the file lacks this kernel: with `FAST_ALLREDUCE_PTX_SOME` it has only some kernels, as
/// for planted bugs.
pub(crate) fn is_left_out(program: &Program, kernel: &str) -> bool {
    let is_there = program.kernels().any(|name| name == kernel);
    assert!(is_there || std::env::var_os("FAST_ALLREDUCE_PTX_SOME").is_some(), "there is no {kernel}");
    !is_there
}

fn main() -> ExitCode {
    // A planted bug is found by the first test that fails.
    if std::env::var_os("FAST_ALLREDUCE_PTX_SOME").is_some() {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |failure| {
            report(failure);
            std::process::exit(101);
        }));
    }
    let tests = [
        hot::tests(),
        nvls::tests(),
        broadcasts::tests(),
        rows::tests(),
        sharded::tests(),
        giving_up::tests(),
        faults::tests(),
    ];
    runner::run(tests.into_iter().flatten().collect())
}
