//! What a comparison yields, as it is written to JSON.

use fast_allreduce::{DType, ReduceOp};
use serde::Serialize;

use crate::bench::contender::Contender;
use crate::bench::device::Endpoint;
use crate::bench::row::{Config, Timing};

/// What the numbers depend on.
#[derive(Debug, Serialize)]
pub struct Contest {
    #[serde(flatten)]
    pub config: Config,
    pub rounds: u64,
    pub against: Vec<Against>,
}

/// One that this crate is compared with.
#[derive(Debug, Serialize)]
pub struct Against {
    pub name: &'static str,
    /// `None`: of the device.
    pub library: Option<String>,
}

/// One that is not in the results, or not in those of a type and operation.
#[derive(Debug, Clone, Serialize)]
pub struct LeftOut {
    pub name: &'static str,
    #[serde(rename = "type")]
    pub dtype: Option<&'static str>,
    pub redop: Option<&'static str>,
    pub reason: String,
}

impl LeftOut {
    /// Of all results.
    pub fn of_run(name: &'static str, reason: &str) -> Self {
        Self { name, dtype: None, redop: None, reason: reason.into() }
    }

    /// Of those of a type and operation.
    pub fn of_kind(name: &'static str, dtype: DType, op: ReduceOp, reason: &str) -> Self {
        Self { name, dtype: Some(dtype.name()), redop: Some(op.name()), reason: reason.into() }
    }

    /// In one line.
    pub fn sentence(&self) -> String {
        let kind = match (self.dtype, self.redop) {
            (Some(dtype), Some(redop)) => format!(" of {dtype} {redop}"),
            _ => String::new(),
        };
        format!("{} left out{kind}: {}", self.name, self.reason)
    }
}

/// One size, type and operation, of one contender.
#[derive(Debug, Serialize)]
pub struct Line {
    pub size: usize,
    pub count: usize,
    #[serde(rename = "type")]
    pub dtype: &'static str,
    pub redop: &'static str,
    pub by: &'static str,
    pub algo: Option<&'static str>,
    pub out_of_place: Timing,
    pub in_place: Timing,
    /// Time divided by that of this crate's fastest.
    pub ratio: Ratio,
}

/// Of each form. `None` where there is no time to divide by.
#[derive(Debug, Serialize)]
pub struct Ratio {
    pub out_of_place: Option<f64>,
    pub in_place: Option<f64>,
}

impl Line {
    /// Wrong elements on all ranks.
    pub fn wrong(&self) -> u64 {
        self.out_of_place.wrong.unwrap_or(0) + self.in_place.wrong.unwrap_or(0)
    }

    /// The larger of both forms'; `None` if nothing was checked.
    pub fn max_error(&self) -> Option<f64> {
        let (a, b) = (self.out_of_place.max_error?, self.in_place.max_error?);
        Some(a.max(b))
    }

    /// True of this crate's.
    pub fn is_ours(&self) -> bool {
        self.algo.is_some()
    }
}

/// The lines of one size, type and operation, in the contenders' order.
pub fn lines<E: Endpoint>(
    contenders: &[Contender<E>],
    count: usize,
    dtype: DType,
    op: ReduceOp,
    (out_of_place, in_place): (Vec<Timing>, Vec<Timing>),
) -> Vec<Line> {
    let fastest = |timings: &[Timing]| {
        let ours = contenders.iter().zip(timings).filter(|(who, _)| matches!(who, Contender::Ours(_)));
        ours.map(|(_, timing)| timing.time_us).fold(f64::INFINITY, f64::min)
    };
    let fastest = (fastest(&out_of_place), fastest(&in_place));
    let ratio = |timing: &Timing, ours: f64| {
        Some(timing.time_us / ours).filter(|ratio| ratio.is_finite() && ours > 0.0)
    };
    let timings = out_of_place.into_iter().zip(in_place);
    let line = |(contender, (out_of_place, in_place)): (&Contender<E>, (Timing, Timing))| Line {
        size: count * dtype.size(),
        count,
        dtype: dtype.name(),
        redop: op.name(),
        by: contender.name(),
        algo: contender.algorithm(count, dtype),
        ratio: Ratio { out_of_place: ratio(&out_of_place, fastest.0), in_place: ratio(&in_place, fastest.1) },
        out_of_place,
        in_place,
    };
    contenders.iter().zip(timings).map(line).collect()
}
