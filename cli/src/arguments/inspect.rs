//! Options of `inspect`.

use std::path::PathBuf;

use clap::Args;

/// The explanation after the help of `inspect`.
pub const NOTES: &str = "\
A rank keeps its latest 256 calls in shared memory, with the times of some. PID is a process of a rank: its peers on \
this machine are found through it. DIRECTORY is the FAST_ALLREDUCE_FLIGHT_DIR of the ranks, where ranks that failed or \
were killed have left their files. The ranks may hang, and do not notice the inspection.

The exit status is 0 if a rank could be read, else 2.";

/// Options of `inspect`.
#[derive(Args, Debug)]
pub struct Inspect {
    /// A process, or a directory with flight records
    #[arg(value_name = "PID|DIRECTORY")]
    pub what: PathBuf,
    /// Print JSON: a list of worlds
    #[arg(long)]
    pub json: bool,
    /// Print metrics in Prometheus' text format
    #[arg(long, conflicts_with = "json")]
    pub metrics: bool,
    /// Also write a page with a timeline of the ranks' calls
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Number of calls printed for each rank
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub calls: usize,
}
