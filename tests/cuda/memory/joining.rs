//! Tests a rank that is replaced by a new process: the graphs of the survivors stay valid, and it finds the memory of
//! its place.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaGraph, CudaStream, DevicePtr};
use fast_allreduce::bootstrap::{Bootstrap as _, Local, UniqueId};
use fast_allreduce::device::cuda::Sharing;
use fast_allreduce::{Algorithm, Buffer, Collective, Communicator, Cuda, Error, Result};

use crate::fixtures::fixture::{compare, download, upload, Fixture, Message, Plain, Setup};
use crate::fixtures::gpu::{context, gpu, stand_in_of_parent, Gpus, LIMIT};
use crate::fixtures::injection::{fail, live, own_calls, take_back, Of};
use crate::fixtures::processes::{part, ranks, this_test, Process};
use crate::fixtures::threads::{mixed_calls, threads};
use crate::launches::graphs::{capture, graph_of, BYTES, COUNT, PLACEMENTS};
use crate::memory::suspension::{check, message};
use crate::random::Random;
use crate::suite::tier::{is_full, left_out};

tests! {
    gpu =>
        a_replaced_rank_costs_no_capture,
        a_rank_of_this_process_is_not_replaced,
        a_resumed_world_grows_and_shrinks;
    stand_in_of_parent => a_driver_call_that_fails_in_a_join;
}

const TEST: &str = "memory::joining::a_replaced_rank_costs_no_capture";
const RANKS: usize = 3;
const LOST: usize = 1;
const SETUP: Setup = Setup {
    algorithm: None,
    order: fast_allreduce::Order::Fixed,
    max_bytes: 4 << 10,
    first_epoch: u32::MAX - 20,
    graph_registration: false,
    programmatic: false,
    sharing: None,
    check: None,
    timeout: LIMIT,
};

/// Returns the message of a round, which has as many calls as [`PLACEMENTS`].
fn of_round(round: usize) -> Message {
    message(&mut Random::new(TEST).fork(round), RANKS)
}

/// What all ranks do after the join: rounds of calls, with a suspension in between. `calls` makes those of a round.
fn rounds(communicator: &Communicator<Cuda>, mut calls: impl FnMut(&Message)) {
    for round in 10..14 {
        calls(&of_round(round));
        communicator.barrier().unwrap();
        if round == 12 {
            communicator.suspend().unwrap();
            communicator.resume(LIMIT).unwrap();
        }
    }
}

/// The calls of a rank that has been replaced, or of the one before: as many as a graph of the others has.
struct Caller<'a> {
    communicator: &'a Communicator<Cuda>,
    input: u64,
    output: u64,
}

impl Caller<'_> {
    fn enqueue(&self, stream: &CudaStream, message: &Message) {
        for _ in PLACEMENTS {
            // SAFETY: the memory is the test's and large enough, and is synchronised below.
            unsafe {
                self.communicator.collective_raw(
                    stream.cu_stream(),
                    Collective::AllReduce(message.op),
                    self.input,
                    self.output,
                    COUNT,
                    message.dtype,
                )
            }
            .unwrap();
        }
    }
}

fn a_replaced_rank_costs_no_capture(gpus: Gpus) {
    let devices = gpus.count.min(2);
    if let Some(algorithm) = part().as_deref().and_then(|part| part.strip_prefix("new ")) {
        return replace(devices, algorithm);
    }
    for (algorithm, gpus) in [
        (Algorithm::OneShotPush, "2"),
        (Algorithm::OneShotPull, "2"),
        (Algorithm::TwoShotPull, "2"),
        (Algorithm::TwoShotPush, "3"),
    ] {
        let name = format!("{algorithm}, {gpus} pretended GPUs");
        ranks(TEST, &name, RANKS, &[("STAND_IN_DEVICES", gpus)], |local| {
            let (rank, context) = (local.rank(), context(local.rank() % devices));
            let setup = Setup { algorithm: Some(algorithm), ..SETUP };
            let fixture = Fixture::new(setup.try_build(context, local).unwrap(), BYTES);
            let communicator = &fixture.communicator;
            assert_eq!(communicator.device().chosen_sharing(), Some(Sharing::Descriptor));
            let memory = communicator.symmetric_memory::<u32>(10).unwrap();
            let graph = graph_of(&fixture, &of_round(0), &PLACEMENTS);
            let replay = |message: &Message| {
                PLACEMENTS.iter().for_each(|&placement| fixture.prepare(message, placement));
                graph.launch().unwrap();
                check(&fixture, message);
            };
            replay(&of_round(1));
            if rank == LOST {
                let id = communicator.join_id().unwrap().to_string();
                drop((graph, memory, fixture));
                let mut command = this_test(TEST, &format!("new {algorithm}"));
                Process::start(command.env("FAST_ALLREDUCE_UNIQUE_ID", id)).finish().unwrap();
                return;
            }
            let addresses: Vec<_> = (0..RANKS).map(|rank| memory.peer_address(rank)).collect();
            // The rank is missed, and then replaced.
            let placement = PLACEMENTS[0];
            fixture.prepare(&of_round(2), placement);
            fixture.start(&fixture.stream, &of_round(2), placement).unwrap();
            communicator.synchronize(&fixture.stream).unwrap_err();
            let progress = communicator.join(&[0, 2], LIMIT).unwrap();
            assert_eq!(progress.of_rank, [Some(0), None, Some(0)]);
            assert_eq!((0..RANKS).map(|rank| memory.peer_address(rank)).collect::<Vec<_>>(), addresses);
            rounds(communicator, replay);
        });
    }
}

