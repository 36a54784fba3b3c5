//! Writes the results to standard output: nccl-tests' table, JSON or CSV.

use std::io::{self, Write};

use serde::Serialize;

use crate::arguments::Format;
use crate::harness::row::{Config, Row, Timing};

/// What the first rank writes.
pub struct Report {
    format: Format,
    config: Config,
    rows: Vec<Row>,
}

/// The one object of the JSON format.
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

    /// Writes a row where the format has lines.
    pub fn add(&mut self, row: Row) -> io::Result<()> {
        let mut out = io::stdout().lock();
        match self.format {
            Format::Table => {
                let is_news = self.rows.last().is_none_or(|last| last.collective != row.collective);
                if is_news && self.config.collective != row.collective {
                    writeln!(out, "# collective {}", row.collective)?;
                }
                write_table_row(&mut out, &row)?;
            }
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
        write_verdict(out, self.config.check, wrong)?;
        let timings = self.rows.iter().flat_map(|row| [Some(&row.out_of_place), row.in_place.as_ref()]);
        let bandwidths: Vec<f64> = timings.flatten().map(|timing| timing.busbw_gbs).collect();
        let average = bandwidths.iter().sum::<f64>() / bandwidths.len().max(1) as f64;
        writeln!(out, "# Avg bus bandwidth    : {}", significant(average))
    }
}

/// Writes what was found of so many wrong elements in so many checked calls.
pub fn write_verdict(out: &mut impl Write, checks: u64, wrong: u64) -> io::Result<()> {
    match (checks, wrong) {
        (0, _) => writeln!(out, "# Out of bounds values : N/A (nothing was checked)"),
        (_, 0) => writeln!(out, "# Out of bounds values : 0 OK"),
        _ => writeln!(out, "# Out of bounds values : {wrong} FAILED"),
    }
}

/// Writes what the numbers depend on, as lines above a table.
pub fn write_facts(out: &mut impl Write, config: &Config) -> io::Result<()> {
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
    if let Some(direct_reads) = &config.direct_reads {
        writeln!(out, "# messages {direct_reads}")?;
    }
    writeln!(out, "# iters {iterations} warmup iters {warmup_iters} check {check} seed {seed}")
}

fn write_table_header(out: &mut impl Write, config: &Config) -> io::Result<()> {
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

fn write_table_row(out: &mut impl Write, row: &Row) -> io::Result<()> {
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

const CSV_HEADER: &str = "collective,size,count,type,redop,root,algo,\
    out_of_place_time_us,out_of_place_p50_us,out_of_place_p99_us,out_of_place_algbw_gbs,out_of_place_busbw_gbs,out_of_place_wrong,\
    in_place_time_us,in_place_p50_us,in_place_p99_us,in_place_algbw_gbs,in_place_busbw_gbs,in_place_wrong,memcpy_us,remark";

fn write_csv_row(out: &mut impl Write, row: &Row) -> io::Result<()> {
    let Row { collective, size, count, dtype, redop, memcpy_us, .. } = row;
    let algo = row.algo.unwrap_or_default();
    let mut cells = vec![(*collective).into(), size.to_string(), count.to_string()];
    cells.extend([(*dtype).into(), (*redop).into(), root(row.root), algo.into()]);
    for timing in [Some(&row.out_of_place), row.in_place.as_ref()] {
        cells.extend(csv_times(timing));
        cells.push(csv_cell(timing.and_then(|timing| timing.wrong)));
    }
    cells.push(format!("{memcpy_us:.4}"));
    cells.push(row.remark().unwrap_or_default().to_string());
    write_csv_record(out, &cells)
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
pub fn write_csv_record(out: &mut impl Write, cells: &[String]) -> io::Result<()> {
    let mut writer = csv::Writer::from_writer(out);
    writer.write_record(cells)?;
    writer.flush()
}
