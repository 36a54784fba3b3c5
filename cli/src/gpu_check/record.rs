//! Findings of a step: lines of JSON from the step's process to the supervisor, and the content of the report.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use crate::failure::Failure;

static HAS_FAILED: AtomicBool = AtomicBool::new(false);

/// Returns whether this process has written a check that failed.
pub fn has_failed() -> bool {
    HAS_FAILED.load(Ordering::Relaxed)
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Record {
    /// A property of the machine or the run.
    Fact { name: String, value: String },
    /// The answer to a question that later steps depend on; printed at the top of the report. A later answer replaces
    /// it.
    Answer { question: String, answer: String },
    /// A check: the number of cases tried, and the first error.
    Check { name: String, cases: u64, error: Option<String> },
    /// A measurement, with its place in a table; the table's name contains the unit.
    Figure { table: String, row: String, column: String, value: f64 },
    /// A constant of the PTX machine's clock (lab/gpu-model.md), in its unit there.
    Constant { name: String, value: f64 },
    /// Work that was not done.
    Skipped { name: String, why: String },
    /// The step has run to its end.
    Done,
}

/// Writes the record to standard output and flushes it: a step that hangs later has still reported it.
pub fn write(record: &Record) -> Result<(), Failure> {
    let line = serde_json::to_string(record).map_err(io::Error::from)?;
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

pub fn fact(name: impl ToString, value: impl ToString) -> Result<(), Failure> {
    write(&Record::Fact { name: name.to_string(), value: value.to_string() })
}

pub fn answer(question: impl ToString, answer: impl ToString) -> Result<(), Failure> {
    write(&Record::Answer { question: question.to_string(), answer: answer.to_string() })
}

pub fn check(name: impl ToString, cases: u64, outcome: Result<(), Failure>) -> Result<(), Failure> {
    let error = outcome.err().map(|failure| failure.to_string());
    HAS_FAILED.fetch_or(error.is_some(), Ordering::Relaxed);
    write(&Record::Check { name: name.to_string(), cases, error })
}

pub fn figure(table: &str, row: impl ToString, column: impl ToString, value: f64) -> Result<(), Failure> {
    write(&Record::Figure { table: table.into(), row: row.to_string(), column: column.to_string(), value })
}

pub fn constant(name: &str, value: f64) -> Result<(), Failure> {
    match value.is_finite() && value >= 0.0 {
        true => write(&Record::Constant { name: name.into(), value }),
        false => skipped(name, format!("the measured value is not a valid cost: {value}")),
    }
}

/// Name of the constant that is the clock of the multiprocessors.
pub const GHZ: &str = "ghz";

/// Name of the check that a GPU had the same clock at both ends of a step.
pub const CLOCK: &str = "the clock";

/// Why work for several GPUs is skipped.
pub const ONE_GPU: &str =
    "this process sees one GPU, and this takes two or more (CUDA_VISIBLE_DEVICES may hide some)";

pub fn skipped(name: impl ToString, why: impl ToString) -> Result<(), Failure> {
    write(&Record::Skipped { name: name.to_string(), why: why.to_string() })
}

/// Writes that `name` was skipped because the step's time is over.
pub fn out_of_time(name: impl ToString) -> Result<(), Failure> {
    skipped(name, "the step's time was over")
}

pub fn done() -> Result<(), Failure> {
    write(&Record::Done)
}

/// The result of a step.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome {
    pub step: String,
    /// Why the step did not run to its end; `None` if it did.
    pub error: Option<String>,
    pub seconds: f64,
    pub records: Vec<Record>,
}

impl Outcome {
    /// Returns whether the step ran to its end and no check failed.
    pub fn is_right(&self) -> bool {
        self.error.is_none() && self.failures() == 0
    }

    /// Returns the number of failed checks.
    fn failures(&self) -> usize {
        let failed = |record: &&Record| matches!(record, Record::Check { error: Some(_), .. });
        self.records.iter().filter(failed).count()
    }

    /// Returns the constants that it measured; of a step that measures the clock, none unless it found at its end that
    /// the clock had not changed.
    pub fn constants(&self) -> impl Iterator<Item = (String, f64)> + '_ {
        let measured = |record: &Record| matches!(record, Record::Constant { name, .. } if name == GHZ);
        let unchanged =
            |record: &Record| matches!(record, Record::Check { name, error: None, .. } if name == CLOCK);
        let constant = |record: &Record| match record {
            Record::Constant { name, value } => Some((name.clone(), *value)),
            _ => None,
        };
        let is_valid = !self.records.iter().any(measured) || self.records.iter().any(unchanged);
        self.records.iter().filter_map(constant).filter(move |_| is_valid)
    }

    pub fn has_figures(&self) -> bool {
        self.records.iter().any(|record| matches!(record, Record::Figure { .. }))
    }

    /// Returns why nothing was checked or measured, if that is so.
    fn all_skipped(&self) -> Option<&str> {
        let is_done = |record: &Record| matches!(record, Record::Check { .. } | Record::Figure { .. });
        let skipped = self.records.iter().find_map(|record| match record {
            Record::Skipped { why, .. } => Some(why.as_str()),
            _ => None,
        });
        skipped.filter(|_| !self.records.iter().any(is_done))
    }

    /// Returns the number of cases checked.
    pub fn cases(&self) -> u64 {
        let cases = |record: &Record| if let Record::Check { cases, .. } = record { *cases } else { 0 };
        self.records.iter().map(cases).sum()
    }

    /// Summarises the outcome in a few words.
    pub fn verdict(&self) -> String {
        match (&self.error, self.failures()) {
            (None, 0) => self.all_skipped().map_or("passed".into(), |why| format!("skipped: {why}")),
            (None, failures) => format!("FAILED ({failures} checks)"),
            (Some(error), 0) => format!("FAILED: {error}"),
            (Some(error), failures) => format!("FAILED ({failures} checks): {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_of_a_clock_that_was_not_checked_are_left_out() {
        let constant = |name: &str| Record::Constant { name: name.into(), value: 1.5 };
        let clock = |error: Option<&str>| Record::Check {
            name: CLOCK.into(),
            cases: 1,
            error: error.map(str::to_owned),
        };
        for (records, count) in [
            (vec![constant("link_gbps")], 1),
            (vec![constant(GHZ), constant("l2_cycles"), clock(None)], 2),
            (vec![constant(GHZ), constant("l2_cycles"), clock(Some("it changed"))], 0),
            // The step was ended before.
            (vec![constant(GHZ), constant("l2_cycles")], 0),
        ] {
            let outcome = Outcome { step: "costs".into(), error: None, seconds: 1.0, records };
            assert_eq!(outcome.constants().count(), count, "{outcome:?}");
        }
    }
}
