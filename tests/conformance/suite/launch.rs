//! Ways to start and connect the ranks of a world: as threads, and as processes.

use std::cell::Cell;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use fast_allreduce::bootstrap::{Bootstrap, Local, Threads, UniqueId};

use super::random::{seed, SEED};

/// A timeout that only a hang reaches.
pub const LIMIT: Duration = Duration::from_secs(60);

/// A rank's bootstrap, however the rank was started; several communicators can be created from it.
pub type Rank = Arc<dyn Bootstrap>;

/// A way to start ranks.
pub trait Launch {
    /// Returns those of `sizes` that can be started. If the world is given, as under `mpirun`, returns its size.
    fn sizes(&self, sizes: &[usize]) -> Vec<usize> {
        sizes.to_vec()
    }

    /// Runs `body` on each rank of a world. Returns after all ranks have returned, and panics if one panicked.
    fn run(&self, size: usize, body: &(dyn Fn(&Rank) + Sync));
}

/// Ranks as threads, connected by `Threads`.
pub struct InThreads;

impl Launch for InThreads {
    fn run(&self, size: usize, body: &(dyn Fn(&Rank) + Sync)) {
        threads(size, |rank| body(&rank));
    }
}

/// Runs `body` on a thread for each rank, and returns the results.
pub fn threads<R: Send>(size: usize, body: impl Fn(Rank) -> R + Sync) -> Vec<R> {
    let ranks = Threads::world(size).unwrap().into_iter();
    each_in_a_thread(ranks.map(|rank| || Arc::new(rank) as Rank), body)
}

/// Ranks as threads, connected by `Local`.
pub struct LocalThreads;

impl Launch for LocalThreads {
    fn run(&self, size: usize, body: &(dyn Fn(&Rank) + Sync)) {
        let id = UniqueId::new().unwrap();
        let id = &id;
        let connect = |rank| move || Arc::new(Local::connect(id, rank, size, LIMIT).unwrap()) as Rank;
        each_in_a_thread((0..size).map(connect), |rank| body(&rank));
    }
}

/// Runs `body` in a thread for each of `ranks`, and returns the results.
fn each_in_a_thread<R: Send>(
    ranks: impl Iterator<Item = impl FnOnce() -> Rank + Send>,
    body: impl Fn(Rank) -> R + Sync,
) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let ranks: Vec<_> = ranks.map(|rank| scope.spawn(move || body(rank()))).collect();
        // Collected first, so that all threads end before the first panic is propagated.
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    })
}

/// Ranks as processes, connected by `Local`: each runs the same test again, as one rank of one of its worlds.
pub struct LocalProcesses {
    test: &'static str,
    made: Cell<usize>,
    environment: Vec<(&'static str, &'static str)>,
}

/// Environment variable of a child process: the number of its world within the test.
const WORLD: &str = "FAST_ALLREDUCE_TEST_WORLD";

impl LocalProcesses {
    /// Creates the launch of a test, given the name that the test harness uses.
    pub fn new(test: &'static str) -> Self {
        Self { test, made: Cell::new(0), environment: Vec::new() }
    }

    /// Sets an environment variable in each process.
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

/// Returns the line that a rank prints after it has completed a world.
fn ran(world: usize) -> String {
    format!("world {world} of this test was run")
}

/// Runs a test again in a process for each rank of one of its worlds. `Local` reads the environment that this sets.
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
    // Starts all processes before it waits for the first.
    let ranks: Vec<_> = (0..size).map(start).collect();
    let reports: Vec<_> = ranks.into_iter().map(Process::finish).collect();
    for (rank, report) in reports.into_iter().enumerate() {
        let output = report
            .unwrap_or_else(|report| panic!("rank {rank} of {size}, a process of world {world}: {report}"));
        assert!(output.contains(&ran(world)), "rank {rank} of {size} has not run world {world}: {output}");
    }
}

/// The path of this program, readable by any user wherever the program is stored.
pub const THIS_PROGRAM: &str = "/proc/self/exe";

/// Creates a command that runs the test `name` alone in a separate process, with the same seed.
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

/// A child process that is killed with its test.
pub struct Process(Option<Child>);

impl Process {
    pub fn start(command: &mut Command) -> Self {
        Self(Some(command.spawn().unwrap()))
    }

    /// Waits for the process. Returns its output, or an error unless exactly one test passed.
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
