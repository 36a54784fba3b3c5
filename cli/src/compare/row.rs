//! The rows of a comparison, as in its JSON.

use fast_allreduce::Algorithm;
use serde::Serialize;

use crate::harness::contender::{Contender, OURS};
use crate::harness::device::MeasuredRank;
use crate::harness::measure::Timings;
use crate::harness::row::{CallInfo, Config, Timing};
use crate::harness::work::Work;

/// Settings and facts that the numbers of a comparison depend on.
#[derive(Debug, Serialize)]
pub struct CompareConfig {
    #[serde(flatten)]
    pub config: Config,
    pub rounds: u64,
    pub against: Vec<Against>,
    /// The implementation of the unfused norm; `None` if no rows are normalised.
    pub norm: Option<String>,
}

/// A contender other than this crate.
#[derive(Debug, Serialize)]
pub struct Against {
    pub name: &'static str,
    /// The library and its version; `None` for a copy.
    pub library: Option<String>,
}

/// One collective, size, type and operation, of one contender.
#[derive(Debug, Serialize)]
pub struct Row {
    #[serde(flatten)]
    pub call: CallInfo,
    /// Elements of a row; `None` if no rows are normalised.
    pub hidden: Option<usize>,
    pub by: &'static str,
    pub algo: Option<&'static str>,
    /// `None` if the contender has no such placement.
    pub out_of_place: Option<Timing>,
    pub in_place: Option<Timing>,
    /// Time divided by that of this crate's fastest algorithm.
    pub ratio: Ratio,
}

/// Ratios of times; `None` if this crate has no time.
#[derive(Debug, Serialize)]
pub struct Ratio {
    pub out_of_place: Option<f64>,
    pub in_place: Option<f64>,
}

impl Row {
    /// Returns the number of wrong elements on all ranks.
    pub fn wrong(&self) -> u64 {
        self.timings().filter_map(|timing| timing.wrong).sum()
    }

    /// Returns whether anything was checked.
    pub fn is_checked(&self) -> bool {
        self.timings().any(|timing| timing.wrong.is_some())
    }

    fn timings(&self) -> impl Iterator<Item = &Timing> {
        [&self.out_of_place, &self.in_place].into_iter().flatten()
    }

    /// Returns the larger error of both placements; `None` if nothing was checked.
    pub fn max_error(&self) -> Option<f64> {
        self.timings().filter_map(|timing| timing.max_error).reduce(f64::max)
    }

    /// Returns whether this is a row of this crate.
    pub fn is_ours(&self) -> bool {
        self.by == OURS
    }
}

/// Returns a time divided by this crate's.
pub fn ratio(timing: &Option<Timing>, ours: f64) -> Option<f64> {
    timing.as_ref().map(|timing| timing.time_us / ours).filter(|ratio| ratio.is_finite() && ours > 0.0)
}

/// Makes the rows of one call, in the order of the contenders.
pub fn rows<E: MeasuredRank>(
    contenders: &[Contender<E>],
    work: &Work,
    (out_of_place, in_place): (Timings, Timings),
) -> Vec<Row> {
    let fastest = |timings: &[Option<Timing>]| {
        let ours =
            contenders.iter().zip(timings).filter(|(contender, _)| matches!(contender, Contender::Ours(_)));
        ours.filter_map(|(_, timing)| Some(timing.as_ref()?.time_us)).fold(f64::INFINITY, f64::min)
    };
    let fastest = (fastest(&out_of_place), fastest(&in_place));
    let timings = out_of_place.into_iter().zip(in_place);
    let row =
        |(contender, (out_of_place, in_place)): (&Contender<E>, (Option<Timing>, Option<Timing>))| Row {
            call: CallInfo::of(work),
            hidden: None,
            by: contender.name(),
            algo: contender.algorithm(work).map(Algorithm::name),
            ratio: Ratio {
                out_of_place: ratio(&out_of_place, fastest.0),
                in_place: ratio(&in_place, fastest.1),
            },
            out_of_place,
            in_place,
        };
    contenders.iter().zip(timings).map(row).collect()
}
