//! `bench --collective all_reduce_rms_norm`, as one of its ranks: the call, what it replaces, and the allreduce in it, in turns.

mod html;
mod report;

use fast_allreduce::{Algorithm, CallKind};
use serde::Serialize;

use self::report::Report;
use crate::arguments::{Bench, RowsCase};
use crate::failure::Failure;
use crate::harness::contender::Contender;
use crate::harness::device::Endpoint;
use crate::harness::progress::Progress;
use crate::harness::rms_norm::{with_float, Way, ROUNDS};
use crate::harness::row::{Config, Timing};
use crate::harness::session::Session;
use crate::harness::{config, measure};
use crate::output::Output;
use crate::page::render;

/// One type, shape and algorithm.
#[derive(Debug, Serialize)]
struct Row {
    collective: &'static str,
    size: usize,
    count: usize,
    #[serde(rename = "type")]
    dtype: &'static str,
    redop: &'static str,
    hidden: usize,
    rows: usize,
    /// As it was asked for; `"auto"`: the plan's.
    algo: &'static str,
    fused: Timing,
    unfused: Timing,
    all_reduce: Timing,
    /// Times: fused / all_reduce.
    over_all_reduce: f64,
    /// Times: unfused / fused.
    gain: f64,
}

/// What the numbers depend on.
#[derive(Debug, Serialize)]
struct NormConfig {
    #[serde(flatten)]
    config: Config,
    rounds: u64,
    /// What adds and normalises after an allreduce.
    norm: String,
}

impl Row {
    fn new(case: &RowsCase, algorithm: Option<Algorithm>, [fused, unfused, all_reduce]: [Timing; 3]) -> Self {
        let ratio = |time: &Timing, other: &Timing| time.time_us / other.time_us;
        Self {
            collective: CallKind::AllReduceRmsNorm.name(),
            size: case.count() * case.dtype.size(),
            count: case.count(),
            dtype: case.dtype.name(),
            redop: "sum",
            hidden: case.hidden,
            rows: case.rows,
            algo: algorithm.map_or("auto", Algorithm::name),
            over_all_reduce: ratio(&fused, &all_reduce),
            gain: ratio(&unfused, &fused),
            fused,
            unfused,
            all_reduce,
        }
    }

    /// Wrong elements on all ranks.
    fn wrong(&self) -> u64 {
        [&self.fused, &self.unfused].iter().filter_map(|timing| timing.wrong).sum()
    }

    fn remark(&self) -> Option<String> {
        let ways = [("fused", &self.fused), ("unfused", &self.unfused), ("all_reduce", &self.all_reduce)];
        let remark = |(name, timing): (&str, &Timing)| Some(format!("{name}: {}", timing.remark.as_ref()?));
        let remarks: Vec<_> = ways.into_iter().filter_map(remark).collect();
        (!remarks.is_empty()).then(|| remarks.join("; "))
    }
}

/// As [`Job::run`](crate::harness::Job::run).
pub fn run<E: Endpoint>(
    options: &Bench,
    session: &Session,
    endpoints: &[E],
    page: Option<&Output>,
) -> Result<bool, Failure> {
    let mut measure = measure(options, session)?;
    let mut norm = String::new();
    for endpoint in endpoints {
        norm = endpoint.ready_norm()?;
    }
    let mut reporting = match session.rank() {
        0 => {
            let config = config(options, &endpoints[0], measure.seed);
            let config = NormConfig { config, rounds: ROUNDS, norm };
            let progress = Progress::new(options.rows_cases().count() * endpoints.len());
            Some((Report::start(options.format, config)?, progress))
        }
        _ => None,
    };
    let algorithms = options.rows_algorithms();
    let mut is_right = true;
    for case in options.rows_cases() {
        for (endpoint, &algorithm) in endpoints.iter().zip(&algorithms) {
            if let Some((_, progress)) = &reporting {
                progress.show(&case.to_string());
            }
            let ours = Contender::Ours(endpoint);
            let ways = [Way::Fused(endpoint), Way::Unfused(ours), Way::Alone(ours)];
            let timings = with_float!(case.dtype, T => measure.ways::<T, E>(&ways, ROUNDS, &case))?;
            let timings: Vec<_> = timings.into_iter().flatten().collect();
            let timings = <[Timing; 3]>::try_from(timings).expect("a timing of each way");
            let row = Row::new(&case, algorithm, timings);
            is_right &= row.wrong() == 0;
            if let Some((report, progress)) = &mut reporting {
                progress.clear();
                progress.advance();
                report.add(row)?;
            }
        }
    }
    if let Some((report, progress)) = reporting {
        drop(progress);
        let (config, rows) = report.finish()?;
        if let Some(page) = page {
            page.write(&render(&html::page(&config, &rows)))?;
        }
    }
    Ok(is_right)
}
