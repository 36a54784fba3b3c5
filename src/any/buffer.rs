//! Registered memory of whichever device.

use std::fmt;

/// Memory that is registered with an [`AnyCommunicator`](crate::AnyCommunicator) as long as this lives. Memory that the communicator
/// allocated is freed with it, as a [`Buffer`](crate::Buffer) is. Whoever drops it keeps the CUDA context that is current.
pub struct AnyBuffer {
    address: u64,
    bytes: usize,
    /// Ends the registration when it is dropped.
    _memory: Box<dyn Send + Sync>,
}

impl AnyBuffer {
    pub(super) fn new(address: u64, bytes: usize, memory: impl Send + Sync + 'static) -> Self {
        Self { address, bytes, _memory: Box::new(memory) }
    }

    /// Where it begins, on this rank's device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl fmt::Debug for AnyBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, bytes, .. } = self;
        f.debug_struct("AnyBuffer").field("address", address).field("bytes", bytes).finish_non_exhaustive()
    }
}
