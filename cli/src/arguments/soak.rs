//! Options of `soak`.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::{values, DeviceName, DEFAULT_RANKS};
use crate::failure::Failure;

pub const SOAK_NOTES: &str = "\
All ranks draw the same calls from one seed: collectives (an allreduce every other time, some with a residual and an RMSNorm), sizes, types, operations,
algorithms, roots, shares that differ, memory that is registered or not, in place or not, at odd offsets; now and then a
rank sleeps, a communicator is dropped and made again, or a call is made in groups that split and shrink make. Every
element of every result is checked, and that nothing beside it and no input has changed. The same seed, ranks,
--maxbytes and --faults replay the same calls.

Before one call in about 150 there are faults, on a communicator of their own. Ranks make one call again and again, and
at a random moment a rank is aborted by another of its threads; or its process is stopped by SIGSTOP, for less than the
communicator's timeout or for more, and goes on. Each rank overwrites its buffers as soon as its call has returned, with
a result or with an error. A call must return in bounded time, and where it returns Ok every element must be right. Then
the ranks, or all but one, go on with a new communicator. Which faults there are, and when, is drawn; what comes of them
depends on the moment, so that one run may find what the next does not. Ranks that soak did not start are not stopped.

After a warm-up and at the end all communicators are dropped, and each rank counts its file descriptors, mappings, threads and
resident memory: growth is a failure.

The exit status is 0 if all is right, 1 if an element is wrong, 2 if the run could not be made, its results
not be written or something grew, 141 if their reader has gone.";

/// Options of `soak`.
#[derive(Args, Debug)]
pub struct Soak {
    /// How long, in minutes, which may be a fraction
    #[arg(long, value_name = "MINUTES", default_value = "1", value_parser = minutes)]
    pub minutes: Duration,
    /// Stop after so many calls instead
    #[arg(long, value_name = "COUNT", conflicts_with = "minutes", value_parser = values::positive)]
    pub calls: Option<u64>,
    /// Ranks, a process each
    #[arg(long, value_name = "COUNT", default_value_t = DEFAULT_RANKS)]
    pub ranks: usize,
    /// Seed of the calls and inputs [default: random]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Largest message
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", default_value = "4M", value_parser = values::size)]
    pub max_bytes: usize,
    /// Where the ranks' memory lives: host
    #[arg(long, value_name = "NAME", value_enum, default_value_t = DeviceName::Host)]
    pub device: DeviceName,
    /// Ranks are aborted and stopped at random: all, abort, stop, none
    #[arg(long, value_name = "KINDS", value_enum, hide_possible_values = true, default_value_t = Faults::All)]
    pub faults: Faults,
    /// Longest wait for another rank; some communicators take twice and four times as much
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = values::seconds)]
    pub timeout: Duration,
    /// Format of the summary
    #[arg(long, value_enum, default_value_t = SummaryFormat::Text)]
    pub format: SummaryFormat,
}

/// What happens to ranks on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Faults {
    /// All of these
    All,
    /// Aborts
    Abort,
    /// SIGSTOP, and SIGCONT
    Stop,
    /// Nothing
    None,
}

impl Faults {
    /// As it is given.
    pub fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Abort => "abort",
            Self::Stop => "stop",
            Self::None => "none",
        }
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
    /// Refuses what cannot be, before anything is started.
    pub fn validate(&self) -> Result<(), Failure> {
        /// Far above what finds anything new; buffers are kept for each communicator.
        const MOST_BYTES: usize = 1 << 30;
        let refuse = |reason: String| Err(Failure::Usage(reason));
        if self.device == DeviceName::Cuda {
            return refuse("soak knows no --device cuda yet".into());
        }
        let max = fast_allreduce::MAX_RANKS;
        if !(1..=max).contains(&self.ranks) {
            return refuse(format!("--ranks {} is not possible: a world has 1 to {max} ranks", self.ranks));
        }
        if self.max_bytes > MOST_BYTES {
            return refuse(format!("--maxbytes {} is more than {MOST_BYTES}", self.max_bytes));
        }
        Ok(())
    }
}

fn minutes(text: &str) -> Result<Duration, String> {
    let duration =
        text.parse::<f64>().ok().and_then(|minutes| Duration::try_from_secs_f64(minutes * 60.0).ok());
    duration.filter(|duration| !duration.is_zero()).ok_or_else(|| "a positive number of minutes".into())
}
