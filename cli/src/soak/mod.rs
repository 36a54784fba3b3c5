//! `soak`: random calls for minutes or hours, between rank processes that check all results.

mod check;
mod draw;
mod episode;
mod fault;
mod fused;
mod memory;
mod rank;
mod report;
mod usage;

use std::sync::Arc;
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::{Bootstrap, Local};
use fast_allreduce::device::host::Isa;
use nix::unistd::Pid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use self::draw::{Call, Parameters, SLOTS};
use self::rank::Rank;
use self::report::{Summary, Tally};
use self::usage::Usage;
use crate::arguments::{self, Faults, Soak, SummaryFormat};
use crate::failure::Failure;
use crate::harness::progress::Progress;
use crate::harness::random_seed;

/// Calls after which the resources of a rank may no longer grow.
const WARM_UP: u64 = 100;

/// Calls between two exchanges of notes.
const ROUND: u64 = 16;

/// The note that a rank sends to the others after a round.
#[derive(Serialize, Deserialize)]
struct Note {
    digest: u64,
    is_over: bool,
    is_wrong: bool,
}

/// Refuses buffers that do not fit the available memory.
pub fn check_memory(options: &Soak) -> Result<(), Failure> {
    let Soak { max_bytes, ranks, .. } = *options;
    // Each communicator may have a registered input and output, as large as the private ones; episodes add two and the
    // kept buffers.
    arguments::check_memory(max_bytes * (SLOTS + 5), ranks).map_err(|_| {
        Failure::Usage(format!(
            "--maxbytes {max_bytes} needs more memory for {ranks} ranks than is available"
        ))
    })
}

/// Runs as the rank that the environment names. Returns whether all is right.
pub fn run(options: &Soak) -> Result<bool, Failure> {
    let Some(bootstrap) = Local::from_env()? else {
        return Err(Failure::Usage("the environment names no world".into()));
    };
    let bootstrap: Arc<dyn Bootstrap> = Arc::new(bootstrap);
    let ranks = bootstrap.world_size();
    if ranks != options.ranks {
        let named = options.ranks;
        return Err(Failure::Usage(format!("--ranks {named}, but the environment names a world of {ranks}")));
    }
    let seed = options.seed.map_or_else(random_seed, Ok)?;
    let own = Start { seed, process: std::process::id() as i32, launcher: crate::environment::launcher() };
    let starts: Vec<Start> = exchange(&*bootstrap, &own, options.timeout)?;
    let processes = siblings(&starts);
    let faults = match options.faults {
        Faults::All if processes.is_empty() => Faults::Abort,
        Faults::Stop if processes.is_empty() => Faults::None,
        faults => faults,
    };
    let parameters = Parameters { seed: starts[0].seed, ranks, max_bytes: options.max_bytes, faults };
    if bootstrap.rank() == 0 && options.format == SummaryFormat::Text {
        // Before the first call, which may end the run abruptly.
        report::write_header(&parameters)?;
    }
    let summary = Run { options, parameters, processes, own_seed: parameters.seed }.run(&bootstrap)?;
    if bootstrap.rank() == 0 {
        summary.write(options.format)?;
        summary.wrong().iter().for_each(|wrong| eprintln!("error: {wrong}"));
    }
    match summary.growth() {
        Some(growth) if summary.wrong().is_empty() => Err(Failure::Ranks(growth)),
        _ => Ok(summary.wrong().is_empty()),
    }
}

/// The message that ranks exchange before the first call.
#[derive(Serialize, Deserialize)]
struct Start {
    seed: u64,
    process: i32,
    launcher: Option<String>,
}

/// Returns the ranks' processes if one launcher started all: then their ids are valid for all of them.
fn siblings(starts: &[Start]) -> Vec<Pid> {
    let first = starts.first().and_then(|start| start.launcher.as_ref());
    match first.is_some() && starts.iter().all(|start| start.launcher.as_ref() == first) {
        true => starts.iter().map(|start| Pid::from_raw(start.process)).collect(),
        false => Vec::new(),
    }
}

/// A rank's view of the run.
struct Run<'a> {
    options: &'a Soak,
    parameters: Parameters,
    /// By rank; empty if they cannot be stopped.
    processes: Vec<Pid>,
    /// See [`Rank::new`].
    own_seed: u64,
}

