//! Tests ranks that suspend and resume: what is given back, which graphs stay valid, and what is refused.

use std::collections::BTreeMap;
use std::time::Duration;

use cudarc::driver::sys::CUgraphInstantiate_flags;
use cudarc::driver::{result, CudaGraph, CudaStream};
use fast_allreduce::bootstrap::Bootstrap as _;
use fast_allreduce::device::cuda::Sharing;
use fast_allreduce::{Algorithm, DType, Error, ReduceOp, Result};

use crate::fixtures::fixture::{Fixture, MemoryKind, Message, Placement, Setup};
use crate::fixtures::gpu::{context, gpu, stand_in_of_parent, two_gpus, Gpus, LIMIT};
use crate::fixtures::injection::{checkpoint, fail, live, own_calls, take_back, Of};
use crate::fixtures::processes::ranks;
use crate::fixtures::threads::{fixtures, mixed_calls, threads};
use crate::launches::graphs::{graph_of, BYTES, COUNT, MODE, PLACEMENTS};
use crate::memory::registration::plain_slice;
use crate::random::Random;
use crate::suite::tier::{is_full, left_out};

tests! {
    gpu =>
        threads_return_to_their_graphs,
        processes_return_to_their_graphs,
        what_cannot_be_given_back_is_refused,
        a_suspended_communicator_refuses_everything_else,
        a_capture_keeps_the_world,
        a_kernel_that_fails_before_the_suspension_is_no_secret;
    two_gpus => gpus_return_to_their_graphs;
    stand_in_of_parent =>
        the_memory_of_a_region_is_given_back,
        a_replay_while_suspended_is_an_error,
        a_suspended_process_is_checkpointed,
        a_driver_call_that_fails_in_a_suspend_or_resume;
}

/// A limit that a rank reaches whose partners do not come.
const SHORT: Duration = Duration::from_millis(500);

pub fn message(random: &mut Random, world: usize) -> Message {
    Message::new(random, (DType::Bf16, ReduceOp::Sum), COUNT, world)
}

pub fn check(fixture: &Fixture, message: &Message) {
    for placement in PLACEMENTS {
        fixture.report(message, placement, fixture.compare(message, placement));
    }
}

/// Suspends and resumes between replays of a graph that was captured before, and between other calls.
fn leave_and_return(fixture: &Fixture, random: &Random) {
    let communicator = &fixture.communicator;
    let (rank, world) = (communicator.rank(), communicator.world_size());
    let graph = graph_of(fixture, &message(&mut random.fork(0), world), &PLACEMENTS);
    communicator.register_graph_buffers().unwrap();
    for round in 1..4 {
        let message = message(&mut random.fork(round), world);
        let prepare = || PLACEMENTS.iter().for_each(|&placement| fixture.prepare(&message, placement));
        prepare();
        graph.launch().unwrap();
        check(fixture, &message);
        prepare();
        fixture.stream.synchronize().unwrap();
        let suspended = communicator.suspend().unwrap();
        assert!(suspended.bytes >= 64 << 10 && suspended.kept_bytes >= 2 * BYTES, "{suspended:?}");
        let progress = communicator.resume(LIMIT).unwrap();
        assert_eq!(progress.of_rank, vec![Some(0); world], "a GPU does not count");
        // From inputs, some of them registered, that were written before the suspension.
        graph.launch().unwrap();
        check(fixture, &message);
        let mut random = random.fork(100 + round);
        for kind in MemoryKind::ALL {
            fixture.check(&Message::random(&mut random, 33 + 200 * round, world), Placement::of(kind));
        }
        let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
        let sent = fixture.stream.clone_htod(&vec![rank as u32; 9000]).unwrap();
        let mut received = fixture.stream.alloc_zeros::<u32>(9000).unwrap();
        communicator.send_recv(&fixture.stream, &sent, next, &mut received, previous, 1).unwrap();
        communicator.synchronize(&fixture.stream).unwrap();
        assert_eq!(fixture.stream.clone_dtoh(&received).unwrap(), vec![previous as u32; 9000]);
        // New memory has a row of its own.
        let buffer = communicator.alloc::<f32>(100).unwrap();
        prepare();
        graph.launch().unwrap();
        check(fixture, &message);
        communicator.barrier().unwrap();
        drop(buffer);
        let pair = communicator.split(Some((rank / 2) as u32), 0).unwrap().unwrap();
        pair.barrier().unwrap();
        // No kernel of a rank waits for another rank that frees memory.
        drop(pair);
        communicator.barrier().unwrap();
    }
}

