//! A world under test.

use super::launch::{Launch, Rank};
use super::ranks::Ranks;
use super::scenario::{Scenario, Setup};
use super::tier;

/// Where scenarios are run.
pub trait World {
    /// Those of `sizes`, the most telling first, that a case is to be run with here; or the one that there is.
    fn sizes(&self, sizes: &[usize]) -> Vec<usize>;

    /// Of cases with thousands of calls, one in so many is made here.
    fn thin(&self) -> usize {
        1
    }

    /// Runs scenarios with that many ranks, one after the other.
    ///
    /// # Panics
    ///
    /// If a rank did.
    fn run(&self, size: usize, scenarios: &[Scenario]);
}

/// What ranks of their own thread or process make their communicators on.
pub trait Device: Sync {
    type Ranks: Ranks;

    /// Makes a communicator of `rank`. Collective.
    fn join(&self, rank: &Rank, setup: &Setup) -> Self::Ranks;
}

/// Ranks that are started, and meet through a bootstrap: a world of any `Launch` on any `Device`.
pub struct Launched<L, D> {
    pub launch: L,
    pub device: D,
    /// How many of the sizes of a case are taken.
    pub most_sizes: usize,
    pub thin: usize,
}

impl<L: Launch, D: Device> Launched<L, D> {
    /// Where everything is tested.
    pub fn new(launch: L, device: D) -> Self {
        Self { launch, device, most_sizes: usize::MAX, thin: 1 }
    }

    /// Where everything is tested in CI, and by default a part: three sizes of each case, and one in three of the
    /// calls of those with thousands.
    pub fn tiered(test: &str, launch: L, device: D) -> Self {
        if tier::is_full() {
            return Self::new(launch, device);
        }
        tier::left_out(&format!("{test}: 3 sizes, 1 in 3 of thousands of calls"));
        Self::some(launch, device, 3, 3)
    }

    /// Where the kernels are those of another world: two sizes of each case in CI, by default one, and one in three
    /// calls.
    pub fn beside(test: &str, launch: L, device: D) -> Self {
        if tier::is_full() {
            return Self::some(launch, device, 2, 3);
        }
        tier::left_out(&format!("{test}: 1 of 2 sizes"));
        Self::some(launch, device, 1, 3)
    }

    /// Where the kernels are those of another world, and less is enough.
    pub fn some(launch: L, device: D, most_sizes: usize, thin: usize) -> Self {
        Self { launch, device, most_sizes, thin }
    }
}

impl<L: Launch, D: Device> World for Launched<L, D> {
    fn sizes(&self, sizes: &[usize]) -> Vec<usize> {
        let mut sizes = self.launch.sizes(sizes);
        sizes.truncate(self.most_sizes);
        assert!(!sizes.is_empty(), "a case that is run in no world");
        sizes
    }

    fn thin(&self) -> usize {
        self.thin
    }

    fn run(&self, size: usize, scenarios: &[Scenario]) {
        let device = &self.device;
        self.launch.run(size, &|rank: &Rank| {
            scenarios.iter().for_each(|scenario| scenario.run(|setup| device.join(rank, setup)));
        });
    }
}
