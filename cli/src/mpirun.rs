//! Runs as one of the ranks that an MPI launcher started.

use std::process::ExitCode;

use crate::environment::MpiLaunch;
use crate::failure::Failure;
#[cfg(feature = "mpi")]
use crate::harness::session::Session;
use crate::harness::Job;

/// Longest wait of started ranks for each other.
#[cfg(feature = "mpi")]
const LIMIT: std::time::Duration = std::time::Duration::from_secs(60);

/// Refuses to run: each rank would launch a world.
#[cfg(not(feature = "mpi"))]
pub fn measure(_: &impl Job, started: MpiLaunch) -> Result<ExitCode, Failure> {
    Err(Failure::Usage(format!(
        "{} started this as {}, but this build is without the feature `mpi`: build it with `--features mpi`, or \
         start it without {0}, and it launches its own ranks",
        started.launcher,
        started.ranks()
    )))
}

/// Runs as one of the launcher's ranks. The first rank writes the results.
#[cfg(feature = "mpi")]
pub fn measure(job: &impl Job, started: MpiLaunch) -> Result<ExitCode, Failure> {
    match run(job, started) {
        Ok(is_right) => Ok(ExitCode::from(if is_right { 0 } else { crate::failure::EXIT_WRONG })),
        Err(failure) => Ok(end_rank(failure, started)),
    }
}

/// Ends this process before it has measured anything.
#[cfg(not(feature = "mpi"))]
pub fn end(failure: Failure) -> ExitCode {
    failure.end()
}

/// Ends this process before it has measured anything. Other ranks may have other arguments, and wait in `MPI_Init`
/// for this one: so it calls `MPI_Init` too.
#[cfg(feature = "mpi")]
pub fn end(failure: Failure) -> ExitCode {
    match crate::environment::mpi_launch().filter(|_| !crate::environment::is_rank()) {
        Some(started) => end_rank(join(started, None).err().unwrap_or(failure), started),
        None => failure.end(),
    }
}

/// Prints why a rank ends. A failure that not every rank has aborts all of them, because others may wait for this one.
#[cfg(feature = "mpi")]
fn end_rank(failure: Failure, started: MpiLaunch) -> ExitCode {
    use std::time::Duration;

    use fast_allreduce::bootstrap::Mpi;
    use fast_allreduce::Error;

    if failure.is_common() {
        // Launchers kill all ranks when one has ended: the rank that prints the failure must end first.
        if started.rank != 0 {
            std::thread::sleep(PRINT_TIME);
        }
        let code = failure.end();
        wait_until_read();
        return code;
    }
    // The rank whose failure explains the others' prints first; of equals, the first rank. The others are killed
    // meanwhile.
    let is_of_another = failure.is_consequence()
        || matches!(failure, Failure::Library(Error::PeerFailed { .. } | Error::Disagreement { .. }));
    let turn = started.rank as u32 + if is_of_another { 10 } else { 0 };
    std::thread::sleep(Duration::from_millis(50) * turn);
    if !failure.is_silent() {
        crate::failure::print_error(format_args!("rank {}: {failure}", started.rank));
        wait_until_read();
    }
    Mpi::abort(failure.status().into())
}

/// Runs as a rank, and returns whether all results are right.
#[cfg(feature = "mpi")]
fn run(job: &impl Job, started: MpiLaunch) -> Result<bool, Failure> {
    use fast_allreduce::bootstrap::Bootstrap;

    let options = job.options();
    // First, because only ranks with the same arguments may fail one by one.
    let mpi = join(started, Some(options.nodes))?;
    options.check_world(mpi.world_size())?;
    crate::harness::device::check(options.device)?;
    #[cfg(feature = "cuda")]
    if options.device == crate::arguments::DeviceName::Cuda {
        check_gpus(&mpi)?;
    }
    match options.nodes {
        1 => crate::harness::run_in(job, mpi),
        nodes => {
            let found = mpi.nodes().into_iter().collect::<std::collections::BTreeSet<_>>().len();
            if found != nodes {
                return Err(Failure::Usage(format!("--nodes {nodes}, but the ranks are on {found}")));
            }
            crate::harness::run_with(job, Session::of_nodes(mpi, nodes, options.communicator.timeout))
        }
    }
}

