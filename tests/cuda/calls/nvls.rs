//! Tests in-switch reduction (NVLS). The stand-in driver has multicast memory if an environment variable enables it,
//! which is set in child processes of the tests. Its switch does not add in rank order.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::{Bootstrap, Local, Threads};
use fast_allreduce::{Algorithm, DType, Error, Order, ReduceOp, Result};

use crate::fixtures::fixture::{Fixture, MemoryKind, Message, Placement, Setup};
use crate::fixtures::gpu::{context, stand_in_of_parent, Gpus, LIMIT};
use crate::fixtures::injection::{calls, fail, live, take_back, Of};
use crate::fixtures::processes::{part, ranks, this_test, Process};
use crate::fixtures::threads::{fixtures, threads};
use crate::launches::graphs;
use crate::random::Random;
use crate::suite::oracle;

tests! {
    stand_in_of_parent =>
        sums_between_threads,
        sums_between_processes,
        replays_of_graphs,
        other_calls_are_done_without_it,
        any_order_chooses_it_for_large_sums,
        a_rank_that_does_not_come_is_named,
        sockets_that_fail_cost_only_the_windows,
        what_has_no_multicast_is_refused,
        one_rank_that_cannot_is_told_to_all,
        a_fabric_that_is_not_ready_is_tried_again_by_all,
        what_the_fabric_refuses_has_a_remedy,
        windows_are_unbound_before_they_are_freed,
        windows_keep_the_world;
}

const TYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];
/// Limit of the region; larger messages are divided into pieces.
const MAX_BYTES: usize = 8 << 10;
const MOST: usize = 3 * MAX_BYTES;
const MULTICAST: (&str, &str) = ("STAND_IN_MULTICAST", "1");
const DEVICES: (&str, &str) = ("STAND_IN_DEVICES", "8");

/// Runs `body` in a child process whose driver has multicast memory and eight devices.
fn with_multicast(gpus: Option<Gpus>, test: &str, body: impl FnOnce()) {
    if gpus.is_none() {
        return body();
    }
    let mut child = this_test(&format!("calls::nvls::{test}"), "multicast");
    child.envs([MULTICAST, DEVICES]);
    Process::start(&mut child).finish().unwrap_or_else(|report| panic!("{report}"));
}

/// Creates a message of small integers, whose sums are exact in any order.
fn exact(random: &mut Random, dtype: DType, count: usize, world: usize) -> Message {
    let bytes = |value: usize| match dtype {
        DType::F16 => half::f16::from_f32(value as f32).to_le_bytes().to_vec(),
        DType::Bf16 => half::bf16::from_f32(value as f32).to_le_bytes().to_vec(),
        _ => (value as f32).to_le_bytes().to_vec(),
    };
    let inputs: Vec<Vec<u8>> =
        (0..world).map(|_| (0..count).flat_map(|_| bytes(random.below(15))).collect()).collect();
    let expected = oracle::reduce(dtype, ReduceOp::Sum, &inputs);
    Message { dtype, op: ReduceOp::Sum, count, inputs, expected }
}

/// Reduces messages of all types at any offset: in one piece, in several, and empty.
fn sums(fixture: &Fixture, random: &Random) {
    let world = fixture.communicator.world_size();
    for (turn, dtype) in TYPES.into_iter().enumerate() {
        for (round, most) in [0, 1, 7, 100, 1000, MOST / dtype.size()].into_iter().enumerate() {
            let mut random = random.fork(16 * turn + round);
            let count = if round < 4 { most } else { most - random.below(most / 4) };
            let message = exact(&mut random, dtype, count, world);
            fixture.check(&message, Placement::random(&mut random));
        }
        let mut random = random.fork(16 * turn + 15);
        fixture.check(&exact(&mut random, dtype, 512, world), Placement::of(MemoryKind::Registered));
    }
}

fn setup(algorithm: Algorithm, check: bool) -> Setup {
    let first_epoch = u32::MAX - 9;
    Setup { check: Some(check), max_bytes: MAX_BYTES, first_epoch, ..Setup::with(algorithm) }
}

