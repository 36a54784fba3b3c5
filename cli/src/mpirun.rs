//! Ranks that an MPI launcher started: what its variables say, and a run as one of them.
//!
//! The variables are those that Open MPI (`mpirun(1)`), Slurm (`srun(1)`) and the PMI of MPICH's Hydra document for the
//! processes that they start.

use std::process::ExitCode;

use crate::bench::Job;
use crate::failure::Failure;

/// How long ranks that have started wait for each other.
#[cfg(feature = "mpi")]
const LIMIT: std::time::Duration = std::time::Duration::from_secs(60);

/// What a launcher says of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Started {
    launcher: &'static str,
    pub rank: usize,
    /// `None` where the launcher does not say.
    size: Option<usize>,
}

/// The launcher that started this process as one of its ranks, if one did.
pub fn found() -> Option<Started> {
    of(|name| std::env::var(name).ok()?.parse().ok())
}

fn of(number: impl Fn(&str) -> Option<usize>) -> Option<Started> {
    let started = |launcher, rank: &str, size: &str| {
        Some(Started { launcher, rank: number(rank)?, size: Some(number(size)?) })
    };
    if let Some(started) = started("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE") {
        return Some(started);
    }
    let hydra = started("mpirun", "PMI_RANK", "PMI_SIZE");
    // Only processes of a step have this one, not the shell of salloc or the script of sbatch. A step of one task may be such
    // a shell: `srun --pty bash`, and what runs in it is no rank, unless another launcher started it there.
    match started("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS") {
        Some(step) if step.size == Some(1) => hydra.filter(|hydra| hydra.size != Some(1)),
        Some(step) => Some(hydra.filter(|hydra| hydra.size != step.size).unwrap_or(step)),
        None => {
            let of_pmix = || Some(Started { launcher: "mpirun", rank: number("PMIX_RANK")?, size: None });
            hydra.or_else(of_pmix)
        }
    }
}

impl Started {
    fn ranks(&self) -> String {
        self.size.map_or("one of several ranks".into(), |size| format!("one of {size} ranks"))
    }
}

/// Refuses to run as many worlds as there are ranks.
#[cfg(not(feature = "mpi"))]
pub fn measure(_: &impl Job, started: Started) -> Result<ExitCode, Failure> {
    Err(Failure::Usage(format!(
        "{} started this as {}, but this build is without the feature `mpi`: build it with `--features mpi`, or start it without \
         {0}, and it launches its own ranks",
        started.launcher,
        started.ranks()
    )))
}

/// Runs as one of the launcher's ranks. The first writes the results.
///
/// A failure that not every rank has ends all of them, since others may wait for this one.
#[cfg(feature = "mpi")]
pub fn measure(job: &impl Job, started: Started) -> Result<ExitCode, Failure> {
    use std::time::Duration;

    use fast_allreduce::bootstrap::Mpi;
    use fast_allreduce::Error;

    let options = job.options();
    if let Some(size) = started.size {
        options.check_world(size)?;
    }
    options.check_device()?;
    let outcome = join(started).and_then(|mpi| {
        #[cfg(feature = "cuda")]
        if options.device == crate::arguments::DeviceName::Cuda {
            check_gpus(&mpi)?;
        }
        crate::bench::run_in(job, mpi)
    });
    match outcome {
        Ok(is_right) => Ok(ExitCode::from(if is_right { 0 } else { crate::WRONG })),
        Err(failure) if failure.is_common() => Err(failure),
        Err(failure) => {
            // Whose failure explains the others' speaks first, and of equals the first rank; the rest are ended meanwhile.
            let is_of_another = failure.is_consequence()
                || matches!(failure, Failure::Library(Error::PeerFailed { .. } | Error::Disagreement { .. }));
            let turn = started.rank as u32 + if is_of_another { 10 } else { 0 };
            std::thread::sleep(Duration::from_millis(50) * turn);
            if !failure.is_silent() {
                crate::failure::say(format_args!("rank {}: {failure}", started.rank));
            }
            Mpi::abort(failure.status().into())
        }
    }
}

