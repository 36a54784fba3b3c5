//! `--collective all_reduce_fused`: the fused call, the sequence that it replaces (an allreduce of this crate or of
//! another library, then an addition and a norm), and the allreduce alone.

use fast_allreduce::{Algorithm, CallKind, ReduceOp};

use super::row::{ratio, Ratio, Row};
use super::Refusals;
use crate::arguments::{Compare, FusedCase};
use crate::failure::Failure;
use crate::harness::contender::Contender;
use crate::harness::device::MeasuredRank;
use crate::harness::fused::{with_float, Sequence};
use crate::harness::measure::{Measure, Timings};
use crate::harness::row::CallInfo;
use crate::results::Reporting;

const NAME: &str = CallKind::AllReduceFused.name();

/// Measures all cases. Returns whether every checked element is right.
pub fn run<E: MeasuredRank>(
    options: &Compare,
    measure: &mut Measure<'_>,
    contenders: &[Contender<'_, E>],
    reporting: &mut Reporting<Row>,
) -> Result<bool, Failure> {
    let (mut refusals, mut is_right) = (Refusals::default(), true);
    let algorithms = options.bench.fused_algorithms();
    for case in options.bench.fused_cases() {
        let mut sequences = Vec::new();
        for &contender in contenders {
            match (contender, contender.refusal(CallKind::AllReduce, case.dtype, ReduceOp::Sum)) {
                (_, Some(reason)) => {
                    refusals.report(reporting, (contender.name(), NAME, "sum"), case.dtype, reason)?;
                }
                (Contender::Ours(measured), _) => sequences.push(Sequence::Fused(measured)),
                (Contender::Memcpy(_), _) => sequences.push(Sequence::Alone(contender)),
                (Contender::Rival(..), _) => sequences.push(Sequence::Unfused(contender)),
            }
        }
        // This crate's come first: a fused call for each algorithm, then the sequence and the allreduce of the first.
        let fused = sequences.iter().filter(|sequence| matches!(sequence, Sequence::Fused(_))).count();
        sequences.insert(fused, Sequence::Unfused(contenders[0]));
        sequences.insert(fused + 1, Sequence::Alone(contenders[0]));
        reporting.show(&case);
        let timings =
            with_float!(case.dtype, T => measure.sequences::<T, E>(&sequences, options.rounds, &case))?;
        let rows = rows(&sequences, &algorithms, &case, timings);
        is_right &= rows.iter().all(|row| row.wrong() == 0);
        reporting.add(rows)?;
    }
    Ok(is_right)
}

/// Makes the rows of one shape, in the order of the sequences: the fused calls come first, in the order of the
/// algorithms.
fn rows<E: MeasuredRank>(
    sequences: &[Sequence<E>],
    algorithms: &[Option<Algorithm>],
    case: &FusedCase,
    timings: Timings,
) -> Vec<Row> {
    let fused = timings.iter().take(algorithms.len()).flatten();
    let fastest = fused.map(|timing| timing.time_us).fold(f64::INFINITY, f64::min);
    let row = |(index, (sequence, timing)): (usize, (&Sequence<E>, _))| Row {
        call: CallInfo {
            collective: NAME,
            size: case.count() * case.dtype.size(),
            count: case.count(),
            dtype: case.dtype.name(),
            redop: "sum",
            root: None,
        },
        hidden: Some(case.hidden),
        by: sequence.name(),
        algo: algorithms.get(index).copied().flatten().map(Algorithm::name),
        ratio: Ratio { out_of_place: ratio(&timing, fastest), in_place: None },
        out_of_place: timing,
        in_place: None,
    };
    sequences.iter().zip(timings).enumerate().map(row).collect()
}
