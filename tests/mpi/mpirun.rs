//! The conformance suite on the host, with the ranks that `mpirun` started.

use std::sync::{Arc, OnceLock};

use fast_allreduce::bootstrap::{Bootstrap, Mpi};
use mpi::topology::SimpleCommunicator;

use crate::host::HostDevice;
use crate::runner::{Found, Missing};
use crate::suite::launch::{Launch, Rank};
use crate::suite::world::Launched;

conformance_where_found! { |_| world() }

/// Fused calls under `mpirun`.
pub mod rows {
    use fast_allreduce::device::host::Isa;

    tests! { super::launch => every_shape_with_a_residual_and_a_norm, every_shape_of_sharded_rows; }

    fn every_shape_with_a_residual_and_a_norm(launch: super::Mpirun) {
        crate::fused::every_shape(&launch, "fused under mpirun", &[], &[Isa::best()], 1);
    }

    fn every_shape_of_sharded_rows(launch: super::Mpirun) {
        crate::sharded::every_shape(&launch, "sharded under mpirun", &[], &[Isa::best()], 1);
    }
}

fn world() -> Found<Launched<Mpirun, HostDevice>> {
    Ok(Launched::new(launch()?, HostDevice::default()))
}

fn launch() -> Found<Mpirun> {
    if ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"].iter().all(|name| std::env::var_os(name).is_none()) {
        return Err(Missing::new("mpirun", "not started by mpirun"));
    }
    static SIZE: OnceLock<usize> = OnceLock::new();
    let size = *SIZE.get_or_init(|| {
        super::end_all_with_this_rank();
        Mpi::init().unwrap().world_size()
    });
    Ok(Mpirun { size })
}

/// The ranks of this process's `mpirun`.
struct Mpirun {
    size: usize,
}

impl Launch for Mpirun {
    /// The world of `mpirun`.
    fn sizes(&self, _: &[usize]) -> Vec<usize> {
        vec![self.size]
    }

    /// Runs this process's rank.
    fn run(&self, size: usize, body: &(dyn Fn(&Rank) + Sync)) {
        assert_eq!(size, self.size);
        body(&(Arc::new(Mpi::from_communicator(&SimpleCommunicator::world()).unwrap()) as Rank));
    }
}
