//! Ranks as programs run them: processes that share memory in either way, and threads with a stream each.

use std::time::Duration;

use fast_allreduce::bootstrap::{Local, Threads};
use fast_allreduce::{Algorithm, DType, ReduceOp, Settings, Wait};

use super::budget::Budget;
use super::probe::{context, wait_limit};
use super::record::{answer, check, figure, has_failed, out_of_time};
use super::several;
use crate::arguments::{GpuCheck, Step};
use crate::failure::Failure;
use crate::harness::device::cuda::{Gpu, GpuOptions};
use crate::harness::measure::{Effort, Measure};
use crate::harness::session::Session;

/// Processes that the GPU runs in time slices wait for whole slices.
pub const TIMEOUT: Duration = Duration::from_secs(20);
const SEED: u64 = 0x5eed;
/// The largest count of the checks takes several launches.
const LAUNCH_BYTES: usize = 64 << 10;
/// The ways in which processes share memory, as the setting `sharing` names them.
const SHARING: [&str; 2] = ["descriptor", "ipc"];

/// Returns the settings of a rank's communicator. Ranks wait less long on a GPU with a watchdog.
pub fn rank_settings(options: &GpuCheck, gpu: usize, launch_bytes: usize) -> Result<Settings, Failure> {
    let mut settings = options.settings(launch_bytes)?;
    let limit = wait_limit(gpu, TIMEOUT)?;
    if limit < TIMEOUT && !options.set.iter().any(|(name, _)| name == "timeout") {
        settings.set("timeout", limit.as_secs_f64().to_string())?;
    }
    Ok(settings)
}

/// Returns the options of ranks that all use one GPU.
pub fn gpu_options(
    options: &GpuCheck,
    sharing: Option<&str>,
    launch_bytes: usize,
) -> Result<GpuOptions, Failure> {
    let mut settings = rank_settings(options, options.gpu, launch_bytes)?;
    if let Some(sharing) = sharing {
        settings.set("sharing", sharing)?;
    }
    Ok(GpuOptions { first_gpu: options.gpu, gpus: 1, eager: false, settings })
}

/// Runs the steps of two processes, once for each way to share memory, so that one way can fail alone.
pub fn processes(step: Step, options: &GpuCheck) -> Result<(), Failure> {
    let ways: &[_] = match step {
        Step::IpcHandles => &[Some("ipc")],
        Step::IpcDescriptors => &[Some("descriptor")],
        Step::TimeSlices => &[None],
        _ => &SHARING.map(Some),
    };
    for &sharing in ways {
        // The first rank writes the findings, failed checks included.
        let mut arguments = options.step_arguments(step, Duration::from_millis(options.limit));
        arguments.extend(sharing.iter().flat_map(|sharing| ["--sharing".into(), (*sharing).into()]));
        let Err(failure) = crate::launch::launch(2, arguments) else { continue };
        if let Some(question) = question(step) {
            answer(question, format!("no: {failure}"))?;
        }
        check(sharing.unwrap_or("two processes"), 0, Err(failure))?;
    }
    Ok(())
}

/// Returns the question that a step of two processes answers.
fn question(step: Step) -> Option<&'static str> {
    match step {
        Step::IpcHandles => Some("Do CUDA IPC handles open between two processes on one GPU?"),
        Step::IpcDescriptors => {
            Some("Do file descriptors of VMM memory open between two processes on one GPU?")
        }
        Step::TimeSlices => Some("What does a barrier cost between two processes that the GPU time-slices?"),
        _ => None,
    }
}

/// Runs as one of the ranks of [`processes`].
pub fn rank(options: &GpuCheck) -> Result<bool, Failure> {
    let Some(bootstrap) = Local::from_env()? else {
        return Err(Failure::Usage("the environment names no world".into()));
    };
    let session = Session::new(bootstrap, Wait::Auto, TIMEOUT)?;
    let sharing = options.sharing.as_deref();
    let name = sharing.unwrap_or("two processes");
    let is_first = session.rank() == 0;
    match options.steps.first() {
        Some(&step @ (Step::IpcHandles | Step::IpcDescriptors)) => {
            let gpu_options = gpu_options(options, sharing, LAUNCH_BYTES)?;
            let (cases, outcome) = check_types(&session, &gpu_options, &[DType::F32], &[ReduceOp::Sum], None);
            if let (true, Some(question)) = (is_first, question(step)) {
                answer(
                    question,
                    match &outcome {
                        Ok(()) => format!("yes; {cases} reductions through them are right"),
                        Err(failure) => format!("no: {failure}"),
                    },
                )?;
                check(name, cases, outcome)?;
            }
        }
        Some(Step::Processes) => {
            let budget = Budget::share(options, SHARING.len() as u32);
            let (dtypes, ops) = dtypes_and_ops(options);
            let gpu_options = gpu_options(options, sharing, LAUNCH_BYTES)?;
            let (cases, outcome) = check_types(&session, &gpu_options, dtypes, ops, Some(budget));
            if is_first {
                check(name, cases, outcome)?;
            }
        }
        Some(&step @ Step::TimeSlices) => {
            let (mean, median) = time_slices(&session, options)?;
            if let (true, Some(question)) = (is_first, question(step)) {
                answer(question, format!("mean {mean:.1} us, median {median:.1} us (plain calls)"))?;
            }
        }
        Some(&step @ (Step::Peers | Step::Nvls | Step::Gpus)) => several::rank(step, &session, options)?,
        _ => return Err(Failure::Usage("this step has no ranks".into())),
    }
    Ok(!has_failed())
}

