//! Writes the results to standard output: nccl-tests' table, JSON or CSV.

use std::io::{self, Write};

use serde::Serialize;

use super::figures::{bandwidth, significant};
use super::html;
use crate::arguments::Format;
use crate::failure::Failure;
use crate::harness::progress::Progress;
use crate::harness::row::{Config, Row, Timing};
use crate::harness::session::Session;
use crate::output::Output;
use crate::page::{render, Page};

/// A kind of result.
pub trait Reported: Serialize + Sized {
    /// What the numbers depend on.
    type Config: Serialize;

    const CSV_HEADER: &'static str;

    /// Wrong elements on all ranks.
    fn wrong(&self) -> u64;

    /// What is above a table.
    fn write_header(out: &mut dyn Write, config: &Self::Config) -> io::Result<()>;

    /// Its line of a table, with what is to be above it, `before` being the row before.
    fn write_line(&self, out: &mut dyn Write, config: &Self::Config, before: Option<&Self>)
        -> io::Result<()>;

    /// What is below a table.
    fn write_footer(out: &mut dyn Write, config: &Self::Config, rows: &[Self], wrong: u64) -> io::Result<()>;

    /// As many as the header of CSV has.
    fn csv_cells(&self) -> Vec<String>;

    /// All of them as a page.
    fn page(config: &Self::Config, rows: &[Self]) -> Page;
}

/// What the first rank writes.
struct Report<R: Reported> {
    format: Format,
    config: R::Config,
    rows: Vec<R>,
}

/// The one object of the JSON format.
#[derive(Serialize)]
struct Document<'a, R: Reported> {
    config: &'a R::Config,
    results: &'a [R],
    wrong: u64,
}

impl<R: Reported> Report<R> {
    /// Writes the header.
    fn start(format: Format, config: R::Config) -> io::Result<Self> {
        let mut out = io::stdout().lock();
        match format {
            Format::Table => R::write_header(&mut out, &config)?,
            Format::Csv => writeln!(out, "{}", R::CSV_HEADER)?,
            Format::Json => {}
        }
        out.flush()?;
        Ok(Self { format, config, rows: Vec::new() })
    }

    /// Writes a row where the format has lines.
    fn add(&mut self, row: R) -> io::Result<()> {
        let mut out = io::stdout().lock();
        match self.format {
            Format::Table => row.write_line(&mut out, &self.config, self.rows.last())?,
            Format::Csv => write_csv_record(&mut out, &row.csv_cells())?,
            Format::Json => {}
        }
        self.rows.push(row);
        out.flush()
    }

    /// Writes what comes last.
    fn finish(&self) -> io::Result<()> {
        let wrong = self.rows.iter().map(R::wrong).sum();
        let mut out = io::stdout().lock();
        match self.format {
            Format::Table => R::write_footer(&mut out, &self.config, &self.rows, wrong)?,
            Format::Csv => {}
            Format::Json => {
                let document = Document { config: &self.config, results: &self.rows, wrong };
                serde_json::to_writer_pretty(&mut out, &document)?;
                writeln!(out)?;
            }
        }
        out.flush()
    }
}

/// A rank's part of writing: the first one's, or nothing.
pub struct Reporting<R: Reported>(Option<(Report<R>, Progress)>);

impl<R: Reported> Reporting<R> {
    /// Writes the header, on the first rank. `rows` are to come.
    pub fn start(
        session: &Session,
        format: Format,
        rows: usize,
        config: impl FnOnce() -> R::Config,
    ) -> io::Result<Self> {
        if session.rank() > 0 {
            return Ok(Self(None));
        }
        Ok(Self(Some((Report::start(format, config())?, Progress::new(rows)))))
    }

    /// Shows what is measured next.
    pub fn show(&self, what: &impl ToString) {
        if let Some((_, progress)) = &self.0 {
            progress.show(&what.to_string());
        }
    }

    /// Writes a row.
    pub fn add(&mut self, row: R) -> io::Result<()> {
        let Some((report, progress)) = &mut self.0 else {
            return Ok(());
        };
        progress.clear();
        progress.advance();
        report.add(row)
    }

