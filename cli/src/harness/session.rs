//! A rank's means to measure together with the others: a fence, and the exchange of measurements.

use std::sync::Arc;
use std::time::Duration;

use fast_allreduce::bootstrap::Bootstrap;
use fast_allreduce::plan::{DeviceKind, Table};
use fast_allreduce::{Builder, Communicator, Device, Host, ReduceOp, Wait};

use crate::failure::Failure;

/// The connection of a rank to the others during a run.
pub struct Session {
    bootstrap: Arc<dyn Bootstrap>,
    /// A separate communicator, so that the fence does not touch the measured one. None between several nodes.
    fence: Option<Communicator<Host>>,
    nodes: usize,
    limit: Duration,
}

impl Session {
    /// Makes the fence. `timeout` is that of the measured calls. Collective.
    pub fn new(bootstrap: impl Bootstrap + 'static, wait: Wait, timeout: Duration) -> Result<Self, Failure> {
        const SMALLEST_REGION: usize = 4 << 10;
        // Before the measured communicators bind this thread.
        crate::facts::cores();
        // Between calls a rank may check many elements.
        let limit = timeout.max(Duration::from_secs(60));
        let bootstrap: Arc<dyn Bootstrap> = Arc::new(bootstrap);
        // The fence does not depend on the measured plan.
        let plan = Table::built_in(DeviceKind::Host);
        let builder = Communicator::builder().max_bytes(SMALLEST_REGION).timeout(limit).table(plan);
        let fence = builder.build(Host::new().wait(wait), Arc::clone(&bootstrap))?;
        Ok(Self { bootstrap, fence: Some(fence), nodes: 1, limit })
    }

    /// Starts a session of ranks on several nodes, which MPI has started. `timeout` is that of the measured calls.
    #[cfg(feature = "mpi")]
    pub fn of_nodes(bootstrap: fast_allreduce::bootstrap::Mpi, nodes: usize, timeout: Duration) -> Self {
        crate::facts::cores();
        let limit = timeout.max(Duration::from_secs(60));
        Self { bootstrap: Arc::new(bootstrap), fence: None, nodes, limit }
    }

    /// Makes a communicator to measure. Collective.
    pub fn build<D: Device>(&self, device: D, builder: Builder) -> Result<Communicator<D>, Failure> {
        Ok(builder.build(device, Arc::clone(&self.bootstrap))?)
    }

    /// Returns the longest wait of a rank for the others.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Returns the number of this rank.
    pub fn rank(&self) -> usize {
        self.bootstrap.rank()
    }

    /// Returns the number of nodes on which the ranks are.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.bootstrap.world_size()
    }

    /// Waits until all ranks have arrived: on one node without system calls, by an allreduce of one element.
    pub fn fence(&self) -> Result<(), Failure> {
        match &self.fence {
            Some(fence) => Ok(fence.all_reduce_in_place(&mut [0f32], ReduceOp::Sum)?),
            None => {
                // With the limit, for ranks that do not come. A rank that fails aborts all others.
                self.exchange(&[])?;
                // Ranks leave the bootstrap's gather with longer pauses.
                #[cfg(feature = "mpi")]
                mpi::traits::CommunicatorCollectives::barrier(&mpi::topology::SimpleCommunicator::world());
                Ok(())
            }
        }
    }

    /// Returns the maximum over ranks of each number. All ranks pass equally many.
    pub fn maxima(&self, mine: &[f64]) -> Result<Vec<f64>, Failure> {
        let all = self.gather(mine.iter().map(|number| number.to_bits()))?;
        let largest = |index| all.iter().map(|theirs| f64::from_bits(theirs[index])).fold(f64::MIN, f64::max);
        Ok((0..mine.len()).map(largest).collect())
    }

    /// Returns the sum over ranks.
    pub fn total(&self, mine: u64) -> Result<u64, Failure> {
        Ok(self.gather([mine].into_iter())?.iter().flatten().sum())
    }

    /// Returns the first rank's number.
    pub fn of_first(&self, mine: u64) -> Result<u64, Failure> {
        Ok(self.gather([mine].into_iter())?[0][0])
    }

    /// Returns the bytes of every rank, in rank order. Lengths may differ.
    pub fn exchange(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        Ok(self.bootstrap.all_gather(mine, self.limit)?)
    }

    /// Gathers numbers by the bootstrap, which is not under test.
    fn gather(&self, mine: impl ExactSizeIterator<Item = u64>) -> Result<Vec<Vec<u64>>, Failure> {
        const WORD: usize = size_of::<u64>();
        let length = mine.len();
        let bytes: Vec<u8> = mine.flat_map(u64::to_le_bytes).collect();
        let all = self.exchange(&bytes)?;
        let numbers = |(rank, theirs): (usize, Vec<u8>)| {
            if theirs.len() != length * WORD {
                let reason = format!("{} bytes of measurements, not {}", theirs.len(), length * WORD);
                return Err(fast_allreduce::Error::Malformed { rank, reason }.into());
            }
            let word = |bytes: &[u8]| u64::from_le_bytes(std::array::from_fn(|index| bytes[index]));
            Ok(theirs.chunks_exact(WORD).map(word).collect())
        };
        all.into_iter().enumerate().map(numbers).collect()
    }
}