fn sums_between_threads(gpus: Option<Gpus>) {
    with_multicast(gpus, "sums_between_threads", || {
        for world in [2, 3, 5, 8] {
            for (algorithm, check) in Algorithm::NVLS.into_iter().zip([false, true]) {
                let random = Random::new(&format!("nvls {algorithm} {world}"));
                fixtures(world, world, setup(algorithm, check ^ (world % 2 == 0)), MOST, |fixture| {
                    assert_eq!(fixture.communicator.nvls(), Ok(()));
                    assert_eq!(fixture.communicator.plan(100, DType::F16).algorithm, algorithm);
                    sums(fixture, &random);
                });
            }
        }
    });
}

fn sums_between_processes(_: Option<Gpus>) {
    let test = "calls::nvls::sums_between_processes";
    for algorithm in Algorithm::NVLS {
        let name = format!("processes, {algorithm}");
        ranks(test, &name, 3, &[MULTICAST, DEVICES], |local| {
            let context = context(local.rank());
            let fixture = Fixture::new(setup(algorithm, false).try_build(context, local).unwrap(), MOST);
            sums(&fixture, &Random::new(&name));
            fixture.communicator.barrier().unwrap();
        });
    }
}

/// Tests graphs of calls in one piece and in several (one launch each), with eager calls in between. The windows'
/// generations advance from replay to replay.
fn replays_of_graphs(gpus: Option<Gpus>) {
    with_multicast(gpus, "replays_of_graphs", || {
        for (algorithm, world, check) in
            [(Algorithm::OneShotNvls, 2, true), (Algorithm::TwoShotNvls, 3, false)]
        {
            for dtype in TYPES {
                let random = Random::new(&format!("nvls graphs {algorithm} {dtype}"));
                // Messages of each type, divided into pieces.
                let (count, setup) = (2500, Setup { max_bytes: 4 << 10, ..setup(algorithm, check) });
                fixtures(world, world, setup, 4 * count, |fixture| {
                    let plan = fixture.communicator.plan(count, dtype);
                    assert!(
                        plan.algorithm == algorithm && plan.piece_bytes < count * dtype.size(),
                        "{plan:?}"
                    );
                    let captured = |random: &mut Random| exact(random, dtype, count, world);
                    let eager = |random: &mut Random, count| exact(random, DType::F16, count, world);
                    graphs::capture_and_replay_these(fixture, &random, captured, eager);
                });
            }
        }
    });
}

fn other_calls_are_done_without_it(gpus: Option<Gpus>) {
    with_multicast(gpus, "other_calls_are_done_without_it", || {
        let random = Random::new("nvls, other calls");
        fixtures(2, 2, setup(Algorithm::TwoShotNvls, true), MOST, |fixture| {
            let kinds = [
                (DType::I32, ReduceOp::Sum),
                (DType::F64, ReduceOp::Sum),
                (DType::F32, ReduceOp::Max),
                (DType::F16, ReduceOp::Avg),
            ];
            for (number, kind) in kinds.into_iter().enumerate() {
                let mut random = random.fork(number);
                let message = Message::new(&mut random, kind, 333, 2);
                fixture.check(&message, Placement::random(&mut random));
                // An NVLS call in between: all calls share the count of generations.
                fixture.check(&exact(&mut random, DType::F16, 333, 2), Placement::random(&mut random));
            }
        });
        // A single rank reduces nothing, and needs no multicast group.
        fixtures(1, 1, setup(Algorithm::OneShotNvls, true), MOST, |fixture| {
            assert!(fixture.communicator.nvls().is_err());
            fixture.check(&exact(&mut random.fork(99), DType::F32, 10, 1), Placement::of(MemoryKind::Plain));
        });
    });
}

