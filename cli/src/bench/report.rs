//! The results of `bench`: columns, the lines around the table, and the page.

use std::io::{self, Write};

use crate::cells::{significant, Cell, Column, Group};
use crate::facts;
use crate::harness::row::{CallInfo, Config, Row, Timing};
use crate::page::{Page, Point};
use crate::results::{Report, Reported, MEMCPY};

/// The columns of [`call_cells`].
pub const CALL: &[Column] = &[
    Column::new("collective", "", 0).off_page(),
    Column::new("size", "B", 12),
    Column::new("count", "elements", 12).off_page(),
    Column::new("type", "", 7).off_page(),
    Column::new("redop", "", 7).off_page(),
    Column::new("root", "", 5).off_page(),
];

pub const ALGORITHM: Column = Column::new("algo", "", 16);

/// The columns of [`timing_cells`].
const TIMING: &[Column] = &[
    Column::new("time", "us", 9),
    Column::new("p50", "us", 9),
    Column::new("p99", "us", 9),
    Column::new("algbw", "GB/s", 7),
    Column::new("busbw", "GB/s", 7),
    Column::new("#wrong", "", 6),
];

const NOTES: &str = "The charts are of calls out of place. time is the mean of calls back to back, on the \
    slowest rank; p50 and p99 are of single calls, each after a barrier, on the slowest rank. size is that of \
    the larger of a call's buffers, algbw is size / time. busbw is algbw times 2 (ranks − 1) / ranks for \
    all_reduce, 1 for broadcast, reduce and send_recv, (ranks − 1) / ranks for the others. #wrong counts \
    elements over all ranks that differ in any bit from the reduction in rank order, or from the data to be \
    copied; for ring and halving-doubling, elements whose distance from the reduction in f64 is more than \
    rounding at every step explains. memcpy is a copy of the same size, made by every rank at the same time. No \
    collective is much faster: compare machines by the ratio to it.";

impl Reported for Row {
    type Config = Config;
    type Summary = ();

    const GROUPS: &'static [Group] = &[
        Group { name: "", columns: CALL },
        Group { name: "", columns: &[ALGORITHM] },
        Group { name: "out-of-place", columns: TIMING },
        Group { name: "in-place", columns: TIMING },
        Group {
            name: "",
            columns: &[
                Column::new("memcpy", "us", 9),
                Column::new("/ memcpy", "", 8),
                Column::new("remark", "", 0).off_page(),
            ],
        },
    ];

    fn cells(&self) -> Vec<Cell> {
        let mut cells = call_cells(&self.call);
        cells.push(Cell::or_none(self.algo, Cell::text));
        cells.extend(timing_cells(Some(&self.out_of_place)));
        cells.extend(timing_cells(self.in_place.as_ref()));
        let copies = (self.memcpy_us > 0.0).then(|| self.out_of_place.time_us / self.memcpy_us);
        cells.extend([Cell::Time(self.memcpy_us), Cell::or_none(copies, Cell::Ratio)]);
        cells.push(Cell::or_none(self.remark(), Cell::Text));
        cells
    }

    fn wrong(&self) -> u64 {
        Row::wrong(self)
    }

    fn remark(&self) -> Option<String> {
        Row::remark(self)
    }

    fn section(&self, config: &Config) -> Option<String> {
        section(&self.call, config)
    }

    fn panel(&self) -> String {
        panel(&self.call)
    }

    fn points(&self, is_forced: bool) -> Vec<(String, Point)> {
        // Unless algorithms are forced, the line shows those that the plan chose.
        let name = self.algo.filter(|_| is_forced).unwrap_or("fast-allreduce");
        // A copy has no bus bandwidth.
        let memcpy = Point { bytes: self.call.size, latency_us: self.memcpy_us, busbw_gbs: 0.0 };
        vec![(name.into(), point(&self.call, &self.out_of_place)), (MEMCPY.into(), memcpy)]
    }

    fn write_facts(out: &mut dyn Write, config: &Config) -> io::Result<()> {
        write_facts(out, config)?;
        writeln!(out, "# {}", config.device.explanation())
    }

    fn summaries(_: &[Self]) -> Vec<()> {
        Vec::new()
    }

    fn write_footer(out: &mut dyn Write, report: &Report<Self>) -> io::Result<()> {
        match (report.config.check, report.wrong) {
            (0, _) => writeln!(out, "# Out of bounds values : N/A (nothing was checked)")?,
            (_, 0) => writeln!(out, "# Out of bounds values : 0 OK")?,
            (_, wrong) => writeln!(out, "# Out of bounds values : {wrong} FAILED")?,
        }
        let timings = report.rows.iter().flat_map(|row| [Some(&row.out_of_place), row.in_place.as_ref()]);
        let bandwidths: Vec<f64> = timings.flatten().map(|timing| timing.busbw_gbs).collect();
        let average = bandwidths.iter().sum::<f64>() / bandwidths.len().max(1) as f64;
        writeln!(out, "# Avg bus bandwidth    : {}", significant(average))?;
        match &report.suspension {
            Some(suspension) => writeln!(out, "# {}", suspension.sentence()),
            None => Ok(()),
        }
    }

    fn page(report: &Report<Self>) -> Page {
        let config = &report.config;
        let remark = |row: &Row| {
            Some(format!("{} of {} bytes: {}", row.call.collective, row.call.size, row.remark()?))
        };
        Page {
            heading: "fast-allreduce bench".into(),
            subject: subject(config),
            wrong: (config.check > 0).then_some(report.wrong),
            findings: Vec::new(),
            warnings: config
                .device
                .warning()
                .into_iter()
                .chain(report.rows.iter().filter_map(remark))
                .collect(),
            facts: page_facts(config),
            panels: Vec::new(),
            notes: NOTES,
        }
    }
}

