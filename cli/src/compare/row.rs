//! What a comparison yields, as it is written to JSON.

use fast_allreduce::{Algorithm, DType};
use serde::Serialize;

use crate::arguments::Case;
use crate::collective::redop;
use crate::harness::contender::{Contender, OURS};
use crate::harness::device::MeasuredRank;
use crate::harness::measure::Timings;
use crate::harness::row::{Config, Timing};
use crate::harness::work::Work;

/// What the numbers depend on.
#[derive(Debug, Serialize)]
pub struct CompareConfig {
    #[serde(flatten)]
    pub config: Config,
    pub rounds: u64,
    pub against: Vec<Against>,
    /// Of rows: what adds and normalises after an allreduce.
    pub norm: Option<String>,
}

/// One that this crate is compared with.
#[derive(Debug, Serialize)]
pub struct Against {
    pub name: &'static str,
    /// `None`: of the device.
    pub library: Option<String>,
}

/// One that is not in the results, or not in those of a collective, type and operation.
#[derive(Debug, Clone, Serialize)]
pub struct LeftOut {
    pub name: &'static str,
    pub collective: Option<&'static str>,
    #[serde(rename = "type")]
    pub dtype: Option<&'static str>,
    pub redop: Option<&'static str>,
    pub reason: String,
}

impl LeftOut {
    /// Of all results.
    pub fn of_run(name: &'static str, reason: &str) -> Self {
        Self { name, collective: None, dtype: None, redop: None, reason: reason.into() }
    }

    /// Of those of a collective, type and operation.
    pub fn of_case(name: &'static str, case: &Case, reason: &str) -> Self {
        let Case { kind, dtype, op, .. } = case;
        Self::of_kind(name, kind.name(), *dtype, redop(*kind, *op), reason)
    }

    /// Of those of a collective, type and operation by their names.
    pub fn of_kind(
        name: &'static str,
        collective: &'static str,
        dtype: DType,
        redop: &'static str,
        reason: &str,
    ) -> Self {
        let (collective, dtype, redop) = (Some(collective), Some(dtype.name()), Some(redop));
        Self { name, collective, dtype, redop, reason: reason.into() }
    }

    /// In one line.
    pub fn sentence(&self) -> String {
        let kind = match (self.collective, self.dtype, self.redop) {
            (Some(collective), Some(dtype), Some("none")) => format!(" of {collective} {dtype}"),
            (Some("all_reduce"), Some(dtype), Some(redop)) => format!(" of {dtype} {redop}"),
            (Some(collective), Some(dtype), Some(redop)) => format!(" of {collective} {dtype} {redop}"),
            _ => String::new(),
        };
        format!("{} left out{kind}: {}", self.name, self.reason)
    }
}

/// One collective, size, type and operation, of one contender.
#[derive(Debug, Serialize)]
pub struct Row {
    pub collective: &'static str,
    pub size: usize,
    pub count: usize,
    #[serde(rename = "type")]
    pub dtype: &'static str,
    pub redop: &'static str,
    /// `None` where there is none.
    pub root: Option<usize>,
    /// Elements of a row; `None` where there are no rows.
    pub hidden: Option<usize>,
    pub by: &'static str,
    pub algo: Option<&'static str>,
    /// `None` where it has no such placement.
    pub out_of_place: Option<Timing>,
    pub in_place: Option<Timing>,
    /// Time divided by that of this crate's fastest.
    pub ratio: Ratio,
}

/// Out of place and in place. `None` where there is no time to divide by.
#[derive(Debug, Serialize)]
pub struct Ratio {
    pub out_of_place: Option<f64>,
    pub in_place: Option<f64>,
}

impl Row {
    /// Wrong elements on all ranks.
    pub fn wrong(&self) -> u64 {
        self.timings().filter_map(|timing| timing.wrong).sum()
    }

    /// Whether anything was checked.
    pub fn is_checked(&self) -> bool {
        self.timings().any(|timing| timing.wrong.is_some())
    }

    fn timings(&self) -> impl Iterator<Item = &Timing> {
        [&self.out_of_place, &self.in_place].into_iter().flatten()
    }

    /// The larger of both placements'; `None` if nothing was checked.
    pub fn max_error(&self) -> Option<f64> {
        self.timings().filter_map(|timing| timing.max_error).reduce(f64::max)
    }

    /// True of this crate's.
    pub fn is_ours(&self) -> bool {
        self.by == OURS
    }
}

/// Its time divided by this crate's.
pub fn ratio(timing: &Option<Timing>, ours: f64) -> Option<f64> {
    timing.as_ref().map(|timing| timing.time_us / ours).filter(|ratio| ratio.is_finite() && ours > 0.0)
}

/// The rows of one call, in the contenders' order.
pub fn rows<E: MeasuredRank>(
    contenders: &[Contender<E>],
    case: &Case,
    work: &Work,
    (out_of_place, in_place): (Timings, Timings),
) -> Vec<Row> {
    let fastest = |timings: &[Option<Timing>]| {
        let ours = contenders.iter().zip(timings).filter(|(who, _)| matches!(who, Contender::Ours(_)));
        ours.filter_map(|(_, timing)| Some(timing.as_ref()?.time_us)).fold(f64::INFINITY, f64::min)
    };
    let fastest = (fastest(&out_of_place), fastest(&in_place));
    let timings = out_of_place.into_iter().zip(in_place);
    let row =
        |(contender, (out_of_place, in_place)): (&Contender<E>, (Option<Timing>, Option<Timing>))| Row {
            collective: work.kind.name(),
            size: work.elements() * case.dtype.size(),
            count: work.count(),
            dtype: case.dtype.name(),
            redop: redop(work.kind, work.op),
            root: work.root(),
            hidden: None,
            by: contender.name(),
            algo: contender.algorithm(work, case.dtype).map(Algorithm::name),
            ratio: Ratio {
                out_of_place: ratio(&out_of_place, fastest.0),
                in_place: ratio(&in_place, fastest.1),
            },
            out_of_place,
            in_place,
        };
    contenders.iter().zip(timings).map(row).collect()
}
