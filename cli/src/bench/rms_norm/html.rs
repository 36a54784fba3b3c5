//! The results of `all_reduce_fused` as a page.

use super::{NormConfig, Row};
use crate::bench::figures::{bandwidth, significant};
use crate::bench::html::{point, settings, subject};
use crate::bench::report::Reported as _;
use crate::harness::row::Timing;
use crate::page::{self, Group, Page, Panel, Series, Table};

const COLUMNS: &[(&str, &str)] =
    &[("time", "µs"), ("p50", "µs"), ("p99", "µs"), ("algbw", "GB/s"), ("wrong", "")];

const NOTES: &str = "fused is the call: the sum over ranks is added to a residual, and the rows of that are normalised. unfused is \
all_reduce, then an addition and a norm by the same ranks. The three ways are timed in turns: time is the median over the rounds of \
the mean of a block of calls back to back, on the slowest rank; p50 and p99 are of single calls, each after a barrier. gain is \
unfused / fused. wrong counts elements of the residual and of the output over all ranks: of fused those that differ in any bit from \
the documented arithmetic, of unfused those of the residual, and those of the output that are farther from the norm in f64 than \
rounding explains.";

/// All of it.
pub fn page(config: &NormConfig, rows: &[Row]) -> Page {
    let mut keys: Vec<_> = rows.iter().map(|row| (row.dtype, row.hidden)).collect();
    keys.dedup();
    let mut facts =
        vec![("Norm of unfused".into(), config.norm.clone()), ("Rounds".into(), config.rounds.to_string())];
    facts.extend(settings(&config.config));
    let remark = |row: &Row| Some(format!("{} rows of {}: {}", row.rows, row.hidden, row.remark()?));
    Page {
        heading: "fast-allreduce bench".into(),
        subject: subject(&config.config),
        wrong: (config.config.check > 0).then(|| rows.iter().map(Row::wrong).sum()),
        findings: Vec::new(),
        warnings: config.config.device.warning().into_iter().chain(rows.iter().filter_map(remark)).collect(),
        facts,
        panels: keys.into_iter().map(|key| panel(key, rows)).collect(),
        notes: NOTES,
    }
}

fn panel((dtype, hidden): (&'static str, usize), rows: &[Row]) -> Panel {
    let rows: Vec<_> = rows.iter().filter(|row| (row.dtype, row.hidden) == (dtype, hidden)).collect();
    let mut series: Vec<Series> = Vec::new();
    let is_forced = rows.iter().any(|row| row.algo != rows[0].algo);
    for row in &rows {
        for (name, timing) in
            [("fused", &row.fused), ("unfused", &row.unfused), ("all_reduce", &row.all_reduce)]
        {
            let name = if is_forced { format!("{name}, {}", row.algo) } else { name.into() };
            let point = point(row.size, timing);
            match series.iter_mut().find(|known| known.name == name) {
                Some(known) => known.points.push(point),
                None => series.push(Series { name, is_floor: false, points: vec![point] }),
            }
        }
    }
    Panel {
        title: format!("all_reduce_fused of {dtype}, rows of {hidden}"),
        series,
        table: Table {
            groups: vec![
                Group { name: "", columns: &[("rows", ""), ("size", "bytes"), ("algorithm", "")] },
                Group { name: "fused", columns: COLUMNS },
                Group { name: "unfused", columns: COLUMNS },
                Group { name: "all_reduce", columns: COLUMNS },
                Group { name: "", columns: &[("fused / all_reduce", ""), ("gain", "")] },
            ],
            rows: rows.iter().map(|row| cells(row)).collect(),
        },
    }
}

fn cells(row: &Row) -> Vec<String> {
    let mut cells = vec![row.rows.to_string(), page::size(row.size), row.algo.into()];
    for Timing { time_us, p50_us, p99_us, algbw_gbs, wrong, .. } in
        [&row.fused, &row.unfused, &row.all_reduce]
    {
        cells.extend([time_us, p50_us, p99_us].map(|time| significant(*time)));
        cells.push(bandwidth(*algbw_gbs));
        cells.push(wrong.map_or("–".into(), |wrong| wrong.to_string()));
    }
    cells.extend([row.over_all_reduce, row.gain].map(|ratio| format!("{ratio:.2}")));
    cells
}
