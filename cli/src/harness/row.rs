//! The results of a run, as in its JSON.

use std::fmt;

use fast_allreduce::{CallKind, ReduceOp};
use serde::Serialize;

use super::check::Verdict;
use super::populations;
use super::work::Work;

/// Settings and facts that the numbers of a run depend on.
#[derive(Debug, Serialize)]
pub struct Config {
    pub version: &'static str,
    pub ranks: usize,
    /// If there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<usize>,
    #[serde(flatten)]
    pub device: DeviceFacts,
    pub registered: bool,
    pub seed: u64,
    /// `None` for as many as take 20 ms.
    pub iters: Option<u64>,
    pub warmup_iters: u64,
    pub check: u64,
    /// `"all"` for each in turn.
    pub collective: &'static str,
    pub timeout_s: f64,
    /// Bytes of shared memory that each rank's region takes.
    pub region_bytes: usize,
    /// The source of the plan, and why it is used.
    pub plan: String,
    /// The order of additions: fixed or any.
    pub order: &'static str,
    /// Why there are no in-switch reductions, if any order was requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvls_refused: Option<String>,
    /// Number of ranks of each socket, if large allreduces have two levels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks_of_socket: Option<usize>,
    /// On the host: whose memory rank 0 reads large messages from directly, and why not that of others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub direct_reads: Option<String>,
}

impl Config {
    /// Describes the order of additions.
    pub fn additions(&self) -> String {
        if self.nodes.is_some() {
            return "that of the ranks of each node, then that of the nodes".into();
        }
        if let Some(count) = self.ranks_of_socket {
            return format!("any: large allreduces between sockets of {count} ranks have two levels");
        }
        match (self.order, &self.nvls_refused) {
            ("any", None) => "any: in-switch reductions, where they are expected to be faster".into(),
            (order, Some(reason)) => format!("{order}, to no effect: {reason}"),
            (order, None) => format!("{order}: that of the ranks, unless the algorithm has another"),
        }
    }
}

/// The value of `timed` with `--eager`.
#[cfg(feature = "cuda")]
pub const EAGER: &str = "calls";

/// Facts of the device that the numbers depend on.
#[derive(Debug, Serialize)]
#[serde(tag = "device", rename_all = "lowercase")]
pub enum DeviceFacts {
    Host {
        instruction_set: &'static str,
        cores: usize,
        /// The requested wait mode.
        wait: &'static str,
        /// The wait mode in use.
        wait_mode: &'static str,
        workers: usize,
        /// The binding of ranks.
        bind: String,
        /// The pages of the first rank's region.
        region: String,
    },
    #[cfg(feature = "cuda")]
    Cuda {
        /// The name of the first rank's GPU.
        gpu: String,
        gpus: usize,
        ranks_per_gpu: usize,
        sharing: &'static str,
        timed: &'static str,
    },
}

impl fmt::Display for DeviceFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host { instruction_set, cores, wait, wait_mode, workers, bind, region } => {
                write!(f, "device host instruction set {instruction_set} cores {cores} ")?;
                let came_to = if wait == wait_mode { String::new() } else { format!(" ({wait_mode})") };
                write!(f, "wait {wait}{came_to} workers {workers} bind {bind} ")?;
                write!(f, "region {region}")
            }
            #[cfg(feature = "cuda")]
            Self::Cuda { gpu, gpus, sharing, timed, .. } => {
                write!(f, "device cuda gpus {gpus} ({gpu}) memory by {sharing} timed {timed}")
            }
        }
    }
}

impl DeviceFacts {
    /// Explains the columns of times.
    pub fn explanation(&self) -> &'static str {
        match self {
            Self::Host { .. } => {
                "time: mean of calls back to back; p50, p99: of single calls, each after a barrier; \
                 all on the slowest rank"
            }
            #[cfg(feature = "cuda")]
            Self::Cuda { timed: EAGER, .. } => {
                "time: mean of plain calls back to back; p50, p99: of single ones, each after a barrier; \
                 all on the slowest rank"
            }
            #[cfg(feature = "cuda")]
            Self::Cuda { .. } => {
                "time: mean of calls in graphs of 20; p50, p99: of graphs, each after a barrier, divided by 20; \
                 all on the slowest rank"
            }
        }
    }

    /// Returns a warning about the numbers.
    pub fn warning(&self) -> Option<String> {
        match self {
            Self::Host { .. } => None,
            #[cfg(feature = "cuda")]
            Self::Cuda { ranks_per_gpu: 1, .. } => None,
            #[cfg(feature = "cuda")]
            Self::Cuda { ranks_per_gpu, .. } => Some(format!(
                "Up to {ranks_per_gpu} ranks share a GPU, which runs their processes in time slices, and nothing \
                 crosses NVLink or PCIe. These are not times of a world with a GPU for each rank."
            )),
        }
    }
}

/// A collective, with its size, type and operation.
#[derive(Debug, Serialize)]
pub struct CallInfo {
    pub collective: &'static str,
    pub size: usize,
    pub count: usize,
    #[serde(rename = "type")]
    pub dtype: &'static str,
    pub redop: &'static str,
    /// `None` if the collective has no root; nccl-tests prints -1.
    pub root: Option<usize>,
}

impl CallInfo {
    pub fn of(work: &Work) -> Self {
        Self {
            collective: work.kind.name(),
            size: work.bytes(work.elements()),
            count: work.count(),
            dtype: work.dtype.name(),
            redop: redop(work.kind, work.op),
            root: work.root(),
        }
    }
}

/// Returns the name of the operation in results, as nccl-tests prints it.
pub fn redop(kind: CallKind, op: ReduceOp) -> &'static str {
    match kind.reduces() {
        true => op.name(),
        false => "none",
    }
}