/// The new process: it has the registered buffers of the place, and makes its calls from one of them.
fn replace(devices: usize, algorithm: &str) {
    let id: UniqueId = std::env::var("FAST_ALLREDUCE_UNIQUE_ID").unwrap().parse().unwrap();
    let local = Local::connect(&id, LOST, RANKS, LIMIT).unwrap();
    let algorithm = Algorithm::DIRECT.into_iter().find(|known| known.name() == algorithm);
    let setup = Setup { algorithm, ..SETUP };
    // Another GPU than that of the rank before, if none of the others uses it.
    let context = context(if CudaContext::device_count().unwrap() > 2 { 2 } else { LOST % devices });
    // Dropped after the communicator, which may wait for it.
    let stream = context.new_stream().unwrap();
    let communicator = setup.try_build(context.clone(), local).unwrap();
    let inherited = communicator.inherited();
    let kinds: Vec<_> = inherited.iter().map(|one| (one.number, one.is_registered)).collect();
    assert_eq!(kinds, [(0, true), (1, true), (2, false)]);
    let buffer = communicator.inherit_buffer::<u8>(0).unwrap();
    let memory = communicator.inherit_memory::<u32>(2).unwrap();
    assert!((0..RANKS).all(|rank| memory.peer_address(rank).is_some()));
    let output = Plain::new(&context, BYTES);
    let input = buffer.device_ptr(&stream).0;
    let bytes = COUNT * 2;
    assert_eq!(download(&stream, input, bytes), vec![0; bytes], "it is new");
    let caller = Caller { communicator: &communicator, input, output: output.address };
    let mut graph: Option<CudaGraph> = None;
    rounds(&communicator, |message| {
        upload(&stream, input, &message.inputs[LOST]);
        upload(&stream, output.address, &message.poison());
        // From the second round on by a graph of its own.
        match &graph {
            Some(graph) => graph.launch().unwrap(),
            None => {
                caller.enqueue(&stream, message);
                communicator.synchronize(&stream).unwrap();
                graph = Some(capture(&stream, || caller.enqueue(&stream, message)));
            }
        }
        communicator.synchronize(&stream).unwrap();
        compare(&download(&stream, output.address, bytes), &message.expected, 2).unwrap();
    });
}

/// Ranks that are threads share one mapping of each part, at the address that its rank has.
fn a_rank_of_this_process_is_not_replaced() {
    let limit = Duration::from_millis(500);
    let (send, receive) = std::sync::mpsc::channel::<UniqueId>();
    let send = std::sync::Mutex::new(send);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let local = Local::connect(&receive.recv().unwrap(), 1, 2, LIMIT);
            let error = local.and_then(|local| Setup::default().try_build(context(0), local)).unwrap_err();
            assert!(error.to_string().contains("in a process of its own"), "{error}");
        });
        threads(2, 1, |rank, context| {
            let setup = Setup { timeout: LIMIT, ..Setup::default() };
            let communicator = setup.try_build(context, rank).unwrap();
            if communicator.rank() == 1 {
                send.lock().unwrap().send(communicator.join_id().unwrap()).unwrap();
                return;
            }
            let error = communicator.join(&[0], LIMIT).unwrap_err();
            assert!(matches!(error, Error::Unavailable { .. }), "{error}");
            assert!(error.to_string().contains("in a process of its own"), "{error}");
            let nobody = communicator.join(&[0], limit).unwrap_err();
            assert!(matches!(nobody, Error::Timeout { .. }), "{nobody}");
        });
    });
}

