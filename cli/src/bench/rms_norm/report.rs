//! Writes the results of `all_reduce_fused` to standard output: a table, JSON or CSV.

use std::io::{self, Write};

use super::{html, NormConfig, Row};
use crate::bench::figures::{bandwidth, significant};
use crate::bench::report::{csv_cell, csv_times, write_facts, write_verdict, Reported};
use crate::harness::row::Timing;
use crate::page::Page;

impl Reported for Row {
    type Config = NormConfig;

    const CSV_HEADER: &'static str = "collective,size,count,type,redop,hidden,rows,algo,\
        fused_time_us,fused_p50_us,fused_p99_us,fused_algbw_gbs,fused_busbw_gbs,fused_wrong,\
        unfused_time_us,unfused_p50_us,unfused_p99_us,unfused_algbw_gbs,unfused_busbw_gbs,unfused_wrong,\
        all_reduce_time_us,all_reduce_p50_us,all_reduce_p99_us,all_reduce_algbw_gbs,all_reduce_busbw_gbs,\
        over_all_reduce,gain,remark";

    fn wrong(&self) -> u64 {
        [&self.fused, &self.unfused].iter().filter_map(|timing| timing.wrong).sum()
    }

    fn write_header(out: &mut dyn Write, config: &NormConfig) -> io::Result<()> {
        write_header(out, config)
    }

    fn write_line(&self, out: &mut dyn Write, _: &NormConfig, _: Option<&Self>) -> io::Result<()> {
        write_row(out, self)
    }

    fn write_footer(out: &mut dyn Write, config: &NormConfig, rows: &[Self], wrong: u64) -> io::Result<()> {
        write_verdict(out, config.config.check, wrong)?;
        let mean = |ratio: fn(&Row) -> f64| {
            let sum: f64 = rows.iter().map(|row| ratio(row).ln()).sum();
            significant((sum / rows.len().max(1) as f64).exp())
        };
        let (over, gain) = (mean(|row| row.over_all_reduce), mean(|row| row.gain));
        writeln!(out, "# Geometric means      : x all_reduce {over}, gain {gain}")
    }

    fn csv_cells(&self) -> Vec<String> {
        let mut cells: Vec<String> =
            vec![self.collective.into(), self.size.to_string(), self.count.to_string()];
        cells.extend([self.dtype.into(), self.redop.into(), self.hidden.to_string(), self.rows.to_string()]);
        cells.push(self.algo.into());
        for timing in [&self.fused, &self.unfused] {
            cells.extend(csv_times(Some(timing)));
            cells.push(csv_cell(timing.wrong));
        }
        cells.extend(csv_times(Some(&self.all_reduce)));
        cells.extend([self.over_all_reduce, self.gain].map(|ratio| format!("{ratio:.4}")));
        cells.push(self.remark().unwrap_or_default());
        cells
    }

    fn page(config: &NormConfig, rows: &[Self]) -> Page {
        html::page(config, rows)
    }
}

fn write_header(out: &mut dyn Write, config: &NormConfig) -> io::Result<()> {
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

fn write_row(out: &mut dyn Write, row: &Row) -> io::Result<()> {
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
