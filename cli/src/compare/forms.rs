//! `--form`: fused calls of the host, the separate steps that they replace, and the plain call.

use super::row::{ratio, Ratio, Row};
use crate::arguments::Compare;
use crate::failure::Failure;
use crate::harness::contender::OURS;
use crate::harness::device::MeasuredRank;
use crate::harness::forms::By;
use crate::harness::fused::with_float;
use crate::harness::measure::Measure;
use crate::harness::row::CallInfo;
use crate::results::Reporting;

/// Measures all cases of all forms. Returns whether every checked element is right.
pub fn run<E: MeasuredRank>(
    options: &Compare,
    measure: &mut Measure<'_>,
    measured: &E,
    reporting: &mut Reporting<Row>,
) -> Result<bool, Failure> {
    let mut is_right = true;
    for form in options.bench.forms() {
        for case in options.bench.fused_cases() {
            reporting.show(&format_args!("{form}, {} rows of {} {}", case.rows, case.hidden, case.dtype));
            let timings =
                with_float!(case.dtype, T => measure.form::<T, E>(form, measured, options.rounds, &case))?;
            let ours =
                timings.first().and_then(Option::as_ref).map_or(f64::INFINITY, |timing| timing.time_us);
            let count = form.rows(case.rows, measure.session.world_size()) * case.hidden;
            let row = |(by, timing)| Row {
                call: CallInfo {
                    collective: form.name(),
                    size: count * case.dtype.size(),
                    count,
                    dtype: case.dtype.name(),
                    redop: "sum",
                    root: None,
                },
                hidden: Some(case.hidden),
                by: match by {
                    By::Ours => OURS,
                    By::Steps => "unfused",
                    By::Plain => "plain",
                },
                algo: None,
                ratio: Ratio { out_of_place: ratio(&timing, ours), in_place: None },
                out_of_place: timing,
                in_place: None,
            };
            let rows: Vec<_> = By::ALL.into_iter().zip(timings).map(row).collect();
            is_right &= rows.iter().all(|row| row.wrong() == 0);
            reporting.add(rows)?;
        }
    }
    Ok(is_right)
}
