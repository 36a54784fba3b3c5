//! Results of `bench` and `compare`: written to standard output as a table, JSON or CSV, and as a page.

use std::io::{self, Write};

use serde::Serialize;

use crate::arguments::Format;
use crate::cells::{
    page_cells, write_csv_header, write_csv_row, write_table_header, write_table_row, Cell, Group,
};
use crate::failure::Failure;
use crate::harness::progress::Progress;
use crate::harness::session::Session;
use crate::harness::suspension::Suspension;
use crate::output::Output;
use crate::page::{render, Page, Panel, Point, Series, Table};

/// A row of results.
pub trait Reported: Serialize + Sized {
    /// Settings and facts that the numbers depend on.
    type Config: Serialize;
    /// A summary of the rows of one contender.
    type Summary: Serialize;

    const GROUPS: &'static [Group];

    /// Returns a cell for each column of [`Self::GROUPS`].
    fn cells(&self) -> Vec<Cell>;

    /// Returns the number of wrong elements on all ranks.
    fn wrong(&self) -> u64;

    /// Returns what a reader must know of the row's times, if anything.
    fn remark(&self) -> Option<String> {
        None
    }

    /// Returns the line above the first row of a section.
    fn section(&self, config: &Self::Config) -> Option<String>;

    /// Returns the title of the row's panel on a page.
    fn panel(&self) -> String;

    /// Returns the row's points in charts, with the names of their lines. `is_forced`: rows differ by algorithm.
    fn points(&self, is_forced: bool) -> Vec<(String, Point)>;

    /// Writes the lines above the header of a table.
    fn write_facts(out: &mut dyn Write, config: &Self::Config) -> io::Result<()>;

    fn summaries(rows: &[Self]) -> Vec<Self::Summary>;

    /// Writes the lines below a table.
    fn write_footer(out: &mut dyn Write, report: &Report<Self>) -> io::Result<()>;

    /// Makes a page; the panels are added to it.
    fn page(report: &Report<Self>) -> Page;
}

/// A contender that is missing from all results, or from those of a collective, type and operation.
#[derive(Debug, Clone, Serialize)]
pub struct LeftOut {
    pub name: &'static str,
    pub collective: Option<&'static str>,
    #[serde(rename = "type")]
    pub dtype: Option<&'static str>,
    pub redop: Option<&'static str>,
    pub reason: String,
}

impl LeftOut {
    /// Leaves a contender out of all results.
    pub fn of_run(name: &'static str, reason: String) -> Self {
        Self { name, collective: None, dtype: None, redop: None, reason }
    }

    pub fn sentence(&self) -> String {
        let kind = match (self.collective, self.dtype, self.redop) {
            (Some(collective), Some(dtype), Some("none")) => format!(" of {collective} {dtype}"),
            (Some("all_reduce"), Some(dtype), Some(redop)) => format!(" of {dtype} {redop}"),
            (Some(collective), Some(dtype), Some(redop)) => format!(" of {collective} {dtype} {redop}"),
            _ => String::new(),
        };
        format!("{} left out{kind}: {}", self.name, self.reason)
    }
}

/// The results so far.
#[derive(Serialize)]
#[serde(bound = "")]
pub struct Report<R: Reported> {
    pub config: R::Config,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOut>,
    #[serde(rename = "results")]
    pub rows: Vec<R>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub summary: Vec<R::Summary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suspension: Option<Suspension>,
    pub wrong: u64,
}

/// Writes results on the first rank, and does nothing on the others.
pub struct Reporting<R: Reported>(Option<Writer<R>>);

struct Writer<R: Reported> {
    format: Format,
    report: Report<R>,
    progress: Progress,
}

impl<R: Reported> Reporting<R> {
    /// Writes the header. `steps` is the total of the progress line.
    pub fn start(
        session: &Session,
        format: Format,
        steps: usize,
        config: impl FnOnce() -> R::Config,
    ) -> io::Result<Self> {
        if session.rank() > 0 {
            return Ok(Self(None));
        }
        let config = config();
        let mut out = io::stdout().lock();
        match format {
            Format::Table => {
                R::write_facts(&mut out, &config)?;
                writeln!(out, "#")?;
                write_table_header(&mut out, R::GROUPS)?;
            }
            Format::Csv => write_csv_header(&mut out, R::GROUPS)?,
            Format::Json => {}
        }
        out.flush()?;
        let report = Report {
            config,
            left_out: Vec::new(),
            rows: Vec::new(),
            summary: Vec::new(),
            suspension: None,
            wrong: 0,
        };
        Ok(Self(Some(Writer { format, report, progress: Progress::new(steps) })))
    }

