//! Writes the results to standard output: nccl-tests' table, JSON or CSV.

use std::io::{self, Write};

use serde::Serialize;

use super::row::{Config, Row, Timing};
use crate::arguments::Format;

/// What the first rank writes.
pub struct Report {
    format: Format,
    config: Config,
    rows: Vec<Row>,
}

/// The one object of the JSON form.
#[derive(Serialize)]
struct Document<'a> {
    config: &'a Config,
    results: &'a [Row],
    wrong: u64,
}

impl Report {
    /// Writes the header.
    pub fn start(format: Format, config: Config) -> io::Result<Self> {
        let mut out = io::stdout().lock();
        match format {
            Format::Table => write_table_header(&mut out, &config)?,
            Format::Csv => writeln!(out, "{CSV_HEADER}")?,
            Format::Json => {}
        }
        out.flush()?;
        Ok(Self { format, config, rows: Vec::new() })
    }

    /// Writes a row where the form has lines.
    pub fn add(&mut self, row: Row) -> io::Result<()> {
        let mut out = io::stdout().lock();
        match self.format {
            Format::Table => write_table_row(&mut out, &row)?,
            Format::Csv => write_csv_row(&mut out, &row)?,
            Format::Json => {}
        }
        self.rows.push(row);
        out.flush()
    }

    /// Writes what comes last, and returns what was written.
    pub fn finish(self) -> io::Result<(Config, Vec<Row>)> {
        let wrong = self.rows.iter().map(Row::wrong).sum();
        let mut out = io::stdout().lock();
        match self.format {
            Format::Table => self.write_table_footer(&mut out, wrong)?,
            Format::Csv => {}
            Format::Json => {
                let document = Document { config: &self.config, results: &self.rows, wrong };
                serde_json::to_writer_pretty(&mut out, &document)?;
                writeln!(out)?;
            }
        }
        out.flush()?;
        Ok((self.config, self.rows))
    }

    fn write_table_footer(&self, out: &mut impl Write, wrong: u64) -> io::Result<()> {
        match (self.config.check, wrong) {
            (0, _) => writeln!(out, "# Out of bounds values : N/A (nothing was checked)")?,
            (_, 0) => writeln!(out, "# Out of bounds values : 0 OK")?,
            _ => writeln!(out, "# Out of bounds values : {wrong} FAILED")?,
        }
        let bandwidths = self.rows.iter().map(|row| row.out_of_place.busbw_gbs + row.in_place.busbw_gbs);
        let average = bandwidths.sum::<f64>() / (2 * self.rows.len()).max(1) as f64;
        writeln!(out, "# Avg bus bandwidth    : {}", significant(average))
    }
}

/// Writes what the numbers depend on, as lines above a table.
pub fn write_facts(out: &mut impl Write, config: &Config) -> io::Result<()> {
    let Config { version, ranks, device, seed, .. } = config;
    let inputs = if config.registered { "registered" } else { "private" };
    let iterations = config.iters.map_or("auto".into(), |iterations| iterations.to_string());
    let Config { warmup_iters, check, .. } = config;
    writeln!(out, "# fast-allreduce {version}")?;
    writeln!(out, "# ranks {ranks} {device} inputs {inputs}")?;
    if let Some(warning) = device.warning() {
        writeln!(out, "# {warning}")?;
    }
    writeln!(out, "# iters {iterations} warmup iters {warmup_iters} check {check} seed {seed}")
}

fn write_table_header(out: &mut impl Write, config: &Config) -> io::Result<()> {
    write_facts(out, config)?;
    writeln!(out, "#")?;
    let (left, right) = ("out-of-place", "in-place");
    writeln!(out, "#{:51}{left:^55}{right:^55}", "")?;
    let form =
        format!("{:>9} {:>9} {:>9} {:>7} {:>7} {:>6}", "time", "p50", "p99", "algbw", "busbw", "#wrong");
    let (size, count, dtype) = ("size", "count", "type");
    writeln!(
        out,
        "#{size:>11}{count:>13}{dtype:>6}{:>6} {:>13}  {form}   {form} {:>9}",
        "redop", "algo", "memcpy"
    )?;
    let form = format!("{:>9} {:>9} {:>9} {:>7} {:>7} {:>6}", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)", "");
    writeln!(out, "#{:>11}{:>13}{:>26}  {form}   {form} {:>9}", "(B)", "(elements)", "", "(us)")
}

fn write_table_row(out: &mut impl Write, row: &Row) -> io::Result<()> {
    let Row { size, count, dtype, redop, algo, .. } = row;
    let form = |timing: &Timing| {
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
    let (out_of_place, in_place) = (form(&row.out_of_place), form(&row.in_place));
    let memcpy = significant(row.memcpy_us);
    writeln!(
        out,
        "{size:>12}{count:>13}{dtype:>6}{redop:>6} {algo:>13}  {out_of_place}   {in_place} {memcpy:>9}"
    )
}

/// In the columns of bandwidths.
pub fn bandwidth(gigabytes_per_second: f64) -> String {
    format!("{gigabytes_per_second:.2}")
}

/// With as many decimals as make four digits.
pub fn significant(value: f64) -> String {
    let decimals = match value {
        value if value < 10.0 => 3,
        value if value < 100.0 => 2,
        value if value < 1000.0 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}")
}

const CSV_HEADER: &str = "size,count,type,redop,algo,\
    out_of_place_time_us,out_of_place_p50_us,out_of_place_p99_us,out_of_place_algbw_gbs,out_of_place_busbw_gbs,out_of_place_wrong,\
    in_place_time_us,in_place_p50_us,in_place_p99_us,in_place_algbw_gbs,in_place_busbw_gbs,in_place_wrong,memcpy_us";

fn write_csv_row(out: &mut impl Write, row: &Row) -> io::Result<()> {
    let Row { size, count, dtype, redop, algo, memcpy_us, .. } = row;
    write!(out, "{size},{count},{dtype},{redop},{algo}")?;
    for timing in [&row.out_of_place, &row.in_place] {
        let Timing { time_us, p50_us, p99_us, algbw_gbs, busbw_gbs, .. } = timing;
        write!(out, ",{time_us:.4},{p50_us:.4},{p99_us:.4},{algbw_gbs:.6},{busbw_gbs:.6},")?;
        timing.wrong.map_or(Ok(()), |wrong| write!(out, "{wrong}"))?;
    }
    writeln!(out, ",{memcpy_us:.4}")
}
