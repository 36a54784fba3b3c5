//! Registered memory of an [`AnyCommunicator`](crate::AnyCommunicator).

use std::fmt;

/// A registration of memory with an [`AnyCommunicator`](crate::AnyCommunicator), which ends when this is dropped.
///
/// Memory that the communicator allocated is freed with it, as a [`Buffer`](crate::Buffer) is. A drop does not change
/// the current CUDA context. [`AnyCommunicator::alloc`](crate::AnyCommunicator::alloc) has an example.
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

    /// Returns the address of the memory on this rank's device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the length in bytes.
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
