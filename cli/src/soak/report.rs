//! What was done, and what came of it: lines to read, or one object.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::Duration;

use fast_allreduce::device::host::Isa;
use fast_allreduce::DType;
use serde::{Deserialize, Serialize};

use super::draw::{Call, Range};
use super::find::Made;
use super::usage::Usage;
use crate::arguments::SummaryFormat;

/// What one rank has done.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Tally {
    /// Calls drawn, of which some are made several times, or by other ranks.
    pub drawn: u64,
    pub calls: u64,
    pub bytes: u64,
    pub by_collective: BTreeMap<String, u64>,
    /// Of allreduces.
    pub by_algorithm: BTreeMap<String, u64>,
    pub by_type: BTreeMap<String, u64>,
    pub communicators: u64,
    pub groups: u64,
    /// Faults that this rank has made, by kind.
    pub faults: BTreeMap<String, u64>,
    /// How rounds of calls with a fault ended.
    pub after_faults: BTreeMap<String, u64>,
    /// How ranks went on after them.
    pub recoveries: BTreeMap<String, u64>,
    pub worst_us: f64,
    pub worst_call: String,
    /// From the communicators' counters.
    pub waits: u64,
    pub timeouts: u64,
    /// The first thing that is.
    pub wrong: Option<String>,
    pub after_warm_up: Option<Usage>,
    pub at_end: Option<Usage>,
}

impl Tally {
    /// Notes how long a call took.
    pub fn time(&mut self, took: Duration, call: &Call, made: &Made) {
        let us = took.as_secs_f64() * 1e6;
        if us > self.worst_us {
            self.worst_us = us;
            self.worst_call = format!("{call} by {made}");
        }
    }

    /// Counts a call.
    pub fn count(&mut self, made: &Made, dtype: DType, bytes: u64) {
        self.calls += 1;
        self.bytes += bytes;
        *self.by_collective.entry(made.kind.name().into()).or_default() += 1;
        if let Some(algorithm) = made.algorithm {
            *self.by_algorithm.entry(algorithm.name().into()).or_default() += 1;
        }
        *self.by_type.entry(dtype.name().into()).or_default() += 1;
    }

    /// What this rank holds more than after the warm-up.
    pub fn growth(&self) -> Option<String> {
        self.at_end?.growth(&self.after_warm_up?)
    }
}

/// Writes what is known before the first call.
pub fn write_header(range: &Range) -> io::Result<()> {
    let Range { seed, ranks, max_bytes, faults } = range;
    let (instruction_set, cores) = (Isa::best().name(), crate::facts::cores());
    let mut out = io::stdout().lock();
    writeln!(out, "# fast-allreduce {} soak", env!("CARGO_PKG_VERSION"))?;
    writeln!(out, "# ranks {ranks} device host instruction set {instruction_set} cores {cores}")?;
    writeln!(out, "# seed {seed} maxbytes {max_bytes} faults {}", faults.name())?;
    out.flush()
}

/// Counts by name.
fn words(counts: &BTreeMap<String, u64>) -> String {
    let words: Vec<_> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
    match words.is_empty() {
        true => "none".into(),
        false => words.join(", "),
    }
}

/// A run, as all of its ranks tell it.
#[derive(Debug, Serialize)]
pub struct Summary {
    pub version: &'static str,
    pub ranks: usize,
    pub seed: u64,
    pub max_bytes: usize,
    pub faults: &'static str,
    pub instruction_set: &'static str,
    pub cores: usize,
    pub seconds: f64,
    /// Of the calls drawn: equal for equal seeds, ranks, sizes and numbers of calls.
    pub digest: String,
    /// Over all ranks, save for what is counted once for all.
    pub total: Tally,
    /// Whether the run was long enough to tell.
    pub leaks_measured: bool,
    /// By rank.
    pub leaks: Vec<Option<String>>,
    pub by_rank: Vec<Tally>,
}