/// Ranks that have returned make a larger world with a new process, and then a smaller one. The world of before and its
/// graph stay as they are.
fn a_resumed_world_grows_and_shrinks(gpus: Gpus) {
    const ROOM: usize = 100 << 10;
    let devices = gpus.count.min(2);
    ranks("memory::joining::a_resumed_world_grows_and_shrinks", "grows", RANKS, &[], |side| {
        let (rank, setup) = (side.rank(), SETUP);
        let context = context(rank % devices);
        // Returns the id that rank 0 has.
        let told = |own: Option<UniqueId>| -> UniqueId {
            let own = own.map(|id| id.to_string()).unwrap_or_default();
            let gathered = side.all_gather(own.as_bytes(), LIMIT).unwrap();
            String::from_utf8(gathered[0].clone()).unwrap().parse().unwrap()
        };
        let connect = |id: &UniqueId, size: usize| {
            setup.try_build(context.clone(), Local::connect(id, rank, size, LIMIT).unwrap()).unwrap()
        };
        let calls = |communicator: Communicator<Cuda>, name: &str| {
            let fixture = Fixture::new(communicator, ROOM);
            mixed_calls(&fixture, &Random::new(name), 6);
            fixture.communicator.barrier().unwrap();
            fixture
        };
        let together = |larger: Communicator<Cuda>| {
            let larger = calls(larger, "larger");
            larger.communicator.suspend().unwrap();
            larger.communicator.resume(LIMIT).unwrap();
            calls(larger.communicator.split(Some(0), 0).unwrap().unwrap(), "all of the larger");
            larger
        };
        let first = told((rank == 0).then(|| UniqueId::new().unwrap()));
        if rank == 2 {
            let id = told(None);
            drop(together(connect(&id, 3)));
            return;
        }
        let fixture = Fixture::new(connect(&first, 2), BYTES);
        let message = message(&mut Random::new("two"), 2);
        let graph = graph_of(&fixture, &message, &PLACEMENTS);
        let replay = || {
            PLACEMENTS.iter().for_each(|&placement| fixture.prepare(&message, placement));
            graph.launch().unwrap();
            check(&fixture, &message);
        };
        for round in 0..2 {
            fixture.communicator.suspend().unwrap();
            fixture.communicator.resume(LIMIT).unwrap();
            replay();
            if round == 1 {
                let id = told(Some(fixture.communicator.join_id().unwrap()));
                assert_eq!(id, fixture.communicator.join_id().unwrap());
                let larger = together(fixture.communicator.grow(3, LIMIT).unwrap());
                replay();
                drop(calls(larger.communicator.shrink(&[0, 1]).unwrap(), "smaller"));
                replay();
            }
        }
        fixture.communicator.barrier().unwrap();
    });
}

/// What a rank has between two joins.
enum Returner {
    /// A survivor, with a graph of the first world.
    Survivor { fixture: Box<Fixture>, graph: CudaGraph, message: Message },
    /// The rank that is replaced, by this process again. Empty while it is in no world.
    Lost { stream: Arc<CudaStream>, output: Plain, message: Message, new: Option<New> },
}

type New = (Box<Communicator<Cuda>>, Buffer<u8, Cuda>);

/// A rank of the test of failing joins, with a bootstrap that no failure touches.
struct Joiner {
    side: Arc<Local>,
    context: Arc<CudaContext>,
    returner: Returner,
}

impl Joiner {
    fn new(local: Local) -> Self {
        let (rank, side) = (local.rank(), Arc::new(local));
        let context = context(rank % 2);
        let setup = Setup { algorithm: Some(Algorithm::OneShotPull), ..SETUP };
        let fixture = Fixture::new(setup.try_build(context.clone(), Arc::clone(&side)).unwrap(), BYTES);
        let message = of_round(0);
        let graph = graph_of(&fixture, &message, &PLACEMENTS);
        let returner = if rank == LOST {
            let (stream, output) = (context.new_stream().unwrap(), Plain::new(&context, BYTES));
            Returner::Lost { stream, output, message, new: None }
        } else {
            Returner::Survivor { fixture: Box::new(fixture), graph, message }
        };
        Self { side, context, returner }
    }

    /// Exchanges text that has nothing to do with the world under test.
    fn exchange(&self, own: &str) -> Vec<String> {
        let gathered = self.side.all_gather(own.as_bytes(), LIMIT).unwrap();
        gathered.into_iter().map(|bytes| String::from_utf8(bytes).unwrap()).collect()
    }

    /// Returns the id by which the ranks meet, which is that of all survivors.
    fn id(&self) -> UniqueId {
        let own = match &self.returner {
            Returner::Survivor { fixture, .. } => fixture.communicator.join_id().unwrap().to_string(),
            Returner::Lost { .. } => String::new(),
        };
        let ids = self.exchange(&own);
        assert_eq!(ids[0], ids[2], "the survivors do not meet again");
        ids[0].parse().unwrap()
    }

