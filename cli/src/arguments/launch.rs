//! Options of commands that launch ranks: where ranks run, and how they meet.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fast_allreduce::device::host::Bind;

use super::values;

#[derive(Args, Debug)]
pub struct LaunchOptions {
    /// What each rank's threads are bound to: core (a core for each thread; if there are too few, threads share them
    /// evenly), numa (a NUMA node for each rank) or none. Ranks that another launcher has bound stay there
    #[arg(long, value_name = "TO", default_value_t = Bind::Core)]
    pub bind: Bind,
    /// Directory in which ranks meet. Containers with separate networks may share it: start each rank there with
    /// FAST_ALLREDUCE_RANK and FAST_ALLREDUCE_WORLD_SIZE [default: FAST_ALLREDUCE_SOCKET_DIR]
    #[arg(long = "socket-dir", value_name = "DIRECTORY")]
    pub socket_directory: Option<PathBuf>,
    /// Longest wait for ranks to start and meet [default: FAST_ALLREDUCE_JOIN_TIMEOUT, or 120]
    #[arg(long, value_name = "SECONDS", value_parser = values::seconds)]
    pub join_timeout: Option<Duration>,
}

impl LaunchOptions {
    /// Puts the options in the environment, for the library and for the ranks that this process starts. Called
    /// before any thread is started.
    pub fn export(&self) {
        if let Some(directory) = &self.socket_directory {
            std::env::set_var(crate::environment::SOCKET_DIRECTORY, directory);
        }
        if let Some(limit) = self.join_timeout {
            std::env::set_var(crate::environment::JOIN_TIMEOUT, limit.as_secs_f64().to_string());
        }
    }
}