fn setup(algorithm: Algorithm) -> Setup {
    Setup { max_bytes: 4 << 10, first_epoch: u32::MAX - 30, ..Setup::with(algorithm) }
}

fn threads_return_to_their_graphs() {
    between_threads("threads_return_to_their_graphs", 1);
}

fn gpus_return_to_their_graphs() {
    between_threads("gpus_return_to_their_graphs", 2);
}

fn between_threads(name: &str, devices: usize) {
    for (number, algorithm) in Algorithm::DIRECT.into_iter().enumerate() {
        let sharing = [Sharing::Pointers, Sharing::Descriptor][number % 2];
        // Rows of inputs of graphs are written again.
        let setup = Setup { sharing: Some(sharing), graph_registration: true, ..setup(algorithm) };
        let random = Random::new(&format!("{name} {algorithm}"));
        fixtures(2 + number % 2, devices, setup, BYTES, |fixture| leave_and_return(fixture, &random));
    }
}

fn processes_return_to_their_graphs(gpus: Gpus) {
    if gpus.stand_in {
        let (test, fabric) =
            ("memory::suspension::processes_return_to_their_graphs", [("STAND_IN_FABRIC", "1")]);
        ranks(test, "return by fabric", 2, &fabric, |local| {
            let setup = Setup { sharing: Some(Sharing::Fabric), ..setup(Algorithm::TwoShotPull) };
            let context = context(local.rank() % gpus.count.min(2));
            let fixture = Fixture::new(setup.try_build(context, local).unwrap(), BYTES);
            leave_and_return(&fixture, &Random::new("fabric"));
            fixture.communicator.barrier().unwrap();
        });
    }
    for (number, algorithm) in Algorithm::DIRECT.into_iter().enumerate() {
        let name = format!("return {algorithm}");
        ranks("memory::suspension::processes_return_to_their_graphs", &name, 2 + number % 2, &[], |local| {
            let context = context(local.rank() % gpus.count.min(2));
            let fixture = Fixture::new(setup(algorithm).try_build(context, local).unwrap(), BYTES);
            assert_eq!(fixture.communicator.device().chosen_sharing(), Some(Sharing::Descriptor));
            leave_and_return(&fixture, &Random::new(&name));
            fixture.communicator.barrier().unwrap();
        });
    }
}

/// Asserts that a suspension and a join are refused for a reason, and that calls still work.
fn is_refused(fixture: &Fixture, reason: &str) {
    let communicator = &fixture.communicator;
    let all: Vec<_> = (0..communicator.world_size()).collect();
    for refused in [communicator.suspend().map(drop), communicator.join(&all, LIMIT).map(drop)] {
        let error = refused.unwrap_err();
        let is_right = matches!(error, Error::Unavailable { .. }) && error.to_string().contains(reason);
        assert!(is_right, "{reason:?} is not in {error}");
    }
    assert!(!communicator.is_suspended());
    mixed_calls(fixture, &Random::new(reason), 2);
}