    /// Enters the next world.
    fn enter(&mut self, id: &UniqueId) -> Result<()> {
        match &mut self.returner {
            Returner::Survivor { fixture, .. } if fixture.communicator.is_suspended() => {
                fixture.communicator.resume(LIMIT).map(drop)
            }
            Returner::Survivor { fixture, .. } => fixture.communicator.join(&[0, 2], LIMIT).map(drop),
            Returner::Lost { new, .. } => {
                let setup = Setup { algorithm: Some(Algorithm::OneShotPull), ..SETUP };
                let local = Local::connect(id, LOST, RANKS, LIMIT)?;
                let communicator = setup.try_build(self.context.clone(), local)?;
                let buffer = communicator.inherit_buffer(0).unwrap();
                *new = Some((Box::new(communicator), buffer));
                Ok(())
            }
        }
    }

    /// Makes the calls of the survivors' graph, and checks their results. Then one rank leaves again.
    fn replay_and_leave(&mut self) {
        match &mut self.returner {
            Returner::Survivor { fixture, graph, message } => {
                PLACEMENTS.iter().for_each(|&placement| fixture.prepare(message, placement));
                graph.launch().unwrap();
                check(fixture, message);
                fixture.communicator.barrier().unwrap();
            }
            Returner::Lost { stream, output, message, new } => {
                let (communicator, buffer) = new.take().unwrap();
                let input = buffer.device_ptr(stream).0;
                upload(stream, input, &message.inputs[LOST]);
                let caller = Caller { communicator: &communicator, input, output: output.address };
                caller.enqueue(stream, message);
                communicator.synchronize(stream).unwrap();
                compare(&download(stream, output.address, COUNT * 2), &message.expected, 2).unwrap();
                communicator.barrier().unwrap();
            }
        }
        self.exchange("");
    }

    /// Lets the `nth` call of a function fail on a rank in a join. Returns whether that failed.
    fn fail(&mut self, function: &str, nth: u64, victim: usize) -> bool {
        let id = self.id();
        if self.side.rank() == victim {
            fail(function, nth, 999, Of::ThisThread);
        }
        let entered = self.enter(&id);
        take_back();
        let case = format!("call {nth} of {function} on rank {victim}: {entered:?}");
        let mut outcomes = self.exchange(&entered.is_ok().to_string());
        outcomes.dedup();
        assert_eq!(outcomes.len(), 1, "{case}");
        if entered.is_err() {
            let id = self.id();
            self.enter(&id).unwrap_or_else(|error| panic!("after {case}: {error}"));
        }
        self.replay_and_leave();
        entered.is_err()
    }

    /// Returns the driver functions that a join calls, with the greatest of the ranks' numbers of calls.
    fn calls(&mut self) -> BTreeMap<String, u64> {
        let id = self.id();
        let before = own_calls();
        self.enter(&id).unwrap();
        let called = own_calls().into_iter().map(|(name, calls)| {
            let calls = calls - before.get(&name).unwrap_or(&0);
            format!("{name} {calls} ")
        });
        let called: String = called.collect();
        let mut greatest = BTreeMap::new();
        for of_rank in self.exchange(&called) {
            let words: Vec<_> = of_rank.split_whitespace().collect();
            for pair in words.chunks(2) {
                let calls = greatest.entry(pair[0].to_owned()).or_default();
                *calls = pair[1].parse::<u64>().unwrap().max(*calls);
            }
        }
        self.replay_and_leave();
        greatest
    }
}

/// Lets driver calls of a join fail, on each rank: all of them in the full tier. Then all ranks have an error or none
/// has, and after another attempt the survivors' graphs are valid.
fn a_driver_call_that_fails_in_a_join(_: Option<Gpus>) {
    if !is_full() {
        left_out("five of six failing calls of a join");
    }
    ranks("memory::joining::a_driver_call_that_fails_in_a_join", "fails", RANKS, &[], |local| {
        let mut joiner = Joiner::new(local);
        // Addresses that could not be freed stay.
        let calls = joiner.calls().into_iter().filter(|(function, _)| function != "cuMemAddressFree");
        let calls: Vec<_> = calls.collect();
        let (before, mut cases, mut failed) = (live(), 0, 0);
        for (function, count) in &calls {
            for (victim, nth) in (0..RANKS).flat_map(|victim| (1..=*count).map(move |nth| (victim, nth))) {
                cases += 1;
                if is_full() || cases % 6 == 0 {
                    failed += u32::from(joiner.fail(function, nth, victim));
                }
            }
        }
        println!("{failed} of {cases} failed");
        assert!(failed > if is_full() { 60 } else { 10 }, "{failed} of {cases}");
        let after = live();
        let kinds: BTreeSet<_> = before.keys().chain(after.keys()).collect();
        let leaks: Vec<_> = kinds.into_iter().filter(|&kind| after.get(kind) > before.get(kind)).collect();
        assert!(leaks.is_empty(), "{leaks:?}: {before:?}, {after:?}");
    });
}
