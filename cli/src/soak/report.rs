//! The summary of a run: lines to read, or one object.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::Duration;

use fast_allreduce::device::host::Isa;
use fast_allreduce::DType;
use serde::{Deserialize, Serialize};

use super::check::Label;
use super::draw::{Call, Parameters};
use super::usage::Usage;
use crate::arguments::SummaryFormat;

/// Counts of one rank's work.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Tally {
    /// Calls drawn; some are repeated, or made by other ranks.
    pub drawn: u64,
    pub calls: u64,
    pub bytes: u64,
    pub by_collective: BTreeMap<String, u64>,
    /// Allreduces only.
    pub by_algorithm: BTreeMap<String, u64>,
    pub by_type: BTreeMap<String, u64>,
    pub communicators: u64,
    pub groups: u64,
    /// Faults that this rank caused, by kind.
    pub faults: BTreeMap<String, u64>,
    /// Rounds with a fault, by how they ended.
    pub after_faults: BTreeMap<String, u64>,
    /// What came after such rounds, by kind; replays of recorded calls.
    pub recoveries: BTreeMap<String, u64>,
    pub worst_us: f64,
    pub worst_call: String,
    /// From the communicators' counters.
    pub waits: u64,
    pub timeouts: u64,
    /// The first error.
    pub wrong: Option<String>,
    pub after_warm_up: Option<Usage>,
    pub at_end: Option<Usage>,
}

impl Tally {
    /// Records the duration of a call.
    pub fn time(&mut self, took: Duration, call: &Call, made: &Label) {
        let us = took.as_secs_f64() * 1e6;
        if us > self.worst_us {
            self.worst_us = us;
            self.worst_call = format!("{call} by {made}");
        }
    }

    /// Counts a call.
    pub fn count(&mut self, made: &Label, dtype: DType, bytes: u64) {
        self.calls += 1;
        self.bytes += bytes;
        *self.by_collective.entry(made.kind.name().into()).or_default() += 1;
        if let Some(algorithm) = made.algorithm {
            *self.by_algorithm.entry(algorithm.name().into()).or_default() += 1;
        }
        *self.by_type.entry(dtype.name().into()).or_default() += 1;
    }

    /// Notes an error, if it is the first.
    pub fn note(&mut self, wrong: String) {
        self.wrong.get_or_insert(wrong);
    }

    /// Returns which resources of this rank have grown since the warm-up.
    pub fn growth(&self) -> Option<String> {
        self.at_end?.growth(&self.after_warm_up?)
    }
}

/// Writes the parameters before the first call.
pub fn write_header(parameters: &Parameters) -> io::Result<()> {
    let Parameters { seed, ranks, max_bytes, faults } = parameters;
    let (instruction_set, cores) = (Isa::best().name(), crate::facts::cores());
    let mut out = io::stdout().lock();
    writeln!(out, "# fast-allreduce {} soak", env!("CARGO_PKG_VERSION"))?;
    writeln!(out, "# ranks {ranks} device host instruction set {instruction_set} cores {cores}")?;
    writeln!(out, "# seed {seed} maxbytes {max_bytes} faults {}", faults.name())?;
    out.flush()
}

/// Formats counts by name.
fn words(counts: &BTreeMap<String, u64>) -> String {
    let words: Vec<_> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
    match words.is_empty() {
        true => "none".into(),
        false => words.join(", "),
    }
}

/// The summary of a run on all ranks.
#[derive(Debug, Serialize)]
pub struct Summary {
    pub version: &'static str,
    pub ranks: usize,
    pub seed: u64,
    pub max_bytes: usize,
    pub faults: String,
    pub instruction_set: &'static str,
    pub cores: usize,
    pub seconds: f64,
    /// Digest of the calls drawn: equal for equal seeds, ranks, sizes and numbers of calls.
    pub digest: String,
    /// Sums over all ranks, except for counts that all ranks share.
    pub total: Tally,
    /// Whether the run was long enough to measure leaks.
    pub leaks_measured: bool,
    /// By rank.
    pub leaks: Vec<Option<String>>,
    pub by_rank: Vec<Tally>,
}

impl Summary {
    /// Adds up the tallies of all ranks.
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

    /// Returns a line for each rank that found an error.
    pub fn wrong(&self) -> Vec<String> {
        let line = |(rank, tally): (usize, &Tally)| Some(format!("rank {rank}: {}", tally.wrong.as_ref()?));
        self.by_rank.iter().enumerate().filter_map(line).collect()
    }

    /// Returns which resources have grown.
    pub fn growth(&self) -> Option<String> {
        let line = |(rank, growth): (usize, &Option<String>)| {
            Some(format!("rank {rank} holds {}", growth.as_ref()?))
        };
        let grown: Vec<_> = self.leaks.iter().enumerate().filter_map(line).collect();
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
            writeln!(out, "after faults   ranks ended with {ends}; then {recoveries}")?;
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
                writeln!(out, "  rank {rank:<7}  {}", after.compared(&before))?;
            }
        }
        match self.wrong().len() {
            0 => writeln!(out, "wrong          nothing"),
            ranks => writeln!(out, "wrong          see the errors of {ranks} of the ranks"),
        }
    }
}