fn what_cannot_be_given_back_is_refused() {
    let test = "memory::suspension::what_cannot_be_given_back_is_refused";
    let build = |local: fast_allreduce::bootstrap::Local, setup: Setup| {
        Fixture::new(setup.try_build(context(0), local).unwrap(), 100 << 10)
    };
    ranks(test, "ipc", 2, &[], |local| {
        is_refused(&build(local, Setup { sharing: Some(Sharing::Ipc), ..Setup::default() }), "sharing=ipc");
    });
    ranks(test, "host", 2, &[], |local| {
        let setup = Setup { sharing: Some(Sharing::Host), ..Setup::default() };
        let communicator = setup.try_build(context(0), local).unwrap();
        let error = communicator.suspend().unwrap_err().to_string();
        assert!(error.contains("sharing=host") && !communicator.is_suspended(), "{error}");
        communicator.barrier().unwrap();
    });
    let random = Random::new(test);
    ranks(test, "graph inputs", 2, &[], |local| {
        let setup = Setup { graph_registration: true, ..Setup::with(Algorithm::OneShotPull) };
        let fixture = build(local, setup);
        let message = message(&mut random.fork(0), 2);
        let graph = graph_of(&fixture, &message, &[Placement::of(MemoryKind::Plain)]);
        fixture.communicator.register_graph_buffers().unwrap();
        is_refused(&fixture, "inputs of captured graphs");
        drop(graph);
        fixture.communicator.register_graph_buffers().unwrap();
        fixture.communicator.barrier().unwrap();
        fixture.communicator.suspend().unwrap();
        fixture.communicator.resume(LIMIT).unwrap();
        fixture.check(&message, Placement::of(MemoryKind::Plain));
        fixture.communicator.barrier().unwrap();
    });
    ranks(test, "memory of the program", 2, &[], |local| {
        let fixture = build(local, Setup::default());
        let slice = plain_slice(&fixture.stream, 4096);
        let registered = fixture.communicator.register(slice).unwrap();
        is_refused(&fixture, "memory of the program");
        let slice = registered.into_inner();
        fixture.communicator.barrier().unwrap();
        drop(slice);
        fixture.communicator.suspend().unwrap();
        fixture.communicator.resume(LIMIT).unwrap();
        mixed_calls(&fixture, &random, 2);
        fixture.communicator.barrier().unwrap();
    });
}

fn a_suspended_communicator_refuses_everything_else() {
    let random = Random::new("memory::suspension::a_suspended_communicator_refuses_everything_else");
    threads(2, 1, |rank, context| {
        let fixture = &Fixture::new(Setup::default().try_build(context, rank).unwrap(), BYTES);
        let communicator = &fixture.communicator;
        let (message, placement) = (message(&mut random.fork(0), 2), Placement::of(MemoryKind::Registered));
        let memory = communicator.symmetric_memory::<f32>(10).unwrap();
        let address = memory.address();
        let peer = memory.peer_address(1 - fixture.rank()).unwrap();
        fixture.prepare(&message, placement);
        communicator.suspend().unwrap();
        let refused = |result: Result<()>| {
            let error = result.unwrap_err();
            assert!(error.to_string().contains("suspended: resume it first"), "{error}");
        };
        refused(fixture.start(&fixture.stream, &message, placement));
        refused(communicator.suspend().map(drop));
        refused(communicator.barrier());
        refused(communicator.barrier_on(&fixture.stream));
        refused(communicator.synchronize(&fixture.stream));
        refused(communicator.check());
        refused(communicator.alloc::<u8>(1).map(drop));
        refused(communicator.register_graph_buffers());
        refused(communicator.register(plain_slice(&fixture.stream, 64)).map(drop));
        refused(communicator.join(&[0, 1], LIMIT).map(drop));
        assert_eq!((memory.address(), memory.peer_address(1 - fixture.rank())), (address, None));
        communicator.resume(LIMIT).unwrap();
        assert_eq!(memory.peer_address(1 - fixture.rank()), Some(peer));
        fixture.check(&message, placement);
        communicator.suspend().unwrap();
        communicator.abort();
        assert_eq!(communicator.resume(LIMIT), Err(Error::Aborted));
    });
}

/// A capture is neither disturbed nor suspended.
fn a_capture_keeps_the_world() {
    let random = Random::new("memory::suspension::a_capture_keeps_the_world");
    fixtures(2, 1, Setup::default(), BYTES, |fixture| {
        let (message, placement) = (message(&mut random.fork(0), 2), Placement::of(MemoryKind::Plain));
        fixture.check(&message, placement);
        let graph: CudaGraph = {
            if fixture.rank() == 0 {
                fixture.stream.begin_capture(MODE).unwrap();
                fixture.start(&fixture.stream, &message, placement).unwrap();
            }
            let error = fixture.communicator.suspend().unwrap_err();
            match fixture.rank() {
                0 => assert!(matches!(error, Error::Unavailable { .. }), "{error}"),
                _ => assert!(matches!(error, Error::PeerFailed { rank: 0, .. }), "{error}"),
            }
            if fixture.rank() == 1 {
                fixture.stream.begin_capture(MODE).unwrap();
                fixture.start(&fixture.stream, &message, placement).unwrap();
            }
            fixture.stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap()
        };
        fixture.communicator.suspend().unwrap();
        fixture.communicator.resume(LIMIT).unwrap();
        fixture.prepare(&message, placement);
        graph.launch().unwrap();
        fixture.report(&message, placement, fixture.compare(&message, placement));
    });
}

