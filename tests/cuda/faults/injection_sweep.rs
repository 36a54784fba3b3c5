//! Lets every driver call of the crate fail, on each rank, with each way of sharing memory: either one call alone, or
//! with an error that the context does not survive. Then either all ranks must get an error or all a correct result, no
//! resource of either rank may leak, and no rank may wait for long.
//!
//! `FAST_ALLREDUCE_TEST_SWEEP` is the number of seconds to run, `all`, or one case as error messages name it; without
//! it nothing runs. With a time limit a sample runs: first one call of each function in each world, then further calls
//! of each, chosen by the seed of the tests.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use cudarc::driver::{result, sys, CudaContext};
use fast_allreduce::bootstrap::{Local, Threads, UniqueId};
use fast_allreduce::device::cuda::Sharing;

use crate::faults::injection_scenario::{run, Bench, Kept, Outcome, LIMIT};
use crate::fixtures::gpu::{context, stand_in_of_parent, Gpus};
use crate::fixtures::injection::{aside, fail, live, own_calls, take_back, Of};
use crate::fixtures::processes::{part, this_test};
use crate::random::Random;
use crate::runner::{Found, Missing};
use crate::suite::launch::Rank;

tests! {
    sweep => every_call_fails_once;
}

const TEST: &str = "faults::injection_sweep::every_call_fails_once";
const SWEEP: &str = "FAST_ALLREDUCE_TEST_SWEEP";

/// Ends a process that hangs. A failed rank has to be noticed long before, and no wait may be longer than the timeout
/// of a call plus that of closing.
const PATIENCE: Duration = Duration::from_secs(30);

/// Longest duration of a step, or of closing: a call's timeout, plus the time that a rank has to close its mappings, on
/// a busy machine.
const LONGEST: Duration = Duration::from_secs(10);

/// A world of two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct World {
    processes: bool,
    devices: usize,
    sharing: Sharing,
}

const RANKS: usize = 2;

const WORLDS: [World; 6] = [
    World { processes: false, devices: 1, sharing: Sharing::Pointers },
    World { processes: false, devices: 2, sharing: Sharing::Pointers },
    World { processes: false, devices: 1, sharing: Sharing::Descriptor },
    World { processes: false, devices: 2, sharing: Sharing::Ipc },
    World { processes: true, devices: 1, sharing: Sharing::Descriptor },
    World { processes: true, devices: 2, sharing: Sharing::Ipc },
];

/// The call of a function that fails, and how the ranks continue.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Case {
    world: usize,
    function: String,
    nth: u64,
    victim: usize,
    goes_on: bool,
    code: u32,
}

/// `CUDA_ERROR_UNKNOWN`, returned by one call.
const UNKNOWN: u32 = 999;
/// `CUDA_ERROR_ILLEGAL_ADDRESS`, returned by all later calls too.
const ILLEGAL_ADDRESS: u32 = 700;

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { world, function, nth, victim, goes_on, code } = self;
        let World { processes, devices, sharing } = WORLDS[*world];
        let kind = if processes { "processes" } else { "threads" };
        let then = if *goes_on { "goes on" } else { "leaves" };
        let name = self.name();
        write!(
            f,
            "{SWEEP}={name} ({kind}, {devices} GPUs, {sharing:?}: call {nth} of {function} fails with {code} on \
             rank {victim}, which {then})"
        )
    }
}

impl Case {
    /// Returns the case in the format of [`SWEEP`].
    fn name(&self) -> String {
        let Self { world, function, nth, victim, goes_on, code } = self;
        format!("{world}:{function}:{nth}:{victim}:{goes_on}:{code}")
    }

    fn parse(name: &str) -> Option<Self> {
        let fields: Vec<&str> = name.split(':').collect();
        let [world, function, nth, victim, goes_on, code] = fields[..] else { return None };
        Some(Self {
            world: world.parse().ok().filter(|&world| world < WORLDS.len())?,
            function: function.into(),
            nth: nth.parse().ok()?,
            victim: victim.parse().ok().filter(|&victim| victim < RANKS)?,
            goes_on: goes_on.parse().ok()?,
            code: code.parse().ok()?,
        })
    }
}

/// A rank's report of a case.
#[derive(Debug, Default)]
struct Report {
    steps: Vec<StepReport>,
    /// The number of this rank's calls of each function.
    calls: BTreeMap<String, u64>,
    /// Whether the injected failure happened.
    happened: bool,
    /// The time outside of the steps, in which the communicator is closed.
    closing: Duration,
}

