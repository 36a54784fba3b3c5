//! Metrics: the text is in Prometheus' format, and its numbers are those of the calls.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use fast_allreduce::flight::metrics;
use fast_allreduce::{Flight, ReduceOp};

use crate::fixtures::world::{builder, threads};

/// Parses a text in Prometheus' format and checks its rules. Returns the samples by name and labels.
fn parsed(text: &str) -> HashMap<String, f64> {
    let (mut samples, mut types) = (HashMap::new(), HashMap::new());
    let (mut helps, mut current) = (HashSet::new(), String::new());
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        let words: Vec<_> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", "HELP", name, help] => {
                assert!(
                    helps.insert(name.to_owned()) && help.ends_with('.') || name.ends_with("info"),
                    "{line}"
                );
                name.clone_into(&mut current);
            }
            ["#", "TYPE", name, kind] => {
                assert_eq!(name, current);
                assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "{line}");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            }
            _ => {
                let (series, value) = line.rsplit_once(' ').unwrap();
                let name = series.split('{').next().unwrap();
                let is_of_histogram = types[&current] == "histogram"
                    && ["_bucket", "_sum", "_count"].iter().any(|end| name == format!("{current}{end}"));
                assert!(name == current || is_of_histogram, "{line}");
                assert!(name.chars().all(|letter| letter.is_ascii_lowercase() || letter == '_'), "{line}");
                let value: f64 = value.parse().unwrap();
                assert!(value.is_finite() && value >= 0.0, "{line}");
                assert!(samples.insert(series.to_owned(), value).is_none(), "{line}");
            }
        }
    }
    samples
}

#[test]
fn metrics_count_the_calls() {
    let meeting = std::sync::Barrier::new(2);
    threads(
        2,
        |_| builder().flight(Flight::All),
        |communicator| {
            let mut data = [1f32; 100];
            for _ in 0..300 {
                communicator.all_reduce_in_place(&mut data, ReduceOp::Max).unwrap();
            }
            communicator.barrier().unwrap();
            if communicator.rank() == 1 {
                let is_early = || communicator.flight_record().ranks[0].begun < 302;
                while is_early() && communicator.survivors().len() == 2 {
                    std::thread::yield_now();
                }
                // Longer than the polling at the start of a wait.
                std::thread::sleep(Duration::from_millis(50));
            }
            communicator.broadcast(&mut data, 1).unwrap();
            meeting.wait();
            let own = parsed(&communicator.metrics());
            let rank = communicator.rank();
            let sum = |name: &str, label: &str| -> f64 {
                let is_such = |series: &&String| series.starts_with(name) && series.contains(label);
                own.iter().filter(|(series, _)| is_such(series)).map(|(_, value)| value).sum()
            };
            assert!(own.keys().all(|series| series.contains(&format!("rank=\"{rank}\""))), "{own:?}");
            for (collective, calls) in
                [("all_reduce", 300.0), ("barrier", 1.0), ("broadcast", 1.0), ("", 302.0)]
            {
                let label = format!("collective=\"{collective}");
                assert_eq!(sum("fast_allreduce_calls_total", &label), calls, "{own:?}");
                assert_eq!(sum("fast_allreduce_call_duration_seconds_count", &label), calls, "{own:?}");
            }
            assert_eq!(sum("fast_allreduce_message_bytes_total", ""), communicator.counters().bytes as f64);
            let longest = sum("fast_allreduce_call_duration_seconds_sum", "broadcast");
            let waited = sum("fast_allreduce_wait_seconds_total", "peer=\"1\"");
            if rank == 0 {
                assert!(longest > 0.04 && waited > 0.01 && waited < 60.0, "{own:?}");
            }
            // Cumulative buckets, the last of which has all.
            let counts: Vec<f64> = communicator
                .metrics()
                .lines()
                .filter(|line| line.contains("_bucket") && line.contains("all_reduce"))
                .map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
                .collect();
            assert!(counts.len() == 27 && counts.windows(2).all(|pair| pair[0] <= pair[1]), "{counts:?}");
            assert_eq!(counts[26], 300.0);
            let all = parsed(&metrics(&[communicator.flight_record()]));
            assert!(all.len() > own.len());
            assert_eq!(communicator.flight_record().ranks[rank].behind, 0);
            meeting.wait();
        },
    );
}
