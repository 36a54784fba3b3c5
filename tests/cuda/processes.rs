//! Ranks as processes, which meet through `Local`.

use std::process::Command;

use fast_allreduce::bootstrap::{Local, UniqueId};
use fast_allreduce::device::cuda::Sharing;
use fast_allreduce::{Algorithm, Error};

use crate::fixture::{Fixture, Setup};
use crate::gpu::{context, gpu, stand_in, Gpus};
use crate::random::Random;
use crate::suite::launch;
pub use crate::suite::launch::Process;
use crate::threads::mixed_calls;

tests! {
    gpu => each_way_of_sharing, a_rank_that_leaves_is_named, a_rank_that_is_killed_is_named;
    stand_in => the_way_of_sharing_is_chosen, what_cannot_be_shared_is_told_to_every_rank;
}

/// Set for a child: which part of its test it runs.
const PART: &str = "FAST_ALLREDUCE_TEST_PART";

/// Which part of a test this process runs; `None` in the process that runs the whole test.
pub fn part() -> Option<String> {
    std::env::var(PART).ok()
}

/// A command that runs one test alone, as its part `part`, with the same seed.
pub fn this_test(test: &str, part: &str) -> Command {
    let mut command = launch::this_test(test);
    command.env(PART, part);
    command
}

/// Runs `body` in a process for each rank. In a child that is a rank of another part, does nothing.
pub fn ranks(test: &str, name: &str, size: usize, settings: &[(&str, &str)], body: impl FnOnce(Local)) {
    for (rank, report) in reports(test, name, size, settings, body).into_iter().enumerate() {
        if let Err(report) = report {
            panic!("{name}: rank {rank} of {size}, a process: {report}");
        }
    }
}

/// As `ranks`, and how each process ended, by rank; nothing in a child.
pub fn reports(
    test: &str,
    name: &str,
    size: usize,
    settings: &[(&str, &str)],
    body: impl FnOnce(Local),
) -> Vec<Result<(), String>> {
    match part() {
        Some(part) if part == name => {
            body(Local::from_env().unwrap().expect("the parent sets the id"));
            println!("{}", ran(name));
            Vec::new()
        }
        Some(_) => Vec::new(),
        None => {
            let id = UniqueId::new().unwrap().to_string();
            let start = |rank: usize| {
                let mut command = this_test(test, name);
                command
                    .env("FAST_ALLREDUCE_UNIQUE_ID", &id)
                    .env("FAST_ALLREDUCE_RANK", rank.to_string())
                    .env("FAST_ALLREDUCE_WORLD_SIZE", size.to_string())
                    .env("STAND_IN_ABORT_ON_EARLY_FREE", "1")
                    .envs(settings.iter().copied());
                Process::start(&mut command)
            };
            // All are started before the first is waited for.
            let ranks: Vec<_> = (0..size).map(start).collect();
            let reports = ranks.into_iter().map(Process::finish);
            reports
                .map(|report| report.map(|told| assert!(told.contains(&ran(name)), "{name}: {told}")))
                .collect()
        }
    }
}

/// What a rank tells of a part that it has run to the end.
fn ran(name: &str) -> String {
    format!("{name} was run")
}

/// A body that makes mixed calls; ranks take turns on the GPUs.
pub fn calls(name: &str, setup: Setup, devices: usize, chosen: Option<Sharing>) -> impl FnOnce(Local) + '_ {
    use fast_allreduce::bootstrap::Bootstrap as _;
    move |local| {
        let context = context(local.rank() % devices);
        let fixture = Fixture::new(setup.try_build(context, local).unwrap(), 100 << 10);
        assert_eq!(fixture.communicator.device().chosen_sharing(), chosen.or(setup.sharing));
        mixed_calls(&fixture, &Random::new(name), 10);
        fixture.communicator.barrier().unwrap();
    }
}

fn each_way_of_sharing(gpus: Gpus) {
    let test = "processes::each_way_of_sharing";
    for (name, sharing) in [("descriptor", Sharing::Descriptor), ("ipc", Sharing::Ipc)] {
        for (size, algorithm) in [(2, None), (3, Some(Algorithm::TwoShotPull))] {
            let setup = Setup { sharing: Some(sharing), first_epoch: u32::MAX - 4, ..Setup::with(algorithm) };
            let name = format!("{name} {size}");
            ranks(test, &name, size, &[], calls(&name, setup, gpus.count.min(2), None));
        }
    }
}

fn the_way_of_sharing_is_chosen(gpus: Gpus) {
    let test = "processes::the_way_of_sharing_is_chosen";
    let devices = gpus.count.min(2);
    for algorithm in Algorithm::DIRECT {
        let name = format!("automatic, {algorithm}");
        let descriptor = Some(Sharing::Descriptor);
        ranks(test, &name, 2, &[], calls(&name, Setup::with(algorithm), devices, descriptor));
    }
    for (name, setting, chosen) in [
        ("no VMM", "STAND_IN_NO_VMM", Sharing::Ipc),
        ("no IPC", "STAND_IN_NO_IPC", Sharing::Descriptor),
        ("IPC is a black hole", "STAND_IN_IPC_BLACK_HOLE", Sharing::Descriptor),
    ] {
        ranks(test, name, 3, &[(setting, "1")], calls(name, Setup::default(), devices, Some(chosen)));
    }
}

