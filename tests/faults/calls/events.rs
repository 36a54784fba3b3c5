//! Events in a program's log.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex};

use fast_allreduce::ReduceOp;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::fixtures::world::{builder, threads};

/// Collects events as lines.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<(Level, String)>>>);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        write!(self.0, "{}={value:?} ", field.name()).unwrap();
    }
}

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        self.0.lock().unwrap().push((*event.metadata().level(), line.0));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn calls_plans_and_failures_are_events() {
    let logs = threads(
        2,
        |_| builder(),
        |communicator| {
            let log = Log::default();
            tracing::subscriber::with_default(log.clone(), || {
                for count in [10, 10, 1000, 1000, 70_000] {
                    communicator.all_reduce_in_place(&mut vec![1f32; count], ReduceOp::Sum).unwrap();
                }
                communicator.abort();
            });
            log.0.lock().unwrap().clone()
        },
    );
    for (rank, events) in logs.iter().enumerate() {
        let of = |level: Level| -> Vec<&str> {
            events.iter().filter(|(at, _)| *at == level).map(|(_, line)| line.as_str()).collect()
        };
        let calls = of(Level::TRACE);
        assert_eq!(calls.len(), 5, "{events:?}");
        assert!(calls[0].contains("number=1 ") && calls[4].contains("count=70000 "), "{calls:?}");
        // One event for the plan of the first call, which the next calls reuse, and one for that of the large message.
        let plans = of(Level::DEBUG);
        assert_eq!(plans.len(), 2, "{plans:?}");
        assert!(plans[0].contains("one-shot-pull") && plans[1].contains("two-shot-pull"), "{plans:?}");
        let failures = of(Level::ERROR);
        assert_eq!(failures.len(), 1, "{failures:?}");
        assert!(
            failures[0].contains(&format!("rank={rank} ")) && failures[0].contains("aborted"),
            "{failures:?}"
        );
    }
}
