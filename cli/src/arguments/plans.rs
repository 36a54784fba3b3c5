//! Options of `plan` and `tune`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fast_allreduce::plan::PlannedCall;
use fast_allreduce::Settings;

use super::values::{self, Choice, Worlds};
use super::{CommunicatorOptions, DeviceName, LaunchOptions};
use crate::failure::Failure;

pub const TUNE_NOTES: &str = "\
For each number of ranks, every direct algorithm of an allreduce, and every other collective and messages, are timed
with several numbers of blocks and piece sizes, in turns, on f32 (sums) out of place; half of the time is for
allreduces. On GPUs only allreduces are tuned, and messages only if ranks have several threads. A choice other than
the built-in plan's, or than that for the size before, is taken only if it is at least 5 % faster in the median of
paired rounds, and faster in most of them. The resulting plan is then timed against the built-in one, again in
turns; for sizes where it is slower, the built-in plan is kept.

ring and halving-doubling are not candidates: their results have other bits, and a tuning file does not change
results.

Numbers of ranks and links that are not measured keep the plan that is installed for this machine, or the built-in
one.

The file is installed in the user's cache, $XDG_CACHE_HOME/fast-allreduce or ~/.cache/fast-allreduce, under a name
made from facts of the machine, where communicators on this machine find it. A file written by --output is used with
FAST_ALLREDUCE_TUNING=FILE, or Builder::tuning. FAST_ALLREDUCE_TUNING=built-in disables tuning files. Measure on an
idle machine.";

/// Options of `plan`.
#[derive(Args, Debug)]
pub struct Plan {
    /// Device of the ranks' memory
    #[arg(long, value_name = "NAME", value_enum, default_value_t = DeviceName::Host)]
    pub device: DeviceName,
    /// Number of ranks: 2 to 16, or all
    #[arg(long, value_name = "COUNT", default_value = "all", value_parser = values::worlds)]
    pub ranks: Worlds,
    /// Print the plan of a tuning file of this machine [default: the plan in force, which the first line names]
    #[arg(long, value_name = "FILE")]
    pub tuning: Option<PathBuf>,
    /// Print a tuning file of this machine instead of words
    #[arg(long)]
    pub toml: bool,
}

/// Options of `tune`.
#[derive(Args, Debug)]
pub struct Tune {
    /// Device of the ranks' memory
    #[arg(long, value_name = "NAME", value_enum, default_value_t = DeviceName::Host)]
    pub device: DeviceName,
    /// Ranks, a process each: 2 to 16, or all numbers up to the number of cores or GPUs
    #[arg(long, value_name = "COUNT", default_value = "all", value_parser = values::worlds)]
    pub ranks: Worlds,
    /// Calls to tune: all_reduce, all_gather, reduce_scatter, broadcast, reduce, messages, or all in turn
    #[arg(long = "calls", value_name = "NAME", default_value = "all", value_parser = values::planned_calls)]
    calls: Choice<PlannedCall>,
    /// Write this file instead of installing one for this machine
    #[arg(long, short = 'O', value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Approximate time to measure
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = values::seconds)]
    pub budget: Duration,
    /// Smallest message; sizes double from there
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", default_value = "1K", value_parser = values::size)]
    pub min_bytes: usize,
    /// Largest message
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", default_value = "16M", value_parser = values::size)]
    pub max_bytes: usize,
    #[command(flatten)]
    pub launch: LaunchOptions,
    #[command(flatten)]
    pub communicator: CommunicatorOptions,
    /// Measure as a rank of one world, and write the plan to this file
    #[arg(long, hide = true)]
    pub part: Option<PathBuf>,
}

impl Tune {
    /// Returns the calls to tune.
    pub fn calls(&self) -> Vec<PlannedCall> {
        self.calls.0.to_vec()
    }

    /// Returns the settings of the communicators to measure.
    pub fn settings(&self) -> Result<Settings, Failure> {
        self.communicator.settings(self.device, &self.launch)
    }

    /// Returns the sizes to measure, in bytes: whole elements.
    pub fn sizes(&self) -> Vec<usize> {
        let first = self.min_bytes.max(1).checked_next_multiple_of(size_of::<f32>());
        let sizes = std::iter::successors(first, |size| size.checked_mul(2));
        sizes.take_while(|&size| size <= self.max_bytes).collect()
    }

    /// Refuses impossible options before anything is started.
    pub fn validate(&self) -> Result<(), Failure> {
        let refuse = |reason: String| Err(Failure::Usage(reason));
        self.settings()?;
        if self.calls.0 == [PlannedCall::Messages] && self.communicator.workers() == 1 {
            let reason = "--calls messages: ranks of one thread have nothing to choose, give --set workers=2";
            return refuse(reason.into());
        }
        if self.device == DeviceName::Cuda && !self.calls.0.contains(&PlannedCall::AllReduce) {
            return refuse("--calls: on GPUs only all_reduce is tuned".into());
        }
        if self.sizes().is_empty() {
            let (min, max) = (self.min_bytes, self.max_bytes);
            return refuse(format!("no size from --minbytes {min} is within --maxbytes {max}"));
        }
        // It would force the choice that is measured.
        match std::env::var_os("FAST_ALLREDUCE_ALGO").filter(|value| !value.is_empty()) {
            Some(_) => {
                refuse("FAST_ALLREDUCE_ALGO is set, and forces one algorithm: unset it to tune".into())
            }
            None => Ok(()),
        }
    }
}
