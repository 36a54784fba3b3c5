//! Ranks as they are in use: processes that share memory in one way or the other, and threads with a stream each.

use std::time::Duration;

use fast_allreduce::bootstrap::{Local, Threads};
use fast_allreduce::device::cuda::Sharing;
use fast_allreduce::{Algorithm, DType, ReduceOp, Wait};

use super::record::{has_failed, Record};
use super::steps::Budget;
use crate::arguments::{GpuCheck, SharingName, Step};
use crate::failure::Failure;
use crate::harness::device::cuda::{Gpu, Settings};
use crate::harness::measure::{Effort, Measure};
use crate::harness::session::Session;

/// Ranks that take turns on a GPU wait for whole turns.
pub const TIMEOUT: Duration = Duration::from_secs(20);
const SEED: u64 = 0x5eed;

impl SharingName {
    const ALL: [Self; 2] = [Self::Descriptor, Self::Ipc];

    fn sharing(self) -> Sharing {
        match self {
            Self::Descriptor => Sharing::Descriptor,
            Self::Ipc => Sharing::Ipc,
        }
    }

    fn argument(self) -> &'static str {
        match self {
            Self::Descriptor => "descriptor",
            Self::Ipc => "ipc",
        }
    }
}

/// One GPU for all ranks.
pub fn settings(
    options: &GpuCheck,
    sharing: Option<Sharing>,
    launch_bytes: usize,
) -> Result<Settings, Failure> {
    let mut given = fast_allreduce::Settings::new();
    given.set("device", "cuda")?;
    given.set("timeout", TIMEOUT.as_secs_f64().to_string())?;
    given.set("max_bytes", launch_bytes.to_string())?;
    if let Some(sharing) = sharing {
        given.set("sharing", sharing.name())?;
    }
    if options.small {
        given.set("max_blocks", "8")?;
    }
    Ok(Settings { first_gpu: options.gpu, gpus: 1, eager: false, given })
}

/// Checks only: the times of such calls are not meant.
fn checking(session: &Session, registered: bool) -> Measure<'_> {
    let effort = Effort { iterations: Some(1), warmup: 0, checks: 1, registered };
    Measure { session, effort, seed: SEED, round: 0 }
}

/// The steps that two processes do: for each way to share memory, so that one way can fail alone.
pub fn processes(step: Step, options: &GpuCheck) -> Result<(), Failure> {
    let ways: &[_] = match step {
        Step::IpcHandles => &[Some(SharingName::Ipc)],
        Step::IpcDescriptors => &[Some(SharingName::Descriptor)],
        Step::TimeSlices => &[None],
        _ => &SharingName::ALL.map(Some),
    };
    for &sharing in ways {
        let Err(failure) = launch(step, options, sharing) else { continue };
        let name = sharing.map_or("two processes", |sharing| sharing.sharing().name());
        if let Some(question) = question(step) {
            Record::answer(question, format!("no: {failure}")).write()?;
        }
        Record::check(name, 0, Err(failure)).write()?;
    }
    Ok(())
}

/// What the step of two processes answers.
fn question(step: Step) -> Option<&'static str> {
    match step {
        Step::IpcHandles => Some("Do CUDA IPC handles open between two processes on one GPU?"),
        Step::IpcDescriptors => {
            Some("Do file descriptors of VMM memory open between two processes on one GPU?")
        }
        Step::TimeSlices => Some("What does a barrier between two processes cost that the GPU runs in turn?"),
        _ => None,
    }
}

/// Runs this step's two ranks. The first one writes what they find.
fn launch(step: Step, options: &GpuCheck, sharing: Option<SharingName>) -> Result<(), Failure> {
    let (step, gpu, limit) = (step.name(), options.gpu.to_string(), options.limit.to_string());
    let mut arguments = vec!["gpu-check", "--alone", "--step", &step, "--gpu", &gpu, "--limit", &limit];
    if options.small {
        arguments.push("--small");
    }
    if let Some(sharing) = sharing {
        arguments.extend(["--sharing", sharing.argument()]);
    }
    // What was wrong is among the records of the first rank.
    crate::launch::launch(2, arguments.into_iter().map(Into::into)).map(|_| ())
}

