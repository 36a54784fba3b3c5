//! The report: one JSON object, and one page of Markdown.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;

use serde::{Deserialize, Serialize};

use super::record::{Outcome, Record};
use crate::arguments::{GpuCheck, Step};
use crate::failure::Failure;
use crate::input;
use crate::output::Output;

/// Reads the report that an earlier run wrote to the file of `--json`, and returns its steps that passed. Returns
/// none if there is no such file.
pub fn earlier(options: &GpuCheck) -> Result<Vec<Outcome>, Failure> {
    let Some(file) = &options.json else {
        return Err(Failure::Usage("--resume needs the --json of the run that it continues".into()));
    };
    let Some(text) = input::read(file)? else {
        return Ok(Vec::new());
    };
    let earlier: Report = serde_json::from_slice(&text).map_err(|error| input::failure(file, error))?;
    if earlier.identity != Identity::new(options) {
        let problem = "the report is of another build or of other settings: --resume cannot continue it";
        return Err(Failure::Usage(format!("{}: {problem}", file.display())));
    }
    Ok(earlier.steps.into_iter().filter(Outcome::is_right).collect())
}

/// The build and the settings of a run.
#[derive(PartialEq, Serialize, Deserialize)]
struct Identity {
    version: String,
    build: Vec<String>,
    gpu: usize,
    small: bool,
    set: Vec<(String, String)>,
}

impl Identity {
    fn new(options: &GpuCheck) -> Self {
        let build = fast_allreduce::build_facts().map(|(what, value)| format!("{what}: {value}")).into();
        let GpuCheck { gpu, small, ref set, .. } = *options;
        Self { version: env!("CARGO_PKG_VERSION").into(), build, gpu, small, set: set.clone() }
    }
}

/// The files of `--json` and `--markdown`. Whatever ends the program, they are whole.
pub struct Files {
    json: Option<Output>,
    markdown: Option<Output>,
}

impl Files {
    /// Checks that the files can be written, before a step runs.
    pub fn check(options: &GpuCheck) -> Result<Self, Failure> {
        let check = |file: &Option<_>| file.as_deref().map(Output::check).transpose();
        Ok(Self { json: check(&options.json)?, markdown: check(&options.markdown)? })
    }
}

/// The findings of all steps.
#[derive(Serialize, Deserialize)]
pub struct Report {
    #[serde(flatten)]
    identity: Identity,
    /// The measured constants, for `ptx-clock --constants`. Written from the records of steps, except those during
    /// which the clock changed or that ended before they checked it.
    #[serde(default)]
    constants: BTreeMap<String, f64>,
    pub steps: Vec<Outcome>,
}

impl Report {
    pub fn new(options: &GpuCheck) -> Self {
        Self { identity: Identity::new(options), constants: BTreeMap::new(), steps: Vec::new() }
    }

    pub fn is_right(&self) -> bool {
        self.steps.iter().all(Outcome::is_right)
    }

    fn records(&self) -> impl Iterator<Item = &Record> {
        self.steps.iter().flat_map(|outcome| &outcome.records)
    }

    /// Writes the files of `--json` and `--markdown`.
    pub fn write_files(&mut self, files: &Files) -> Result<(), Failure> {
        self.constants = self.steps.iter().flat_map(Outcome::constants).collect();
        if let Some(json) = &files.json {
            let text = serde_json::to_string_pretty(self).map_err(std::io::Error::from)?;
            json.write(&(text + "\n"))?;
        }
        files.markdown.as_ref().map_or(Ok(()), |markdown| markdown.write(&self.markdown()))
    }

    /// Writes the summary to standard output, unless `--markdown` names a file.
    pub fn write_summary(&self, options: &GpuCheck) -> Result<(), Failure> {
        if options.markdown.is_none() {
            let mut out = std::io::stdout().lock();
            out.write_all(self.markdown().as_bytes())?;
            out.flush()?;
        }
        Ok(())
    }

    fn markdown(&self) -> String {
        let mut page = String::new();
        // Writing to a String cannot fail.
        let _ = self.write_markdown(&mut page);
        page
    }

