//! Worlds of processes that `mpirun` has started: each runs the same tests in the same order (`--test-threads=1`).
//!
//! `scripts/test-mpi.sh` starts them. A rank that panics ends all, so that none waits for it.

use std::sync::{Arc, OnceLock};

use fast_allreduce::bootstrap::{Bootstrap, Mpi};
use mpi::topology::{Color, SimpleCommunicator};
use mpi::traits::Communicator;

use crate::worlds::Rank;

/// The size of the world that there is, as the only one; none, with a word why, where no `mpirun` has started this process.
pub fn sizes() -> &'static [usize] {
    static SIZES: OnceLock<Vec<usize>> = OnceLock::new();
    SIZES.get_or_init(|| {
        if ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"].iter().all(|name| std::env::var_os(name).is_none()) {
            println!("skipped: not started by mpirun");
            return Vec::new();
        }
        let size = Mpi::init().unwrap().world_size();
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            report(panic);
            Mpi::abort(101);
        }));
        vec![size]
    })
}

/// This process' rank in a new world of the first `size` ranks, if it is one of them and there are as many. Collective.
pub fn rank(size: usize) -> Option<Rank> {
    if !sizes().iter().any(|&most| size <= most) {
        return None;
    }
    let world = SimpleCommunicator::world();
    let is_in = usize::try_from(world.rank()).unwrap() < size;
    let color = if is_in { Color::with_value(0) } else { Color::undefined() };
    let part = world.split_by_color(color)?;
    Some(Arc::new(Mpi::from_communicator(&part).unwrap()))
}