/// A rank's report of a step. Its outcome is `+` (right), `-` (failed) or `!` (wrong).
#[derive(Debug)]
struct StepReport {
    name: String,
    agreed: bool,
    outcome: char,
    took: Duration,
    problem: String,
}

// The worker process.

/// Reads cases, runs this process's ranks of them, and prints the results.
fn work() {
    // SAFETY: the contexts stay retained, so that live objects can be compared.
    let contexts = [0, 1].map(context);
    let mut lines = std::io::stdin().lines();
    while let Some(line) = lines.next() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let [world, rank, id, function, nth, victim, goes_on, code] = words[..] else { panic!("{line}") };
        let before = live();
        let World { processes, devices, sharing } = WORLDS[world.parse::<usize>().unwrap()];
        let (nth, victim, goes_on, code): (u64, usize, bool, u32) =
            (nth.parse().unwrap(), victim.parse().unwrap(), goes_on == "true", code.parse().unwrap());
        let made = Barrier::new(if processes { 1 } else { RANKS });
        let run = |bootstrap: Box<dyn FnOnce() -> Rank + Send>, rank: usize| {
            let bench = aside(|| Bench::new(rank % devices));
            // If one thread's context is lost, it may be that of the other rank too.
            made.wait();
            let started = Instant::now();
            let bootstrap = bootstrap();
            if rank == victim && nth > 0 {
                fail(function, nth, code, Of::ThisThread);
            }
            let (steps, kept) = run(bootstrap, bench, sharing, goes_on);
            let elapsed = started.elapsed() - steps.iter().map(|step| step.took).sum::<Duration>();
            for step in steps {
                let outcome = match step.outcome {
                    Outcome::Right => '+',
                    Outcome::Failed => '-',
                    Outcome::Wrong => '!',
                };
                let (took, problem) = (step.took.as_millis(), step.problem.replace('\n', " "));
                println!("@step {rank}|{}|{}|{outcome}|{took}|{problem}", step.name, step.agreed);
            }
            for (function, calls) in own_calls() {
                println!("@calls {rank}|{function}|{calls}");
            }
            println!("@closed {rank}|{}", elapsed.as_millis());
            // The receiver drops it within `aside`.
            kept
        };
        let run = &run;
        let kept: Vec<Kept> = std::thread::scope(|scope| {
            let ranks: Vec<_> = if processes {
                let rank: usize = rank.parse().unwrap();
                let id: UniqueId = id.parse().unwrap();
                let connect = move || Arc::new(Local::connect(&id, rank, RANKS, LIMIT).unwrap()) as Rank;
                vec![scope.spawn(move || run(Box::new(connect), rank))]
            } else {
                let ranks = Threads::world(RANKS).unwrap().into_iter().enumerate();
                ranks
                    .map(|(rank, bootstrap)| {
                        scope.spawn(move || run(Box::new(move || Arc::new(bootstrap) as Rank), rank))
                    })
                    .collect()
            };
            ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
        });
        let left = take_back();
        println!("@ran {left}");
        // All ranks have finished.
        assert_eq!(lines.next().expect("a line").unwrap(), "release");
        aside(|| drop(kept));
        for context in contexts.iter().filter(|context| is_lost(context)) {
            // A reset of the context frees all its objects.
            // SAFETY: the context is not used any more.
            aside(|| unsafe { sys::cuDevicePrimaryCtxReset_v2(context.cu_device()) }).result().unwrap();
        }
        let after = live();
        let kinds: std::collections::BTreeSet<_> = before.keys().chain(after.keys()).collect();
        for kind in kinds {
            let count = |of: &BTreeMap<String, u64>| of.get(kind).copied().unwrap_or(0) as i64;
            // Objects that an earlier case had to keep may have been freed since.
            if count(&after) > count(&before) {
                println!("@left {kind}|{}", count(&after) - count(&before));
            }
        }
        println!("@done");
    }
}

/// Returns whether the context has an error that it does not survive.
fn is_lost(context: &CudaContext) -> bool {
    aside(|| {
        // SAFETY: the context is retained.
        unsafe { result::ctx::set_current(context.cu_ctx()) }.unwrap();
        result::mem_get_info().is_err()
    })
}

// The parent process.

