//! The results of `compare`: columns, the lines around the table, and the page.

use std::io::{self, Write};

use fast_allreduce::CallKind;

use super::row::{CompareConfig, Row};
use super::summary::{summaries, Summary};
use crate::bench::report::{
    call_cells, page_facts, panel, point, section, subject, timing_cells, write_facts, ALGORITHM, CALL,
};
use crate::cells::{distance, ratio, Cell, Column, Group};
use crate::page::{Page, Point};
use crate::results::{LeftOut, Report, Reported, MEMCPY};

const TIMING: &[Column] = &[
    Column::new("time", "us", 9),
    Column::new("p50", "us", 0),
    Column::new("p99", "us", 0),
    Column::new("algbw", "GB/s", 7).off_page(),
    Column::new("busbw", "GB/s", 7),
    Column::new("#wrong", "", 6),
    Column::new("max_error", "", 0).off_page(),
    Column::new("ratio", "", 7),
];

const NOTES: &str = "The charts are of calls out of place. All contenders work on the same buffers, in \
    turns: time is the median over the rounds of the mean of a block of calls back to back, on the slowest rank; \
    p50 and p99 are of single calls, each after a barrier. ratio is time divided by that of fast-allreduce (its \
    fastest algorithm, if there are several): above 1, the contender is slower. busbw is size / time · 2 (ranks \
    − 1) / ranks for all_reduce, size / time for broadcast, reduce and send_recv, size / time · (ranks − 1) / \
    ranks for the others. #wrong counts elements over all ranks: for fast-allreduce those that differ in any bit \
    from the reduction in rank order, or from the data to be copied; for the others, and for ring and \
    halving-doubling, those whose distance from the reduction in f64 is more than rounding at every step \
    explains. error is the largest distance from the reduction in f64. memcpy is a copy of the same size made by \
    every rank at the same time: a lower bound, not a collective.";

impl Reported for Row {
    type Config = CompareConfig;
    type Summary = Summary;

    const GROUPS: &'static [Group] = &[
        Group { name: "", columns: CALL },
        Group { name: "", columns: &[Column::new("by", "", 14), ALGORITHM] },
        Group { name: "out-of-place", columns: TIMING },
        Group { name: "in-place", columns: TIMING },
        Group { name: "", columns: &[Column::new("error", "", 9), Column::new("hidden", "", 0).off_page()] },
    ];

    fn cells(&self) -> Vec<Cell> {
        let mut cells = call_cells(&self.call);
        cells.extend([Cell::text(self.by), Cell::or_none(self.algo, Cell::text)]);
        for (timing, ratio) in
            [(&self.out_of_place, self.ratio.out_of_place), (&self.in_place, self.ratio.in_place)]
        {
            cells.extend(timing_cells(timing.as_ref()));
            let error = timing.as_ref().and_then(|timing| timing.max_error);
            cells.push(Cell::or_missing(error, Cell::Error));
            let missing = if timing.is_some() { Cell::None } else { Cell::Missing };
            cells.push(ratio.map_or(missing, Cell::Ratio));
        }
        cells.extend([Cell::or_none(self.max_error(), Cell::Error), Cell::or_none(self.hidden, Cell::text)]);
        cells
    }

    fn wrong(&self) -> u64 {
        Row::wrong(self)
    }

    fn section(&self, config: &CompareConfig) -> Option<String> {
        match self.hidden {
            Some(hidden) if self.call.collective != CallKind::AllReduceFused.name() => {
                Some(format!("{}, rows of {hidden} elements", self.call.collective))
            }
            Some(hidden) => Some(format!("rows of {hidden} elements")),
            None => section(&self.call, &config.config),
        }
    }

    fn panel(&self) -> String {
        match self.hidden {
            Some(hidden) => format!("{} of {}, rows of {hidden}", self.call.collective, self.call.dtype),
            None => panel(&self.call),
        }
    }

    fn points(&self, is_forced: bool) -> Vec<(String, Point)> {
        // MPI's broadcast, for one, has no call out of place.
        let Some(timing) = &self.out_of_place else { return Vec::new() };
        let mut point = point(&self.call, timing);
        if self.by == MEMCPY {
            // A copy has no bus bandwidth.
            point.busbw_gbs = 0.0;
        }
        vec![(self.algo.filter(|_| is_forced).unwrap_or(self.by).into(), point)]
    }

    fn write_facts(out: &mut dyn Write, config: &CompareConfig) -> io::Result<()> {
        write_facts(out, &config.config)?;
        writeln!(out, "# rounds {}", config.rounds)?;
        if let Some(norm) = &config.norm {
            let unfused = "all_reduce of fast-allreduce, then an addition and a norm by the same ranks";
            writeln!(out, "# unfused: {unfused}, {norm}")?;
            writeln!(out, "# all_reduce: that of fast-allreduce alone; memcpy: a copy of the input alone")?;
            writeln!(out, "# others: their all_reduce, then the addition and the norm")?;
        }
        for against in &config.against {
            let library = against.library.as_deref().unwrap_or("a copy by the device");
            writeln!(out, "# against {}: {library}", against.name)?;
        }
        writeln!(
            out,
            "# time: median over the rounds of the mean of a block of calls back to back, on the slowest rank; \
             ratio: time / fast-allreduce's"
        )
    }

    fn summaries(rows: &[Self]) -> Vec<Summary> {
        summaries(rows)
    }

    fn write_footer(out: &mut dyn Write, report: &Report<Self>) -> io::Result<()> {
        for Summary { by, wrong, max_error, ratio: spread } in &report.summary {
            let wrong = match wrong {
                None => "N/A".into(),
                Some(0) => "0 OK".into(),
                Some(wrong) => format!("{wrong} FAILED"),
            };
            let error = max_error.map_or("-".into(), distance);
            write!(out, "# {by:<15}: out of bounds values {wrong}, largest error {error}")?;
            if let Some(spread) = spread {
                let [mean, least, most] = [spread.mean, spread.least, spread.most].map(ratio);
                write!(out, ", time / fast-allreduce {mean} ({least} to {most})")?;
            }
            writeln!(out)?;
        }
        Ok(())
    }

    fn page(report: &Report<Self>) -> Page {
        let CompareConfig { config, rounds, against, .. } = &report.config;
        let names: Vec<_> = against.iter().map(|against| against.name).collect();
        let library = |name: &str, library: &String| (format!("Library of {name}"), library.clone());
        let libraries =
            against.iter().filter_map(|against| Some(library(against.name, against.library.as_ref()?)));
        let rounds = ("Rounds".into(), rounds.to_string());
        let left_out = report.left_out.iter().map(LeftOut::sentence);
        Page {
            heading: format!("fast-allreduce against {}", names.join(", ")),
            subject: subject(config),
            wrong: (config.check > 0).then_some(report.wrong),
            findings: report.summary.iter().filter_map(finding).collect(),
            warnings: config.device.warning().into_iter().chain(left_out).collect(),
            facts: libraries.chain([rounds]).chain(page_facts(config)).collect(),
            panels: Vec::new(),
            notes: NOTES,
        }
    }
}

fn finding(summary: &Summary) -> Option<String> {
    let spread = summary.ratio.as_ref()?;
    let [mean, least, most] = [spread.mean, spread.least, spread.most].map(ratio);
    Some(format!(
        "{} takes {mean} times as long as fast-allreduce: the geometric mean over all sizes, in place and out of \
         place, whose ratios are between {least} and {most}.",
        summary.by
    ))
}