fn any_order_chooses_it_for_large_sums(gpus: Option<Gpus>) {
    with_multicast(gpus, "any_order_chooses_it_for_large_sums", || {
        const LARGE: usize = 9 << 20;
        let random = Random::new("nvls, any order");
        let any = Setup { order: Order::Any, max_bytes: LARGE, ..Setup::default() };
        fixtures(5, 5, any, LARGE, |fixture| {
            let communicator = &fixture.communicator;
            assert_eq!(communicator.nvls(), Ok(()));
            let algorithm =
                |bytes: usize, dtype: DType| communicator.plan(bytes / dtype.size(), dtype).algorithm;
            for dtype in TYPES {
                assert_eq!(algorithm(LARGE, dtype), Algorithm::TwoShotNvls);
                assert!(algorithm(4 << 10, dtype).is_direct());
            }
            assert!(algorithm(LARGE, DType::I32).is_direct());
            for (number, count) in [1000, LARGE / 2].into_iter().enumerate() {
                fixture.check(
                    &exact(&mut random.fork(number), DType::Bf16, count, 5),
                    Placement::of(MemoryKind::Pool),
                );
            }
        });
        fixtures(5, 5, Setup { order: Order::Fixed, ..any }, 1, |fixture| {
            assert!(fixture.communicator.nvls().is_err());
            assert!(fixture.communicator.plan(LARGE, DType::F32).algorithm.is_direct());
        });
        // Ranks whose settings differ get an error.
        let errors = threads(2, 2, |rank, context| {
            let order = [Order::Any, Order::Fixed][rank.rank()];
            Setup { order, ..Setup::default() }.try_build(context, rank).map(drop).unwrap_err()
        });
        for error in errors {
            assert!(matches!(&error, Error::Disagreement { what, .. } if *what == "order"), "{error}");
        }
    });
}

fn a_rank_that_does_not_come_is_named(gpus: Option<Gpus>) {
    with_multicast(gpus, "a_rank_that_does_not_come_is_named", || {
        for algorithm in Algorithm::NVLS {
            let timeout = std::time::Duration::from_millis(500);
            let setup = Setup { timeout, ..setup(algorithm, false) };
            let random = Random::new("nvls, a rank that does not come");
            fixtures_of_lost(setup, &random);
        }
    });
}

fn fixtures_of_lost(setup: Setup, random: &Random) {
    threads(3, 3, |rank, context| {
        let fixture = Fixture::new(setup.try_build(context, rank).unwrap(), MOST);
        let (message, placement) =
            (exact(&mut random.fork(0), DType::F16, 500, 3), Placement::of(MemoryKind::Plain));
        fixture.check(&message, placement);
        if fixture.rank() == 1 {
            // Sleeps until the other ranks have timed out.
            std::thread::sleep(4 * setup.timeout);
            return;
        }
        fixture.prepare(&message, placement);
        let started = fixture.start(&fixture.stream, &message, placement);
        let error = started.and_then(|()| fixture.communicator.synchronize(&fixture.stream)).unwrap_err();
        let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
        assert_eq!(missing, &[1], "{error}");
    });
}

/// In the third exchange of descriptors, which is that of the windows, rank 0 finds sockets that do not exist.
struct Misled(Threads, AtomicUsize);

impl Bootstrap for Misled {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn all_gather(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        const NAME: &[u8] = b"fast-allreduce-";
        let mut all = self.0.all_gather(bytes, timeout)?;
        let is_exchange = bytes.windows(NAME.len()).any(|part| part == NAME);
        if is_exchange && self.1.fetch_add(1, Ordering::Relaxed) == 2 && self.rank() == 0 {
            all.iter_mut().skip(1).filter_map(|bytes| bytes.last_mut()).for_each(|last| *last ^= 1);
        }
        Ok(all)
    }
}

fn sockets_that_fail_cost_only_the_windows(gpus: Option<Gpus>) {
    with_multicast(gpus, "sockets_that_fail_cost_only_the_windows", || {
        let refused = threads(5, 5, |rank, context| {
            let setup = Setup { order: Order::Any, ..Setup::default() };
            let communicator = setup.try_build(context, Misled(rank, AtomicUsize::new(0))).unwrap();
            communicator.barrier().unwrap();
            communicator.nvls().unwrap_err().to_string()
        });
        assert!(refused.iter().all(|error| error.contains("passing a file descriptor")), "{refused:?}");
    });
}