/// A rank's last kernel waits for one that the other does not launch, when both suspend.
fn a_kernel_that_fails_before_the_suspension_is_no_secret() {
    let random = Random::new("memory::suspension::a_kernel_that_fails_before_the_suspension_is_no_secret");
    threads(2, 1, |rank, context| {
        let fixture = &Fixture::new(Setup::default().try_build(context, rank).unwrap(), BYTES);
        let communicator = &fixture.communicator;
        let (message, placement) = (message(&mut random.fork(0), 2), Placement::of(MemoryKind::Plain));
        fixture.check(&message, placement);
        communicator.set_timeout(SHORT);
        if fixture.rank() == 1 {
            fixture.prepare(&message, placement);
            fixture.start(&fixture.stream, &message, placement).unwrap();
        }
        let error = communicator.suspend().unwrap_err();
        let is_right = match fixture.rank() {
            0 => matches!(error, Error::PeerFailed { rank: 1, .. }),
            _ => matches!(&error, Error::Timeout { missing, .. } if *missing == [0]),
        };
        assert!(is_right, "{error}");
        assert!(!communicator.is_suspended());
    });
}

/// Returns the bytes of the GPU that this process uses.
fn used(stream: &CudaStream) -> usize {
    stream.context().bind_to_thread().unwrap();
    let (free, total) = result::mem_get_info().unwrap();
    total - free
}

/// Returns the bytes of GPU memory, which the stand-in driver keeps in files, that this process has mapped.
fn mapped() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let bytes = |line: &str| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16).unwrap());
        line.contains("stand-in-device").then_some(end - start)
    };
    maps.lines().filter_map(bytes).sum()
}

/// A process that is suspended has nothing of others mapped, and has only its buffers and what the test allocated.
fn the_memory_of_a_region_is_given_back(_: Option<Gpus>) {
    let test = "memory::suspension::the_memory_of_a_region_is_given_back";
    ranks(test, "given back", 3, &[], |local| {
        let context = context(local.rank() % 2);
        let stream = context.new_stream().unwrap();
        let (used_first, mapped_first) = (used(&stream), mapped());
        let communicator =
            Setup { max_bytes: 4 << 20, ..Setup::default() }.try_build(context, local).unwrap();
        let region = used(&stream) - used_first;
        assert!(region > 4 << 20, "{region}");
        assert_eq!(mapped() - mapped_first, 3 * region);
        let buffer = communicator.alloc::<u8>(5 << 20).unwrap();
        let buffer_bytes = used(&stream) - used_first - region;
        let (all, reserved) = (mapped(), live()["cuMemAddressReserve"]);
        for _ in 0..3 {
            // All ranks have come here before one of them counts.
            communicator.barrier().unwrap();
            let suspended = communicator.suspend().unwrap();
            assert_eq!((suspended.bytes, suspended.kept_bytes), (region, 5 << 20));
            assert_eq!(used(&stream) - used_first, buffer_bytes);
            assert_eq!(mapped() - mapped_first, buffer_bytes);
            assert_eq!((live()["cuMemCreate"], live()["cuMemMap"]), (1, 1));
            assert_eq!(live()["cuMemAddressReserve"], reserved, "the addresses stay");
            communicator.resume(LIMIT).unwrap();
            assert_eq!((used(&stream) - used_first, mapped()), (region + buffer_bytes, all));
            assert_eq!(live()["cuMemAddressReserve"], reserved);
        }
        communicator.suspend().unwrap();
        drop((buffer, communicator));
        let none = BTreeMap::new();
        assert_eq!((used(&stream), mapped()), (used_first, mapped_first));
        let left =
            live().into_iter().filter(|(kind, _)| kind.starts_with("cuMem")).collect::<BTreeMap<_, _>>();
        assert_eq!(left, none);
    });
}

