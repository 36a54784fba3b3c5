//! What passes between a communicator and its device when a call is planned.

use super::Choice;

/// Geometry of a device's packs, which the capacity of a region is computed from.
#[derive(Debug, Clone, Copy)]
pub struct Packing {
    /// Bytes of a pack.
    pub pack_bytes: usize,
    /// Bytes of the mailbox slot that holds one pack.
    pub slot_bytes: usize,
}

/// What a device makes a plan from: facts that all ranks share, and what the table has chosen for them.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    pub bytes: usize,
    pub world_size: usize,
    pub choice: Choice,
}
