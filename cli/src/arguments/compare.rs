//! Options of `compare`.

use clap::{Args, ValueEnum};

use super::{values, Bench};
use crate::failure::Failure;

pub const NOTES: &str = "\
Every contender works on the same buffers. For each size, type and operation the run has --rounds rounds, and in
each of them a block of calls of each contender; --iters is the number of timed calls in all blocks together. time
is the median of the blocks' means, each on its slowest rank; algbw, busbw and #wrong are those of bench. ratio is
time divided by this crate's (its fastest algorithm, if --algo names several): above 1, the contender is slower.

#wrong of this crate counts elements that differ in any bit from the reduction in rank order with one rounding. Of
the others, and of this crate's ring and halving-doubling, it counts elements whose distance from the reduction in
f64 is more than rounding in the element type at every step explains, or that were copied wrongly. error is the
largest distance of an element from the reduction in f64, out of place or in place.

memcpy is a copy of the same size made by every rank at the same time, from one buffer to the other in both
placements: not a collective, but a lower bound. mpi is MPI_Allreduce, MPI_Allgather(v), MPI_Reduce_scatter(_block),
MPI_Bcast, MPI_Reduce, MPI_Gather, MPI_Scatter, MPI_Alltoall(v) or MPI_Sendrecv. nccl is ncclAllReduce. gloo is
torch.distributed's all_reduce, in place, in a process of python3 beside each rank, which times its calls; it needs
torch, and reads GLOO_SOCKET_IFNAME and MASTER_ADDR. naive is an allreduce as a program might implement it: each rank
copies its input to shared memory, waits for the others, adds all inputs, and waits again. A placement that a
contender lacks is N/A: MPI's broadcast is in place only, and its reduce-scatters in place leave results elsewhere
than this crate's. A contender that lacks a collective, a type or an operation is left out of those rows, and a line
says why. One that this machine or build lacks is left out of the run; if none is left, the exit status is 2.

--nodes needs the feature `mpi`, and ranks that mpirun has started on several nodes. This crate's all_reduce is then
hierarchical: by its kernels in each node, by MPI between them.

The exit status is 0 if all is right, 1 if an element of any contender is wrong, 2 if the run failed or its results
could not be written, 141 if the reader of the results has closed the pipe.";

const ROUNDS: u64 = 10;

/// Options of `compare`.
#[derive(Args, Debug)]
pub struct Compare {
    /// Contender to compare with; may be given several times [default: memcpy, and nccl on GPUs, else mpi, or naive
    /// without MPI]
    #[arg(long = "vs", value_name = "NAME", value_enum)]
    vs: Vec<RivalName>,
    /// Rounds, in each of which every contender has a block of calls
    #[arg(long, value_name = "COUNT", default_value_t = ROUNDS, value_parser = values::positive)]
    pub rounds: u64,
    #[command(flatten)]
    pub bench: Bench,
}

/// A contender that this crate is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RivalName {
    /// A copy of the same size: a lower bound
    Memcpy,
    /// MPI's collective, under mpirun
    Mpi,
    /// NCCL, with --device cuda
    Nccl,
    /// gloo, through the torch of python3
    Gloo,
    /// A simple allreduce over shared memory
    Naive,
}

impl RivalName {
    pub fn name(self) -> &'static str {
        match self {
            Self::Memcpy => "memcpy",
            Self::Mpi => "mpi",
            Self::Nccl => "nccl",
            Self::Gloo => "gloo",
            Self::Naive => "naive",
        }
    }
}

impl Compare {
    /// Returns the comparison that `bench` makes of `all_reduce_fused`.
    pub fn of_fused(bench: Bench) -> Self {
        Self { vs: Vec::new(), rounds: ROUNDS, bench }
    }

    /// Returns the contenders to compare with, without duplicates; an empty list stands for the default.
    pub fn rivals(&self) -> Vec<RivalName> {
        let is_first = |index: usize| !self.vs[..index].contains(&self.vs[index]);
        (0..self.vs.len()).filter(|&index| is_first(index)).map(|index| self.vs[index]).collect()
    }

    /// Refuses impossible options before anything is started.
    pub fn validate(&self) -> Result<(), Failure> {
        self.bench.validate()?;
        if self.bench.suspend {
            return Err(Failure::Usage("--suspend is an option of bench".into()));
        }
        if self.bench.is_fused() && self.vs.contains(&RivalName::Gloo) {
            let reason = "--vs gloo has no all_reduce_fused: its allreduce is in place";
            return Err(Failure::Usage(reason.into()));
        }
        if self.bench.registered && self.bench.algorithms().is_some_and(|names| names.len() > 1) {
            let reason = "--registered with --algo all: a registered buffer belongs to one communicator, and so to one \
                algorithm";
            return Err(Failure::Usage(reason.into()));
        }
        Ok(())
    }
}