    /// Shows the next case on the progress line.
    pub fn show(&self, what: &impl ToString) {
        if let Some(writer) = &self.0 {
            writer.progress.show(&what.to_string());
        }
    }

    /// Reports a contender that is missing from here on.
    pub fn leave_out(&mut self, left: LeftOut) -> io::Result<()> {
        let Some(Writer { format, report, progress }) = &mut self.0 else {
            return Ok(());
        };
        progress.clear();
        match format {
            Format::Table => writeln!(io::stdout(), "# {}", left.sentence())?,
            // Standard output has only records.
            Format::Csv => eprintln!("{}", left.sentence()),
            Format::Json => {}
        }
        report.left_out.push(left);
        Ok(())
    }

    /// Adds what a suspension takes.
    pub fn set_suspension(&mut self, suspension: Suspension) {
        if let Some(writer) = &mut self.0 {
            writer.report.suspension = Some(suspension);
        }
    }

    /// Writes the rows of a step.
    pub fn add(&mut self, rows: impl IntoIterator<Item = R>) -> io::Result<()> {
        let Some(Writer { format, report, progress }) = &mut self.0 else {
            return Ok(());
        };
        progress.clear();
        progress.advance();
        let mut out = io::stdout().lock();
        for row in rows {
            match format {
                Format::Table => {
                    let section = |row: &R| row.section(&report.config);
                    let before = report.rows.last().and_then(section);
                    if let Some(section) = section(&row).filter(|section| Some(section) != before.as_ref()) {
                        writeln!(out, "# {section}")?;
                    }
                    write_table_row(&mut out, R::GROUPS, &row.cells(), row.remark())?;
                }
                Format::Csv => write_csv_row(&mut out, &row.cells())?,
                Format::Json => {}
            }
            report.wrong += row.wrong();
            report.rows.push(row);
        }
        out.flush()
    }

    /// Writes the end of the results, and the page. After a failure the rows so far are not lost. Returns `outcome`.
    pub fn finish(self, page: Option<&Output>, outcome: Result<bool, Failure>) -> Result<bool, Failure> {
        let Some(Writer { format, mut report, progress }) = self.0 else {
            return outcome;
        };
        drop(progress);
        report.summary = R::summaries(&report.rows);
        if outcome.is_ok() || !report.rows.is_empty() {
            let mut out = io::stdout().lock();
            match format {
                Format::Table => R::write_footer(&mut out, &report)?,
                // Standard output has only records.
                Format::Csv => report.suspension.iter().for_each(|found| eprintln!("{}", found.sentence())),
                Format::Json => {
                    serde_json::to_writer_pretty(&mut out, &report).map_err(io::Error::from)?;
                    writeln!(out)?;
                }
            }
            out.flush()?;
        }
        let is_right = outcome?;
        if let Some(page) = page {
            let content = Page { panels: panels(&report.rows), ..R::page(&report) };
            page.write(&render(&content))?;
        }
        Ok(is_right)
    }
}

/// Name of the contender, and of the line in charts, that is a copy.
pub const MEMCPY: &str = "memcpy";

/// Makes a panel for each title, in order of appearance.
fn panels<R: Reported>(rows: &[R]) -> Vec<Panel> {
    let mut titles: Vec<String> = rows.iter().map(R::panel).collect();
    titles.dedup();
    titles
        .into_iter()
        .map(|title| panel(rows.iter().filter(|row| row.panel() == title), title.clone()))
        .collect()
}

fn panel<'a, R: Reported + 'a>(rows: impl Iterator<Item = &'a R> + Clone, title: String) -> Panel {
    // Several rows of one line and size differ by algorithm.
    let unforced: Vec<_> = rows.clone().flat_map(|row| row.points(false)).collect();
    let is_forced = unforced.iter().enumerate().any(|(index, (name, point))| {
        name != MEMCPY && unforced[..index].iter().any(|(n, p)| n == name && p.bytes == point.bytes)
    });
    let mut series: Vec<Series> = Vec::new();
    for (name, point) in rows.clone().flat_map(|row| row.points(is_forced)) {
        let is_floor = name == MEMCPY;
        match series.iter_mut().find(|series| series.name == name) {
            Some(series) => {
                match series.points.iter_mut().find(|other| is_floor && other.bytes == point.bytes) {
                    // Copies of one size differ by what else ran: the fastest counts.
                    Some(other) => other.latency_us = other.latency_us.min(point.latency_us),
                    None => series.points.push(point),
                }
            }
            None => series.push(Series { name, is_floor, points: vec![point] }),
        }
    }
    series.sort_by_key(|series| series.is_floor);
    let rows = rows.map(|row| page_cells(R::GROUPS, &row.cells())).collect();
    Panel { title, series, table: Table { groups: R::GROUPS, rows } }
}