    fn write_markdown(&self, page: &mut String) -> std::fmt::Result {
        let Identity { version, build, gpu, .. } = &self.identity;
        writeln!(page, "# fast-allreduce {version} on GPU {gpu}\n")?;
        build.iter().try_for_each(|fact| writeln!(page, "* {fact}"))?;
        let between_gpus = [Step::Peers, Step::Nvls, Step::Gpus].map(Step::name);
        let measures_links =
            |outcome: &Outcome| between_gpus.contains(&outcome.step) && outcome.has_figures();
        let links = match self.steps.iter().any(measures_links) {
            true => "Only the steps `peers`, `nvls` and `gpus` measure links between GPUs; all others ran on one GPU.",
            false => "Everything ran on one GPU: no figure here measures NVLink or PCIe.",
        };
        writeln!(page, "\n{links}\n")?;
        for record in self.records() {
            if let Record::Answer { question, answer } = record {
                writeln!(page, "* {question} **{answer}**")?;
            }
        }
        let seconds: f64 = self.steps.iter().map(|outcome| outcome.seconds).sum();
        writeln!(page, "\nAll steps took {seconds:.0} s.\n")?;
        writeln!(page, "| step | result | cases | seconds |\n|---|---|---:|---:|")?;
        for outcome in &self.steps {
            let Outcome { step, seconds, .. } = outcome;
            writeln!(page, "| {step} | {} | {} | {seconds:.1} |", cell(&outcome.verdict()), outcome.cases())?;
        }
        for outcome in &self.steps {
            writeln!(page, "\n## {}\n", outcome.step)?;
            write_lists(page, &outcome.records)?;
            write_tables(page, &outcome.records)?;
        }
        Ok(())
    }
}

fn write_lists(page: &mut String, records: &[Record]) -> std::fmt::Result {
    for record in records {
        match record {
            Record::Fact { name, value } => writeln!(page, "* {name}: {value}")?,
            Record::Answer { question, answer } => writeln!(page, "* {question} {answer}")?,
            Record::Check { name, cases, error: None } => writeln!(page, "* {name}: right, {cases} cases")?,
            Record::Check { name, cases, error: Some(error) } => {
                writeln!(page, "* **{name}: FAILED** in {cases} cases: {error}")?;
            }
            Record::Skipped { name, why } => writeln!(page, "* {name}: skipped: {why}")?,
            Record::Constant { name, value } => writeln!(page, "* `{name} = {value:.5}`")?,
            Record::Figure { .. } | Record::Done => {}
        }
    }
    Ok(())
}

/// Writes the tables; rows and columns are in the order of their first figures.
fn write_tables(page: &mut String, records: &[Record]) -> std::fmt::Result {
    let figures = || {
        records.iter().filter_map(|record| match record {
            Record::Figure { table, row, column, value } => Some((table, row, column, *value)),
            _ => None,
        })
    };
    for table in distinct(figures().map(|(table, ..)| table)) {
        let of_table = || figures().filter(move |(of, ..)| *of == table);
        let columns = distinct(of_table().map(|(_, _, column, _)| column));
        let names: Vec<_> = columns.iter().map(|column| cell(column)).collect();
        writeln!(page, "\n{table}:\n\n| | {} |\n|---|{}", names.join(" | "), "---:|".repeat(columns.len()))?;
        for row in distinct(of_table().map(|(_, row, ..)| row)) {
            write!(page, "| {} |", cell(row))?;
            for column in &columns {
                match of_table().find(|(_, r, c, _)| *r == row && c == column) {
                    Some((.., value)) => write!(page, " {value:.2} |")?,
                    None => write!(page, " - |")?,
                }
            }
            writeln!(page)?;
        }
    }
    Ok(())
}

fn distinct<'a>(names: impl Iterator<Item = &'a String>) -> Vec<&'a String> {
    let mut seen = std::collections::BTreeSet::new();
    names.filter(|name| seen.insert(*name)).collect()
}

/// Escapes text for a cell of a Markdown table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}