/// As one of those ranks.
pub fn rank(options: &GpuCheck) -> Result<bool, Failure> {
    let Some(bootstrap) = Local::from_env()? else {
        return Err(Failure::Usage("the environment names no world".into()));
    };
    let session = Session::new(bootstrap, Wait::Auto, TIMEOUT)?;
    let sharing = options.sharing.map(SharingName::sharing);
    let name = sharing.map_or("two processes", Sharing::name);
    match options.steps.first() {
        Some(&step @ (Step::IpcHandles | Step::IpcDescriptors)) => {
            let checked = check_types(&session, options, sharing, &[DType::F32], &[ReduceOp::Sum], None);
            if let (0, Some(question)) = (session.rank(), question(step)) {
                let answer = match &checked.outcome {
                    Ok(()) => format!("yes; {} reductions through them are right", checked.cases),
                    Err(failure) => format!("no: {failure}"),
                };
                Record::answer(question, answer).write()?;
            }
            first(&session, || checked.into_record(name))
        }
        Some(Step::Processes) => {
            let budget = Budget::share(options, SharingName::ALL.len() as u32);
            let (dtypes, ops) = dtypes_and_ops(options);
            let outcome = check_types(&session, options, sharing, dtypes, ops, Some(budget));
            first(&session, || outcome.into_record(name))
        }
        Some(&step @ Step::TimeSlices) => {
            let (mean, median) = fixed_between_processes(&session, options)?;
            match (session.rank(), question(step)) {
                (0, Some(question)) => {
                    let answer =
                        format!("{mean:.1} us on average, {median:.1} us in the median (plain calls)");
                    Record::answer(question, answer).write()
                }
                _ => Ok(()),
            }
        }
        _ => Err(Failure::Usage("this step has no ranks".into())),
    }?;
    Ok(!has_failed())
}

/// The smallest pull, by two processes that the GPU runs in turn: the mean and the median, in microseconds.
fn fixed_between_processes(session: &Session, options: &GpuCheck) -> Result<(f64, f64), Failure> {
    let settings = Settings { eager: true, ..settings(options, None, 64 << 10)? };
    let gpu = Gpu::new(session, &settings, Some(Algorithm::OneShotPull))?;
    let effort = Effort { iterations: Some(20), warmup: 2, checks: 1, registered: false };
    let mut measure = Measure { session, effort, seed: SEED, round: 0 };
    let work = measure.all_reduce(DType::F32, 1, ReduceOp::Sum);
    let row = measure.row(&gpu, &work)?;
    if session.rank() == 0 {
        let table =
            "Microseconds of plain calls of two processes that take turns, one-shot-pull of 1 element";
        for (column, value) in [("mean", row.out_of_place.time_us), ("p50", row.out_of_place.p50_us)] {
            Record::figure(table, "one barrier", column, value).write()?;
        }
    }
    Ok((row.out_of_place.time_us, row.out_of_place.p50_us))
}

/// Ranks as threads of this process, for each world; every rank calls `run`.
pub fn as_threads(
    worlds: &[usize],
    name: &str,
    run: impl Fn(&Session) -> Result<(), Failure> + Sync,
) -> Result<(), Failure> {
    for &world_size in worlds {
        let bootstraps = Threads::world(world_size)?;
        let outcomes: Vec<Result<(), Failure>> = std::thread::scope(|scope| {
            let start = |bootstrap| scope.spawn(|| run(&Session::new(bootstrap, Wait::Auto, TIMEOUT)?));
            let ranks: Vec<_> = bootstraps.into_iter().map(start).collect();
            let outcome = |rank: std::thread::ScopedJoinHandle<'_, Result<(), Failure>>| {
                rank.join().unwrap_or_else(|_| Err(Failure::Ranks("a rank's thread has panicked".into())))
            };
            ranks.into_iter().map(outcome).collect()
        });
        let failures =
            outcomes.into_iter().enumerate().filter_map(|(rank, outcome)| Some((rank, outcome.err()?)));
        // Of those who suffer from another and those who do not, the latter tell why.
        if let Some((rank, failure)) = failures.min_by_key(|(_, failure)| failure.is_consequence()) {
            let failure = Failure::OfRank(rank.to_string(), Box::new(failure));
            Record::check(format!("{name}, world of {world_size}"), 0, Err(failure)).write()?;
        }
    }
    Ok(())
}

