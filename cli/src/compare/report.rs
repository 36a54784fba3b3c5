//! Writes a comparison to standard output: nccl-tests' columns with a ratio and an error, JSON or CSV.

use std::io::{self, Write};

use serde::Serialize;

use super::row::{CompareConfig, LeftOut, Row};
use super::summary::{summaries, Summary};
use crate::arguments::Format;
use crate::bench::figures::{bandwidth, significant};
use crate::bench::report::{csv_cell, csv_times, root, write_csv_record, write_facts};
use crate::harness::row::Timing;

/// What the first rank writes.
pub struct Report {
    format: Format,
    results: Results,
}

/// The one object of the JSON format.
#[derive(Debug, Serialize)]
pub struct Results {
    pub config: CompareConfig,
    pub left_out: Vec<LeftOut>,
    pub results: Vec<Row>,
    pub summary: Vec<Summary>,
    pub wrong: u64,
}

impl Report {
    /// Writes the header.
    pub fn start(format: Format, config: CompareConfig, unavailable: &[LeftOut]) -> io::Result<Self> {
        let mut out = io::stdout().lock();
        match format {
            Format::Table => write_header(&mut out, &config)?,
            Format::Csv => writeln!(out, "{CSV_HEADER}")?,
            Format::Json => {}
        }
        out.flush()?;
        let results =
            Results { config, left_out: Vec::new(), results: Vec::new(), summary: Vec::new(), wrong: 0 };
        let mut report = Self { format, results };
        unavailable.iter().try_for_each(|left| report.leave_out(left.clone()))?;
        Ok(report)
    }

    /// Says who is missing from here on.
    pub fn leave_out(&mut self, left: LeftOut) -> io::Result<()> {
        match self.format {
            Format::Table => writeln!(io::stdout(), "# {}", left.sentence())?,
            // Lines there are rows.
            Format::Csv => eprintln!("{}", left.sentence()),
            Format::Json => {}
        }
        self.results.left_out.push(left);
        Ok(())
    }

    /// Writes a size's rows where the format has lines.
    pub fn add(&mut self, rows: Vec<Row>) -> io::Result<()> {
        let mut out = io::stdout().lock();
        match self.format {
            Format::Table => {
                let name = |row: Option<&Row>| row.map(|row| (row.collective, row.hidden));
                let (last, next) = (name(self.results.results.last()), name(rows.first()));
                match next {
                    Some((_, Some(hidden))) if next != last => writeln!(out, "# rows of {hidden} elements")?,
                    Some((collective, None))
                        if next != last && collective != self.results.config.config.collective =>
                    {
                        writeln!(out, "# collective {collective}")?;
                    }
                    _ => {}
                }
                rows.iter().try_for_each(|row| write_row(&mut out, row))?;
            }
            Format::Csv => rows.iter().try_for_each(|row| write_csv_row(&mut out, row))?,
            Format::Json => {}
        }
        self.results.results.extend(rows);
        out.flush()
    }

    /// Writes what comes last, and returns what was written.
    pub fn finish(mut self) -> io::Result<Results> {
        self.results.wrong = self.results.results.iter().map(Row::wrong).sum();
        self.results.summary = summaries(&self.results.results);
        let mut out = io::stdout().lock();
        match self.format {
            Format::Table => write_footer(&mut out, &self.results)?,
            Format::Csv => {}
            Format::Json => {
                serde_json::to_writer_pretty(&mut out, &self.results)?;
                writeln!(out)?;
            }
        }
        out.flush()?;
        Ok(self.results)
    }
}

fn write_header(out: &mut impl Write, contest: &CompareConfig) -> io::Result<()> {
    write_facts(out, &contest.config)?;
    writeln!(out, "# rounds {}", contest.rounds)?;
    if let Some(norm) = &contest.norm {
        writeln!(
            out,
            "# unfused: all_reduce of fast-allreduce, then an addition and a norm by the same ranks, {norm}"
        )?;
        writeln!(
            out,
            "# others: their all_reduce, and the same after it; memcpy: a copy of the input alone"
        )?;
    }
    for against in &contest.against {
        let library = against.library.as_deref().unwrap_or("of the device");
        writeln!(out, "# against {}: {library}", against.name)?;
    }
    writeln!(
        out,
        "# time: median over the rounds of the mean of a block of calls back to back, on the slowest rank; ratio: time / fast-allreduce's"
    )?;
    writeln!(out, "#")?;
    writeln!(out, "#{:79}{:^42}{:^43}", "", "out-of-place", "in-place")?;
    let columns = format!("{:>9} {:>7} {:>7} {:>6} {:>7}", "time", "algbw", "busbw", "#wrong", "ratio");
    let (size, count, dtype) = ("size", "count", "type");
    let kind = format!("{size:>11}{count:>13} {dtype:>7} {:>7}{:>6}", "redop", "root");
    writeln!(out, "#{kind} {:>14} {:>16}  {columns}   {columns} {:>9}", "by", "algo", "error")?;
    let columns = format!("{:>9} {:>7} {:>7} {:>6} {:>7}", "(us)", "(GB/s)", "(GB/s)", "", "");
    writeln!(out, "#{:>11}{:>13}{:>54}  {columns}   {columns}", "(B)", "(elements)", "")
}

