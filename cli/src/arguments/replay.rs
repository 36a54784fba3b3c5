//! Options of `replay`.

use std::path::PathBuf;

use clap::Args;

/// The explanation after the help of `replay`.
pub const NOTES: &str = "\
Ranks on CPUs record their collectives if FAST_ALLREDUCE_RECORD_DIR names a directory: a file for each, \
WORLD-RANK.record. A recording has at most FAST_ALLREDUCE_RECORD_BYTES bytes (1 GiB); if that is `hashes`, it has \
hashes of inputs and results alone. Messages between pairs are not recorded.

The files of one world are replayed: a rank for each makes its calls again, with the same inputs, plans and number of \
workers. The files of two worlds are compared: the first call of each rank that has other inputs, or equal inputs and \
other results.

The exit status is 1 if a result differs, and 2 if a file cannot be used or ends within a call: the calls before it \
are made.";

/// Options of `replay`.
#[derive(Args, Debug)]
pub struct Replay {
    /// The recordings of all ranks of a world, or of two worlds
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
}
