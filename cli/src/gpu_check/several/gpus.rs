//! The step `gpus`: calls between GPUs are checked, then timed beside NCCL's.

use fast_allreduce::{Algorithm, CallKind, DType, ReduceOp};

use super::launch;
use crate::arguments::{GpuCheck, RivalName, Step};
use crate::compare::contenders::Contenders;
use crate::failure::Failure;
use crate::gpu_check::budget::Budget;
use crate::gpu_check::ranks::{check_types, rank_settings, run_threads};
use crate::gpu_check::record::{check, fact, figure, out_of_time, skipped};
use crate::harness::device::cuda::{Gpu, GpuOptions, GRAPH_CALLS, MEGABYTE};
use crate::harness::measure::{Effort, Measure};
use crate::harness::session::Session;
use crate::harness::work::Work;

const SEED: u64 = 0x5eed;

/// Runs worlds of processes, then one of threads.
pub fn run(options: &GpuCheck, count: usize) -> Result<(), Failure> {
    let budget = Budget::of(options);
    let worlds: Vec<usize> = match options.small {
        true => vec![count],
        // The largest world first: it is the most informative one.
        false => (2..=count).rev().collect(),
    };
    for ranks in worlds {
        if budget.is_spent() {
            return out_of_time(format!("worlds of {ranks} GPUs and fewer"));
        }
        // The ranks divide what is left of the time.
        let left = GpuCheck { limit: budget.left().as_millis() as u64, ..options.clone() };
        if let Err(failure) = launch(Step::Gpus, &left, ranks, &[]) {
            check(format!("{ranks} GPUs, processes"), 0, Err(failure))?;
        }
    }
    if budget.is_spent() {
        return out_of_time("ranks as threads");
    }
    let outcome = run_threads(count, &|session| {
        let cases = conformance(session, options, budget)?;
        report(session, "threads", cases)
    });
    outcome.or_else(|failure| check(format!("{count} GPUs, threads"), 0, Err(failure)))
}

/// Runs as one of the ranks that are processes.
pub fn rank(session: &Session, options: &GpuCheck) -> Result<(), Failure> {
    // Half of the time is for worlds of fewer GPUs.
    let cases = conformance(session, options, Budget::share(options, 4))?;
    report(session, "processes", cases)?;
    bench(session, options, Budget::share(options, 4))
}

/// Reports cases that are right. A failure is every rank's result, and [`run`] reports the one that explains most.
fn report(session: &Session, kind: &str, cases: u64) -> Result<(), Failure> {
    match session.rank() {
        0 => check(format!("{} GPUs, {kind}", session.world_size()), cases, Ok(())),
        _ => Ok(()),
    }
}

fn gpu_options(session: &Session, options: &GpuCheck, launch_bytes: usize) -> Result<GpuOptions, Failure> {
    let settings = rank_settings(options, session.rank(), launch_bytes)?;
    Ok(GpuOptions { first_gpu: 0, gpus: session.world_size(), eager: false, settings })
}

/// Checks every direct algorithm, type and operation, then every collective. Returns the number of cases. Collective.
fn conformance(session: &Session, options: &GpuCheck, budget: Budget) -> Result<u64, Failure> {
    const LAUNCH_BYTES: usize = 64 << 10;
    let gpu_options = gpu_options(session, options, LAUNCH_BYTES)?;
    let (dtypes, ops) = match options.small {
        true => (&[DType::F32][..], &[ReduceOp::Sum][..]),
        false => (&DType::ALL[..], &ReduceOp::ARITHMETIC[..]),
    };
    let (mut cases, outcome) = check_types(session, &gpu_options, dtypes, ops, Some(budget));
    outcome?;
    let gpu = Gpu::new(session, &gpu_options, None)?;
    let effort = Effort { iterations: Some(1), warmup: 0, checks: 1, registered: false };
    let mut measure = Measure { session, effort, seed: SEED, round: 0 };
    for kind in CallKind::MEASURED {
        // Ranks in one collective, messages between all pairs, and from the last root.
        for (dtype, root) in [(DType::F32, 0), (DType::Bf16, session.world_size() - 1)] {
            for elements in [session.world_size(), 40_001] {
                let (rank, ranks) = (session.rank(), session.world_size());
                let work = Work::new(kind, dtype, ReduceOp::Sum, root, elements, rank, ranks);
                let wrong = measure.wrong(&gpu, &work)?;
                cases += 1;
                if wrong > 0 {
                    let what =
                        format!("{wrong} wrong elements: {} of {elements} {dtype}, root {root}", kind.name());
                    return Err(Failure::Ranks(what));
                }
            }
        }
    }
    Ok(cases)
}

/// Times the plan's choice beside NCCL. Collective.
fn bench(session: &Session, options: &GpuCheck, budget: Budget) -> Result<(), Failure> {
    const SIZES: [usize; 8] = [1 << 10, 8 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20, 8 << 20, 64 << 20];
    let sizes = if options.small { &SIZES[1..2] } else { &SIZES[..] };
    let is_first = session.rank() == 0;
    let launch_bytes = MEGABYTE * if options.small { 1 } else { 64 };
    let mut gpus = Vec::new();
    for programmatic in ["0", "1"] {
        let mut gpu_options = gpu_options(session, options, launch_bytes)?;
        gpu_options.settings.set("programmatic_launch", programmatic)?;
        gpus.push(Gpu::new(session, &gpu_options, None)?);
    }
    let entered = Contenders::new(&[RivalName::Nccl, RivalName::Memcpy], session, &gpus[0])?;
    for left in entered.unavailable().iter().filter(|_| is_first) {
        skipped(format!("{} beside {} GPUs", left.name, session.world_size()), &left.reason)?;
    }
    let contenders = entered.all(&gpus);
    let effort = Effort { iterations: None, warmup: GRAPH_CALLS, checks: 1, registered: false };
    let mut measure = Measure { session, effort, seed: SEED, round: 0 };
    let table = format!(
        "bf16 sum between {} GPUs: microseconds of a call in a graph of {GRAPH_CALLS}",
        session.world_size()
    );
    let mut wrong = Vec::new();
    for &bytes in sizes {
        // The first rank decides for all.
        if session.of_first(u64::from(budget.is_spent()))? != 0 {
            if is_first {
                out_of_time(format!("{table}: from {bytes} B on"))?;
            }
            break;
        }
        let work = measure.all_reduce(DType::Bf16, bytes / 2, ReduceOp::Sum);
        let (timings, _) = measure.contest(&contenders, 3, &work)?;
        let columns = ["ours", "ours, programmatic launch"].into_iter().map(str::to_owned);
        let columns = columns.chain(contenders.iter().skip(2).map(|contender| contender.name().to_owned()));
        for (column, timing) in columns.zip(timings) {
            let Some(timing) = timing else { continue };
            if let Some(elements @ 1..) = timing.wrong {
                wrong.push(format!("{elements} wrong elements of {bytes} B, {column}"));
            }
            if is_first {
                figure(&table, bytes, column, timing.time_us)?;
            }
        }
        if let (true, Some(algorithm)) = (is_first, contenders[0].algorithm(&work).map(Algorithm::name)) {
            fact(format!("plan of {bytes} B, {} GPUs", session.world_size()), algorithm)?;
        }
    }
    match is_first && !wrong.is_empty() {
        true => check(table, 1, Err(Failure::Ranks(wrong.join("; ")))),
        false => Ok(()),
    }
}
