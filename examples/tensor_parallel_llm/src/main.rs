//! A language model of the Llama architecture on several rank processes on CPUs: candle computes, fast-allreduce
//! communicates.
//!
//!     examples/tensor_parallel_llm/fetch-weights.sh
//!     cargo run --release --manifest-path examples/tensor_parallel_llm/Cargo.toml -- --ranks 2 "Once upon a time"
//!
//! The launcher (`launch`) starts a process for each rank (`rank`), which loads its part of the weights (`weights`)
//! into a model (`model`) and generates (`generate`).

mod arguments;
mod backend;
mod config;
mod generate;
mod launch;
mod model;
mod random;
mod rank;
mod text;
mod weights;

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;

/// The reason why a run fails, as text.
type Error = Box<dyn std::error::Error + Send + Sync>;
type Result<T = (), E = Error> = std::result::Result<T, E>;

/// Prints an error in one write, so that lines of several ranks stay whole.
fn print_error(error: &Error) {
    let line = format!("error: {error}\n");
    // An error means that standard error is closed.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

fn main() -> ExitCode {
    let arguments = match arguments::Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            // clap prints help to standard output with status 0, and errors to standard error with status 2.
            let _ = error.print();
            return ExitCode::from(error.exit_code() as u8);
        }
    };
    let outcome = match launch::rank_of_this_process() {
        Some(rank) => rank::run(&arguments).map_err(|error| format!("rank {rank}: {error}").into()),
        None => launch::launch(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(&error);
            ExitCode::FAILURE
        }
    }
}
