//! The environment of this process: whether it is a rank, and which launcher started it.
//!
//! This program's launcher uses variables of the library and one of its own. The variables of other launchers are
//! those that Open MPI (`mpirun(1)`), Slurm (`srun(1)`) and the PMI of MPICH's Hydra document for the processes
//! that they start.

/// Id of the world to join.
pub const UNIQUE_ID: &str = "FAST_ALLREDUCE_UNIQUE_ID";
pub const WORLD_SIZE: &str = "FAST_ALLREDUCE_WORLD_SIZE";
pub const RANK: &str = "FAST_ALLREDUCE_RANK";
/// Directory in which ranks meet, if there is no id.
pub const SOCKET_DIRECTORY: &str = "FAST_ALLREDUCE_SOCKET_DIR";
/// Longest wait for all ranks to meet, in seconds.
pub const JOIN_TIMEOUT: &str = "FAST_ALLREDUCE_JOIN_TIMEOUT";
/// Process id of the launcher that started this rank.
pub const LAUNCHER: &str = "FAST_ALLREDUCE_LAUNCHER";

/// Returns whether this process is a rank of a world that the environment names.
pub fn is_rank() -> bool {
    std::env::var_os(UNIQUE_ID).is_some() || socket_directory().is_some() && std::env::var_os(RANK).is_some()
}

/// Returns the directory in which ranks meet.
pub fn socket_directory() -> Option<std::ffi::OsString> {
    std::env::var_os(SOCKET_DIRECTORY).filter(|path| !path.is_empty())
}

/// Returns the process id of the launcher that started this rank, if one did.
pub fn launcher() -> Option<String> {
    std::env::var(LAUNCHER).ok()
}

/// Returns whether this process prints for all: it is the first rank, or not a rank.
pub fn is_first_rank() -> bool {
    if !is_rank() {
        return mpi_launch().is_none_or(|started| started.rank == 0);
    }
    std::env::var_os(RANK).is_none_or(|rank| rank == "0")
}

/// This process's place in the world of an MPI launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MpiLaunch {
    pub launcher: &'static str,
    pub rank: usize,
    /// `None` if the launcher does not say.
    pub size: Option<usize>,
}

/// Returns which launcher started this process as one of its ranks, if one did.
pub fn mpi_launch() -> Option<MpiLaunch> {
    mpi_launch_of(|name| std::env::var(name).ok()?.parse().ok())
}

fn mpi_launch_of(number: impl Fn(&str) -> Option<usize>) -> Option<MpiLaunch> {
    let started = |launcher, rank: &str, size: &str| {
        Some(MpiLaunch { launcher, rank: number(rank)?, size: Some(number(size)?) })
    };
    if let Some(started) = started("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE") {
        return Some(started);
    }
    let hydra = started("mpirun", "PMI_RANK", "PMI_SIZE");
    // Only processes of a step have SLURM_STEP_NUM_TASKS, not the shell of salloc or the script of sbatch. A step
    // of one task may be such a shell (`srun --pty bash`): a process in it is not a rank, unless another launcher
    // started it there.
    match started("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS") {
        Some(step) if step.size == Some(1) => hydra.filter(|hydra| hydra.size != Some(1)),
        Some(step) => Some(hydra.filter(|hydra| hydra.size != step.size).unwrap_or(step)),
        None => {
            let of_pmix = || Some(MpiLaunch { launcher: "mpirun", rank: number("PMIX_RANK")?, size: None });
            hydra.or_else(of_pmix)
        }
    }
}

impl MpiLaunch {
    /// Describes this process: `one of 4 ranks`.
    pub fn ranks(&self) -> String {
        self.size.map_or("one of several ranks".into(), |size| format!("one of {size} ranks"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn among(variables: &[(&str, usize)]) -> Option<(&'static str, usize, Option<usize>)> {
        let started =
            mpi_launch_of(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| *value));
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
    fn a_slurm_step_is_distinguished_from_its_allocation() {
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
        // mpirun in that shell, and mpirun that starts its proxies by srun, one on each node.
        let hydra = [("SLURM_PROCID", 0), ("SLURM_STEP_NUM_TASKS", 1), ("PMI_RANK", 2), ("PMI_SIZE", 3)];
        assert_eq!(among(&hydra), Some(("mpirun", 2, Some(3))));
        let hydra = [("SLURM_PROCID", 1), ("SLURM_STEP_NUM_TASKS", 2), ("PMI_RANK", 5), ("PMI_SIZE", 8)];
        assert_eq!(among(&hydra), Some(("mpirun", 5, Some(8))));
    }
}