/// Checks both ways to request NVLS. Forcing the algorithm returns an error. Allowing any order, in a world where NVLS
/// would be faster, returns a communicator that states why it does not use NVLS.
fn refused(size: usize, devices: usize, reason: &str) {
    let built = |setup: Setup| {
        threads(size, devices, |rank: Threads, context| {
            setup.try_build(context, rank).map(|communicator| {
                communicator.barrier().unwrap();
                communicator.nvls()
            })
        })
    };
    for result in built(Setup::with(Algorithm::TwoShotNvls)) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(reason), "{reason:?} is not in {error:?}");
    }
    for result in built(Setup { order: Order::Any, ..Setup::default() }) {
        let error = result.unwrap().unwrap_err().to_string();
        assert!(error.contains(reason), "{reason:?} is not in {error:?}");
    }
}

fn what_has_no_multicast_is_refused(gpus: Option<Gpus>) {
    if gpus.is_some() {
        refused(5, 1, "ranks share a GPU");
        // The stand-in driver has no multicast memory unless it is enabled.
        let mut child = this_test("calls::nvls::what_has_no_multicast_is_refused", "none");
        Process::start(child.env(DEVICES.0, DEVICES.1)).finish().unwrap_or_else(|report| panic!("{report}"));
    } else if part().as_deref() == Some("none") {
        refused(5, 5, "no multicast memory");
    }
    with_multicast(gpus, "what_has_no_multicast_is_refused", || {
        if part().as_deref() == Some("multicast") {
            refused(5, 4, "ranks share a GPU");
        }
    });
}

fn one_rank_that_cannot_is_told_to_all(_: Option<Gpus>) {
    let test = "calls::nvls::one_rank_that_cannot_is_told_to_all";
    let body = |setup: Setup, needle: &'static str| {
        move |local: Local| {
            let context = context(local.rank());
            let error = match setup.try_build(context, local) {
                Ok(communicator) => {
                    assert_eq!(setup.order, Order::Any);
                    communicator.barrier().unwrap();
                    communicator.nvls().unwrap_err()
                }
                Err(error) => {
                    assert_eq!(setup.order, Order::Fixed);
                    error
                }
            };
            assert!(error.to_string().contains(needle), "{needle:?} is not in {error}");
        }
    };
    for setup in [Setup::with(Algorithm::OneShotNvls), Setup { order: Order::Any, ..Setup::default() }] {
        let name = |what: &str| format!("{what}, {}", setup.order);
        for (what, function) in [
            ("granularity", "cuMulticastGetGranularity"),
            ("join", "cuMulticastAddDevice"),
            ("bind", "cuMulticastBindMem"),
        ] {
            one_differs(test, &name(what), &format!("{function}:1:801"), body(setup, function));
        }
        one_differs(test, &name("no attribute"), "", body(setup, "no multicast memory"));
    }
}

/// `CUDA_ERROR_ILLEGAL_STATE` and `CUDA_ERROR_SYSTEM_NOT_READY`.
const FABRIC_CODES: [u32; 2] = [401, 802];

/// Lets the first calls of a function of rank 1 of 5 fail, and returns `Communicator::nvls` of each rank.
fn nvls_after(function: &str, code: u32, times: u64, timeout: Duration) -> Vec<Result<(), Error>> {
    threads(5, 5, |rank, context| {
        if rank.rank() == 1 {
            (1..=times).for_each(|nth| fail(function, nth, code, Of::ThisThread));
        }
        let setup = Setup { order: Order::Any, timeout, ..Setup::default() };
        let communicator = setup.try_build(context, rank).unwrap();
        communicator.barrier().unwrap();
        communicator.nvls()
    })
}

fn a_fabric_that_is_not_ready_is_tried_again_by_all(gpus: Option<Gpus>) {
    with_multicast(gpus, "a_fabric_that_is_not_ready_is_tried_again_by_all", || {
        for function in ["cuMulticastAddDevice", "cuMulticastBindMem"] {
            let before = calls();
            let results = nvls_after(function, FABRIC_CODES[1], 2, LIMIT);
            assert_eq!(results, [const { Ok(()) }; 5], "{function}");
            let made = |function: &str| calls()[function] - before.get(function).unwrap_or(&0);
            assert_eq!((take_back(), made(function), made("cuMulticastCreate")), (0, 15, 3), "{function}");
        }
    });
}

