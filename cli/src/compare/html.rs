//! A comparison as a page.

use super::report::{distance, times, Results};
use super::row::{LeftOut, Ratio, Row};
use super::summary::Summary;
use crate::bench::figures::{bandwidth, significant};
use crate::bench::html::{by_panel, point, settings, subject, title, PanelKey};
use crate::harness::row::Timing;
use crate::page::{self, Group, Page, Panel, Series, Table};

const COLUMNS: &[(&str, &str)] =
    &[("time", "µs"), ("p50", "µs"), ("p99", "µs"), ("busbw", "GB/s"), ("wrong", ""), ("ratio", "")];

const NOTES: &str = "The charts are of calls out of place. All contenders work on the same buffers, in turns: time is the median \
over the rounds of the mean of a block of calls back to back, on the slowest rank; p50 and p99 are of single calls, each after a \
barrier. ratio is time divided by that of fast-allreduce (its fastest algorithm, where there are several): above 1, the \
contender is slower. busbw is size / time · 2 (ranks − 1) / ranks for all_reduce, size / time for broadcast, reduce and \
send_recv, size / time · (ranks − 1) / ranks for the others. wrong counts elements over all ranks: for fast-allreduce those \
that differ in any bit from the reduction in rank order, or from what is to be copied, for the others, and for ring and \
halving-doubling, those that are farther from the reduction in f64 than \
rounding at every step explains. error is the largest distance from the reduction in f64. memcpy is a copy of the same size \
made by every rank at the same time: a floor, no collective.";

/// All of it.
pub fn page(results: &Results) -> Page {
    let config = &results.config.config;
    let names: Vec<_> = results.config.against.iter().map(|against| against.name).collect();
    let mut facts: Vec<(String, String)> = Vec::new();
    for against in &results.config.against {
        if let Some(library) = &against.library {
            facts.push((format!("Library of {}", against.name), library.clone()));
        }
    }
    facts.push(("Rounds".into(), results.config.rounds.to_string()));
    facts.extend(settings(config));
    let mut warnings: Vec<_> = config.device.warning().into_iter().collect();
    warnings.extend(results.left_out.iter().map(LeftOut::sentence));
    let panels = by_panel(&results.results, |row| (row.collective, row.dtype, row.redop));
    Page {
        heading: format!("fast-allreduce against {}", names.join(", ")),
        subject: subject(config),
        wrong: (config.check > 0).then_some(results.wrong),
        findings: results.summary.iter().filter_map(finding).collect(),
        warnings,
        facts,
        panels: panels.into_iter().map(|(key, rows)| panel(key, &rows)).collect(),
        notes: NOTES,
    }
}

fn finding(summary: &Summary) -> Option<String> {
    let (by, ratio) = (summary.by, summary.ratio.as_ref()?);
    let (mean, least, most) = (times(ratio.mean), times(ratio.least), times(ratio.most));
    Some(format!(
        "{by} takes {mean} times as long as fast-allreduce: the geometric mean over all sizes, in place and out of place, which \
         go from {least} to {most}."
    ))
}

fn panel(key: PanelKey, rows: &[&Row]) -> Panel {
    let is_forced = rows.iter().filter(|row| row.is_ours() && row.size == rows[0].size).count() > 1;
    let name = |row: &Row| match row.algo {
        Some(algo) if is_forced => algo,
        _ => row.by,
    };
    let mut series: Vec<Series> = Vec::new();
    for row in rows {
        // A broadcast of MPI is in place.
        let Some(timing) = row.out_of_place.as_ref() else { continue };
        let (name, mut point) = (name(row), point(row.size, timing));
        let is_floor = row.by == "memcpy";
        if is_floor {
            // No bus is in it.
            point.busbw_gbs = 0.0;
        }
        match series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => {
                series.push(Series { name: name.into(), is_floor, points: vec![point] });
            }
        }
    }
    // Behind the others.
    series.sort_by_key(|series| series.is_floor);
    Panel {
        title: title(key),
        series,
        table: Table {
            groups: vec![
                Group { name: "", columns: &[("size", "bytes"), ("by", ""), ("algorithm", "")] },
                Group { name: "out of place", columns: COLUMNS },
                Group { name: "in place", columns: COLUMNS },
                Group { name: "", columns: &[("error", "")] },
            ],
            rows: rows.iter().map(|row| cells(row)).collect(),
        },
    }
}

fn cells(row: &Row) -> Vec<String> {
    let none = || String::from("–");
    let mut cells = vec![page::size(row.size), row.by.into(), row.algo.unwrap_or("").into()];
    let Ratio { out_of_place, in_place } = row.ratio;
    for (timing, ratio) in [(&row.out_of_place, out_of_place), (&row.in_place, in_place)] {
        let Some(timing) = timing else {
            cells.extend(COLUMNS.iter().map(|_| none()));
            continue;
        };
        let Timing { time_us, p50_us, p99_us, busbw_gbs, wrong, .. } = timing;
        cells.extend([time_us, p50_us, p99_us].map(|time| significant(*time)));
        cells.push(bandwidth(*busbw_gbs));
        cells.push(wrong.map_or_else(none, |wrong| wrong.to_string()));
        cells.push(ratio.map_or_else(none, times));
    }
    cells.push(row.max_error().map_or_else(none, distance));
    cells
}