fn write_row(out: &mut impl Write, row: &Row) -> io::Result<()> {
    let Row { size, count, dtype, redop, by, algo, ratio, .. } = row;
    let columns = |timing: &Option<Timing>, ratio: Option<f64>| {
        let Some(timing) = timing else {
            return format!("{:>9} {:>7} {:>7} {:>6} {:>7}", "N/A", "N/A", "N/A", "N/A", "N/A");
        };
        format!(
            "{:>9} {:>7} {:>7} {:>6} {:>7}",
            significant(timing.time_us),
            bandwidth(timing.algbw_gbs),
            bandwidth(timing.busbw_gbs),
            timing.wrong.map_or("N/A".into(), |wrong| wrong.to_string()),
            ratio.map_or("-".into(), times),
        )
    };
    let (out_of_place, in_place) =
        (columns(&row.out_of_place, ratio.out_of_place), columns(&row.in_place, ratio.in_place));
    let (root, algo, error) =
        (root(row.root), algo.unwrap_or("-"), row.max_error().map_or("-".into(), distance));
    writeln!(
        out,
        "{size:>12}{count:>13} {dtype:>7} {redop:>7}{root:>6} {by:>14} {algo:>16}  {out_of_place}   {in_place} {error:>9}"
    )
}

fn write_footer(out: &mut impl Write, results: &Results) -> io::Result<()> {
    for summary in &results.summary {
        let Summary { by, .. } = summary;
        let wrong = match summary.wrong {
            None => "N/A".into(),
            Some(0) => "0 OK".into(),
            Some(wrong) => format!("{wrong} FAILED"),
        };
        let error = summary.max_error.map_or("-".into(), distance);
        write!(out, "# {by:<15}: out of bounds values {wrong}, largest error {error}")?;
        match &summary.ratio {
            Some(ratio) => writeln!(
                out,
                ", time / fast-allreduce {} ({} to {})",
                times(ratio.mean),
                times(ratio.least),
                times(ratio.most)
            )?,
            None => writeln!(out)?,
        }
    }
    Ok(())
}

/// A ratio of times, with two decimals or two digits.
pub fn times(ratio: f64) -> String {
    let decimals = (1.0 - ratio.max(1e-9).log10().floor()).clamp(2.0, 6.0) as usize;
    format!("{ratio:.decimals$}")
}

/// An error of results.
pub fn distance(error: f64) -> String {
    if error == 0.0 {
        return "0".into();
    }
    format!("{error:.2e}")
}

const CSV_HEADER: &str = "collective,size,count,type,redop,root,by,algo,\
    out_of_place_time_us,out_of_place_p50_us,out_of_place_p99_us,out_of_place_algbw_gbs,out_of_place_busbw_gbs,\
    out_of_place_wrong,out_of_place_max_error,out_of_place_ratio,\
    in_place_time_us,in_place_p50_us,in_place_p99_us,in_place_algbw_gbs,in_place_busbw_gbs,in_place_wrong,in_place_max_error,\
    in_place_ratio,hidden";

fn write_csv_row(out: &mut impl Write, row: &Row) -> io::Result<()> {
    let Row { collective, size, count, dtype, redop, by, ratio, .. } = row;
    let algo = row.algo.unwrap_or_default();
    let mut cells = vec![(*collective).into(), size.to_string(), count.to_string()];
    cells.extend([(*dtype).into(), (*redop).into(), root(row.root), (*by).into(), algo.into()]);
    for (timing, ratio) in [(&row.out_of_place, ratio.out_of_place), (&row.in_place, ratio.in_place)] {
        cells.extend(csv_times(timing.as_ref()));
        let (wrong, error) = timing.as_ref().map_or((None, None), |timing| (timing.wrong, timing.max_error));
        cells.push(csv_cell(wrong));
        cells.push(csv_cell(error.map(|error| format!("{error:e}"))));
        cells.push(csv_cell(ratio.map(|ratio| format!("{ratio:.4}"))));
    }
    cells.push(csv_cell(row.hidden));
    write_csv_record(out, &cells)
}
