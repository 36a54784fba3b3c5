//! What a step finds: lines of JSON from its process to the supervisor, and the content of the report.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use crate::failure::Failure;

static HAS_FAILED: AtomicBool = AtomicBool::new(false);

/// True if this process has written a check that failed.
pub fn has_failed() -> bool {
    HAS_FAILED.load(Ordering::Relaxed)
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Record {
    /// Something that is so.
    Fact { name: String, value: String },
    /// What a question that all else depends on comes to: stands at the top of the report.
    Answer { question: String, answer: String },
    /// Something that must be so: how many cases were tried, and what was wrong.
    Check { name: String, cases: u64, error: Option<String> },
    /// A measurement, with its place in a table.
    Figure { table: String, row: String, column: String, value: f64 },
    /// A constant of the clock of the PTX machine (lab/gpu-model.md), in its unit there.
    Constant { name: String, value: f64 },
    /// What was left out.
    Skipped { name: String, why: String },
    /// The step has come to its end.
    Done,
}

impl Record {
    /// A fact.
    pub fn fact(name: impl Into<String>, value: impl ToString) -> Self {
        Self::Fact { name: name.into(), value: value.to_string() }
    }

    /// A question and its answer.
    pub fn answer(question: impl Into<String>, answer: impl ToString) -> Self {
        Self::Answer { question: question.into(), answer: answer.to_string() }
    }

    /// A check of `cases` cases that ended with `outcome`.
    pub fn check(name: impl Into<String>, cases: u64, outcome: Result<(), Failure>) -> Self {
        Self::Check { name: name.into(), cases, error: outcome.err().map(|failure| failure.to_string()) }
    }

    /// A number; the name of the table says its unit.
    pub fn figure(table: &str, row: impl ToString, column: impl ToString, value: f64) -> Self {
        Self::Figure { table: table.into(), row: row.to_string(), column: column.to_string(), value }
    }

    /// Something that was left out.
    pub fn skipped(name: impl Into<String>, why: impl ToString) -> Self {
        Self::Skipped { name: name.into(), why: why.to_string() }
    }

    /// Writes it, at once.
    pub fn write(&self) -> Result<(), Failure> {
        if matches!(self, Self::Check { error: Some(_), .. }) {
            HAS_FAILED.store(true, Ordering::Relaxed);
        }
        let line = serde_json::to_string(self).map_err(io::Error::from)?;
        let mut out = io::stdout().lock();
        writeln!(out, "{line}")?;
        Ok(out.flush()?)
    }
}

/// Writes a constant of the clock.
pub fn constant(name: &str, value: f64) -> Result<(), Failure> {
    match value.is_finite() && value >= 0.0 {
        true => Record::Constant { name: name.into(), value }.write(),
        false => Record::skipped(name, format!("what was measured is no cost: {value}")).write(),
    }
}

/// What became of a step.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome {
    pub step: String,
    /// `None`: nothing.
    pub error: Option<String>,
    pub seconds: f64,
    pub records: Vec<Record>,
}

impl Outcome {
    /// True if it came to its end and no check failed.
    pub fn is_right(&self) -> bool {
        self.error.is_none() && self.failures() == 0
    }

    /// Checks that failed.
    pub fn failures(&self) -> usize {
        let failed = |record: &&Record| matches!(record, Record::Check { error: Some(_), .. });
        self.records.iter().filter(failed).count()
    }

    /// Cases that were checked.
    pub fn cases(&self) -> u64 {
        let cases = |record: &Record| if let Record::Check { cases, .. } = record { *cases } else { 0 };
        self.records.iter().map(cases).sum()
    }

    /// In a few words.
    pub fn verdict(&self) -> String {
        let is_skipped = |record: &Record| matches!(record, Record::Skipped { .. });
        match (&self.error, self.failures()) {
            (None, 0) if !self.records.is_empty() && self.records.iter().all(is_skipped) => "skipped".into(),
            (None, 0) => "passed".into(),
            (None, failures) => format!("FAILED ({failures} checks)"),
            (Some(error), 0) => format!("FAILED: {error}"),
            (Some(error), failures) => format!("FAILED ({failures} checks): {error}"),
        }
    }

    /// On one line.
    pub fn line(&self) -> String {
        format!("{:15} {:6.1} s  {} cases  {}", self.step, self.seconds, self.cases(), self.verdict())
    }
}
