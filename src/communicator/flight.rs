//! What the ranks did last: flight records and metrics.

use std::sync::Arc;

use super::place::locked;
use super::Communicator;
use crate::device::Device;
use crate::endpoint::Membership;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::liveness::FlightRecord;

impl<D: Device> Communicator<D> {
    /// Returns the latest calls of all ranks of this machine, without waiting, also of ranks that hang or have ended.
    ///
    /// It also works on a communicator that has failed, and while a call waits in another thread. [`FlightRecord`] has
    /// an example, [`flight`](crate::flight) reads the records of other processes. While the communicator is suspended,
    /// it is the record of the world that it has left.
    pub fn flight_record(&self) -> FlightRecord {
        let read = |membership: &Arc<Membership<D>>| {
            membership.liveness.set_waits(&membership.region.waits());
            membership.liveness.flight_record(membership.lineage.id())
        };
        let kept = || locked(&self.returning.record).clone();
        let read = self.endpoint.with_membership(read);
        read.or_else(|error| kept().ok_or(error))
            .unwrap_or_else(|error| FlightRecord::none(self.world_size, &error))
    }

    /// Returns this rank's metrics in Prometheus' text format: [`flight::metrics`](crate::flight::metrics).
    pub fn metrics(&self) -> String {
        let mut record = self.flight_record();
        record.ranks.retain(|rank| rank.rank == self.rank);
        crate::liveness::metrics(&[record])
    }

    /// Writes [`Communicator::metrics`] to a file, for example for node_exporter's textfile collector: readers see all
    /// of it, or the previous file. Give each rank its own file.
    ///
    /// # Errors
    ///
    /// [`Error::System`], if the file cannot be written.
    pub fn write_metrics(&self, path: impl AsRef<std::path::Path>) -> Result<()> {
        crate::liveness::write(&self.metrics(), path.as_ref())
    }
}