/// The addresses of a graph are reserved, and nothing is there: a kernel's access fails, as on a GPU.
fn a_replay_while_suspended_is_an_error(_: Option<Gpus>) {
    let test = "memory::suspension::a_replay_while_suspended_is_an_error";
    ranks(test, "replay", 2, &[], |local| {
        let context = context(local.rank());
        let fixture = Fixture::new(Setup::default().try_build(context, local).unwrap(), BYTES);
        let message = message(&mut Random::new(test).fork(0), 2);
        let graph = graph_of(&fixture, &message, &[Placement::of(MemoryKind::Plain)]);
        fixture.communicator.suspend().unwrap();
        graph.launch().unwrap();
        let error = fixture.stream.synchronize().unwrap_err();
        assert_eq!(error.0, cudarc::driver::sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    });
}

/// The steps that cuda-checkpoint takes. The stand-in's restore puts memory into other files, so that what another
/// process still had of it would be wrong.
fn a_suspended_process_is_checkpointed(_: Option<Gpus>) {
    const NOT_SUPPORTED: u32 = 801;
    let test = "memory::suspension::a_suspended_process_is_checkpointed";
    ranks(test, "checkpoint", 2, &[], |local| {
        let context = context(local.rank());
        let fixture = Fixture::new(Setup::default().try_build(context, local).unwrap(), BYTES);
        let message = message(&mut Random::new(test).fork(0), 2);
        let graph = graph_of(&fixture, &message, &PLACEMENTS);
        let sleeper = Sleeper { fixture: &fixture, graph, message };
        for round in 0..2 {
            sleeper.replay();
            if round == 0 {
                // In its world it has memory of the other one.
                assert_eq!(checkpoint(c"cuCheckpointProcessLock"), 0);
                assert_eq!(checkpoint(c"cuCheckpointProcessCheckpoint"), NOT_SUPPORTED);
                assert_eq!(checkpoint(c"cuCheckpointProcessUnlock"), 0);
                fixture.communicator.barrier().unwrap();
            }
            fixture.communicator.suspend().unwrap();
            for step in [
                c"cuCheckpointProcessLock",
                c"cuCheckpointProcessCheckpoint",
                c"cuCheckpointProcessRestore",
                c"cuCheckpointProcessUnlock",
            ] {
                assert_eq!(checkpoint(step), 0, "{step:?}");
            }
            fixture.communicator.resume(LIMIT).unwrap();
        }
        sleeper.replay();
    });
}

/// Functions that a suspend or a resume calls. Those that fail leave nothing behind.
const FUNCTIONS: [&str; 19] = [
    "cuMemCreate",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemGetAllocationGranularity",
    "cuMemsetD8Async",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuLaunchKernel",
    "cuStreamSynchronize",
    "cuStreamIsCapturing",
    "cuCtxGetCurrent",
    "cuDeviceGetUuid",
    "cuDeviceGetAttribute",
    "cuThreadExchangeStreamCaptureMode",
];

/// A rank that suspends and resumes, and has a graph of before.
struct Sleeper<'a> {
    fixture: &'a Fixture,
    graph: CudaGraph,
    message: Message,
}