impl Summary {
    /// Adds up what the ranks have done.
    pub fn total(by_rank: &[Tally]) -> Tally {
        let mut total = by_rank.first().cloned().unwrap_or_default();
        for tally in by_rank.iter().skip(1) {
            total.calls += tally.calls;
            total.bytes += tally.bytes;
            total.groups += tally.groups;
            total.waits += tally.waits;
            total.timeouts += tally.timeouts;
            for (mine, theirs) in [
                (&mut total.by_collective, &tally.by_collective),
                (&mut total.by_algorithm, &tally.by_algorithm),
                (&mut total.by_type, &tally.by_type),
                (&mut total.faults, &tally.faults),
                (&mut total.after_faults, &tally.after_faults),
            ] {
                theirs.iter().for_each(|(name, count)| *mine.entry(name.clone()).or_default() += count);
            }
            if tally.worst_us > total.worst_us {
                (total.worst_us, total.worst_call) = (tally.worst_us, tally.worst_call.clone());
            }
        }
        (total.after_warm_up, total.at_end) = (None, None);
        total
    }

    /// What is wrong, a line for each rank that found something.
    pub fn wrong(&self) -> Vec<String> {
        let told = |(rank, tally): (usize, &Tally)| Some(format!("rank {rank}: {}", tally.wrong.as_ref()?));
        self.by_rank.iter().enumerate().filter_map(told).collect()
    }

    /// What has grown.
    pub fn growth(&self) -> Option<String> {
        let told = |(rank, growth): (usize, &Option<String>)| {
            Some(format!("rank {rank} holds {}", growth.as_ref()?))
        };
        let grown: Vec<_> = self.leaks.iter().enumerate().filter_map(told).collect();
        (!grown.is_empty()).then(|| grown.join("; "))
    }

    pub fn write(&self, format: SummaryFormat) -> io::Result<()> {
        let mut out = io::stdout().lock();
        match format {
            SummaryFormat::Text => self.write_text(&mut out)?,
            SummaryFormat::Json => {
                serde_json::to_writer_pretty(&mut out, self)?;
                writeln!(out)?;
            }
        }
        out.flush()
    }

    fn write_text(&self, out: &mut impl Write) -> io::Result<()> {
        let Self { seconds, total, .. } = self;
        let rate = total.drawn as f64 / seconds;
        writeln!(out, "drawn          {} calls in {seconds:.1} s, {rate:.1} calls/s", total.drawn)?;
        writeln!(out, "digest         {}", self.digest)?;
        writeln!(out, "made           {} calls of {} bytes, on all ranks", total.calls, total.bytes)?;
        for (what, counts) in [
            ("by collective", &total.by_collective),
            ("by algorithm", &total.by_algorithm),
            ("by type", &total.by_type),
        ] {
            writeln!(out, "{what:<14} {}", words(counts))?;
        }
        writeln!(out, "faults         {}", words(&total.faults))?;
        if !total.after_faults.is_empty() {
            let (ends, recoveries) = (words(&total.after_faults), words(&total.recoveries));
            writeln!(out, "after faults   ranks ended with {ends}; new communicators by {recoveries}")?;
        }
        let Tally { communicators, groups, waits, timeouts, .. } = total;
        writeln!(out, "communicators  {communicators} made by all ranks; {groups} of groups, on all ranks")?;
        writeln!(out, "worst call     {:.1} ms: {}", total.worst_us / 1e3, total.worst_call)?;
        writeln!(out, "counters       {waits} waits beyond the first polls, {timeouts} timeouts")?;
        let leaks = match (self.growth(), self.leaks_measured) {
            (Some(growth), _) => growth,
            (None, true) => "none".into(),
            (None, false) => "not measured: the run ended before its warm-up".into(),
        };
        writeln!(out, "leaks          {leaks}")?;
        for (rank, tally) in self.by_rank.iter().enumerate() {
            if let (Some(before), Some(after)) = (tally.after_warm_up, tally.at_end) {
                writeln!(
                    out,
                    "  rank {rank:<7}  descriptors {} to {}, threads {} to {}, shared mappings {} to {}, mappings {} to {}, \
                     resident memory {} to {} KiB",
                    before.descriptors,
                    after.descriptors,
                    before.threads,
                    after.threads,
                    before.shared_mappings,
                    after.shared_mappings,
                    before.mappings,
                    after.mappings,
                    before.resident_kib,
                    after.resident_kib
                )?;
            }
        }
        match self.wrong().len() {
            0 => writeln!(out, "wrong          nothing"),
            ranks => writeln!(out, "wrong          see the errors of {ranks} of the ranks"),
        }
    }
}
