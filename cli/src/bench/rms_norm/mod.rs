//! `bench --collective all_reduce_fused`, as one of its ranks: the call, what it replaces, and the allreduce in it, in turns.

mod html;
mod report;

use fast_allreduce::{Algorithm, CallKind};
use serde::Serialize;

use crate::arguments::{Bench, RowsCase};
use crate::bench::report::{Reported as _, Reporting};
use crate::failure::Failure;
use crate::harness::contender::Contender;
use crate::harness::device::MeasuredRank;
use crate::harness::rms_norm::{with_float, Way, ROUNDS};
use crate::harness::row::{Config, Timing};
use crate::harness::session::Session;
use crate::harness::{config, measure};
use crate::output::Output;

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
            collective: CallKind::AllReduceFused.name(),
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

    fn remark(&self) -> Option<String> {
        let ways = [("fused", &self.fused), ("unfused", &self.unfused), ("all_reduce", &self.all_reduce)];
        let remark = |(name, timing): (&str, &Timing)| Some(format!("{name}: {}", timing.remark.as_ref()?));
        let remarks: Vec<_> = ways.into_iter().filter_map(remark).collect();
        (!remarks.is_empty()).then(|| remarks.join("; "))
    }
}

/// As [`Job::run`](crate::harness::Job::run).
pub fn run<E: MeasuredRank>(
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
    let (rows, seed) = (options.rows_cases().count() * endpoints.len(), measure.seed);
    let mut reporting = Reporting::start(session, options.format, rows, || NormConfig {
        config: config(options, &endpoints[0], seed),
        rounds: ROUNDS,
        norm,
    })?;
    let algorithms = options.rows_algorithms();
    let contenders = endpoints.iter().zip(algorithms);
    let mut is_right = true;
    let run = |(case, (endpoint, algorithm)): (RowsCase, (&E, Option<Algorithm>))| {
        reporting.show(&case);
        let ours = Contender::Ours(endpoint);
        let ways = [Way::Fused(endpoint), Way::Unfused(ours), Way::Alone(ours)];
        let timings = with_float!(case.dtype, T => measure.ways::<T, E>(&ways, ROUNDS, &case))?;
        let timings: Vec<_> = timings.into_iter().flatten().collect();
        let timings = <[Timing; 3]>::try_from(timings).expect("a timing of each way");
        let row = Row::new(&case, algorithm, timings);
        is_right &= row.wrong() == 0;
        Ok(reporting.add(row)?)
    };
    let mut cases = options.rows_cases().flat_map(|case| contenders.clone().map(move |one| (case, one)));
    let outcome = cases.try_for_each(run);
    reporting.finish(page, outcome.map(|()| is_right))
}
