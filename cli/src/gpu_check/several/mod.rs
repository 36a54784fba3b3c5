//! The steps for several GPUs, each with one rank: `peers`, `nvls` and `gpus`.

mod fit;
mod gpus;
mod nvls;
mod pair;
mod peers;

use std::process::ExitCode;
use std::time::Duration;

use fast_allreduce::MAX_RANKS;

use super::record::skipped;
use crate::arguments::{GpuCheck, Step};
use crate::failure::Failure;
use crate::harness::device::cuda;
use crate::harness::session::Session;

/// Runs a step as the process that starts its ranks.
pub fn run(step: Step, options: &GpuCheck) -> Result<(), Failure> {
    let count = cuda::gpus()?.min(MAX_RANKS);
    match step {
        _ if count < 2 => skipped(step.name(), super::ONE_GPU),
        Step::Peers => peers::run(options, count),
        Step::Nvls => nvls::run(options, count),
        _ => gpus::run(options, count),
    }
}

/// Runs a step as one of its ranks.
pub fn rank(step: Step, session: &Session, options: &GpuCheck) -> Result<(), Failure> {
    match step {
        Step::Peers => {
            let way = options.sharing.as_deref().unwrap_or("descriptor");
            peers::rank(session, options, way).map(drop)
        }
        Step::Nvls => nvls::rank(session, options),
        _ => gpus::rank(session, options),
    }
}

/// Starts the ranks of a step as processes, and waits for them. The first one writes the findings. Returns whether no
/// check of theirs failed.
fn launch(step: Step, options: &GpuCheck, ranks: usize, more: &[&str]) -> Result<bool, Failure> {
    let mut arguments = options.step_arguments(step, Duration::from_millis(options.limit));
    arguments.extend(more.iter().map(Into::into));
    Ok(crate::launch::launch(ranks, arguments)? == ExitCode::SUCCESS)
}

/// Returns the ordinal of a rank's GPU: as `--gpus` lists them, or the rank.
fn ordinal(options: &GpuCheck, rank: usize) -> usize {
    options.gpus.get(rank).copied().unwrap_or(rank)
}
