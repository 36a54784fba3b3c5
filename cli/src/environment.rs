//! What the environment says of this process: whether it is a rank, and who started it.
//!
//! This program's own launcher has variables of the library and one of its own. Those of others are what Open MPI
//! (`mpirun(1)`), Slurm (`srun(1)`) and the PMI of MPICH's Hydra document for the processes that they start.

pub const UNIQUE_ID: &str = "FAST_ALLREDUCE_UNIQUE_ID";
pub const WORLD_SIZE: &str = "FAST_ALLREDUCE_WORLD_SIZE";
/// Names the variable that holds a rank's number.
pub const RANK: &str = "FAST_ALLREDUCE_RANK";
/// Names a directory to meet in, where there is no id.
pub const SOCKET_DIRECTORY: &str = "FAST_ALLREDUCE_SOCKET_DIR";
/// Limits, in seconds, how long ranks wait for each other to come.
pub const JOIN_TIMEOUT: &str = "FAST_ALLREDUCE_JOIN_TIMEOUT";
/// Process id of the launcher, for ranks that have one.
pub const LAUNCHER: &str = "FAST_ALLREDUCE_LAUNCHER";

/// True in a process that is to be a rank.
pub fn is_rank() -> bool {
    std::env::var_os(UNIQUE_ID).is_some() || socket_directory().is_some() && std::env::var_os(RANK).is_some()
}

/// The directory in which ranks are to meet.
pub fn socket_directory() -> Option<std::ffi::OsString> {
    std::env::var_os(SOCKET_DIRECTORY).filter(|path| !path.is_empty())
}

/// The launcher of this rank, as it calls itself, if it has one.
pub fn launcher() -> Option<String> {
    std::env::var(LAUNCHER).ok()
}

/// True in the rank that speaks for all, and in a process that is no rank.
pub fn is_first_rank() -> bool {
    if !is_rank() {
        return found().is_none_or(|started| started.rank == 0);
    }
    std::env::var_os(RANK).is_none_or(|rank| rank == "0")
}

/// What a launcher of MPI ranks says of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Started {
    pub launcher: &'static str,
    pub rank: usize,
    /// `None` where the launcher does not say.
    pub size: Option<usize>,
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
    /// In words.
    pub fn ranks(&self) -> String {
        self.size.map_or("one of several ranks".into(), |size| format!("one of {size} ranks"))
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