    /// Writes what comes last, and to `page` too. Of a run that has failed, what was measured before that is not lost.
    pub fn finish(self, page: Option<&Output>, outcome: Result<bool, Failure>) -> Result<bool, Failure> {
        let Some((report, progress)) = self.0 else {
            return outcome;
        };
        drop(progress);
        if outcome.is_ok() || !report.rows.is_empty() {
            report.finish()?;
        }
        let is_right = outcome?;
        if let Some(page) = page {
            page.write(&render(&R::page(&report.config, &report.rows)))?;
        }
        Ok(is_right)
    }
}

impl Reported for Row {
    type Config = Config;

    const CSV_HEADER: &'static str = "collective,size,count,type,redop,root,algo,\
        out_of_place_time_us,out_of_place_p50_us,out_of_place_p99_us,out_of_place_algbw_gbs,\
        out_of_place_busbw_gbs,out_of_place_wrong,\
        in_place_time_us,in_place_p50_us,in_place_p99_us,in_place_algbw_gbs,in_place_busbw_gbs,in_place_wrong,\
        memcpy_us,remark";

    fn wrong(&self) -> u64 {
        Row::wrong(self)
    }

    fn write_header(out: &mut dyn Write, config: &Config) -> io::Result<()> {
        write_table_header(out, config)
    }

    fn write_line(&self, out: &mut dyn Write, config: &Config, before: Option<&Self>) -> io::Result<()> {
        let is_news = before.is_none_or(|before| before.collective != self.collective);
        if is_news && config.collective != self.collective {
            writeln!(out, "# collective {}", self.collective)?;
        }
        write_table_row(out, self)
    }

    fn write_footer(out: &mut dyn Write, config: &Config, rows: &[Self], wrong: u64) -> io::Result<()> {
        write_verdict(out, config.check, wrong)?;
        let timings = rows.iter().flat_map(|row| [Some(&row.out_of_place), row.in_place.as_ref()]);
        let bandwidths: Vec<f64> = timings.flatten().map(|timing| timing.busbw_gbs).collect();
        let average = bandwidths.iter().sum::<f64>() / bandwidths.len().max(1) as f64;
        writeln!(out, "# Avg bus bandwidth    : {}", significant(average))
    }

    fn csv_cells(&self) -> Vec<String> {
        let Row { collective, size, count, dtype, redop, memcpy_us, .. } = self;
        let algo = self.algo.unwrap_or_default();
        let mut cells = vec![(*collective).into(), size.to_string(), count.to_string()];
        cells.extend([(*dtype).into(), (*redop).into(), root(self.root), algo.into()]);
        for timing in [Some(&self.out_of_place), self.in_place.as_ref()] {
            cells.extend(csv_times(timing));
            cells.push(csv_cell(timing.and_then(|timing| timing.wrong)));
        }
        cells.push(format!("{memcpy_us:.4}"));
        cells.push(self.remark().unwrap_or_default());
        cells
    }

    fn page(config: &Config, rows: &[Self]) -> Page {
        html::page(config, rows)
    }
}

/// Writes what was found of so many wrong elements in so many checked calls.
pub fn write_verdict(out: &mut dyn Write, checks: u64, wrong: u64) -> io::Result<()> {
    match (checks, wrong) {
        (0, _) => writeln!(out, "# Out of bounds values : N/A (nothing was checked)"),
        (_, 0) => writeln!(out, "# Out of bounds values : 0 OK"),
        _ => writeln!(out, "# Out of bounds values : {wrong} FAILED"),
    }
}