/// Returns the mean and the median time, in microseconds, of the smallest pull between two processes that the GPU
/// runs in time slices.
fn time_slices(session: &Session, options: &GpuCheck) -> Result<(f64, f64), Failure> {
    let gpu_options = GpuOptions { eager: true, ..gpu_options(options, None, 64 << 10)? };
    let gpu = Gpu::new(session, &gpu_options, Some(Algorithm::OneShotPull))?;
    let effort = Effort { iterations: Some(20), warmup: 2, checks: 1, registered: false };
    let mut measure = Measure { session, effort, seed: SEED, round: 0 };
    let work = measure.all_reduce(DType::F32, 1, ReduceOp::Sum);
    let timing = measure.row(&gpu, &work)?.out_of_place;
    if session.rank() == 0 {
        let table = "Microseconds of plain calls of two time-sliced processes, one-shot-pull of 1 element";
        figure(table, "one barrier", "mean", timing.time_us)?;
        figure(table, "one barrier", "p50", timing.p50_us)?;
    }
    Ok((timing.time_us, timing.p50_us))
}

/// Runs ranks as threads of this process, for each number of ranks; every rank calls `run`.
pub fn as_threads(
    worlds: &[usize],
    name: &str,
    run: impl Fn(&Session) -> Result<(), Failure> + Sync,
) -> Result<(), Failure> {
    for &world_size in worlds {
        if let Err(failure) = run_threads(world_size, &run) {
            check(format!("{name}, world of {world_size}"), 0, Err(failure))?;
        }
    }
    Ok(())
}

/// Runs ranks as threads of this process. Returns the failure that explains most.
pub fn run_threads(
    world_size: usize,
    run: &(impl Fn(&Session) -> Result<(), Failure> + Sync),
) -> Result<(), Failure> {
    let bootstraps = Threads::world(world_size)?;
    let outcomes: Vec<Result<(), Failure>> = std::thread::scope(|scope| {
        let start = |bootstrap| scope.spawn(|| run(&Session::new(bootstrap, Wait::Auto, TIMEOUT)?));
        let ranks: Vec<_> = bootstraps.into_iter().map(start).collect();
        let panicked = || Failure::Ranks("a rank's thread has panicked".into());
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| Err(panicked()))).collect()
    });
    let failures =
        outcomes.into_iter().enumerate().filter_map(|(rank, outcome)| Some((rank, outcome.err()?)));
    // A failure that another rank caused explains less than one that it did not.
    match failures.min_by_key(|(_, failure)| failure.is_consequence()) {
        Some((rank, failure)) => Err(Failure::OfRank(rank.to_string(), Box::new(failure))),
        None => Ok(()),
    }
}

pub fn threads(options: &GpuCheck, budget: Budget) -> Result<(), Failure> {
    let _context = context(options.gpu)?;
    let (dtypes, ops) = dtypes_and_ops(options);
    as_threads(&[2, 4], "ranks as threads", |session| {
        let gpu_options = gpu_options(options, None, LAUNCH_BYTES)?;
        let (cases, outcome) = check_types(session, &gpu_options, dtypes, ops, Some(budget));
        match session.rank() {
            0 => check(format!("ranks as threads, world of {}", session.world_size()), cases, outcome),
            _ => Ok(()),
        }
    })
}

fn dtypes_and_ops(options: &GpuCheck) -> (&'static [DType], &'static [ReduceOp]) {
    match options.small {
        true => (&[DType::F16, DType::F32, DType::I8], &[ReduceOp::Sum]),
        false => (&DType::ALL, &ReduceOp::ARITHMETIC),
    }
}

/// Checks every direct algorithm with these types and operations: private and registered inputs, out of place and
/// in place. Returns the number of cases and the outcome, which are equal on all ranks unless one fails.
/// Collective.
pub fn check_types(
    session: &Session,
    gpu_options: &GpuOptions,
    dtypes: &[DType],
    ops: &[ReduceOp],
    budget: Option<Budget>,
) -> (u64, Result<(), Failure>) {
    let mut cases = 0;
    let mut run = || {
        let make = |algorithm| Gpu::new(session, gpu_options, Some(algorithm));
        let gpus = Algorithm::DIRECT.into_iter().map(make).collect::<Result<Vec<_>, _>>()?;
        for registered in [false, true] {
            // The times of these calls are not used.
            let effort = Effort { iterations: Some(1), warmup: 0, checks: 1, registered };
            let mut measure = Measure { session, effort, seed: SEED, round: 0 };
            for (&op, &dtype) in ops.iter().flat_map(|op| dtypes.iter().map(move |dtype| (op, dtype))) {
                // The first rank decides for all.
                let is_spent = budget.is_some_and(Budget::is_spent);
                if session.of_first(u64::from(is_spent))? != 0 {
                    return match session.rank() {
                        0 => out_of_time(format!("after {cases} cases with {} ranks", session.world_size())),
                        _ => Ok(()),
                    };
                }
                // The last count takes several launches.
                for count in [1, 1001, 40_001] {
                    let work = measure.all_reduce(dtype, count, op);
                    for (gpu, algorithm) in gpus.iter().zip(Algorithm::DIRECT) {
                        let wrong = measure.wrong(gpu, &work)?;
                        // Out of place and in place.
                        cases += 2;
                        if wrong > 0 {
                            return Err(Failure::Ranks(format!(
                                "{wrong} wrong elements: {algorithm} of {count} {dtype}, {op}, registered: {registered}"
                            )));
                        }
                    }
                }
            }
        }
        Ok(())
    };
    let outcome = run();
    (cases, outcome)
}
