//! Writes the results of `all_reduce_rms_norm` to standard output: a table, JSON or CSV.

use std::io::{self, Write};

use serde::Serialize;

use super::{NormConfig, Row};
use crate::arguments::Format;
use crate::bench::report::{
    bandwidth, csv_cell, csv_times, significant, write_csv_record, write_facts, write_verdict,
};
use crate::harness::row::Timing;

/// What the first rank writes.
pub struct Report {
    format: Format,
    config: NormConfig,
    rows: Vec<Row>,
}

/// The one object of the JSON format.
#[derive(Serialize)]
struct Document<'a> {
    config: &'a NormConfig,
    results: &'a [Row],
    wrong: u64,
}

impl Report {
    /// Writes the header.
    pub fn start(format: Format, config: NormConfig) -> io::Result<Self> {
        let mut out = io::stdout().lock();
        match format {
            Format::Table => write_header(&mut out, &config)?,
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
            Format::Table => write_row(&mut out, &row)?,
            Format::Csv => write_csv_row(&mut out, &row)?,
            Format::Json => {}
        }
        self.rows.push(row);
        out.flush()
    }

    /// Writes what comes last, and returns what was written.
    pub fn finish(self) -> io::Result<(NormConfig, Vec<Row>)> {
        let wrong = self.rows.iter().map(Row::wrong).sum();
        let mut out = io::stdout().lock();
        match self.format {
            Format::Table => {
                write_verdict(&mut out, self.config.config.check, wrong)?;
                let mean = |ratio: fn(&Row) -> f64| {
                    let sum: f64 = self.rows.iter().map(|row| ratio(row).ln()).sum();
                    significant((sum / self.rows.len().max(1) as f64).exp())
                };
                let (over, gain) = (mean(|row| row.over_all_reduce), mean(|row| row.gain));
                writeln!(out, "# Geometric means      : x all_reduce {over}, gain {gain}")?;
            }
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
}

fn write_header(out: &mut impl Write, config: &NormConfig) -> io::Result<()> {
    write_facts(out, &config.config)?;
    writeln!(out, "# rounds {}, in each a block of calls of each way", config.rounds)?;
    writeln!(
        out,
        "# fused: the call: residual += sum of the inputs, output = rows of that, normalised and times a weight"
    )?;
    writeln!(out, "# unfused: all_reduce, then an addition and a norm by the same ranks, {}", config.norm)?;
    writeln!(out, "# x all_reduce: fused / all_reduce; gain: unfused / fused; of times")?;
    writeln!(
        out,
        "# time: median over the rounds of means of calls back to back; p50, p99: of single calls"
    )?;
    writeln!(out, "#")?;
    writeln!(out, "#{:52}{:^46}{:^38}{:^20}", "", "fused", "unfused", "all_reduce")?;
    writeln!(
        out,
        "#{:>7}{:>8}{:>12} {:>5} {:>16}  {:>9} {:>9} {:>9} {:>7} {:>7}   {:>9} {:>9} {:>9} {:>7}  {:>9} {:>9} {:>12} {:>6}",
        "rows", "hidden", "size", "type", "algo", "time", "p50", "p99", "algbw", "#wrong", "time", "p50", "p99",
        "#wrong", "time", "p50", "x all_reduce", "gain"
    )?;
    writeln!(
        out,
        "#{:>27} {:>22}  {:>9} {:>9} {:>9} {:>7} {:>7}   {:>9} {:>9} {:>9} {:>7}  {:>9} {:>9}",
        "(B)", "", "(us)", "(us)", "(us)", "(GB/s)", "", "(us)", "(us)", "(us)", "", "(us)", "(us)"
    )
}

fn write_row(out: &mut impl Write, row: &Row) -> io::Result<()> {
    let Row { rows, hidden, size, dtype, algo, fused, unfused, all_reduce, .. } = row;
    let times = |timing: &Timing| {
        let [time, p50, p99] = [timing.time_us, timing.p50_us, timing.p99_us].map(significant);
        format!("{time:>9} {p50:>9} {p99:>9}")
    };
    let wrong = |timing: &Timing| timing.wrong.map_or("N/A".into(), |wrong| wrong.to_string());
    let remark = row.remark().map_or(String::new(), |remark| format!("  # {remark}"));
    writeln!(
        out,
        "{rows:>8}{hidden:>8}{size:>12} {dtype:>5} {algo:>16}  {} {:>7} {:>7}   {} {:>7}  {:>9} {:>9} {:>12.2} {:>6.2}{remark}",
        times(fused),
        bandwidth(fused.algbw_gbs),
        wrong(fused),
        times(unfused),
        wrong(unfused),
        significant(all_reduce.time_us),
        significant(all_reduce.p50_us),
        row.over_all_reduce,
        row.gain,
    )
}

const CSV_HEADER: &str = "collective,size,count,type,redop,hidden,rows,algo,\
    fused_time_us,fused_p50_us,fused_p99_us,fused_algbw_gbs,fused_busbw_gbs,fused_wrong,\
    unfused_time_us,unfused_p50_us,unfused_p99_us,unfused_algbw_gbs,unfused_busbw_gbs,unfused_wrong,\
    all_reduce_time_us,all_reduce_p50_us,all_reduce_p99_us,all_reduce_algbw_gbs,all_reduce_busbw_gbs,\
    over_all_reduce,gain,remark";

fn write_csv_row(out: &mut impl Write, row: &Row) -> io::Result<()> {
    let mut cells: Vec<String> = vec![row.collective.into(), row.size.to_string(), row.count.to_string()];
    cells.extend([row.dtype.into(), row.redop.into(), row.hidden.to_string(), row.rows.to_string()]);
    cells.push(row.algo.into());
    for timing in [&row.fused, &row.unfused] {
        cells.extend(csv_times(Some(timing)));
        cells.push(csv_cell(timing.wrong));
    }
    cells.extend(csv_times(Some(&row.all_reduce)));
    cells.extend([row.over_all_reduce, row.gain].map(|ratio| format!("{ratio:.4}")));
    cells.push(row.remark().unwrap_or_default());
    write_csv_record(out, &cells)
}
