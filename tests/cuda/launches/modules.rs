//! Tests that all communicators of a context share the kernels' modules, so that nothing is loaded while a kernel of
//! another communicator spins.

use std::collections::BTreeMap;
use std::time::Duration;

use cudarc::driver::sys;
use fast_allreduce::device::cuda::CooperativeRanks;
use fast_allreduce::{Algorithm, Cuda, DType, ReduceOp};

use crate::fixtures::fixture::{MemoryKind, Message, Placement, Setup};
use crate::fixtures::gpu::{context, stand_in_of_parent, LIMIT};
use crate::fixtures::injection::{calls, live};
use crate::fixtures::processes::{part, this_test, Process};
use crate::fixtures::threads::{fixtures, threads};
use crate::random::Random;

tests! {
    stand_in_of_parent =>
        a_context_has_its_modules_once,
        a_reset_context_has_other_modules,
        nothing_is_loaded_beside_a_kernel;
}

/// Runs `body` in a separate process, in which no other test has loaded modules.
fn alone(test: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    match part() {
        Some(_) => body(),
        None => {
            let mut command = this_test(&format!("launches::modules::{test}"), "alone");
            command.envs(settings.iter().copied());
            Process::start(&mut command).finish().unwrap_or_else(|report| panic!("{test}: {report}"));
        }
    }
}

/// Returns how often all modules have been loaded in total, and how often they are loaded now.
fn modules() -> (u64, u64) {
    (of_all(&calls(), "cuModuleLoadData"), of_all(&live(), "cuModuleLoad"))
}

fn unloaded() -> u64 {
    of_all(&calls(), "cuModuleUnload")
}

/// Returns a count of operations divided by the number of kernel families, as each family has one module.
fn of_all(counts: &BTreeMap<String, u64>, name: &str) -> u64 {
    const FAMILIES: u64 = 4;
    let count = counts.get(name).copied().unwrap_or(0);
    assert_eq!(count % FAMILIES, 0, "{name}: {count}");
    count / FAMILIES
}

/// Makes a call between two ranks of one GPU, and checks the result.
fn reduce(random: &Random) {
    fixtures(2, 1, Setup::with(Algorithm::OneShotPull), 4096, |fixture| {
        let message = Message::new(&mut random.fork(0), (DType::F32, ReduceOp::Sum), 500, 2);
        fixture.check(&message, Placement::of(MemoryKind::Plain));
    });
}

fn a_context_has_its_modules_once() {
    alone("a_context_has_its_modules_once", &[], || {
        // Two contexts, in each of which several ranks load at the same time.
        let device = |rank: usize| Cuda::new(context(rank % 2)).unwrap();
        let devices: Vec<_> = std::thread::scope(|scope| {
            let opened: Vec<_> = (0..8).map(|rank| scope.spawn(move || device(rank))).collect();
            opened.into_iter().map(|opened| opened.join().unwrap()).collect()
        });
        assert_eq!(modules(), (2, 2));
        threads(4, 2, |rank, context| {
            let communicator = Setup::default().try_build(context, rank).unwrap();
            communicator.split(Some(0), 0).unwrap().unwrap().barrier().unwrap();
            communicator.barrier().unwrap();
        });
        drop(CooperativeRanks::new(0, 2, 4096, 0, LIMIT).unwrap());
        assert_eq!(modules(), (2, 2));
        // The last user unloads the modules, and the next one loads them again.
        drop(devices);
        assert_eq!((unloaded(), modules()), (2, (2, 0)));
        reduce(&Random::new("launches::modules::a_context_has_its_modules_once"));
        assert_eq!(modules(), (3, 0));
    });
}

/// Tests a primary context that is reset: its handle stays the same, but its modules are lost.
fn a_reset_context_has_other_modules() {
    alone("a_reset_context_has_other_modules", &[], || {
        let before = Cuda::open(0).unwrap();
        let handle = before.context().cu_ctx();
        // SAFETY: nothing runs, and objects of the old context are only dropped.
        unsafe { sys::cuDevicePrimaryCtxReset_v2(before.context().cu_device()) }.result().unwrap();
        let after = Cuda::open(0).unwrap();
        assert_eq!(after.context().cu_ctx(), handle);
        assert_eq!(modules(), (2, 1));
        let random = Random::new("launches::modules::a_reset_context_has_other_modules");
        reduce(&random);
        // Dropping the device of the old context must not unload the modules of the new one.
        drop(before);
        assert_eq!((unloaded(), modules()), (0, (2, 1)));
        reduce(&random);
        assert_eq!(modules(), (2, 1));
        drop(after);
        assert_eq!((unloaded(), modules()), (1, (2, 0)));
    });
}

/// Tests that a rank which opens its device again loads nothing: the driver may wait for all running work when it loads
/// a module, and the peer's kernel in the same context waits for this rank.
fn nothing_is_loaded_beside_a_kernel() {
    alone("nothing_is_loaded_beside_a_kernel", &[("STAND_IN_SYNCHRONISE", "1")], || {
        let setup = Setup { timeout: Duration::from_secs(5), ..Setup::with(Algorithm::OneShotPull) };
        let random = Random::new("launches::modules::nothing_is_loaded_beside_a_kernel");
        let both = std::sync::Barrier::new(2);
        fixtures(2, 1, setup, 4096, |fixture| {
            let message = Message::new(&mut random.fork(0), (DType::F32, ReduceOp::Sum), 500, 2);
            let placement = Placement::of(MemoryKind::Plain);
            fixture.prepare(&message, placement);
            fixture.stream.synchronize().unwrap();
            if fixture.rank() == 0 {
                fixture.start(&fixture.stream, &message, placement).unwrap();
            }
            both.wait();
            if fixture.rank() == 1 {
                drop(Cuda::new(context(0)).unwrap());
                fixture.start(&fixture.stream, &message, placement).unwrap();
            }
            fixture.report(&message, placement, fixture.compare(&message, placement));
        });
    });
}