/// The world of the launcher: the one that it says, of ranks that were asked for the same.
#[cfg(feature = "mpi")]
fn join(started: Started) -> Result<fast_allreduce::bootstrap::Mpi, Failure> {
    use std::os::unix::ffi::OsStrExt;

    use fast_allreduce::bootstrap::{Bootstrap, Mpi};

    let mpi = Mpi::init()?;
    if started.size.is_some_and(|size| size != mpi.world_size()) {
        return Err(Failure::Usage(format!(
            "{} started this as {}, but {} made a world of {}: start it with the mpirun of that library; with srun, choose what the \
             library speaks (`srun --mpi=list`)",
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

/// Refuses more ranks than GPUs: a launcher is told how many ranks there are to be, and may show each a GPU of its own.
#[cfg(all(feature = "mpi", feature = "cuda"))]
fn check_gpus(mpi: &fast_allreduce::bootstrap::Mpi) -> Result<(), Failure> {
    use fast_allreduce::bootstrap::Bootstrap;

    let own = crate::bench::device::cuda::gpu_of(mpi.rank());
    // Those that have none say so below, when the others know.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn among(variables: &[(&str, usize)]) -> Option<(&'static str, usize, Option<usize>)> {
        let started = of(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| *value));
        started.map(|started| (started.launcher, started.rank, started.size))
    }

    #[test]
    fn launchers_are_recognised() {
        let open_mpi = [("OMPI_COMM_WORLD_RANK", 2), ("OMPI_COMM_WORLD_SIZE", 4), ("PMIX_RANK", 2)];
        assert_eq!(among(&open_mpi), Some(("mpirun", 2, Some(4))));
        assert_eq!(among(&[("PMI_RANK", 0), ("PMI_SIZE", 1)]), Some(("mpirun", 0, Some(1))));
        assert_eq!(among(&[("PMIX_RANK", 3)]), Some(("mpirun", 3, None)));
        assert_eq!(among(&[]), None);
        assert_eq!(among(&[("PMI_RANK", 0)]), None);
    }

    #[test]
    fn a_step_of_slurm_is_told_from_its_allocation() {
        let srun = [("SLURM_NTASKS", 4), ("SLURM_PROCID", 1), ("SLURM_STEP_NUM_TASKS", 4)];
        assert_eq!(among(&srun), Some(("srun", 1, Some(4))));
        let pmi2 = [("SLURM_PROCID", 1), ("SLURM_STEP_NUM_TASKS", 4), ("PMI_RANK", 1), ("PMI_SIZE", 4)];
        assert_eq!(among(&pmi2), Some(("srun", 1, Some(4))));
        // The shell of salloc, the script of sbatch, and a shell in a step.
        assert_eq!(among(&[("SLURM_NTASKS", 4)]), None);
        assert_eq!(among(&[("SLURM_NTASKS", 4), ("SLURM_PROCID", 0)]), None);
        let shell = [("SLURM_NTASKS", 4), ("SLURM_PROCID", 0), ("SLURM_STEP_NUM_TASKS", 1), ("PMIX_RANK", 0)];
        assert_eq!(among(&shell), None);
        let of_pmi2 = [("SLURM_PROCID", 0), ("SLURM_STEP_NUM_TASKS", 1), ("PMI_RANK", 0), ("PMI_SIZE", 1)];
        assert_eq!(among(&of_pmi2), None);
        // mpirun in that shell, and mpirun that starts its helpers by srun, one on each node.
        let hydra = [("SLURM_PROCID", 0), ("SLURM_STEP_NUM_TASKS", 1), ("PMI_RANK", 2), ("PMI_SIZE", 3)];
        assert_eq!(among(&hydra), Some(("mpirun", 2, Some(3))));
        let hydra = [("SLURM_PROCID", 1), ("SLURM_STEP_NUM_TASKS", 2), ("PMI_RANK", 5), ("PMI_SIZE", 8)];
        assert_eq!(among(&hydra), Some(("mpirun", 5, Some(8))));
    }
}