/// Time in which the first rank prints the failure of all.
#[cfg(feature = "mpi")]
const PRINT_TIME: std::time::Duration = std::time::Duration::from_millis(500);

/// Waits, for a second at most, until the launcher has read what this rank printed: MPICH's launcher drops output
/// that it finds in a pipe after an abort.
#[cfg(feature = "mpi")]
fn wait_until_read() {
    use std::time::{Duration, Instant};

    use nix::libc::{c_int, ioctl, FIONREAD, STDERR_FILENO};
    use nix::sys::stat::{fstat, SFlag};

    let is_pipe =
        |mode: nix::libc::mode_t| SFlag::from_bits_truncate(mode & SFlag::S_IFMT.bits()) == SFlag::S_IFIFO;
    if !fstat(std::io::stderr()).is_ok_and(|about| is_pipe(about.st_mode)) {
        return;
    }
    let start = Instant::now();
    let mut unread: c_int = 1;
    while unread > 0 && start.elapsed() < Duration::from_secs(1) {
        // SAFETY: the request writes one int, to a variable of this function.
        if unsafe { ioctl(STDERR_FILENO, FIONREAD, &mut unread) } != 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Joins the launcher's world. `nodes` other than 1 allows several. Refuses a world of another size than the launcher
/// says, and ranks with different arguments.
#[cfg(feature = "mpi")]
fn join(started: MpiLaunch, nodes: Option<usize>) -> Result<fast_allreduce::bootstrap::Mpi, Failure> {
    use std::os::unix::ffi::OsStrExt;

    use fast_allreduce::bootstrap::{Bootstrap, Mpi};
    use fast_allreduce::Error;

    let mpi = match Mpi::init() {
        // MPI runs: only the nodes were refused.
        Err(Error::Unavailable { .. }) if nodes != Some(1) && mpi::environment::is_initialized() => {
            Mpi::of_all_nodes(&mpi::topology::SimpleCommunicator::world())?
        }
        joined => joined?,
    };
    if started.size.is_some_and(|size| size != mpi.world_size()) {
        return Err(Failure::Usage(format!(
            "{} started this as {}, but {} made a world of {}: start it with the mpirun of that library; with srun, \
             choose a PMI that the library supports (`srun --mpi=list`)",
            started.launcher,
            started.ranks(),
            Mpi::library(),
            mpi.world_size()
        )));
    }
    let own: Vec<_> = std::env::args_os().skip(1).collect();
    let all = mpi.all_gather(own.join(std::ffi::OsStr::new("\0")).as_bytes(), LIMIT)?;
    match all.iter().position(|theirs| *theirs != all[0]) {
        Some(rank) => {
            Err(Failure::Usage(format!("rank {rank} was started with other arguments than rank 0")))
        }
        None => Ok(mpi),
    }
}

/// Refuses ranks that share a GPU: the launcher's user chose the number of ranks.
#[cfg(all(feature = "mpi", feature = "cuda"))]
fn check_gpus(mpi: &fast_allreduce::bootstrap::Mpi) -> Result<(), Failure> {
    use fast_allreduce::bootstrap::Bootstrap;

    let own = crate::harness::device::cuda::gpu_of(mpi.rank());
    // A rank without a GPU fails after the exchange, when the others know.
    let all = mpi.all_gather(own.as_ref().map_or(&[][..], |uuid| uuid), LIMIT)?;
    own?;
    let mut pairs = (0..all.len()).flat_map(|second| (0..second).map(move |first| (first, second)));
    match pairs.find(|&(first, second)| !all[first].is_empty() && all[first] == all[second]) {
        Some((first, second)) => Err(Failure::Usage(format!(
            "{} ranks, but ranks {first} and {second} have the same GPU: start at most one rank for each",
            all.len()
        ))),
        None => Ok(()),
    }
}