fn what_the_fabric_refuses_has_a_remedy(gpus: Option<Gpus>) {
    with_multicast(gpus, "what_the_fabric_refuses_has_a_remedy", || {
        for code in FABRIC_CODES {
            let before = live();
            let started = Instant::now();
            for (rank, result) in
                nvls_after("cuMulticastBindMem", code, 1000, Duration::from_secs(2)).iter().enumerate()
            {
                let error = result.as_ref().unwrap_err();
                assert_eq!(rank != 1, matches!(error, Error::PeerFailed { rank: 1, .. }), "{error}");
                for fact in ["cuMulticastBindMem", "nvidia-fabricmanager", "nvidia-smi"] {
                    assert!(error.to_string().contains(fact), "{fact} is not in {error}");
                }
            }
            assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
            assert_eq!(
                take_back() == 999,
                code == FABRIC_CODES[0],
                "only the code that may pass is tried again"
            );
            assert_eq!(live(), before, "{code}");
        }
    });
}

/// Tests that a window is unbound after its last use on any rank and before it is unmapped.
fn windows_are_unbound_before_they_are_freed(_: Option<Gpus>) {
    let test = "calls::nvls::windows_are_unbound_before_they_are_freed";
    ranks(test, "processes", 3, &[MULTICAST, DEVICES], |local| {
        let rank = local.rank();
        let before = live();
        let fixture =
            Fixture::new(setup(Algorithm::TwoShotNvls, false).try_build(context(rank), local).unwrap(), MOST);
        sums(&fixture, &Random::new(test));
        assert_eq!(live()["cuMulticastBindMem"], 1);
        // The ranks end at different times: the windows of those that are early are still used.
        drop(fixture);
        assert_eq!(live(), before);
        assert_eq!(calls()["cuMulticastUnbind"], 1);
    });
}

/// Starts five processes. In the second, the driver calls that `fails` lists fail; if `fails` is empty, its driver has
/// no multicast memory.
fn one_differs(test: &str, name: &str, fails: &str, body: impl FnOnce(Local)) {
    use fast_allreduce::bootstrap::UniqueId;
    match part() {
        Some(part) if part == name => body(Local::from_env().unwrap().unwrap()),
        Some(_) => {}
        None => {
            let id = UniqueId::new().unwrap().to_string();
            let started = [0, 1, 2, 3, 4].map(|rank: usize| {
                let mut command = this_test(test, name);
                let (multicast, fails) = match (rank, fails) {
                    (0 | 2.., _) => ("1", ""),
                    (_, "") => ("0", ""),
                    (_, fails) => ("1", fails),
                };
                command
                    .env("FAST_ALLREDUCE_UNIQUE_ID", &id)
                    .env("FAST_ALLREDUCE_RANK", rank.to_string())
                    .env("FAST_ALLREDUCE_WORLD_SIZE", "5")
                    .env(DEVICES.0, DEVICES.1)
                    .env(MULTICAST.0, multicast)
                    .env("STAND_IN_FAIL", fails);
                Process::start(&mut command)
            });
            started
                .into_iter()
                .for_each(|rank| drop(rank.finish().unwrap_or_else(|report| panic!("{report}"))));
        }
    }
}

/// Windows cannot be given back, so that a suspension and a join are refused on all ranks.
fn windows_keep_the_world(gpus: Option<Gpus>) {
    with_multicast(gpus, "windows_keep_the_world", || {
        let random = Random::new("nvls, suspended");
        fixtures(2, 2, setup(Algorithm::TwoShotNvls, true), MOST, |fixture| {
            let communicator = &fixture.communicator;
            let refused = [communicator.suspend().map(drop), communicator.join(&[0, 1], LIMIT).map(drop)];
            for error in refused.map(Result::unwrap_err) {
                assert!(matches!(error, Error::Unavailable { .. }), "{error}");
                assert!(error.to_string().contains("NVLS"), "{error}");
            }
            sums(fixture, &random);
        });
    });
}
