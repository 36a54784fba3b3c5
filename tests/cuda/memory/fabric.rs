//! Tests ranks on several machines that share memory by fabric handles. The machines are pretended: the stand-in driver
//! refuses descriptors and IPC handles of another node, and the bootstrap says which rank is on which.

use std::sync::Arc;
use std::time::Duration;

use fast_allreduce::bootstrap::{Bootstrap, Local, UniqueId};
use fast_allreduce::device::cuda::Sharing;
use fast_allreduce::{Algorithm, Communicator, Error, Host, Order, Result};

use crate::fixtures::fixture::{Fixture, MemoryKind, Message, Placement, Setup};
use crate::fixtures::gpu::{context, stand_in_of_parent, Gpus, LIMIT};
use crate::fixtures::processes::ranks;
use crate::fixtures::threads::mixed_calls;
use crate::launches::graphs::{graph_of, PLACEMENTS};
use crate::memory::suspension::{check, message};
use crate::random::Random;

tests! {
    stand_in_of_parent =>
        calls_between_machines,
        machines_return_to_their_graphs,
        machines_without_a_fabric_are_told_what_it_needs,
        a_fabric_that_loses_data_is_found,
        what_needs_one_machine_is_refused,
        a_rank_that_leaves_is_named_on_its_machine_and_missed_on_others;
}

const RANKS: usize = 4;
const FABRIC: (&str, &str) = ("STAND_IN_FABRIC", "1");

/// Ranks 0 and 1 are on one node, 2 and 3 on the other.
struct TwoNodes(Arc<Local>);

fn node(rank: usize) -> usize {
    rank / 2
}

impl TwoNodes {
    /// Sets the node of this process's driver. No call has initialised it yet.
    fn new(local: impl Into<Arc<Local>>) -> Self {
        let local = local.into();
        // SAFETY: only this thread uses the environment: the driver reads it at its first call.
        unsafe { std::env::set_var("STAND_IN_NODE", node(local.rank()).to_string()) };
        Self(local)
    }
}

impl Bootstrap for TwoNodes {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn all_gather(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.0.all_gather(bytes, timeout)
    }

    fn nodes(&self) -> Vec<usize> {
        (0..RANKS).map(node).collect()
    }
}

/// Builds a communicator on the GPU that the rank has in its node.
fn build(local: impl Into<Arc<Local>>, setup: Setup) -> Result<Communicator<fast_allreduce::Cuda>> {
    let bootstrap = TwoNodes::new(local);
    setup.try_build(context(bootstrap.rank() % 2), bootstrap)
}

fn calls_between_machines(_: Option<Gpus>) {
    let test = "memory::fabric::calls_between_machines";
    ranks(test, "by fabric", RANKS, &[FABRIC], |local| {
        let fixture = Fixture::new(build(local, Setup::default()).unwrap(), 100 << 10);
        assert_eq!(fixture.communicator.device().chosen_sharing(), Some(Sharing::Fabric));
        mixed_calls(&fixture, &Random::new(test), 10);
        fixture.communicator.barrier().unwrap();
    });
    // Nothing else works between machines.
    for sharing in Sharing::ALL.into_iter().filter(|&sharing| sharing != Sharing::Fabric) {
        ranks(test, sharing.name(), RANKS, &[FABRIC], |local| {
            let setup = Setup { sharing: Some(sharing), ..Setup::default() };
            let error = build(local, setup).unwrap_err();
            assert!(matches!(error, Error::Unavailable { .. }), "{error}");
            for fact in [sharing.name(), "sharing=fabric", "Hierarchical"] {
                assert!(error.to_string().contains(fact), "{fact} is not in {error}");
            }
        });
    }
}

/// Ranks of several machines suspend, and resume over another bootstrap than before.
fn machines_return_to_their_graphs(_: Option<Gpus>) {
    let test = "memory::fabric::machines_return_to_their_graphs";
    ranks(test, "resume", RANKS, &[FABRIC], |local| {
        let (rank, first) = (local.rank(), Arc::new(local));
        let setup = Setup { algorithm: Some(Algorithm::TwoShotPull), ..Setup::default() };
        let fixture = Fixture::new(build(Arc::clone(&first), setup).unwrap(), 100 << 10);
        let communicator = &fixture.communicator;
        let graph = graph_of(&fixture, &message(&mut Random::new(test).fork(0), RANKS), &PLACEMENTS);
        for round in 1..4 {
            let message = message(&mut Random::new(test).fork(round), RANKS);
            PLACEMENTS.iter().for_each(|&placement| fixture.prepare(&message, placement));
            graph.launch().unwrap();
            check(&fixture, &message);
            communicator.barrier().unwrap();
            communicator.suspend().unwrap();
            let own = UniqueId::new().unwrap().to_string();
            let ids = first.all_gather(own.as_bytes(), LIMIT).unwrap();
            let id: UniqueId = String::from_utf8(ids[0].clone()).unwrap().parse().unwrap();
            // The ranks' own meeting is of one machine.
            let local = Local::connect(&id, rank, RANKS, LIMIT).unwrap();
            communicator.resume_with(TwoNodes(Arc::new(local))).unwrap();
        }
        mixed_calls(&fixture, &Random::new(test), 6);
        communicator.barrier().unwrap();
    });
}