/// Writes what the numbers depend on, as lines above a table.
pub fn write_facts(out: &mut dyn Write, config: &Config) -> io::Result<()> {
    let Config { version, ranks, device, seed, .. } = config;
    let inputs = if config.registered { "registered" } else { "private" };
    let iterations = config.iters.map_or("auto".into(), |iterations| iterations.to_string());
    let Config { warmup_iters, check, .. } = config;
    writeln!(out, "# fast-allreduce {version}")?;
    writeln!(out, "# collective {} ranks {ranks} {device} inputs {inputs}", config.collective)?;
    if let Some(warning) = device.warning() {
        writeln!(out, "# {warning}")?;
    }
    writeln!(out, "# plan {}", config.plan)?;
    writeln!(out, "# order {}", config.additions())?;
    if let Some(direct_reads) = &config.direct_reads {
        writeln!(out, "# messages {direct_reads}")?;
    }
    writeln!(out, "# iters {iterations} warmup iters {warmup_iters} check {check} seed {seed}")
}

fn write_table_header(out: &mut dyn Write, config: &Config) -> io::Result<()> {
    write_facts(out, config)?;
    writeln!(out, "# {}", config.device.explanation())?;
    writeln!(out, "#")?;
    let (left, right) = ("out-of-place", "in-place");
    writeln!(out, "#{:64}{left:^55}{right:^55}", "")?;
    let columns =
        format!("{:>9} {:>9} {:>9} {:>7} {:>7} {:>6}", "time", "p50", "p99", "algbw", "busbw", "#wrong");
    let (size, count, dtype) = ("size", "count", "type");
    writeln!(
        out,
        "#{size:>11}{count:>13} {dtype:>7} {:>7}{:>6} {:>16}  {columns}   {columns} {:>9}",
        "redop", "root", "algo", "memcpy"
    )?;
    let columns =
        format!("{:>9} {:>9} {:>9} {:>7} {:>7} {:>6}", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)", "");
    writeln!(out, "#{:>11}{:>13}{:>39}  {columns}   {columns} {:>9}", "(B)", "(elements)", "", "(us)")
}

fn write_table_row(out: &mut dyn Write, row: &Row) -> io::Result<()> {
    let Row { size, count, dtype, redop, .. } = row;
    let (root, algo) = (root(row.root), row.algo.unwrap_or("-"));
    let columns = |timing: &Timing| {
        format!(
            "{:>9} {:>9} {:>9} {:>7} {:>7} {:>6}",
            significant(timing.time_us),
            significant(timing.p50_us),
            significant(timing.p99_us),
            bandwidth(timing.algbw_gbs),
            bandwidth(timing.busbw_gbs),
            timing.wrong.map_or("N/A".into(), |wrong| wrong.to_string()),
        )
    };
    let missing = || format!("{:>9} {:>9} {:>9} {:>7} {:>7} {:>6}", "N/A", "N/A", "N/A", "N/A", "N/A", "N/A");
    let (out_of_place, in_place) =
        (columns(&row.out_of_place), row.in_place.as_ref().map_or_else(missing, columns));
    let memcpy = significant(row.memcpy_us);
    let remark = row.remark().map_or(String::new(), |remark| format!("  # {remark}"));
    writeln!(
        out,
        "{size:>12}{count:>13} {dtype:>7} {redop:>7}{root:>6} {algo:>16}  {out_of_place}   {in_place} {memcpy:>9}{remark}"
    )
}

/// As nccl-tests prints it: -1 is none.
pub fn root(root: Option<usize>) -> String {
    root.map_or("-1".into(), |rank| rank.to_string())
}

/// Times and bandwidths of a call; empty cells of one that there is not.
pub fn csv_times(timing: Option<&Timing>) -> [String; 5] {
    timing.map_or_else(Default::default, |timing| {
        let Timing { time_us, p50_us, p99_us, algbw_gbs, busbw_gbs, .. } = timing;
        let [time, p50, p99] = [time_us, p50_us, p99_us].map(|time| format!("{time:.4}"));
        let [algbw, busbw] = [algbw_gbs, busbw_gbs].map(|bandwidth| format!("{bandwidth:.6}"));
        [time, p50, p99, algbw, busbw]
    })
}

/// A value, or an empty cell.
pub fn csv_cell(value: Option<impl ToString>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}

/// One line.
pub fn write_csv_record(out: &mut dyn Write, cells: &[String]) -> io::Result<()> {
    let mut writer = csv::Writer::from_writer(out);
    writer.write_record(cells)?;
    writer.flush()
}
