//! Metrics in Prometheus' text format, from flight records.

use std::fmt::{Display, Write as _};
use std::io::Write as _;
use std::path::Path;
use std::{fs, io};

use super::record::{CallTotals, FlightRecord, RankRecord, RankState};
use super::totals::{upper_bound, BUCKETS};
use crate::error::{Error, Result};

/// A metric: name, type and help.
type Metric = (&'static str, &'static str, &'static str);

const CALLS: Metric =
    ("fast_allreduce_calls_total", "counter", "Calls that have ended, or on a GPU been enqueued.");
const BYTES: Metric =
    ("fast_allreduce_message_bytes_total", "counter", "Bytes of the rank's messages in these calls.");
const DURATIONS: Metric = (
    "fast_allreduce_call_duration_seconds",
    "histogram",
    "Durations of a sample of the calls: every 127th, unless the setting flight says otherwise.",
);
const WAITS: Metric =
    ("fast_allreduce_slow_waits_total", "counter", "Waits for a peer that outlasted their first polls.");
const WAITED: Metric = (
    "fast_allreduce_wait_seconds_total",
    "counter",
    "Time in these waits after their first polls, summed over the rank's threads. CPUs only.",
);
const BEHIND: Metric =
    ("fast_allreduce_calls_behind", "gauge", "Calls that the rank has begun fewer than the rank with most.");
const FAILED: Metric =
    ("fast_allreduce_failed", "gauge", "1 if the rank's communicator has failed, or its process ended.");
const INFO: Metric = ("fast_allreduce_info", "gauge", "1, with facts of the rank as labels.");

/// Text of metrics.
struct Text(String);

impl Text {
    /// Writes a metric with all its samples; nothing if there are none.
    fn metric(&mut self, (name, kind, help): Metric, samples: impl Iterator<Item = String>) {
        let samples: String = samples.collect();
        if !samples.is_empty() {
            // Writing to a string does not fail.
            let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n{samples}");
        }
    }
}

/// Returns a sample: a line.
fn sample(name: &str, labels: &[(&str, &dyn Display)], value: impl Display) -> String {
    let labels: Vec<_> =
        labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(&value.to_string()))).collect();
    format!("{name}{{{}}} {value}\n", labels.join(","))
}

/// Escapes the value of a label.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Returns the metrics of all ranks in some flight records, in Prometheus' text format.
///
/// The label `communicator` is the world's identity ([`FlightRecord::world`]). `docs/reliability.md` lists the metrics.
///
/// ```
#[doc = include_str!("../example_ranks.txt")]
/// # ranks(2, |communicator| {
/// communicator.barrier()?;
/// let text = fast_allreduce::flight::metrics(&[communicator.flight_record()]); // Of both ranks.
/// assert!(text.contains("fast_allreduce_calls_total{"));
/// assert!(communicator.metrics().contains("collective=\"barrier\"")); // Of this rank.
/// # communicator.barrier()?;
/// # Ok(()) });
/// ```
#[must_use]
pub fn metrics(records: &[FlightRecord]) -> String {
    let ranks: Vec<(&FlightRecord, &RankRecord)> =
        records.iter().flat_map(|world| world.ranks.iter().map(move |rank| (world, rank))).collect();
    let of_ranks = |name: &'static str, value: fn(&RankRecord) -> u64| {
        ranks.iter().map(move |(world, rank)| {
            sample(name, &[("communicator", &world.world), ("rank", &rank.rank)], value(rank))
        })
    };
    let of_calls = || {
        ranks
            .iter()
            .flat_map(|(world, rank)| rank.totals.iter().map(move |totals| (&world.world, rank.rank, totals)))
    };
    let of_peers = |name: &'static str, values: fn(&RankRecord) -> &[u64], scale: f64| {
        ranks.iter().flat_map(move |(world, rank)| {
            let others = values(rank).iter().enumerate().filter(|(peer, _)| *peer != rank.rank);
            others.map(move |(peer, value)| {
                let labels: [(&str, &dyn Display); 3] =
                    [("communicator", &world.world), ("rank", &rank.rank), ("peer", &peer)];
                sample(name, &labels, *value as f64 / scale)
            })
        })
    };
    let mut text = Text(String::new());
    text.metric(
        CALLS,
        of_calls().flat_map(|(world, rank, CallTotals { collective, algorithms, .. })| {
            algorithms.iter().map(move |(algorithm, calls)| {
                let algorithm = algorithm.unwrap_or("none");
                let labels: [(&str, &dyn Display); 4] = [
                    ("communicator", world),
                    ("rank", &rank),
                    ("collective", collective),
                    ("algorithm", &algorithm),
                ];
                sample(CALLS.0, &labels, calls)
            })
        }),
    );
    text.metric(
        BYTES,
        of_calls().map(|(world, rank, CallTotals { collective, bytes, .. })| {
            sample(BYTES.0, &[("communicator", world), ("rank", &rank), ("collective", collective)], bytes)
        }),
    );
    text.metric(
        DURATIONS,
        of_calls()
            .filter(|(.., totals)| totals.timed > 0)
            .map(|(world, rank, totals)| histogram(world, rank, totals)),
    );
    text.metric(WAITS, of_peers(WAITS.0, |rank| &rank.waits, 1.0));
    text.metric(WAITED, of_peers(WAITED.0, |rank| &rank.waited_ns, 1e9));
    text.metric(BEHIND, of_ranks(BEHIND.0, |rank| rank.behind));
    text.metric(FAILED, of_ranks(FAILED.0, |rank| (rank.state as u8 >= RankState::Failed as u8).into()));
    text.metric(
        INFO,
        ranks.iter().map(|(world, rank)| {
            let version = env!("CARGO_PKG_VERSION");
            let labels: [(&str, &dyn Display); 5] = [
                ("communicator", &world.world),
                ("rank", &rank.rank),
                ("world_size", &world.world_size),
                ("process", &rank.process),
                ("version", &version),
            ];
            sample(INFO.0, &labels, 1)
        }),
    );
    text.0
}

