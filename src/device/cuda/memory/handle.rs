//! Handle by which peers map a rank's memory: one tagged value of fixed size.

pub use crate::catalogue::settings::Sharing;
use crate::error::{Error, Result};

/// Handle of an allocation, for a peer to map it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Handle {
    /// Identity of the exporting process; a peer in the same process uses `export`.
    pub process: [u8; 16],
    /// ID of the allocation in its process.
    pub export: u64,
    /// Size of the allocation.
    pub bytes: u64,
    /// Offset of the first shared byte from the allocation's base.
    pub offset: u64,
    pub payload: Payload,
}

/// How a peer opens the allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Payload {
    /// By `export`, in the same process.
    Pointers,
    /// By a file descriptor, which is sent separately.
    Descriptor,
    /// By a CUDA IPC handle.
    Ipc([u8; 64]),
    /// By a fabric handle.
    Fabric([u8; 64]),
}

impl Handle {
    pub const BYTES: usize = 1 + 16 + 3 * 8 + 64;

    pub fn encode(&self) -> Vec<u8> {
        let (tag, payload) = match &self.payload {
            Payload::Pointers => (0, [0; 64]),
            Payload::Descriptor => (1, [0; 64]),
            Payload::Ipc(handle) => (2, *handle),
            Payload::Fabric(handle) => (3, *handle),
        };
        let mut bytes = vec![tag];
        bytes.extend(self.process);
        for word in [self.export, self.bytes, self.offset] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(payload);
        bytes
    }

    /// Decodes a handle received from `rank`.
    ///
    /// # Errors
    ///
    /// [`Error::Malformed`] naming `rank` if the bytes are not a handle, or its offset is beyond its allocation.
    pub fn decode(rank: usize, bytes: &[u8]) -> Result<Self> {
        let malformed = |reason: String| Error::Malformed { rank, reason };
        let (Some((&tag, rest)), Self::BYTES) = (bytes.split_first(), bytes.len()) else {
            return Err(malformed(format!(
                "a memory handle of {} bytes instead of {}",
                bytes.len(),
                Self::BYTES
            )));
        };
        let mut process = [0; 16];
        process.copy_from_slice(&rest[..16]);
        let word = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&rest[16 + 8 * index..24 + 8 * index]);
            u64::from_le_bytes(word)
        };
        let mut payload = [0; 64];
        payload.copy_from_slice(&rest[40..]);
        let payload = match tag {
            0 => Payload::Pointers,
            1 => Payload::Descriptor,
            2 => Payload::Ipc(payload),
            3 => Payload::Fabric(payload),
            _ => return Err(malformed(format!("a memory handle of unknown kind {tag}"))),
        };
        let handle = Self { process, export: word(0), bytes: word(1), offset: word(2), payload };
        if handle.bytes > isize::MAX as u64 || handle.offset > handle.bytes {
            let Self { bytes, offset, .. } = handle;
            return Err(malformed(format!("a memory handle with offset {offset} into {bytes} bytes")));
        }
        Ok(handle)
    }
}

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_memory_handle, |bytes| Handle::decode(1, bytes));

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::damaged::damaged;

    fn valid() -> Vec<Vec<u8>> {
        let payloads =
            [Payload::Pointers, Payload::Descriptor, Payload::Ipc([7; 64]), Payload::Fabric([9; 64])];
        let handle = |payload| Handle { process: [1; 16], export: 2, bytes: 4096, offset: 64, payload };
        payloads.map(|payload| handle(payload).encode()).into()
    }

    fn payload() -> impl Strategy<Value = Payload> {
        prop_oneof![
            Just(Payload::Pointers),
            Just(Payload::Descriptor),
            proptest::collection::vec(any::<u8>(), 64)
                .prop_map(|bytes| Payload::Ipc(bytes.try_into().expect("64 bytes"))),
            proptest::collection::vec(any::<u8>(), 64)
                .prop_map(|bytes| Payload::Fabric(bytes.try_into().expect("64 bytes"))),
        ]
    }

    proptest! {
        #[test]
        fn handles_round_trip(process: [u8; 16], export: u64, bytes in 0..1u64 << 50, payload in payload()) {
            let handle = Handle { process, export, bytes, offset: bytes / 3, payload };
            prop_assert_eq!(Handle::decode(0, &handle.encode()), Ok(handle));
        }

        #[test]
        fn bytes_of_a_peer_never_panic(bytes in damaged(valid())) {
            let decoded = Handle::decode(3, &bytes);
            if bytes.len() != Handle::BYTES {
                prop_assert!(matches!(decoded, Err(Error::Malformed { rank: 3, .. })), "length {}", bytes.len());
            }
            if let Ok(handle) = decoded {
                prop_assert!(handle.offset <= handle.bytes);
                prop_assert_eq!(Handle::decode(3, &handle.encode()), Ok(handle));
            }
        }

        #[test]
        fn an_offset_beyond_the_allocation_is_refused(bytes in 0..1u64 << 50, beyond in 1..1u64 << 50) {
            let handle = Handle {
                process: [7; 16], export: 1, bytes, offset: bytes + beyond, payload: Payload::Descriptor,
            };
            prop_assert!(Handle::decode(0, &handle.encode()).is_err());
        }
    }
}
