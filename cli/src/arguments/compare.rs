//! Options of `compare`.

use clap::{Args, ValueEnum};

use super::{values, Bench};
use crate::failure::Failure;

pub const NOTES: &str = "\
Every contender works on the same buffers. For each size, type and operation the run goes through --rounds rounds, and in each of
them through all contenders, with a block of calls each; --iters is the number of timed calls in all blocks together. time is
the median of the blocks' means, each on its slowest rank; algbw, busbw and #wrong are those of bench. ratio is time divided by
this crate's (its fastest, where --algo names several): above 1, the contender is slower.

#wrong of this crate counts elements that differ in any bit from the reduction in rank order with one rounding; of the others,
elements that are farther from the reduction in f64 than rounding in the element type at every step explains, or copied wrongly; ring and
halving-doubling of this crate are held to the same. error is the
largest distance from the reduction in f64 that any element has, out of place or in place.

memcpy is a copy of the same size made by every rank at the same time, from one buffer to the other either way: no collective,
but a floor. mpi is MPI_Allreduce, MPI_Allgather(v), MPI_Reduce_scatter(_block), MPI_Bcast, MPI_Reduce, MPI_Gather, MPI_Scatter,
MPI_Alltoall(v) or MPI_Sendrecv; nccl is ncclAllReduce. naive is what a program would write itself: each rank copies its input
to shared memory, waits for the others, adds all up, and waits again. What one lacks is N/A: MPI's broadcast is in place only, and its
reduce-scatters in place leave results elsewhere than this crate's. A contender that lacks a collective, a type or an operation is left out of those rows, with the reason in a line. One that
this machine or build lacks is left out of the run; if none is left, the exit status is 2.

The exit status is 0 if all is right, 1 if an element of any contender is wrong, 2 if the run could not
be made or its results not be written, 141 if their reader has gone.";

/// Options of `compare`.
#[derive(Args, Debug)]
pub struct Compare {
    /// What to compare with; may be given several times [default: memcpy, and the first that there is of: nccl on GPUs; mpi, naive]
    #[arg(long = "vs", value_name = "NAME", value_enum)]
    vs: Vec<RivalName>,
    /// Rounds, in each of which every contender has a block of calls
    #[arg(long, value_name = "COUNT", default_value_t = 10, value_parser = values::positive)]
    pub rounds: u64,
    #[command(flatten)]
    pub bench: Bench,
}

/// What this crate is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RivalName {
    /// A copy of the same size: the floor
    Memcpy,
    /// The same collective of MPI, under mpirun
    Mpi,
    /// NCCL, with --device cuda
    Nccl,
    /// An allreduce over shared memory as a program would write it itself
    Naive,
}

impl RivalName {
    /// As it is in the results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memcpy => "memcpy",
            Self::Mpi => "mpi",
            Self::Nccl => "nccl",
            Self::Naive => "naive",
        }
    }
}

impl Compare {
    /// What to compare with, each once; nothing, if what is usual.
    pub fn rivals(&self) -> Vec<RivalName> {
        let mut rivals = Vec::new();
        for &name in &self.vs {
            if !rivals.contains(&name) {
                rivals.push(name);
            }
        }
        rivals
    }

    /// Refuses what cannot be, before anything is started.
    pub fn validate(&self) -> Result<(), Failure> {
        self.bench.validate()?;
        if self.bench.registered && self.bench.algorithms().is_some_and(|names| names.len() > 1) {
            let reason = "--registered with --algo all: a registered buffer belongs to one communicator, and so to one algorithm";
            return Err(Failure::Usage(reason.into()));
        }
        Ok(())
    }
}
