//! Tests random calls; proptest shrinks those that fail.

use fast_allreduce::{Algorithm, DType, ReduceOp};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::host::{Build as _, HostDevice};
use crate::suite::launch::{threads, InThreads};
use crate::suite::message::{Message, Placement};
use crate::suite::random::{Random, Values};
use crate::suite::scenario::{Scenario, Sequence, Setup, Step};
use crate::suite::world::{Launched, World as _};

/// Creates a runner whose cases derive from the printed seed.
fn runner(name: &str, cases: u32) -> TestRunner {
    let mut random = Random::new(name);
    let seed: Vec<u8> = (0..4).flat_map(|_| random.bits().to_le_bytes()).collect();
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 60, ..Config::default() };
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed))
}

fn algorithm() -> impl Strategy<Value = Option<Algorithm>> {
    proptest::option::of(proptest::sample::select(&Algorithm::DIRECT[..]))
}

/// Counts up to a random limit, so that sizes of every magnitude occur.
fn count() -> impl Strategy<Value = usize> {
    (0u32..14).prop_flat_map(|power| 0..=(1usize << power))
}

#[derive(Debug, Clone)]
struct Call {
    case: (DType, ReduceOp),
    count: usize,
    values: Values,
    placements: u64,
}

fn call() -> impl Strategy<Value = Call> {
    let types = proptest::sample::select(&DType::ALL[..]);
    let operations = proptest::sample::select(&ReduceOp::ARITHMETIC[..]);
    let values = proptest::sample::select(&Values::ALL[..]);
    (types, operations, count(), values, any::<u64>()).prop_map(|(dtype, op, count, values, placements)| {
        Call { case: (dtype, op), count, values, placements }
    })
}

#[test]
fn any_calls_of_any_world() {
    let calls = proptest::collection::vec(call(), 1..12);
    let worlds = (1usize..=8, algorithm(), 4096usize..100_000, 1usize..=3, any::<u32>());
    let mut runner = runner("any calls of any world", 60);
    let result =
        runner.run(&(worlds, calls), |((size, algorithm, max_bytes, workers, first_epoch), calls)| {
            let random = Random::fixed(u64::from(first_epoch));
            let message = |call: &Call| {
                Message::new(&mut random.fork(call.count), call.case, call.count, size, call.values)
            };
            let setup = Setup { algorithm, max_bytes, workers, first_epoch, ..Setup::default() };
            let scenario = Scenario::new([setup], |_| {
                let call = |(message, call): (usize, &Call)| {
                    let placements = Placement::randoms(&mut random.fork(call.placements as usize), size);
                    Step::Call { communicator: 0, message, placements }
                };
                let steps = calls.iter().enumerate().map(call).collect();
                Sequence::new(calls.len(), calls.iter().map(message).collect(), steps)
            });
            Launched::new(InThreads, HostDevice::default()).run(size, &[scenario]);
            Ok(())
        });
    result.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn plans_fit_the_region() {
    let worlds = (1usize..=16, algorithm(), 4096usize..3_000_000, 1usize..=64);
    let mut runner = runner("plans fit the region", 24);
    let calls = proptest::collection::vec((any::<usize>(), 0u32..64), 1..40);
    let result = runner.run(&(worlds, calls), |((size, algorithm, max_bytes, workers), calls)| {
        let setup = Setup { algorithm, max_bytes, ..Setup::default() };
        let plans = threads(size, |rank| {
            // Only the number of workers matters here, not their work, so large worlds get few.
            let workers = if size <= 2 { workers } else { workers % 3 + 1 };
            let communicator = Setup { workers, ..setup }.build(&rank);
            assert!(communicator.region_bytes() <= 6 * max_bytes + (1 << 20));
            let plan = |&(count, shift): &(usize, u32), dtype: DType| {
                let plan = communicator.plan(count >> shift, dtype);
                assert!((1..=workers).contains(&plan.blocks));
                assert!(plan.piece_bytes >= 64 && plan.piece_bytes % 64 == 0, "whole packs: {plan:?}");
                assert!(plan.piece_bytes <= max_bytes, "{plan:?}");
                assert!(algorithm.is_none_or(|algorithm| algorithm == plan.algorithm));
                let packs = plan.piece_bytes / 64;
                match plan.algorithm {
                    Algorithm::OneShotPush => assert!(packs * size * 72 <= max_bytes, "{plan:?}"),
                    Algorithm::TwoShotPush => {
                        assert!(packs.div_ceil(size) * 2 * size * 72 <= max_bytes, "{plan:?}")
                    }
                    _ => {}
                }
                plan
            };
            let plans = calls.iter().flat_map(|call| DType::ALL.map(|dtype| plan(call, dtype)));
            plans.collect::<Vec<_>>()
        });
        prop_assert!(plans.windows(2).all(|pair| pair[0] == pair[1]), "ranks plan differently");
        Ok(())
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
}