impl Sleeper<'_> {
    fn replay(&self) {
        PLACEMENTS.iter().for_each(|&placement| self.fixture.prepare(&self.message, placement));
        self.graph.launch().unwrap();
        check(self.fixture, &self.message);
        self.fixture.communicator.barrier().unwrap();
    }

    /// Returns the number of this rank's calls of each function in `body`.
    fn calls(&self, functions: &[&str], body: impl FnOnce()) -> Vec<u32> {
        let count = || {
            let calls = own_calls();
            functions.iter().map(|&name| calls.get(name).map_or(0, |&calls| calls as u32)).collect::<Vec<_>>()
        };
        let before = count();
        body();
        count().iter().zip(before).map(|(now, before)| now - before).collect()
    }

    /// Returns the greatest of the ranks' numbers.
    fn greatest(&self, own: &[u32]) -> Vec<u32> {
        let Fixture { stream, communicator, .. } = self.fixture;
        let mut counts = stream.clone_htod(own).unwrap();
        communicator.all_reduce_in_place(stream, &mut counts, ReduceOp::Max).unwrap();
        communicator.synchronize(stream).unwrap();
        stream.clone_dtoh(&counts).unwrap()
    }

    /// Lets each of the functions' calls fail on each rank. Returns the number of steps that failed.
    fn fail_each(&self, functions: &[&str]) -> u32 {
        let communicator = &self.fixture.communicator;
        let of_suspend = self.calls(functions, || assert!(communicator.suspend().is_ok()));
        let of_resume = self.calls(functions, || assert!(communicator.resume(LIMIT).is_ok()));
        let [of_suspend, of_resume] = [of_suspend, of_resume].map(|own| self.greatest(&own));
        let mut failed = 0;
        for (at, function) in functions.iter().enumerate() {
            for victim in 0..2 {
                let inject = |nth: u32| {
                    if self.fixture.rank() == victim {
                        fail(function, nth.into(), 999, Of::ThisThread);
                    }
                };
                // Without the full tier one of three.
                let is_chosen = |nth: &u32| is_full() || (*nth as usize + at + victim) % 3 == 0;
                for nth in (1..=of_suspend[at]).filter(is_chosen) {
                    inject(nth);
                    let suspended = communicator.suspend();
                    take_back();
                    let case = format!("call {nth} of {function} in suspend on rank {victim}: {suspended:?}");
                    failed += u32::from(suspended.is_err());
                    assert_eq!(communicator.is_suspended(), suspended.is_ok(), "{case}");
                    match suspended {
                        Ok(_) => communicator.resume(LIMIT),
                        // In its world, or failed in a part of its memory.
                        Err(_) => communicator.join(&[0, 1], LIMIT),
                    }
                    .unwrap_or_else(|error| panic!("after {case}: {error}"));
                    self.replay();
                }
                for nth in (1..=of_resume[at]).filter(is_chosen) {
                    communicator.suspend().unwrap();
                    inject(nth);
                    let resumed = communicator.resume(LIMIT);
                    take_back();
                    let case = format!("call {nth} of {function} in resume on rank {victim}: {resumed:?}");
                    assert_eq!(communicator.is_suspended(), resumed.is_err(), "{case}");
                    if resumed.is_err() {
                        failed += 1;
                        communicator.resume(LIMIT).unwrap_or_else(|error| panic!("after {case}: {error}"));
                    }
                    self.replay();
                }
            }
        }
        failed
    }
}

/// Lets driver calls of a suspend and of a resume fail, on each rank: all of them in the full tier. Then all ranks have
/// an error or none has, and after another attempt the graph is valid.
fn a_driver_call_that_fails_in_a_suspend_or_resume(_: Option<Gpus>) {
    if !is_full() {
        left_out("two of three failing calls of a suspend and a resume");
    }
    let test = "memory::suspension::a_driver_call_that_fails_in_a_suspend_or_resume";
    ranks(test, "fails", 2, &[], |local| {
        let context = context(local.rank());
        let setup = Setup { max_bytes: 4 << 10, ..Setup::with(Algorithm::TwoShotPull) };
        let fixture = Fixture::new(setup.try_build(context, local).unwrap(), BYTES);
        let message = message(&mut Random::new(test).fork(0), 2);
        let graph = graph_of(&fixture, &message, &PLACEMENTS);
        let sleeper = Sleeper { fixture: &fixture, graph, message };
        sleeper.replay();
        let before = live();
        let failed = sleeper.fail_each(&FUNCTIONS);
        assert!(failed > if is_full() { 40 } else { 15 }, "{failed} cases");
        println!("{failed} steps failed");
        let after = live();
        let kinds: std::collections::BTreeSet<_> = before.keys().chain(after.keys()).collect();
        let leaks: Vec<_> = kinds.into_iter().filter(|&kind| after.get(kind) > before.get(kind)).collect();
        assert!(leaks.is_empty(), "{leaks:?}: {before:?}, {after:?}");
        // Addresses that could not be freed stay.
        sleeper.fail_each(&["cuMemAddressFree"]);
        fixture.communicator.barrier().unwrap();
    });
}