pub fn call_cells(call: &CallInfo) -> Vec<Cell> {
    let CallInfo { collective, size, count, dtype, redop, root } = call;
    let root = root.map_or("-1".into(), |root| root.to_string());
    let [collective, count, dtype, redop] = [collective, &*count.to_string(), dtype, redop].map(Cell::text);
    vec![collective, Cell::Bytes(*size), count, dtype, redop, Cell::Text(root)]
}

pub fn timing_cells(timing: Option<&Timing>) -> [Cell; 6] {
    let cells: [fn(&Timing) -> Cell; 6] = [
        |timing| Cell::Time(timing.time_us),
        |timing| Cell::Time(timing.p50_us),
        |timing| Cell::Time(timing.p99_us),
        |timing| Cell::Bandwidth(timing.algbw_gbs),
        |timing| Cell::Bandwidth(timing.busbw_gbs),
        |timing| Cell::or_missing(timing.wrong, Cell::text),
    ];
    cells.map(|cell| Cell::or_missing(timing, cell))
}

/// Returns the section of a call in a run of all collectives.
pub fn section(call: &CallInfo, config: &Config) -> Option<String> {
    (config.collective != call.collective).then(|| format!("collective {}", call.collective))
}

/// Returns the title of the panel of a collective, type and operation.
pub fn panel(CallInfo { collective, dtype, redop, .. }: &CallInfo) -> String {
    match *redop {
        "none" => format!("{collective} of {dtype}"),
        _ => format!("{collective}: {redop} of {dtype}"),
    }
}

pub fn point(call: &CallInfo, timing: &Timing) -> Point {
    Point { bytes: call.size, latency_us: timing.p50_us, busbw_gbs: timing.busbw_gbs }
}

/// Writes what the numbers depend on, as lines above a table.
pub fn write_facts(out: &mut dyn Write, config: &Config) -> io::Result<()> {
    let Config { version, ranks, device, seed, warmup_iters, check, .. } = config;
    let nodes = config.nodes.map_or(String::new(), |nodes| format!("nodes {nodes} "));
    let inputs = if config.registered { "registered" } else { "private" };
    let iterations = config.iters.map_or("auto".into(), |iterations| iterations.to_string());
    writeln!(out, "# fast-allreduce {version}")?;
    writeln!(out, "# collective {} ranks {ranks} {nodes}{device} inputs {inputs}", config.collective)?;
    if let Some(warning) = device.warning() {
        writeln!(out, "# {warning}")?;
    }
    writeln!(out, "# plan {}", config.plan)?;
    writeln!(out, "# order {}", config.additions())?;
    if let Some(direct_reads) = &config.direct_reads {
        writeln!(out, "# messages {direct_reads}")?;
    }
    writeln!(out, "# iters {iterations} warmup iters {warmup_iters} check {check} seed {seed}")
}

/// Returns the subject of a page: half a sentence.
pub fn subject(config: &Config) -> String {
    let inputs = if config.registered { "registered" } else { "private" };
    let collective = if config.collective == "all" { "all collectives" } else { config.collective };
    format!("{collective}, {} ranks, {inputs} inputs", config.ranks)
}

/// Returns what the numbers of a page depend on: settings, and facts of the machine.
pub fn page_facts(config: &Config) -> Vec<(String, String)> {
    let Config { version, ranks, device, seed, iters, warmup_iters, check, .. } = config;
    let iterations = iters.map_or("as many as take 20 ms".into(), |iterations| iterations.to_string());
    let settings = [
        ("Version", format!("fast-allreduce {version}")),
        ("Ranks", config.nodes.map_or(ranks.to_string(), |nodes| format!("{ranks} on {nodes} nodes"))),
        ("Device", device.to_string().replacen("device ", "", 1)),
        ("Timed calls", format!("{iterations}, after {warmup_iters} that are not timed")),
        ("Checked calls", check.to_string()),
        ("Seed of the inputs", seed.to_string()),
        ("Plan", config.plan.clone()),
        ("Order of additions", config.additions()),
        ("Timeout", format!("{} s", config.timeout_s)),
        ("Region of a rank", format!("{} bytes", config.region_bytes)),
    ];
    settings.into_iter().chain(facts::machine()).map(|(name, value)| (name.into(), value)).collect()
}
