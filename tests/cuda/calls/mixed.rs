//! Tests worlds of several processes with several ranks each: the memory of some peers is accessed by pointer, that of
//! others through a handle.

use fast_allreduce::bootstrap::{Local, UniqueId};
use fast_allreduce::device::cuda::Sharing;
use fast_allreduce::Algorithm;

use crate::fixtures::fixture::{Fixture, Setup};
use crate::fixtures::gpu::{context, gpu, two_gpus, Gpus, LIMIT};
use crate::fixtures::processes::{part, this_test, Process};
use crate::fixtures::threads::mixed_calls;
use crate::launches::graphs;
use crate::memory::registration;
use crate::random::Random;

tests! {
    gpu => calls_in_each_way_of_sharing, callers_buffers_and_graphs;
    two_gpus => calls_in_each_way_of_sharing_between_gpus;
}

const PROCESSES: usize = 2;
const THREADS: usize = 2;
const PROCESS: &str = "FAST_ALLREDUCE_TEST_PROCESS";
const ID: &str = "FAST_ALLREDUCE_UNIQUE_ID";

/// Runs `body` with a fixture for each rank: two processes, with a thread for each of their ranks.
fn fixtures(
    test: &str,
    name: &str,
    setup: Setup,
    devices: usize,
    bytes: usize,
    body: impl Fn(&Fixture) + Sync,
) {
    match part() {
        Some(part) if part == name => {
            let process: usize = std::env::var(PROCESS).unwrap().parse().unwrap();
            let id: UniqueId = std::env::var(ID).unwrap().parse().unwrap();
            std::thread::scope(|scope| {
                for rank in process * THREADS..(process + 1) * THREADS {
                    let (id, body) = (&id, &body);
                    scope.spawn(move || {
                        let local = Local::connect(id, rank, PROCESSES * THREADS, LIMIT).unwrap();
                        let context = context(rank % devices);
                        let fixture = Fixture::new(setup.try_build(context, local).unwrap(), bytes);
                        body(&fixture);
                        fixture.stream.synchronize().unwrap();
                        fixture.communicator.barrier().unwrap();
                    });
                }
            });
        }
        Some(_) => {}
        None => {
            let id = UniqueId::new().unwrap().to_string();
            let start = |process: usize| {
                let mut command = this_test(test, name);
                command.env(ID, &id).env(PROCESS, process.to_string());
                command.env("STAND_IN_ABORT_ON_EARLY_FREE", "1");
                Process::start(&mut command)
            };
            // Starts all processes before it waits for the first.
            let processes: Vec<_> = (0..PROCESSES).map(start).collect();
            let reports: Vec<_> = processes.into_iter().map(Process::finish).collect();
            for (process, report) in reports.into_iter().enumerate() {
                if let Err(report) = report {
                    panic!("{name}: process {process} of {PROCESSES}: {report}");
                }
            }
        }
    }
}

fn calls_in_each_way_of_sharing() {
    each_way_of_sharing("calls::mixed::calls_in_each_way_of_sharing", 1);
}

fn calls_in_each_way_of_sharing_between_gpus() {
    each_way_of_sharing("calls::mixed::calls_in_each_way_of_sharing_between_gpus", 2);
}

fn each_way_of_sharing(test: &str, devices: usize) {
    for sharing in [None, Some(Sharing::Ipc)] {
        for algorithm in Algorithm::DIRECT {
            let setup = Setup { sharing, first_epoch: u32::MAX - 4, ..Setup::with(algorithm) };
            let name = format!("{algorithm} on {devices} by {sharing:?}");
            fixtures(test, &name, setup, devices, 100 << 10, |fixture| {
                mixed_calls(fixture, &Random::new(&name), 6);
            });
        }
    }
}

fn callers_buffers_and_graphs(gpus: Gpus) {
    let (test, devices) = ("calls::mixed::callers_buffers_and_graphs", gpus.count.min(2));
    for algorithm in [Algorithm::OneShotPull, Algorithm::TwoShotPull] {
        let setup = Setup { graph_registration: true, ..Setup::with(algorithm) };
        let name = format!("registered, {algorithm}");
        fixtures(test, &name, setup, devices, registration::BYTES, |fixture| {
            registration::register_and_reduce(fixture, &Random::new(&name));
        });
        let name = format!("captured, {algorithm}");
        fixtures(test, &name, setup, devices, graphs::BYTES, |fixture| {
            graphs::capture_and_replay(fixture, &Random::new(&name));
        });
    }
}
