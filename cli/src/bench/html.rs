//! The results of `bench` as a page.

use super::figures::{bandwidth, significant};
use crate::facts;
use crate::harness::row::{Config, Row, Timing};
use crate::page::{self, Group, Page, Panel, Point, Series, Table};

const COLUMNS: &[(&str, &str)] =
    &[("time", "µs"), ("p50", "µs"), ("p99", "µs"), ("algbw", "GB/s"), ("busbw", "GB/s"), ("wrong", "")];

const NOTES: &str = "The charts are of calls out of place. time is the mean of calls back to back, on the slowest rank; p50 \
and p99 are of single calls, each after a barrier, on the slowest rank. size is that of the larger of a call's buffers, algbw size / time, busbw algbw \
times 2 (ranks − 1) / ranks for all_reduce, 1 for broadcast, reduce and send_recv, (ranks − 1) / ranks for the others. wrong \
counts elements over all ranks that differ in any bit from the reduction in rank order, or from what is to be copied; for ring \
and halving-doubling, those that are farther from the reduction in f64 than rounding at every step explains. memcpy is a copy of \
the same size made by every rank at the same time, which no collective can beat by much: compare machines by the ratio to it.";

/// All of it.
pub fn page(config: &Config, rows: &[Row]) -> Page {
    let wrong = rows.iter().map(Row::wrong).sum();
    let panels = by_panel(rows, |row| (row.collective, row.dtype, row.redop));
    Page {
        heading: "fast-allreduce bench".into(),
        subject: subject(config),
        wrong: (config.check > 0).then_some(wrong),
        findings: Vec::new(),
        warnings: config.device.warning().into_iter().chain(remarks(rows)).collect(),
        facts: settings(config),
        panels: panels.into_iter().map(|(key, rows)| panel(key, &rows)).collect(),
        notes: NOTES,
    }
}

/// What is to be said of rows whose calls are not of one population.
fn remarks(rows: &[Row]) -> impl Iterator<Item = String> + '_ {
    rows.iter().filter_map(|row| Some(format!("{} of {} bytes: {}", row.collective, row.size, row.remark()?)))
}

/// What every page says was measured.
pub fn subject(config: &Config) -> String {
    let inputs = if config.registered { "registered" } else { "private" };
    let collective = if config.collective == "all" { "all collectives" } else { config.collective };
    format!("{collective}, {} ranks, {inputs} inputs", config.ranks)
}

/// What the numbers of a run depend on, and the machine.
pub fn settings(config: &Config) -> Vec<(String, String)> {
    let Config { version, ranks, device, seed, iters, warmup_iters, check, .. } = config;
    let iterations = iters.map_or("as many as take 20 ms".into(), |iterations| iterations.to_string());
    let mut all = vec![
        ("Version".into(), format!("fast-allreduce {version}")),
        ("Ranks".into(), ranks.to_string()),
        ("Device".into(), device.to_string().replacen("device ", "", 1)),
        ("Timed calls".into(), format!("{iterations}, after {warmup_iters} that are not timed")),
        ("Checked calls".into(), check.to_string()),
        ("Seed of the inputs".into(), seed.to_string()),
        ("Plan".into(), config.plan.clone()),
        ("Order of additions".into(), config.additions()),
        ("Longest wait".into(), format!("{} s", config.timeout_s)),
        ("Region of a rank".into(), format!("{} bytes", config.region_bytes)),
    ];
    all.extend(facts::machine().into_iter().map(|(name, value)| (name.into(), value)));
    all
}

/// A panel is of one collective, type and operation.
pub type PanelKey = (&'static str, &'static str, &'static str);

/// In words, for a panel.
pub fn title((collective, dtype, redop): PanelKey) -> String {
    match redop {
        "none" => format!("{collective} of {dtype}"),
        _ => format!("{collective}: {redop} of {dtype}"),
    }
}

/// What belongs to each collective, type and operation, in order of appearance.
pub fn by_panel<T>(all: &[T], key: impl Fn(&T) -> PanelKey) -> Vec<(PanelKey, Vec<&T>)> {
    let mut panels: Vec<(_, Vec<&T>)> = Vec::new();
    for one in all {
        match panels.iter_mut().find(|(known, _)| *known == key(one)) {
            Some((_, others)) => others.push(one),
            None => panels.push((key(one), vec![one])),
        }
    }
    panels
}

/// A call's place in the charts.
pub fn point(bytes: usize, timing: &Timing) -> Point {
    Point { bytes, latency_us: timing.p50_us, busbw_gbs: timing.busbw_gbs }
}

fn panel(key: PanelKey, rows: &[&Row]) -> Panel {
    let mut sizes: Vec<_> = rows.iter().map(|row| row.size).collect();
    sizes.dedup();
    // Where the plan chooses, the line is of whatever it chose.
    let is_forced = rows.len() > sizes.len();
    let mut named: Vec<(String, Vec<&Row>)> = Vec::new();
    for row in rows {
        let name = row.algo.filter(|_| is_forced).unwrap_or("fast-allreduce");
        match named.iter_mut().find(|(known, _)| known == name) {
            Some((_, rows)) => rows.push(row),
            None => named.push((name.into(), vec![row])),
        }
    }
    let series = named.into_iter().map(|(name, rows)| Series {
        name,
        is_floor: false,
        points: rows.iter().map(|row| point(row.size, &row.out_of_place)).collect(),
    });
    let memcpy = Series { name: "memcpy".into(), is_floor: true, points: memcpy(rows, &sizes) };
    Panel {
        title: title(key),
        series: series.chain([memcpy]).collect(),
        table: Table {
            groups: vec![
                Group { name: "", columns: &[("size", "bytes"), ("algorithm", "")] },
                Group { name: "out of place", columns: COLUMNS },
                Group { name: "in place", columns: COLUMNS },
                Group { name: "", columns: &[("memcpy", "µs")] },
            ],
            rows: rows.iter().map(|row| cells(row)).collect(),
        },
    }
}

/// The least of each size's: they differ by what else ran. No bus is in it.
fn memcpy(rows: &[&Row], sizes: &[usize]) -> Vec<Point> {
    let point = |&bytes: &usize| {
        let times = rows.iter().filter(|row| row.size == bytes).map(|row| row.memcpy_us);
        Point { bytes, latency_us: times.fold(f64::INFINITY, f64::min), busbw_gbs: 0.0 }
    };
    sizes.iter().map(point).collect()
}

fn cells(row: &Row) -> Vec<String> {
    let mut cells = vec![page::size(row.size), row.algo.unwrap_or("–").into()];
    for timing in [Some(&row.out_of_place), row.in_place.as_ref()] {
        let Some(timing) = timing else {
            cells.extend(COLUMNS.iter().map(|_| "–".into()));
            continue;
        };
        cells.extend([timing.time_us, timing.p50_us, timing.p99_us].map(significant));
        cells.extend([timing.algbw_gbs, timing.busbw_gbs].map(bandwidth));
        cells.push(timing.wrong.map_or("–".into(), |wrong| wrong.to_string()));
    }
    cells.push(significant(row.memcpy_us));
    cells
}