/// A process that runs ranks. It is restarted if it ends.
struct Worker {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Worker {
    fn start() -> Self {
        let mut command = this_test(TEST, "worker");
        command.stdin(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (send, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines() {
                let Ok(line) = line else { return };
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        let input = child.stdin.take().unwrap();
        Self { child, input, lines }
    }

    fn say(&mut self, line: &str) {
        // A write error means that the worker has ended; this is noticed when its answer is missing.
        let _ = writeln!(self.input, "{line}").and_then(|()| self.input.flush());
    }

    /// Reads the lines up to one that begins with `end`.
    fn until(&mut self, end: &str) -> Result<Vec<String>, String> {
        let deadline = Instant::now() + PATIENCE;
        let mut lines = Vec::new();
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) if line.contains(end) => {
                    lines.push(line);
                    return Ok(lines);
                }
                Ok(line) => lines.push(line),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(format!("hangs for more than {PATIENCE:?}, after {:?}", lines.last()));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.child.wait();
                    return Err(format!("the process ended: {status:?}, after {:?}", lines.last()));
                }
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The processes that run one case together.
#[derive(Default)]
struct Workers(Vec<Worker>);

impl Workers {
    /// Runs a case. Returns each rank's report, and the objects that either rank leaked.
    fn run(&mut self, case: &Case) -> Result<([Report; RANKS], BTreeMap<String, i64>), String> {
        let ran = self.try_run(case);
        if ran.is_err() {
            self.0.clear();
        }
        ran
    }

    fn try_run(&mut self, case: &Case) -> Result<([Report; RANKS], BTreeMap<String, i64>), String> {
        let count = if WORLDS[case.world].processes { RANKS } else { 1 };
        while self.0.len() < count {
            self.0.push(Worker::start());
        }
        let workers = &mut self.0[..count];
        // The rendezvous process waits until all ranks have joined and left, so worlds of threads must not start one.
        let id = WORLDS[case.world].processes.then(|| UniqueId::new().unwrap().to_string());
        let id = id.as_deref().unwrap_or("none");
        let Case { world, function, nth, victim, goes_on, code } = case;
        for (rank, worker) in workers.iter_mut().enumerate() {
            worker.say(&format!("{world} {rank} {id} {function} {nth} {victim} {goes_on} {code}"));
        }
        let mut reports: [Report; RANKS] = Default::default();
        let mut left = BTreeMap::new();
        for (rank, worker) in workers.iter_mut().enumerate() {
            let lines = worker.until("@ran").map_err(|problem| format!("rank {rank}: {problem}"))?;
            for line in lines {
                read(&line, rank == *victim || count == 1, *victim, &mut reports);
            }
        }
        // The victim is released first: its peers have closed their mappings of its memory, and its own mappings end
        // with its context if that is lost.
        let in_turns = if count == 1 { vec![0] } else { vec![*victim, RANKS - 1 - victim] };
        for rank in in_turns {
            let worker = &mut workers[rank];
            worker.say("release");
            let lines =
                worker.until("@done").map_err(|problem| format!("rank {rank}, at its end: {problem}"))?;
            for line in lines {
                if let Some((kind, count)) = line.strip_prefix("@left ").and_then(|rest| rest.split_once('|'))
                {
                    *left.entry(kind.to_owned()).or_insert(0) += count.parse::<i64>().unwrap();
                }
            }
        }
        Ok((reports, left))
    }
}

/// Adds one line of a worker to the reports.
fn read(line: &str, of_victim: bool, victim: usize, reports: &mut [Report; RANKS]) {
    // The test harness prints the name of the test before the first line.
    let Some(at) = line.find('@') else { return };
    let Some((what, rest)) = line[at + 1..].split_once(' ') else { return };
    let fields: Vec<&str> = rest.splitn(6, '|').collect();
    let rank = || fields[0].parse::<usize>().unwrap();
    match what {
        "step" => {
            let [_, name, agreed, outcome, took, problem] = fields[..] else { panic!("{line}") };
            reports[rank()].steps.push(StepReport {
                name: name.into(),
                agreed: agreed == "true",
                outcome: outcome.chars().next().unwrap(),
                took: milliseconds(took),
                problem: problem.into(),
            });
        }
        "calls" => {
            reports[rank()].calls.insert(fields[1].into(), fields[2].parse().unwrap());
        }
        "closed" => reports[rank()].closing = milliseconds(fields[1]),
        "ran" if of_victim => reports[victim].happened = rest == "0",
        _ => {}
    }
}

fn milliseconds(text: &str) -> Duration {
    Duration::from_millis(text.parse().unwrap())
}

/// Returns the violations in a case that was run.
fn faults(case: &Case, reports: &[Report; RANKS], left: &BTreeMap<String, i64>) -> Vec<String> {
    let mut faults = Vec::new();
    for (rank, report) in reports.iter().enumerate() {
        for StepReport { name, outcome, took, problem, .. } in &report.steps {
            if *outcome == '!' {
                faults.push(format!("rank {rank}, {name}: Ok and wrong: {problem}"));
            }
            if *took > LONGEST {
                faults.push(format!("rank {rank}, {name}: takes {took:?}; {problem}"));
            }
        }
        if report.closing > LONGEST {
            faults.push(format!("rank {rank} takes {:?} to close", report.closing));
        }
    }
    for StepReport { name, outcome, problem, .. } in reports[0].steps.iter().filter(|step| step.agreed) {
        let Some(other) = reports[1].steps.iter().find(|step| step.name == *name) else { continue };
        if other.outcome != *outcome {
            let (theirs, their_problem) = (other.outcome, &other.problem);
            faults.push(format!(
                "{name}: {outcome} {problem:?} on rank 0, {theirs} {their_problem:?} on rank 1"
            ));
        }
    }
    let failure = |rank: usize| reports[rank].steps.iter().find(|step| step.outcome == '-');
    for (rank, other) in [(0, 1), (1, 0)] {
        if let (Some(StepReport { name, problem, .. }), None) = (failure(rank), failure(other)) {
            faults.push(format!("rank {rank} fails in {name}: {problem:?}; rank {other} is never notified"));
        }
        // After a failed call the ranks may be out of step, so the last step must not succeed.
        let call = reports[rank].steps.iter().find(|step| !step.agreed && step.outcome == '-');
        let Some(StepReport { name, problem, .. }) = call else { continue };
        for (which, report) in reports.iter().enumerate() {
            if report.steps.iter().any(|step| step.name == "farewell" && step.outcome == '+') {
                faults.push(format!(
                    "rank {rank} fails in {name}: {problem:?}; rank {which} completes its last step"
                ));
            }
        }
    }
    for (kind, count) in left {
        if !may_stay(&case.function, kind, *count) && !stays_open(case, reports, kind) {
            faults.push(format!("left over: {count} of {kind}"));
        }
    }
    faults
}

/// Returns whether an object may leak because the function that frees it failed.
fn may_stay(function: &str, kind: &str, count: i64) -> bool {
    let kinds: &[&str] = match function {
        "cuMemFree" => &["cuMemAlloc"],
        "cuMemFreeAsync" => &["cuMemAllocAsync", "cuMemAlloc"],
        "cuMemFreeHost" => &["cuMemHostAlloc"],
        "cuStreamDestroy" => &["cuStreamCreate"],
        "cuEventDestroy" => &["cuEventCreate"],
        "cuModuleUnload" => &["cuModuleLoad"],
        "cuMemUnmap" => &["cuMemMap", "cuMemAddressReserve", "cuMemCreate"],
        "cuMemAddressFree" => &["cuMemAddressReserve"],
        "cuMemRelease" => &["cuMemCreate"],
        // The peer keeps memory that may still be read.
        "cuIpcCloseMemHandle" => &["cuIpcOpenMemHandle", "cuMemAlloc", "freed while open elsewhere"],
        "cuDevicePrimaryCtxRelease" => &["cuDevicePrimaryCtxRetain"],
        _ => &[],
    };
    count == 1 && kinds.contains(&kind)
}

/// Returns whether objects may stay on all ranks, because memory that peers have open is not freed. This happens if a
/// communicator is closed without knowing whether its calls have ended, if its context is lost, or if a rank waited in
/// vain for its peer while closing.
fn stays_open(case: &Case, reports: &[Report; RANKS], kind: &str) -> bool {
    const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
    const WAITS: [&str; 5] = [
        "cuStreamIsCapturing",
        "cuStreamSynchronize",
        "cuEventSynchronize",
        "cuCtxGetCurrent",
        "cuCtxSetCurrent",
    ];
    let in_closing = reports.iter().all(|report| report.steps.iter().all(|step| step.outcome == '+'));
    let late = reports.iter().any(|report| report.closing >= CLOSE_TIMEOUT);
    let World { processes, sharing, .. } = WORLDS[case.world];
    let is_open = sharing == Sharing::Ipc && (late || in_closing && WAITS.contains(&case.function.as_str()));
    // A caller's slice that could not be registered stays too, with what it keeps alive.
    let is_lost = processes && case.code == ILLEGAL_ADDRESS;
    match kind {
        "cuMemAlloc" | "cuDevicePrimaryCtxRetain" => is_open || is_lost,
        "cuEventCreate" | "cuStreamCreate" => is_lost,
        _ => false,
    }
}

/// Returns all cases in the order of execution: first one call of each function in each world, then another call of
/// each, and so on.
fn cases(profiles: &[[Report; RANKS]], random: &mut Random) -> Vec<Case> {
    let mut queues: Vec<VecDeque<Case>> = Vec::new();
    for (world, reports) in profiles.iter().enumerate() {
        for (victim, report) in reports.iter().enumerate() {
            for (function, &calls) in &report.calls {
                let mut queue: Vec<Case> = (1..=calls)
                    .map(|nth| {
                        let goes_on = random.one_in(2);
                        let code = if random.one_in(3) { ILLEGAL_ADDRESS } else { UNKNOWN };
                        Case { world, function: function.clone(), nth, victim, goes_on, code }
                    })
                    .collect();
                shuffle(&mut queue, random);
                queues.push(queue.into());
            }
        }
    }
    shuffle(&mut queues, random);
    let mut all = Vec::new();
    while queues.iter().any(|queue| !queue.is_empty()) {
        all.extend(queues.iter_mut().filter_map(VecDeque::pop_front));
    }
    all
}

fn shuffle<T>(values: &mut [T], random: &mut Random) {
    for last in (1..values.len()).rev() {
        values.swap(last, random.below(last + 1));
    }
}

/// The sweep runs only on request, and only with the stand-in driver.
fn sweep() -> Found<Option<Gpus>> {
    let gpus = stand_in_of_parent()?;
    match gpus.is_some() && asked().is_empty() {
        true => Err(Missing::new("sweep", format!("{SWEEP} is not set"))),
        false => Ok(gpus),
    }
}

fn asked() -> String {
    std::env::var(SWEEP).unwrap_or_default()
}

fn every_call_fails_once() {
    if part().is_some() {
        return work();
    }
    let asked = asked();
    let one = Case::parse(&asked);
    let alone = one.is_some();
    let budget = asked.parse().ok().map(Duration::from_secs);
    assert!(one.is_some() || budget.is_some() || asked == "all", "{SWEEP}={asked} is not valid");
    let started = Instant::now();
    let mut random = Random::new(TEST);
    let mut workers = Workers::default();
    let profiles: Vec<_> = (0..WORLDS.len())
        .map(|world| {
            let (function, code) = ("nothing".into(), UNKNOWN);
            let case = Case { world, function, nth: 0, victim: 0, goes_on: false, code };
            let (reports, left) = workers.run(&case).unwrap();
            assert_eq!(faults(&case, &reports, &left), [""; 0], "{case}: without a failure");
            assert!(
                reports.iter().all(|report| report.steps.iter().all(|step| step.outcome == '+')),
                "{reports:?}"
            );
            reports
        })
        .collect();
    let all = one.map_or_else(|| cases(&profiles, &mut random), |case| vec![case]);
    let count = all.len();
    let queue = Mutex::new(VecDeque::from(all));
    let found = Mutex::new(Vec::new());
    let (ran, missed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    // Two cases run concurrently, as ranks mostly wait.
    std::thread::scope(|scope| {
        for mut workers in [workers, Workers::default()] {
            let (queue, found, ran, missed) = (&queue, &found, &ran, &missed);
            scope.spawn(move || {
                while budget.is_none_or(|budget| started.elapsed() < budget) {
                    let Some(case) = queue.lock().unwrap().pop_front() else { return };
                    let faults = match workers.run(&case) {
                        Ok((reports, left)) => {
                            // Ranks that are threads free shared objects in an order that depends on timing, so an
                            // injected failure may not happen.
                            missed.fetch_add(usize::from(!reports[case.victim].happened), Relaxed);
                            if alone {
                                println!("{reports:#?}");
                            }
                            faults(&case, &reports, &left)
                        }
                        Err(problem) => vec![problem],
                    };
                    ran.fetch_add(1, Relaxed);
                    if !faults.is_empty() {
                        println!("{case}:");
                        faults.iter().for_each(|fault| println!("    {fault}"));
                        found.lock().unwrap().push(case);
                    }
                }
            });
        }
    });
    let (ran, found) = (ran.into_inner(), found.into_inner().unwrap());
    println!(
        "{ran} of {count} failing calls were run, in {} of which the failure did not happen; seed {}, {:?}",
        missed.into_inner(),
        crate::random::seed(),
        started.elapsed()
    );
    assert!(found.is_empty(), "{} cases have faults", found.len());
    assert!(ran > 0, "no case was run");
}