/// Returns the samples of a histogram, whose buckets are cumulative.
fn histogram(world: &str, rank: usize, totals: &CallTotals) -> String {
    let CallTotals { collective, durations, durations_ns, .. } = totals;
    let name = DURATIONS.0;
    let labels: [(&str, &dyn Display); 3] =
        [("communicator", &world), ("rank", &rank), ("collective", collective)];
    let mut sum = 0_u64;
    let mut text = String::new();
    for (bucket, count) in durations.iter().enumerate() {
        sum = sum.saturating_add(*count);
        let bound = match bucket + 1 < BUCKETS {
            true => format!("{:e}", upper_bound(bucket) as f64 / 1e9),
            false => "+Inf".to_owned(),
        };
        let [communicator, rank, collective] = labels;
        text += &sample(&format!("{name}_bucket"), &[communicator, rank, collective, ("le", &bound)], sum);
    }
    text += &sample(&format!("{name}_sum"), &labels, *durations_ns as f64 / 1e9);
    text + &sample(&format!("{name}_count"), &labels, sum)
}

/// Writes a text to a file for node_exporter's textfile collector: a reader sees all of it, or the previous text.
pub(crate) fn write(text: &str, path: &Path) -> Result<()> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
    let written = path.file_name().ok_or_else(invalid).and_then(|name| {
        // The collector reads names that end in .prom.
        let temporary = path.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
        let write = || fs::File::create(&temporary)?.write_all(text.as_bytes());
        write().and_then(|()| fs::rename(&temporary, path)).inspect_err(|_| {
            // The first error counts.
            let _ = fs::remove_file(&temporary);
        })
    });
    written.map_err(Error::io("writing the metrics"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped() {
        assert_eq!(sample("a", &[("b", &"c\"\\\nd")], 1), "a{b=\"c\\\"\\\\\\nd\"} 1\n");
    }

    #[test]
    fn a_file_is_written_whole_or_not_at_all() {
        let folder = crate::testing::temporary::Folder::new();
        let path = folder.path().join("ranks.prom");
        write("one\n", &path).unwrap();
        write("two\n", &path).unwrap();
        assert_eq!((fs::read_to_string(&path).unwrap(), folder.names().len()), ("two\n".to_owned(), 1));
        write("three", folder.path()).unwrap_err();
        write("three", &folder.path().join("missing/ranks.prom")).unwrap_err();
        write("three", Path::new("/")).unwrap_err();
        assert_eq!(folder.names(), ["ranks.prom"]);
    }
}
