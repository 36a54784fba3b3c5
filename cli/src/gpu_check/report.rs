//! The report: one JSON object, and one page of Markdown.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;

use serde::{Deserialize, Serialize};

use super::record::{Outcome, Record};
use crate::arguments::GpuCheck;
use crate::failure::Failure;

/// The steps that came to their end without a failure in an earlier run that wrote the same file; none where there is none.
pub fn earlier(options: &GpuCheck) -> Result<Vec<Outcome>, Failure> {
    #[derive(Deserialize)]
    struct Earlier {
        version: String,
        build: Vec<String>,
        gpu: usize,
        small: bool,
        steps: Vec<Outcome>,
    }
    let Some(file) = &options.json else {
        return Err(Failure::Usage("--resume needs the --json of the run that it goes on with".into()));
    };
    let text = match std::fs::read(file) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Failure::File(file.clone(), error)),
    };
    let earlier: Earlier =
        serde_json::from_slice(&text).map_err(|error| Failure::File(file.clone(), error.into()))?;
    let now = Report::new(options);
    if (&*earlier.version, &earlier.build, earlier.gpu, earlier.small)
        != (now.version, &now.build, now.gpu, now.small)
    {
        let problem = "of another build or with other settings: --resume does not go on with it";
        return Err(Failure::Usage(format!("{}: {problem}", file.display())));
    }
    Ok(earlier.steps.into_iter().filter(Outcome::is_right).collect())
}

/// What all steps found.
#[derive(Serialize)]
pub struct Report {
    version: &'static str,
    build: Vec<String>,
    gpu: usize,
    small: bool,
    /// As `ptx-clock --constants` takes them.
    constants: BTreeMap<String, f64>,
    steps: Vec<Outcome>,
}

impl Report {
    pub fn new(options: &GpuCheck) -> Self {
        let build = fast_allreduce::build_facts().map(|(what, value)| format!("{what}: {value}")).into();
        let GpuCheck { gpu, small, .. } = *options;
        Self {
            version: env!("CARGO_PKG_VERSION"),
            build,
            gpu,
            small,
            constants: BTreeMap::new(),
            steps: Vec::new(),
        }
    }

    pub fn add(&mut self, outcome: Outcome) {
        for record in &outcome.records {
            if let Record::Constant { name, value } = record {
                self.constants.insert(name.clone(), *value);
            }
        }
        self.steps.push(outcome);
    }

    pub fn is_right(&self) -> bool {
        self.steps.iter().all(Outcome::is_right)
    }

    /// Writes the files that were asked for.
    pub fn write_files(&self, options: &GpuCheck) -> Result<(), Failure> {
        if let Some(file) = &options.json {
            let mut json = serde_json::to_string_pretty(self).map_err(std::io::Error::from)?;
            json.push('\n');
            std::fs::write(file, json)?;
        }
        if let Some(file) = &options.markdown {
            std::fs::write(file, self.markdown())?;
        }
        Ok(())
    }

    /// Writes the summary to standard output, if no file was asked for.
    pub fn write_summary(&self, options: &GpuCheck) -> Result<(), Failure> {
        if options.markdown.is_some() {
            return Ok(());
        }
        let mut out = std::io::stdout().lock();
        out.write_all(self.markdown().as_bytes())?;
        Ok(out.flush()?)
    }

    fn markdown(&self) -> String {
        let mut page = String::new();
        // Writing to a String cannot fail.
        let _ = self.write_markdown(&mut page);
        page
    }

    fn write_markdown(&self, page: &mut String) -> std::fmt::Result {
        writeln!(page, "# fast-allreduce {} on GPU {}\n", self.version, self.gpu)?;
        for fact in &self.build {
            writeln!(page, "* {fact}")?;
        }
        writeln!(page, "\nEverything ran on one GPU: no figure here is one of NVLink or PCIe.\n")?;
        for record in self.steps.iter().flat_map(|outcome| &outcome.records) {
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

/// Tables, rows and columns in the order of their first figures.
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
        writeln!(page, "\n{table}:\n\n| | {} |", names.join(" | "))?;
        writeln!(page, "|---|{}", "---:|".repeat(columns.len()))?;
        for row in distinct(of_table().map(|(_, row, ..)| row)) {
            let value = |column: &&String| {
                let at = |(_, r, c, _): &(_, &String, &String, _)| *r == row && *c == *column;
                of_table().find(at).map_or("-".into(), |(.., value)| format!("{value:.2}"))
            };
            writeln!(
                page,
                "| {} | {} |",
                cell(row),
                columns.iter().map(value).collect::<Vec<_>>().join(" | ")
            )?;
        }
    }
    Ok(())
}

fn distinct<'a>(names: impl Iterator<Item = &'a String>) -> Vec<&'a String> {
    let mut seen = Vec::new();
    for name in names {
        if !seen.contains(&name) {
            seen.push(name);
        }
    }
    seen
}

/// Text that does not end a cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}
