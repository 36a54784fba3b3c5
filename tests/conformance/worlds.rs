//! Worlds to test in: each way in which ranks can meet, behind one call that runs a body on every rank.

use std::cell::Cell;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::{Bootstrap, Local, Threads, UniqueId};
use fast_allreduce::device::host::Isa;
use fast_allreduce::{Algorithm, Communicator, Host, Wait};

use crate::random::{seed, SEED};

/// A limit that nothing reaches unless something hangs.
pub const LIMIT: Duration = Duration::from_secs(60);

/// What a rank of any transport gets; it may make several communicators of it.
pub type Rank = Arc<dyn Bootstrap>;

/// How the ranks meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    Threads,
    LocalThreads,
    LocalProcesses,
    #[cfg(feature = "mpi")]
    Mpirun,
}

/// Number of the world, in a test, that a child process belongs to.
const WORLD: &str = "FAST_ALLREDUCE_TEST_WORLD";

/// The worlds of one test, one after the other.
pub struct Worlds {
    transport: Transport,
    /// As the test harness names it.
    test: &'static str,
    made: Cell<usize>,
}

impl Worlds {
    /// `path` is the test's `module_path!()`, with the crate's name, and its function.
    pub fn new(transport: Transport, path: &'static str) -> Self {
        let (_crate_name, test) = path.split_once("::").expect("a test is in a module");
        Self { transport, test, made: Cell::new(0) }
    }

    /// All of `sizes` between threads by `Threads`; elsewhere, where the kernels are the same, the first two.
    pub fn sizes<'a>(&self, sizes: &'a [usize]) -> &'a [usize] {
        match self.transport {
            Transport::Threads => sizes,
            #[cfg(feature = "mpi")]
            Transport::Mpirun => crate::mpirun::sizes(),
            _ => &sizes[..sizes.len().min(2)],
        }
    }

    pub fn is_threads(&self) -> bool {
        self.transport == Transport::Threads
    }

    /// Runs `body` on each rank of a world of `size`, with what `prepare` made; returns when all ranks have, panics if one did.
    pub fn run<P: Sync>(&self, size: usize, prepare: impl FnOnce() -> P, body: impl Fn(&Rank, &P) + Sync) {
        let world = self.made.get();
        self.made.set(world + 1);
        match self.transport {
            Transport::Threads => {
                let prepared = prepare();
                threads(size, |rank| body(&rank, &prepared));
            }
            Transport::LocalThreads => {
                let prepared = prepare();
                let id = UniqueId::new().unwrap();
                std::thread::scope(|scope| {
                    for rank in 0..size {
                        let (id, prepared, body) = (&id, &prepared, &body);
                        scope.spawn(move || {
                            body(
                                &(Arc::new(Local::connect(id, rank, size, LIMIT).unwrap()) as Rank),
                                prepared,
                            );
                        });
                    }
                });
            }
            Transport::LocalProcesses => match std::env::var(WORLD) {
                // This process is a rank, of this world or of another one of the test.
                Ok(mine) if mine == world.to_string() => {
                    let local = Local::from_env().unwrap().expect("the parent sets the id");
                    body(&(Arc::new(local) as Rank), &prepare());
                }
                Ok(_) => {}
                Err(_) => self.run_processes(world, size),
            },
            #[cfg(feature = "mpi")]
            Transport::Mpirun => {
                if let Some(rank) = crate::mpirun::rank(size) {
                    body(&rank, &prepare());
                }
            }
        }
    }

    /// Runs this test again in a process for each rank.
    fn run_processes(&self, world: usize, size: usize) {
        let id = UniqueId::new().unwrap();
        let ranks = (0..size).map(|rank| {
            let mut command = this_test(self.test);
            command
                .env("FAST_ALLREDUCE_UNIQUE_ID", id.to_string())
                .env("FAST_ALLREDUCE_RANK", rank.to_string())
                .env("FAST_ALLREDUCE_WORLD_SIZE", size.to_string())
                .env(WORLD, world.to_string());
            Process(Some(command.spawn().unwrap()))
        });
        // All are started before the first is waited for.
        let ranks: Vec<_> = ranks.collect();
        let reports: Vec<_> = ranks.into_iter().map(Process::finish).collect();
        for (rank, report) in reports.into_iter().enumerate() {
            if let Err(report) = report {
                panic!("rank {rank} of {size}, a process: {report}");
            }
        }
    }
}

/// A command that runs the one test `name` alone in a process of its own, with the same seed.
pub fn this_test(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", name, "--test-threads=1", "--nocapture"])
        .env(SEED, seed().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A child that does not outlive its test.
pub struct Process(pub Option<Child>);

impl Process {
    /// Its output, as an error unless the one test passed.
    pub fn finish(mut self) -> Result<(), String> {
        let output = self.0.take().expect("finished once").wait_with_output().map_err(|e| e.to_string())?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() && text.contains("1 passed") {
            return Ok(());
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

/// Runs `body` on a thread for each rank and returns what each returned.
pub fn threads<R: Send>(size: usize, body: impl Fn(Rank) -> R + Sync) -> Vec<R> {
    let ranks = Threads::world(size).unwrap();
    std::thread::scope(|scope| {
        let body = &body;
        let ranks = ranks.into_iter().map(|rank| scope.spawn(move || body(Arc::new(rank))));
        let ranks: Vec<_> = ranks.collect();
        // All end before one is asked, so that the panic seen is not only the first rank's.
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    })
}

/// How a communicator is made.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    pub algorithm: Option<Algorithm>,
    pub max_bytes: usize,
    pub workers: usize,
    pub isa: Isa,
    pub first_epoch: u32,
    pub timeout: Duration,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            algorithm: None,
            max_bytes: 64 << 10,
            workers: 1,
            isa: Isa::best(),
            first_epoch: 0,
            timeout: LIMIT / 2,
        }
    }
}

impl Setup {
    pub fn with(algorithm: impl Into<Option<Algorithm>>) -> Self {
        Self { algorithm: algorithm.into(), ..Self::default() }
    }

    pub fn try_build(&self, rank: &Rank) -> fast_allreduce::Result<Communicator<Host>> {
        let device = Host::new().isa(self.isa)?.workers(self.workers)?.wait(Wait::Yield);
        Communicator::builder()
            .algorithm(self.algorithm)
            .max_bytes(self.max_bytes)
            .first_epoch(self.first_epoch)
            .timeout(self.timeout)
            .build(device, Arc::clone(rank))
    }

    pub fn build(&self, rank: &Rank) -> Communicator<Host> {
        self.try_build(rank).unwrap()
    }
}

/// Waits until `reached`, which something else makes true.
pub fn wait_until(what: &str, mut reached: impl FnMut() -> bool) {
    let started = Instant::now();
    while !reached() {
        assert!(started.elapsed() < LIMIT, "waited too long: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
