//! Tests programmatic dependent launch: the results are the same, and launches that request it have the attribute if
//! the driver and the kernels support it.

use fast_allreduce::{Algorithm, DType, ReduceOp};

use crate::fixtures::fixture::{MemoryKind, Message, Placement, Setup};
use crate::fixtures::gpu::{gpu, stand_in_of_parent, Gpus};
use crate::fixtures::processes::{part, this_test, Process};
use crate::fixtures::threads::{calls, fixtures};
use crate::launches::graphs::{capture, capture_and_replay, BYTES};
use crate::random::Random;
use crate::temporary::Folder;

tests! {
    gpu => calls_in_streams_and_graphs;
    stand_in_of_parent => launches_have_the_attribute_where_they_can;
}

fn setup(algorithm: Algorithm) -> Setup {
    Setup { programmatic: true, ..Setup::with(algorithm) }
}

fn calls_in_streams_and_graphs(gpus: Gpus) {
    for algorithm in [Algorithm::OneShotPush, Algorithm::TwoShotPull] {
        calls("programmatic", 2, gpus.count.min(2), setup(algorithm), 6);
        let random = Random::new(&format!("programmatic graphs {algorithm}"));
        fixtures(2, gpus.count.min(2), setup(algorithm), BYTES, |fixture| {
            capture_and_replay(fixture, &random);
        });
    }
}

/// Numbers of elements of the calls on a stream, and of those in a graph.
const EAGER: usize = 512;
const CAPTURED: usize = 1024;
/// The part of a child process whose calls request programmatic launch.
const ASKS: &str = "asks";

fn launches_have_the_attribute_where_they_can(gpus: Option<Gpus>) {
    if gpus.is_none() {
        return two_of_each(part().as_deref() == Some(ASKS));
    }
    // Each row: the part, a setting of the driver, and whether eager and captured launches have the attribute.
    for (part, setting, eager, captured) in [
        (ASKS, None, true, true),
        ("does not", None, false, false),
        (ASKS, Some(("STAND_IN_DRIVER_VERSION", "12020")), true, false),
        (ASKS, Some(("STAND_IN_VIRTUAL_ARCHITECTURE", "80")), false, false),
    ] {
        let folder = Folder::new();
        let log = folder.path().join("log");
        let mut child = this_test("launches::programmatic::launches_have_the_attribute_where_they_can", part);
        let ended = Process::start(child.env("STAND_IN_LAUNCH_LOG", &log).envs(setting)).finish();
        let lines = std::fs::read_to_string(&log);
        ended.unwrap_or_else(|report| panic!("{part} {setting:?}: {report}"));
        let lines = lines.unwrap();
        for (count, expected) in [(EAGER, eager), (CAPTURED, captured)] {
            let of_count = |line: &&str| line.split(' ').nth(3) == Some(&count.to_string());
            let launches: Vec<&str> = lines.lines().filter(of_count).collect();
            assert_eq!(launches.len(), 4, "two of each rank: {lines}");
            for launch in launches {
                assert_eq!(launch.ends_with(" programmatic"), expected, "{part} {setting:?}: {launch}");
            }
        }
    }
}

fn two_of_each(programmatic: bool) {
    let setup = Setup { programmatic, ..Setup::with(Algorithm::OneShotPush) };
    let random = Random::new("programmatic launches");
    fixtures(2, 1, setup, BYTES, |fixture| {
        let message =
            |count, round| Message::new(&mut random.fork(round), (DType::F32, ReduceOp::Sum), count, 2);
        let placement = Placement::of(MemoryKind::Plain);
        for round in 0..2 {
            fixture.check(&message(EAGER, round), placement);
        }
        let captured = message(CAPTURED, 2);
        let graph = capture(&fixture.stream, || {
            fixture.start(&fixture.stream, &captured, placement).unwrap();
        });
        for _ in 0..2 {
            fixture.prepare(&captured, placement);
            graph.launch().unwrap();
            fixture.report(&captured, placement, fixture.compare(&captured, placement));
        }
    });
}