fn what_cannot_be_shared_is_told_to_every_rank() {
    let test = "processes::what_cannot_be_shared_is_told_to_every_rank";
    let fails = |sharing: Option<Sharing>, needles: &'static [&'static str]| {
        move |local: Local| {
            let setup = Setup { sharing, ..Setup::default() };
            let error = setup.try_build(context(0), local).unwrap_err().to_string();
            for needle in needles {
                assert!(error.contains(needle), "{needle:?} is not in {error:?}");
            }
        }
    };
    let both = [("STAND_IN_NO_VMM", "1"), ("STAND_IN_NO_IPC", "1")];
    let reasons = &["descriptor: ", "ipc: ", "cuIpcGetMemHandle", "NOT_SUPPORTED"];
    ranks(test, "neither", 3, &both, fails(None, reasons));
    ranks(test, "no VMM, but asked for", 2, &both[..1], fails(Some(Sharing::Descriptor), &["NOT_SUPPORTED"]));
    let hole = [("STAND_IN_NO_VMM", "1"), ("STAND_IN_IPC_BLACK_HOLE", "1")];
    ranks(test, "a black hole", 2, &hole, fails(None, &["it maps, but reads"]));
    ranks(test, "a black hole, asked for", 2, &hole[1..], fails(Some(Sharing::Ipc), &["it maps, but reads"]));
    let apart = [("STAND_IN_NO_PEER", "1")];
    ranks(test, "GPUs apart", 2, &apart, |local| {
        use fast_allreduce::bootstrap::Bootstrap as _;
        let context = context(local.rank());
        let error = Setup::default().try_build(context, local).unwrap_err().to_string();
        assert!(error.contains("cannot access the memory of rank"), "{error}");
    });
    // Of three ranks, one has no virtual memory management: all must go on to the next way together.
    let name = "one without VMM";
    match part() {
        Some(part) if part == name => {
            let local = Local::from_env().unwrap().unwrap();
            let setup = Setup::default();
            calls(name, setup, 1, Some(Sharing::Ipc))(local);
        }
        Some(_) => {}
        None => {
            let id = UniqueId::new().unwrap().to_string();
            let started = (0..3).map(|rank: usize| {
                let mut command = this_test(test, name);
                command
                    .env("FAST_ALLREDUCE_UNIQUE_ID", &id)
                    .env("FAST_ALLREDUCE_RANK", rank.to_string())
                    .env("FAST_ALLREDUCE_WORLD_SIZE", "3")
                    .env("STAND_IN_NO_VMM", if rank == 1 { "1" } else { "0" });
                Process::start(&mut command)
            });
            let started: Vec<_> = started.collect();
            started.into_iter().for_each(|rank| drop(rank.finish().unwrap()));
        }
    }
}

/// A rank that leaves is named by those that wait for it, while their kernels wait.
fn a_rank_that_leaves_is_named() {
    let test = "processes::a_rank_that_leaves_is_named";
    use fast_allreduce::bootstrap::Bootstrap as _;
    ranks(test, "leaves", 2, &[], |local| {
        let rank = local.rank();
        let fixture = Fixture::new(Setup::default().try_build(context(0), local).unwrap(), 4096);
        let random = Random::new("leaves");
        let message = crate::fixture::Message::random(&mut random.fork(0), 100, 2);
        let placement = crate::fixture::Placement::of(crate::fixture::MemoryKind::Pool);
        fixture.check(&message, placement);
        if rank == 1 {
            return;
        }
        fixture.prepare(&message, placement);
        fixture.start(&fixture.stream, &message, placement).unwrap();
        let error = fixture.communicator.synchronize(&fixture.stream).unwrap_err();
        assert!(matches!(&error, Error::PeerLost { rank: 1, .. }), "{error}");
    });
}

/// A rank that is killed is named by one whose kernel spins for it, long before the limit.
fn a_rank_that_is_killed_is_named() {
    let test = "processes::a_rank_that_is_killed_is_named";
    use fast_allreduce::bootstrap::Bootstrap as _;
    let ends = reports(test, "killed", 2, &[], |local| {
        let rank = local.rank();
        let fixture = Fixture::new(Setup::default().try_build(context(0), local).unwrap(), 4096);
        let random = Random::new("killed");
        let message = crate::fixture::Message::random(&mut random.fork(0), 100, 2);
        let placement = crate::fixture::Placement::of(crate::fixture::MemoryKind::Pool);
        fixture.check(&message, placement);
        if rank == 1 {
            // The other's kernel is waiting by then.
            std::thread::sleep(std::time::Duration::from_millis(300));
            // SAFETY: ends this process, as the test is about.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        fixture.prepare(&message, placement);
        fixture.start(&fixture.stream, &message, placement).unwrap();
        let started = std::time::Instant::now();
        let error = fixture.communicator.synchronize(&fixture.stream).unwrap_err();
        let Error::PeerLost { rank: 1, ref reason } = error else { panic!("{error}") };
        assert!(reason.contains("its process ended"), "{error}");
        assert!(started.elapsed() < crate::gpu::LIMIT / 4, "{:?}", started.elapsed());
    });
    if let [survivor, killed] = &ends[..] {
        assert_eq!(*survivor, Ok(()));
        assert!(killed.as_ref().is_err_and(|report| report.contains("signal: 9")), "{killed:?}");
    }
}