impl Run<'_> {
    fn run(&self, bootstrap: &Arc<dyn Bootstrap>) -> Result<Summary, Failure> {
        let Self { options, parameters, ref processes, own_seed } = *self;
        let mut rank = Rank::new(Arc::clone(bootstrap), parameters, options, processes.clone(), own_seed);
        let start = Instant::now();
        let progress = (bootstrap.rank() == 0).then(|| Progress::new(0));
        let mut number = 0;
        loop {
            let end = options.calls.map_or(number + ROUND, |calls| calls.min(number + ROUND));
            while number < end {
                if number == WARM_UP {
                    rank.tally.after_warm_up = Some(self.usage(bootstrap, &mut rank, None)?);
                }
                rank.call(&Call::draw(&parameters, number))?;
                number += 1;
            }
            if let Some(progress) = &progress {
                let (seconds, megabytes) = (start.elapsed().as_secs_f64(), rank.tally.bytes as f64 / 1e6);
                let rate = number as f64 / seconds;
                progress
                    .show(&format!("{seconds:.0} s, {number} calls, {megabytes:.1} MB, {rate:.0} calls/s"));
            }
            let is_over = match options.calls {
                Some(calls) => number == calls,
                None => start.elapsed() >= options.minutes,
            };
            let (digest, is_wrong) = (rank.digest(), rank.tally.wrong.is_some());
            let notes = exchange(&**bootstrap, &Note { digest, is_over, is_wrong }, self.round_limit())?;
            if let Some(other) = notes.iter().position(|note| note.digest != digest) {
                return Err(Failure::Ranks(format!("rank {other} has drawn other calls than this one")));
            }
            // Clocks differ: the first rank decides.
            if notes[0].is_over || notes.iter().any(|note| note.is_wrong) {
                break;
            }
        }
        drop(progress);
        let seconds = start.elapsed().as_secs_f64();
        let before = rank.tally.after_warm_up;
        rank.tally.at_end = Some(self.usage(bootstrap, &mut rank, before)?);
        let by_rank: Vec<Tally> = exchange(&**bootstrap, &rank.tally, self.round_limit())?;
        Ok(Summary {
            version: env!("CARGO_PKG_VERSION"),
            ranks: parameters.ranks,
            seed: parameters.seed,
            max_bytes: parameters.max_bytes,
            faults: parameters.faults.name(),
            instruction_set: Isa::best().name(),
            cores: crate::facts::cores(),
            seconds,
            digest: format!("{:016x}", rank.digest()),
            total: Summary::total(&by_rank),
            leaks_measured: by_rank.iter().all(|tally| tally.after_warm_up.is_some()),
            leaks: by_rank.iter().map(Tally::growth).collect(),
            by_rank,
        })
    }

    /// Returns the resources of this rank without communicators. Waits a moment for resources that go away by
    /// themselves, such as a thread that the system still counts.
    fn usage(
        &self,
        bootstrap: &Arc<dyn Bootstrap>,
        rank: &mut Rank,
        before: Option<Usage>,
    ) -> Result<Usage, Failure> {
        const MOMENT: Duration = Duration::from_millis(50);
        const MOMENTS: usize = 40;
        rank.retire_all();
        bootstrap.barrier(self.round_limit())?;
        std::thread::sleep(MOMENT);
        let mut usage = Usage::now()?;
        for _ in 0..MOMENTS {
            if before.is_none_or(|before| usage.growth(&before).is_none()) {
                break;
            }
            std::thread::sleep(MOMENT);
            usage = Usage::now()?;
        }
        Ok(usage)
    }

    /// Returns the longest time between the ends of a call on two ranks, which check several results in it.
    fn round_limit(&self) -> Duration {
        2 * self.options.timeout
    }
}

/// Returns every rank's value.
fn exchange<T: Serialize + DeserializeOwned>(
    bootstrap: &dyn Bootstrap,
    mine: &T,
    limit: Duration,
) -> Result<Vec<T>, Failure> {
    let malformed = |rank: usize| {
        move |error: serde_json::Error| fast_allreduce::Error::Malformed { rank, reason: error.to_string() }
    };
    let mine = serde_json::to_vec(mine).map_err(malformed(bootstrap.rank()))?;
    let all = bootstrap.all_gather(&mine, limit)?;
    let decode =
        |(rank, bytes): (usize, &Vec<u8>)| Ok(serde_json::from_slice(bytes).map_err(malformed(rank))?);
    all.iter().enumerate().map(decode).collect()
}

#[cfg(test)]
mod tests {
    use fast_allreduce::bootstrap::Threads;

    use super::*;

    /// Runs ranks as threads, each of which makes its inputs from its own seed.
    fn soak(calls: u64, own_seeds: [u64; 3]) -> Vec<Summary> {
        let (seed, ranks, max_bytes) = (9, 3, 10_000);
        let options = Soak {
            minutes: Duration::MAX,
            calls: Some(calls),
            ranks,
            seed: Some(seed),
            max_bytes,
            settings: Vec::new(),
            faults: Faults::Abort,
            timeout: Duration::from_secs(60),
            format: SummaryFormat::Text,
        };
        let world = Threads::world(ranks).unwrap();
        std::thread::scope(|scope| {
            let start = |(bootstrap, own_seed)| {
                let options = &options;
                scope.spawn(move || {
                    let bootstrap: Arc<dyn Bootstrap> = Arc::new(bootstrap);
                    let parameters = Parameters { seed, ranks, max_bytes, faults: options.faults };
                    let run = Run { options, parameters, processes: Vec::new(), own_seed };
                    run.run(&bootstrap).unwrap()
                })
            };
            let threads: Vec<_> = world.into_iter().zip(own_seeds).map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_agree_and_nothing_is_wrong() {
        for summary in soak(60, [9; 3]) {
            assert_eq!(summary.wrong(), [""; 0]);
            assert_eq!((summary.total.drawn, summary.total.timeouts), (60, 0));
        }
    }

    #[test]
    fn a_rank_that_gives_other_numbers_is_found_by_all() {
        for summary in soak(60, [9, 10, 9]) {
            let wrong = summary.wrong();
            assert_eq!(wrong.len(), 3, "{wrong:?}");
            for (rank, line) in wrong.iter().enumerate() {
                assert!(line.starts_with(&format!("rank {rank}: seed 9, call ")), "{line}");
                assert!(line.contains("elements are wrong, the first is number "), "{line}");
            }
            // It ends with the round.
            assert_eq!(summary.total.drawn, ROUND);
        }
    }
}
