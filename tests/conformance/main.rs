//! One suite for every device, bootstrap and algorithm: results against an oracle, bit for bit.
//!
//! `suite` runs over each way in which ranks can meet (`worlds`): threads by `Threads`, threads by `Local`, processes by
//! `Local`; and with the feature `mpi`, processes that `mpirun` started. Each rank compares its output with the one expected output of the message, so equality across ranks, algorithms
//! and instruction sets follows. Inputs come from a seed that every test prints; `FAST_ALLREDUCE_TEST_SEED` sets it.

mod errors;
mod leaks;
mod message;
#[cfg(feature = "mpi")]
mod mpirun;
mod oracle;
mod properties;
mod random;
mod suite;
mod worlds;
