//! Options of `soak`.

use std::time::Duration;

use clap::{Args, ValueEnum};
use fast_allreduce::Settings;

use super::settings::{soak_setting, Setting};
use super::{value_name, values, DEFAULT_RANKS};
use crate::failure::Failure;

pub const NOTES: &str = "\
All ranks draw the same calls from one seed: collectives (every other one an allreduce, some with a residual and an
RMSNorm), sizes, types, operations, algorithms, roots, unequal shares, registered and private memory, in place and
out of place, odd offsets. Now and then a rank sleeps, a communicator is dropped and made again, or a call is made
in groups of split or shrink. Every element of every result is checked, and that the memory around it and the inputs
have not changed. The same seed, ranks, --maxbytes, --faults and --set replay the same calls.

Settings of communicators are drawn too: algorithm, max_bytes, workers, check, wait. --set fixes a setting for all
of them.

Before one call in about 150 there are faults, on a separate communicator. Ranks repeat one call, and at a random
moment a rank is aborted by another of its threads; or its process is stopped by SIGSTOP, for less or for more than
the communicator's timeout, and continued. Each rank overwrites its buffers as soon as its call has returned, with a
result or with an error. A call must return in bounded time, and if it returns Ok every element must be right. Then
the ranks, or all except one, continue with a new communicator; or they suspend and resume the same one, or join it
again if it has failed, in both cases sometimes with one rank in a new communicator. Sometimes the last calls are
recorded, and made again from the recording. Which faults happen, and when, is drawn; their effect depends on timing,
so that a run may find what the next does not. Ranks that another launcher started are not stopped.

After a warm-up and at the end all communicators are dropped, and each rank counts its file descriptors, mappings,
threads and resident memory: growth is a failure.

The exit status is 0 if all is right, 1 if an element is wrong, 2 if the run failed, its results could not be
written or a resource grew, 141 if the reader of the results has closed the pipe.";

/// Options of `soak`.
#[derive(Args, Debug)]
pub struct Soak {
    /// Duration in minutes, which may be a fraction
    #[arg(long, value_name = "MINUTES", default_value = "1", value_parser = values::minutes)]
    pub minutes: Duration,
    /// Stop after this number of calls instead
    #[arg(long, value_name = "COUNT", conflicts_with = "minutes", value_parser = values::positive)]
    pub calls: Option<u64>,
    /// Ranks, a process each
    #[arg(long, value_name = "COUNT", default_value_t = DEFAULT_RANKS, value_parser = values::ranks)]
    pub ranks: usize,
    /// Seed of the calls and inputs [default: random]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Largest message
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", default_value = "4M", value_parser = values::size)]
    pub max_bytes: usize,
    /// Abort and stop ranks at random: all, abort, stop, none
    #[arg(long, value_name = "KINDS", value_enum, hide_possible_values = true, default_value_t = Faults::All)]
    pub faults: Faults,
    /// A setting of all communicators, such as workers=2 or algorithm=ring, which is then not drawn; may be given
    /// several times. docs/tuning.md lists all settings
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = soak_setting)]
    pub settings: Vec<Setting>,
    /// Longest wait for another rank; some communicators have twice or four times as much
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = values::seconds)]
    pub timeout: Duration,
    /// Format of the summary
    #[arg(long, value_enum, default_value_t = SummaryFormat::Text)]
    pub format: SummaryFormat,
}

/// Faults that soak causes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Faults {
    /// All of these
    All,
    /// Aborts
    Abort,
    /// SIGSTOP, then SIGCONT
    Stop,
    /// No faults
    None,
}

impl Faults {
    pub fn name(self) -> String {
        value_name(self)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SummaryFormat {
    /// Lines to read
    Text,
    /// One object
    Json,
}

impl Soak {
    /// Refuses impossible options before anything is started.
    pub fn validate(&self) -> Result<(), Failure> {
        /// More finds nothing new, and buffers are kept for each communicator.
        const MOST_BYTES: usize = 1 << 30;
        if self.max_bytes > MOST_BYTES {
            return Err(Failure::Usage(format!("--maxbytes {} is more than {MOST_BYTES}", self.max_bytes)));
        }
        let mut settings = Settings::new();
        for (name, value) in &self.settings {
            settings.set(name, value)?;
        }
        Ok(settings.check()?)
    }
}
