//! `compare --collective all_reduce_fused`: the call, and what it replaces: this crate's allreduce and those of others, with an
//! addition and a norm after them.

use std::collections::BTreeSet;

use fast_allreduce::{Algorithm, CallKind, ReduceOp};

use super::report::Report;
use super::row::{ratio, LeftOut, Ratio, Row};
use crate::arguments::{Compare, RowsCase};
use crate::failure::Failure;
use crate::harness::contender::Contender;
use crate::harness::device::MeasuredRank;
use crate::harness::measure::{Measure, Timings};
use crate::harness::progress::Progress;
use crate::harness::rms_norm::{with_float, Way};

const NAME: &str = CallKind::AllReduceFused.name();

/// True if every checked element is right.
pub fn run<E: MeasuredRank>(
    options: &Compare,
    measure: &mut Measure<'_>,
    contenders: &[Contender<'_, E>],
    mut reporting: Option<&mut (Report, Progress)>,
) -> Result<bool, Failure> {
    let (mut refused, mut is_right) = (BTreeSet::new(), true);
    let algorithms = options.bench.rows_algorithms();
    for case in options.bench.rows_cases() {
        let mut ways = Vec::new();
        for &contender in contenders {
            let reason = contender.refusal(CallKind::AllReduce, case.dtype, ReduceOp::Sum);
            match (contender, reason) {
                (_, Some(reason)) => {
                    let is_news = refused.insert((contender.name(), case.dtype.name()));
                    if let Some((report, progress)) = reporting.as_deref_mut().filter(|_| is_news) {
                        progress.clear();
                        report.leave_out(LeftOut::of_kind(
                            contender.name(),
                            NAME,
                            case.dtype,
                            "sum",
                            reason,
                        ))?;
                    }
                }
                (Contender::Ours(endpoint), _) => ways.push(Way::Fused(endpoint)),
                (Contender::Memcpy(_), _) => ways.push(Way::Alone(contender)),
                (Contender::Rival(..), _) => ways.push(Way::Unfused(contender)),
            }
        }
        // After those of the call, of which there is one for each algorithm.
        let fused = ways.iter().filter(|way| matches!(way, Way::Fused(_))).count();
        ways.insert(fused, Way::Unfused(contenders[0]));
        if let Some((_, progress)) = reporting.as_deref() {
            progress.show(&case.to_string());
        }
        let timings = with_float!(case.dtype, T => measure.ways::<T, E>(&ways, options.rounds, &case))?;
        let rows = rows(&ways, &algorithms, &case, timings);
        is_right &= rows.iter().all(|row| row.wrong() == 0);
        if let Some((report, progress)) = reporting.as_deref_mut() {
            progress.clear();
            progress.advance();
            report.add(rows)?;
        }
    }
    Ok(is_right)
}

/// The rows of one shape, in the order of the ways. The first of them are the call by each of the algorithms.
fn rows<E: MeasuredRank>(
    ways: &[Way<E>],
    algorithms: &[Option<Algorithm>],
    case: &RowsCase,
    timings: Timings,
) -> Vec<Row> {
    let is_fused = |way: &Way<E>| matches!(way, Way::Fused(_));
    let fused = ways.iter().zip(&timings).filter(|(way, _)| is_fused(way));
    let fastest =
        fused.filter_map(|(_, timing)| Some(timing.as_ref()?.time_us)).fold(f64::INFINITY, f64::min);
    let row = |(index, (way, timing)): (usize, (&Way<E>, _))| Row {
        collective: NAME,
        size: case.count() * case.dtype.size(),
        count: case.count(),
        dtype: case.dtype.name(),
        redop: "sum",
        root: None,
        hidden: Some(case.hidden),
        by: way.name(),
        algo: algorithms.get(index).copied().flatten().map(Algorithm::name),
        ratio: Ratio { out_of_place: ratio(&timing, fastest), in_place: None },
        out_of_place: timing,
        in_place: None,
    };
    ways.iter().zip(timings).enumerate().map(row).collect()
}