fn machines_without_a_fabric_are_told_what_it_needs(_: Option<Gpus>) {
    let test = "memory::fabric::machines_without_a_fabric_are_told_what_it_needs";
    ranks(test, "none", RANKS, &[], |local| {
        let error = build(local, Setup::default()).unwrap_err().to_string();
        for fact in ["NVLink domain", "nvidia-imex", "Hierarchical", "NOT_SUPPORTED"] {
            assert!(error.contains(fact), "{fact} is not in {error}");
        }
    });
    // Errors that have other causes do not speak of it.
    ranks(test, "full", RANKS, &[FABRIC, ("STAND_IN_FAIL", "cuMemCreate:1:2")], |local| {
        let error = build(local, Setup::default()).unwrap_err();
        let is_right = matches!(error, Error::Allocation { .. }) && !error.to_string().contains("imex");
        assert!(is_right, "{error}");
    });
}

fn a_fabric_that_loses_data_is_found(_: Option<Gpus>) {
    let test = "memory::fabric::a_fabric_that_loses_data_is_found";
    ranks(
        test,
        "stores",
        RANKS,
        &[FABRIC, ("STAND_IN_BROKEN_PEERS", "stores"), ("STAND_IN_PTX", "0")],
        |local| {
            let error = build(local, Setup::default()).unwrap_err().to_string();
            for fact in ["does not carry data", "nvidia-imex-ctl", "Hierarchical"] {
                assert!(error.contains(fact), "{fact} is not in {error}");
            }
        },
    );
}

fn what_needs_one_machine_is_refused(_: Option<Gpus>) {
    let test = "memory::fabric::what_needs_one_machine_is_refused";
    ranks(test, "refused", RANKS, &[FABRIC, ("STAND_IN_MULTICAST", "1")], |local| {
        let rank = local.rank();
        let setup = Setup { order: Order::Any, ..Setup::default() };
        let fixture = Fixture::new(build(local, setup).unwrap(), 4096);
        let communicator = &fixture.communicator;
        let refused = |error: Error, fact: &str| {
            assert!(
                matches!(error, Error::Unavailable { .. }) && error.to_string().contains(fact),
                "{error}"
            );
        };
        let slice = crate::memory::registration::plain_slice(&fixture.stream, 4096);
        refused(communicator.register(slice).err().unwrap(), "several machines");
        refused(communicator.split(Some(rank as u32 % 2), 0).err().unwrap(), "another node");
        communicator.barrier().unwrap();
        // A part of one machine's ranks has all that one machine has.
        let part = communicator.split(Some(node(rank) as u32), 0).unwrap().unwrap();
        assert_eq!((part.world_size(), part.device().chosen_sharing()), (2, Some(Sharing::Descriptor)));
        part.barrier().unwrap();
        communicator.barrier().unwrap();
    });
    ranks(test, "host", RANKS, &[], |local| {
        let error = Communicator::builder().build(Host::new(), TwoNodes::new(local)).map(drop).unwrap_err();
        assert!(error.to_string().contains("several nodes"), "{error}");
    });
}

fn a_rank_that_leaves_is_named_on_its_machine_and_missed_on_others(_: Option<Gpus>) {
    let test = "memory::fabric::a_rank_that_leaves_is_named_on_its_machine_and_missed_on_others";
    ranks(test, "leaves", RANKS, &[FABRIC], |local| {
        let rank = local.rank();
        let timeout = Duration::from_secs(5);
        let fixture = Fixture::new(build(local, Setup { timeout, ..Setup::default() }).unwrap(), 4096);
        let (message, placement) =
            (Message::random(&mut Random::new(test).fork(0), 100, RANKS), Placement::of(MemoryKind::Plain));
        fixture.check(&message, placement);
        if rank == 3 {
            return;
        }
        fixture.prepare(&message, placement);
        let started = std::time::Instant::now();
        fixture.start(&fixture.stream, &message, placement).unwrap();
        let error = fixture.communicator.synchronize(&fixture.stream).unwrap_err();
        match (rank, &error) {
            (2, Error::PeerLost { rank: 3, .. }) => {}
            (0 | 1, Error::Timeout { missing, .. }) => assert!(missing.contains(&3), "{error}"),
            _ => panic!("rank {rank}: {error}"),
        }
        assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
    });
}
