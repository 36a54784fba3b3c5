//! How the ranks of a world come to be and meet: as threads, and as processes.

use std::cell::Cell;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use fast_allreduce::bootstrap::{Bootstrap, Local, Threads, UniqueId};

use super::random::{seed, SEED};

/// A limit that nothing reaches unless something hangs.
pub const LIMIT: Duration = Duration::from_secs(60);

/// What a rank gets, however it was started; it may make several communicators of it.
pub type Rank = Arc<dyn Bootstrap>;

/// A way to start ranks.
pub trait Launch {
    /// Those of `sizes` that can be started; where the world is given, as under `mpirun`, its size.
    fn sizes(&self, sizes: &[usize]) -> Vec<usize> {
        sizes.to_vec()
    }

    /// Runs `body` on each rank of a world; returns when all ranks have, panics if one did.
    fn run(&self, size: usize, body: &(dyn Fn(&Rank) + Sync));
}

/// Threads by `Threads`.
pub struct InThreads;

impl Launch for InThreads {
    fn run(&self, size: usize, body: &(dyn Fn(&Rank) + Sync)) {
        threads(size, |rank| body(&rank));
    }
}

/// Runs `body` on a thread for each rank and returns what each returned.
pub fn threads<R: Send>(size: usize, body: impl Fn(Rank) -> R + Sync) -> Vec<R> {
    let ranks = Threads::world(size).unwrap().into_iter();
    each_in_a_thread(ranks.map(|rank| || Arc::new(rank) as Rank), body)
}

/// Threads by `Local`.
pub struct LocalThreads;

impl Launch for LocalThreads {
    fn run(&self, size: usize, body: &(dyn Fn(&Rank) + Sync)) {
        let id = UniqueId::new().unwrap();
        let id = &id;
        let connect = |rank| move || Arc::new(Local::connect(id, rank, size, LIMIT).unwrap()) as Rank;
        each_in_a_thread((0..size).map(connect), |rank| body(&rank));
    }
}

/// Runs `body` in a thread for each of `ranks`, which meet there.
fn each_in_a_thread<R: Send>(
    ranks: impl Iterator<Item = impl FnOnce() -> Rank + Send>,
    body: impl Fn(Rank) -> R + Sync,
) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let ranks: Vec<_> = ranks.map(|rank| scope.spawn(move || body(rank()))).collect();
        // All end before one is asked, so that the panic seen is not only the first rank's.
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    })
}

/// Processes by `Local`: each runs the same test again, as one rank of one of its worlds.
pub struct LocalProcesses {
    test: &'static str,
    made: Cell<usize>,
    environment: Vec<(&'static str, &'static str)>,
}

/// Number of the world, in a test, that a child process belongs to.
const WORLD: &str = "FAST_ALLREDUCE_TEST_WORLD";

impl LocalProcesses {
    /// Those of a test, as the harness names it.
    pub fn new(test: &'static str) -> Self {
        Self { test, made: Cell::new(0), environment: Vec::new() }
    }

    /// With a variable in the environment of each.
    #[allow(dead_code, reason = "not every target that includes the suite has such worlds")]
    pub fn with(mut self, name: &'static str, value: &'static str) -> Self {
        self.environment.push((name, value));
        self
    }
}

impl Launch for LocalProcesses {
    fn run(&self, size: usize, body: &(dyn Fn(&Rank) + Sync)) {
        let world = self.made.get();
        self.made.set(world + 1);
        match std::env::var(WORLD) {
            // This process is a rank, of this world or of another one of the test.
            Ok(mine) if mine == world.to_string() => {
                let local = Local::from_env().unwrap().expect("the parent sets the id");
                body(&(Arc::new(local) as Rank));
                println!("{}", ran(world));
            }
            Ok(_) => {}
            Err(_) => run_processes(self.test, size, world, &self.environment),
        }
    }
}

/// What a rank tells of a world that it has run to the end.
fn ran(world: usize) -> String {
    format!("world {world} of this test was run")
}

/// Runs a test again in a process for each rank of one of its worlds, with an environment that `Local` reads.
fn run_processes(test: &str, size: usize, world: usize, environment: &[(&str, &str)]) {
    let id = UniqueId::new().unwrap().to_string();
    let start = |rank: usize| {
        let mut command = this_test(test);
        command
            .env("FAST_ALLREDUCE_UNIQUE_ID", &id)
            .env("FAST_ALLREDUCE_RANK", rank.to_string())
            .env("FAST_ALLREDUCE_WORLD_SIZE", size.to_string())
            .env(WORLD, world.to_string())
            .envs(environment.iter().copied());
        Process::start(&mut command)
    };
    // All are started before the first is waited for.
    let ranks: Vec<_> = (0..size).map(start).collect();
    let reports: Vec<_> = ranks.into_iter().map(Process::finish).collect();
    for (rank, report) in reports.into_iter().enumerate() {
        let told = report
            .unwrap_or_else(|report| panic!("rank {rank} of {size}, a process of world {world}: {report}"));
        assert!(told.contains(&ran(world)), "rank {rank} of {size} has not run world {world}: {told}");
    }
}

/// This program, by a name that any user can follow, wherever it lies.
pub const THIS_PROGRAM: &str = "/proc/self/exe";

/// A command that runs the one test `name` alone in a process of its own, with the same seed.
pub fn this_test(name: &str) -> Command {
    let mut command = Command::new(THIS_PROGRAM);
    command
        .args(["--exact", name, "--test-threads=1", "--nocapture"])
        .env(SEED, seed().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A child that does not outlive its test.
pub struct Process(Option<Child>);

impl Process {
    pub fn start(command: &mut Command) -> Self {
        Self(Some(command.spawn().unwrap()))
    }

    /// What it has told, as an error unless the one test passed.
    pub fn finish(mut self) -> Result<String, String> {
        let output = self.0.take().expect("finished once").wait_with_output().map_err(|e| e.to_string())?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() && text.contains("1 passed") {
            return Ok(text);
        }
        Err(format!("{}\n{text}{}", output.status, String::from_utf8_lossy(&output.stderr)))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