/// One collective, size, type, operation and algorithm.
#[derive(Debug, Serialize)]
pub struct Row {
    #[serde(flatten)]
    pub call: CallInfo,
    /// `None` if the collective has one algorithm only.
    pub algo: Option<&'static str>,
    pub out_of_place: Timing,
    /// `None` if the call cannot be in place.
    pub in_place: Option<Timing>,
    pub memcpy_us: f64,
}

impl Row {
    /// Returns what a reader must know of the times, if anything.
    pub fn remark(&self) -> Option<String> {
        let of = |form: &str, timing: Option<&Timing>| {
            timing?.remark.as_ref().map(|remark| format!("{form}: {remark}"))
        };
        let both = [of("out of place", Some(&self.out_of_place)), of("in place", self.in_place.as_ref())];
        let remarks: Vec<_> = both.into_iter().flatten().collect();
        (!remarks.is_empty()).then(|| remarks.join("; "))
    }

    /// Returns the number of wrong elements on all ranks.
    pub fn wrong(&self) -> u64 {
        let of = |timing: &Timing| timing.wrong.unwrap_or(0);
        of(&self.out_of_place) + self.in_place.as_ref().map_or(0, of)
    }
}

/// The times of a call, out of place or in place.
#[derive(Debug, Serialize)]
pub struct Timing {
    pub time_us: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub algbw_gbs: f64,
    pub busbw_gbs: f64,
    /// `None` if nothing was checked.
    pub wrong: Option<u64>,
    /// The largest distance of an element from the reduction in f64, or for integers from the exact one.
    pub max_error: Option<f64>,
    /// Why the calls are not from one population, if they are not.
    pub remark: Option<String>,
}

impl Timing {
    /// Makes a timing from the means of calls back to back, of which the median counts, and the times of single
    /// calls, in seconds. `bus_factor` is the collective's.
    pub fn new(mut means: Vec<f64>, mut singles: Vec<f64>, bytes: usize, bus_factor: f64) -> Self {
        means.sort_unstable_by(f64::total_cmp);
        singles.sort_unstable_by(f64::total_cmp);
        let mean = median(&means);
        let algbw_gbs = if mean > 0.0 { bytes as f64 / mean * 1e-9 } else { 0.0 };
        Self {
            time_us: mean * 1e6,
            p50_us: percentile(&singles, 0.50) * 1e6,
            p99_us: percentile(&singles, 0.99) * 1e6,
            algbw_gbs,
            busbw_gbs: algbw_gbs * bus_factor,
            wrong: None,
            max_error: None,
            remark: None,
        }
    }

    /// Adds a remark about `calls` single calls, and about the ranks' cores in each sample.
    #[must_use]
    pub fn remarked(self, calls: usize, cores: &[Vec<u16>]) -> Self {
        Self { remark: populations::remark(calls, self.p50_us, self.p99_us, cores), ..self }
    }

    /// Adds the verdict of the checked calls.
    #[must_use]
    pub fn checked(self, verdict: Option<Verdict>) -> Self {
        let (wrong, max_error) = (verdict.map(|found| found.wrong), verdict.map(|found| found.error));
        Self { wrong, max_error, ..self }
    }
}

/// Returns the median of sorted values; 0 without values.
fn median(sorted: &[f64]) -> f64 {
    match sorted.len() {
        0 => 0.0,
        length => (sorted[(length - 1) / 2] + sorted[length / 2]) / 2.0,
    }
}

/// Returns the smallest value that is not less than a share of all; 0 without values.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let position = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(position.saturating_sub(1)).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidths_are_those_of_nccl_tests() {
        let timing = Timing::new(vec![1e-3], vec![1e-3], 1_000_000, 1.5);
        assert!((timing.time_us - 1000.0).abs() < 1e-9);
        assert!((timing.algbw_gbs - 1.0).abs() < 1e-9);
        assert!((timing.busbw_gbs - 1.5).abs() < 1e-9);
        assert_eq!(Timing::new(vec![1e-3], vec![1e-3], 1000, 0.0).busbw_gbs, 0.0);
    }

    #[test]
    fn the_time_is_the_median_of_the_blocks() {
        assert!((Timing::new(vec![9.0, 1.0, 2.0], vec![], 1, 1.0).time_us - 2e6).abs() < 1.0);
        assert!((Timing::new(vec![9.0, 1.0], vec![], 1, 1.0).time_us - 5e6).abs() < 1.0);
        assert_eq!(Timing::new(vec![], vec![], 1, 1.0).time_us, 0.0);
    }

    #[test]
    fn percentiles_are_samples() {
        let samples: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!((percentile(&samples, 0.5), percentile(&samples, 0.99)), (100.0, 198.0));
        assert_eq!((percentile(&[7.0], 0.5), percentile(&[7.0], 0.99)), (7.0, 7.0));
        assert_eq!(percentile(&[], 0.99), 0.0);
    }

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        use CallKind::{
            AllGather, AllGatherV, AllReduce, AllToAll, AllToAllV, Broadcast, Gather, Reduce, ReduceScatter,
            ReduceScatterV, Scatter, SendRecv,
        };
        assert_eq!([AllReduce, AllGather, SendRecv].map(|kind| kind.bus_factor(4)), [1.5, 0.75, 1.0]);
        for kind in [Broadcast, Reduce] {
            assert_eq!(kind.bus_factor(4), 1.0);
        }
        for kind in [AllGatherV, AllToAll, AllToAllV, Gather, ReduceScatter, ReduceScatterV, Scatter] {
            assert_eq!((kind.bus_factor(4), kind.bus_factor(1)), (0.75, 0.0));
        }
    }
}
