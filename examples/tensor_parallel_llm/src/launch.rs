//! Starts a process for each rank, and waits for all of them.

use std::io::Read as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use fast_allreduce::bootstrap::UniqueId;

use crate::arguments::{Arguments, Weights};
use crate::{weights, Result};

const RANK: &str = "FAST_ALLREDUCE_RANK";

/// Set for ranks that this program started, whose standard input closes when this program ends.
const LAUNCHED: &str = "TENSOR_PARALLEL_LLM_LAUNCHED";

/// Variables in which MPI launchers pass the rank.
const MPI_RANKS: [&str; 3] = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"];

/// Time for the other ranks to print their errors after one has failed.
const GRACE: Duration = Duration::from_secs(2);

pub const WITHOUT_MPI: &str = "this build is without MPI: build it with --features mpi";

/// Returns the rank of this process, if it is one.
pub fn rank_of_this_process() -> Option<usize> {
    let number = |name| std::env::var(name).ok()?.parse().ok();
    std::iter::once(RANK).chain(MPI_RANKS).find_map(number)
}

/// Returns the number of candle's threads in each rank.
pub fn threads(arguments: &Arguments, ranks: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    arguments.threads.unwrap_or((cores / ranks).max(1))
}

/// Ends this rank when the launcher ends, for whatever reason.
pub fn end_with_launcher() {
    if std::env::var_os(LAUNCHED).is_some() {
        std::thread::spawn(|| {
            // Returns only at the end of the input.
            let _ = std::io::stdin().read(&mut [0]);
            std::process::exit(1);
        });
    }
}

pub fn launch(arguments: &Arguments) -> Result {
    if let Weights::File(path) = arguments.weights() {
        (0..arguments.ranks).try_for_each(|rank| weights::check_is_there(&weights::path_of(&path, rank)))?;
    }
    if arguments.backend.needs_mpi() {
        return by_mpirun(arguments.ranks);
    }
    let id = UniqueId::new()?;
    let mut running = Running(Vec::new());
    let (ended, ends) = mpsc::channel();
    for rank in 0..arguments.ranks {
        let mut process = start(&id, rank, arguments.ranks)?;
        // Closes when the rank's process ends.
        let output = process.stderr.take();
        running.0.push(process);
        let ended = ended.clone();
        std::thread::spawn(move || {
            let _ = output.map(|mut output| std::io::copy(&mut output, &mut std::io::stderr()));
            let _ = ended.send(rank);
        });
    }
    let mut failed = Vec::new();
    for _ in 0..arguments.ranks {
        let rank = match failed.is_empty() {
            true => ends.recv().map_err(|error| error.to_string()),
            false => ends.recv_timeout(GRACE).map_err(|error| error.to_string()),
        };
        // The grace period is over. Dropping `running` ends the others.
        let Ok(rank) = rank else { break };
        let status = running.0[rank].wait()?;
        if !status.success() {
            failed.push((rank, status));
        }
    }
    match failed.iter().find(|(_, status)| status.code() != Some(1)).or(failed.first()) {
        None => Ok(()),
        Some((rank, status)) => Err(format!("rank {rank} ended: {}", words(*status)).into()),
    }
}

fn words(status: ExitStatus) -> String {
    match status.code() {
        Some(1) => "its error is above".into(),
        _ => status.to_string(),
    }
}

fn start(id: &UniqueId, rank: usize, ranks: usize) -> Result<Child> {
    Ok(Command::new("/proc/self/exe")
        .args(std::env::args_os().skip(1))
        .env("FAST_ALLREDUCE_UNIQUE_ID", id.to_string())
        .env(RANK, rank.to_string())
        .env("FAST_ALLREDUCE_WORLD_SIZE", ranks.to_string())
        .env(LAUNCHED, "1")
        .stdin(Stdio::piped())
        .stdout(if rank == 0 { Stdio::inherit() } else { Stdio::null() })
        .stderr(Stdio::piped())
        .spawn()?)
}

/// Starts the ranks with mpirun.
fn by_mpirun(ranks: usize) -> Result {
    if cfg!(not(feature = "mpi")) {
        return Err(WITHOUT_MPI.into());
    }
    let launcher = std::env::var("MPIRUN").unwrap_or_else(|_| "mpirun".into());
    let mut words = launcher.split_whitespace();
    let program = words.next().ok_or("MPIRUN is empty")?;
    let status = Command::new(program)
        .args(words)
        .args(["-np", &ranks.to_string()])
        .arg(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .status()
        .map_err(|error| format!("{program}: {error}"))?;
    match status.success() {
        true => Ok(()),
        false => Err(format!("{program} ended: {status}").into()),
    }
}

/// Rank processes. Dropping it ends those that still run.
struct Running(Vec<Child>);

impl Drop for Running {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            // An error means that the process has ended.
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}
