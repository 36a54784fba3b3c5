//! A world under test.

use super::launch::{Launch, Rank};
use super::ranks::Ranks;
use super::scenario::{Scenario, Setup};
use super::tier;

/// A world that runs scenarios.
pub trait World {
    /// Returns those of `sizes` (the most important first) with which a case runs here, or the size of a world that is
    /// given.
    fn sizes(&self, sizes: &[usize]) -> Vec<usize>;

    /// Returns n if one in n calls is made, in cases with thousands of calls.
    fn thin(&self) -> usize {
        1
    }

    /// Runs scenarios in sequence with `size` ranks.
    ///
    /// # Panics
    ///
    /// If a rank panics.
    fn run(&self, size: usize, scenarios: &[Scenario]);
}

/// A device on which ranks in their own thread or process create their communicators.
pub trait Device: Sync {
    type Ranks: Ranks;

    /// Creates the communicator of `rank`. All ranks must call this.
    fn join(&self, rank: &Rank, setup: &Setup) -> Self::Ranks;
}

/// Ranks that are started and connected by a bootstrap: a world of any `Launch` on any `Device`.
pub struct Launched<L, D> {
    pub launch: L,
    pub device: D,
    /// Maximum number of sizes of each case.
    pub most_sizes: usize,
    pub thin: usize,
}

impl<L: Launch, D: Device> Launched<L, D> {
    /// Creates a world that runs everything.
    pub fn new(launch: L, device: D) -> Self {
        Self { launch, device, most_sizes: usize::MAX, thin: 1 }
    }

    /// Creates a world that runs three sizes of each case, and one in three calls of cases with thousands; everything
    /// in the full tier.
    pub fn tiered(test: &str, launch: L, device: D) -> Self {
        if tier::is_full() {
            return Self::new(launch, device);
        }
        tier::left_out(&format!("{test}: 3 sizes, 1 in 3 of thousands of calls"));
        Self::some(launch, device, 3, 3)
    }

    /// Creates a world whose kernels another world tests too. It runs one size of each case, two in the full
    /// tier, and one in three calls.
    pub fn reduced(test: &str, launch: L, device: D) -> Self {
        if tier::is_full() {
            return Self::some(launch, device, 2, 3);
        }
        tier::left_out(&format!("{test}: 1 of 2 sizes"));
        Self::some(launch, device, 1, 3)
    }

    /// Creates a world that runs only some sizes and calls, as another world tests the same kernels.
    pub fn some(launch: L, device: D, most_sizes: usize, thin: usize) -> Self {
        Self { launch, device, most_sizes, thin }
    }
}

impl<L: Launch, D: Device> World for Launched<L, D> {
    fn sizes(&self, sizes: &[usize]) -> Vec<usize> {
        let mut sizes = self.launch.sizes(sizes);
        sizes.truncate(self.most_sizes);
        assert!(!sizes.is_empty(), "the case runs in no world");
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
