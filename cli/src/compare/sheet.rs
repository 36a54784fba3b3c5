//! A comparison as a page.

use super::line::{LeftOut, Line, Ratio};
use super::report::{distance, times, Results};
use super::summary::Summary;
use crate::bench::report::{bandwidth, significant};
use crate::bench::row::Timing;
use crate::bench::sheet::{kinds, point, settings, subject, title, Kind};
use crate::page::{self, Group, Page, Panel, Series, Table};

const FORM: &[(&str, &str)] =
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
    let panels = kinds(&results.results, |line| (line.collective, line.dtype, line.redop));
    Page {
        heading: format!("fast-allreduce against {}", names.join(", ")),
        subject: subject(config),
        wrong: (config.check > 0).then_some(results.wrong),
        findings: results.summary.iter().filter_map(finding).collect(),
        warnings,
        facts,
        panels: panels.into_iter().map(|(kind, lines)| panel(kind, &lines)).collect(),
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

fn panel(kind: Kind, lines: &[&Line]) -> Panel {
    let is_forced = lines.iter().filter(|line| line.is_ours() && line.size == lines[0].size).count() > 1;
    let name = |line: &Line| match line.algo {
        Some(algo) if is_forced => algo,
        _ => line.by,
    };
    let mut series: Vec<Series> = Vec::new();
    for line in lines {
        // A broadcast of MPI is in place.
        let Some(timing) = line.out_of_place.as_ref() else { continue };
        let (name, mut point) = (name(line), point(line.size, timing));
        let is_floor = line.by == "memcpy";
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
        title: title(kind),
        series,
        table: Table {
            groups: vec![
                Group { name: "", columns: &[("size", "bytes"), ("by", ""), ("algorithm", "")] },
                Group { name: "out of place", columns: FORM },
                Group { name: "in place", columns: FORM },
                Group { name: "", columns: &[("error", "")] },
            ],
            rows: lines.iter().map(|line| cells(line)).collect(),
        },
    }
}

fn cells(line: &Line) -> Vec<String> {
    let none = || String::from("–");
    let mut cells = vec![page::size(line.size), line.by.into(), line.algo.unwrap_or("").into()];
    let Ratio { out_of_place, in_place } = line.ratio;
    for (timing, ratio) in [(&line.out_of_place, out_of_place), (&line.in_place, in_place)] {
        let Some(timing) = timing else {
            cells.extend(FORM.iter().map(|_| none()));
            continue;
        };
        let Timing { time_us, p50_us, p99_us, busbw_gbs, wrong, .. } = timing;
        cells.extend([time_us, p50_us, p99_us].map(|time| significant(*time)));
        cells.push(bandwidth(*busbw_gbs));
        cells.push(wrong.map_or_else(none, |wrong| wrong.to_string()));
        cells.push(ratio.map_or_else(none, times));
    }
    cells.push(line.max_error().map_or_else(none, distance));
    cells
}
