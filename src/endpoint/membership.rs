//! A rank's membership in one world: what ends with that world, while the device and the buffers stay.

use std::sync::{Arc, OnceLock};

use super::{Connection, Region};
use crate::bootstrap::Lineage;
use crate::device::Device;
use crate::error::Error;
use crate::liveness::{DirectReads, Liveness};

/// What a rank has of one world.
///
/// The endpoint holds it twice: under its lock, for calls, and under a lock of its own, for what must not wait for a
/// call, such as an abort. Code that holds neither lock holds a reference.
pub(crate) struct Membership<D: Device> {
    // Dropped first: its thread marks ranks in the region.
    pub liveness: Liveness,
    /// `None` on GPUs.
    pub direct_reads: Option<Arc<DirectReads>>,
    /// The first failure.
    pub failed: OnceLock<Error>,
    pub lineage: Arc<Lineage>,
    /// The watcher's thread holds it as well.
    pub region: Arc<Region<D>>,
    // Dropped last: exported memory is freed after this rank's own mappings are closed.
    pub connection: Connection<D>,
}