/// The step `threads`.
pub fn threads(options: &GpuCheck, budget: Budget) -> Result<(), Failure> {
    let (dtypes, ops) = dtypes_and_ops(options);
    as_threads(&[2, 4], "ranks as threads", |session| {
        let outcome = check_types(session, options, None, dtypes, ops, Some(budget));
        first(session, || {
            outcome.into_record(&format!("ranks as threads, world of {}", session.world_size()))
        })
    })
}

fn dtypes_and_ops(options: &GpuCheck) -> (&'static [DType], &'static [ReduceOp]) {
    match options.small {
        true => (&[DType::F16, DType::F32, DType::I8], &[ReduceOp::Sum]),
        false => (&DType::ALL, &ReduceOp::ARITHMETIC),
    }
}

/// Writes a record if this rank speaks for all.
fn first(session: &Session, record: impl FnOnce() -> Record) -> Result<(), Failure> {
    match session.rank() {
        0 => record().write(),
        _ => Ok(()),
    }
}

/// What was checked, equal on all ranks unless one failed.
struct Checked {
    cases: u64,
    outcome: Result<(), Failure>,
}

impl Checked {
    fn into_record(self, name: &str) -> Record {
        Record::check(name, self.cases, self.outcome)
    }
}

/// Every algorithm, private and registered inputs, out of place and in place, for these types and operations. Collective.
fn check_types(
    session: &Session,
    options: &GpuCheck,
    sharing: Option<Sharing>,
    dtypes: &[DType],
    ops: &[ReduceOp],
    budget: Option<Budget>,
) -> Checked {
    let mut cases = 0;
    let outcome = check_types_counting(session, options, sharing, dtypes, ops, budget, &mut cases);
    Checked { cases, outcome }
}

fn check_types_counting(
    session: &Session,
    options: &GpuCheck,
    sharing: Option<Sharing>,
    dtypes: &[DType],
    ops: &[ReduceOp],
    budget: Option<Budget>,
    cases: &mut u64,
) -> Result<(), Failure> {
    const LAUNCH_BYTES: usize = 64 << 10;
    let settings = settings(options, sharing, LAUNCH_BYTES)?;
    let make = |algorithm| Gpu::new(session, &settings, Some(algorithm));
    let gpus = Algorithm::DIRECT.into_iter().map(make).collect::<Result<Vec<_>, _>>()?;
    for registered in [false, true] {
        let mut measure = checking(session, registered);
        for (&op, &dtype) in ops.iter().flat_map(|op| dtypes.iter().map(move |dtype| (op, dtype))) {
            // One of them decides for all.
            let is_spent = budget.is_some_and(Budget::is_spent);
            if session.of_first(u64::from(is_spent))? != 0 {
                return first(session, || {
                    Record::skipped(
                        format!("what came after {cases} cases with {} ranks", session.world_size()),
                        "the step's time was over",
                    )
                });
            }
            // The last takes several launches.
            for count in [1, 1001, 40_001] {
                let work = measure.all_reduce(dtype, count, op);
                for (gpu, algorithm) in gpus.iter().zip(Algorithm::DIRECT) {
                    let wrong = measure.wrong(gpu, &work)?;
                    // Out of place and in place.
                    *cases += 2;
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
}
