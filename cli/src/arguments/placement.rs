//! Options on where ranks run, and where and how long they meet.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fast_allreduce::device::host::Bind;

use super::values;

/// Options of what starts ranks.
#[derive(Args, Debug)]
pub struct Placement {
    /// What each rank's threads are bound to, where there are as many cores as threads: core (a core for each thread), numa (a NUMA node
    /// for each rank) or none. Ranks that a launcher has bound stay there
    #[arg(long, value_name = "TO", default_value_t = Bind::Core)]
    pub bind: Bind,
    /// Have ranks meet in a directory, which containers with networks of their own may share: there, start each rank with
    /// FAST_ALLREDUCE_RANK and FAST_ALLREDUCE_WORLD_SIZE [default: that of FAST_ALLREDUCE_SOCKET_DIR]
    #[arg(long = "socket-dir", value_name = "DIRECTORY")]
    pub socket_directory: Option<PathBuf>,
    /// Longest wait for ranks to start and meet [default: that of FAST_ALLREDUCE_JOIN_TIMEOUT, or 120]
    #[arg(long, value_name = "SECONDS", value_parser = values::seconds)]
    pub join_timeout: Option<Duration>,
}

impl Placement {
    /// Has the library, and the ranks that this process starts, find the directory and keep the limit. Before any thread is started.
    pub fn announce(&self) {
        if let Some(directory) = &self.socket_directory {
            std::env::set_var(crate::environment::SOCKET_DIRECTORY, directory);
        }
        if let Some(limit) = self.join_timeout {
            std::env::set_var(crate::environment::JOIN_TIMEOUT, limit.as_secs_f64().to_string());
        }
    }
}
