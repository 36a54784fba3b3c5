//! Identity of a rank's process and GPU, which ranks exchange when they join.

use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{CUdevice_attribute, CUuuid};
use cudarc::driver::CudaContext;

use crate::device::cuda::driver::{api, driver};
use crate::error::{Error, Result};

/// Identity of a rank's process, GPU and communicator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    pub process: [u8; 16],
    pub uuid: [u8; 16],
    pub multiprocessors: u32,
    /// ID of the communicator being built, unique in this process.
    pub communicator: u64,
    /// ID in its process of the memory of its region of before; 0 for a rank of a new world.
    pub region: u64,
    /// PCI address of the GPU, in the driver's format.
    pub pci: String,
}

impl Identity {
    const FIXED: usize = 16 + 16 + 4 + 2 * 8;
    const LONGEST: usize = Self::FIXED + 64;

    pub fn of(context: &CudaContext, process: [u8; 16], region: u64) -> Result<Self> {
        static COMMUNICATORS: AtomicU64 = AtomicU64::new(0);
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: the driver writes 16 bytes.
        unsafe { api::cuDeviceGetUuid_v2(&mut uuid, context.cu_device()) }
            .map_err(driver("cuDeviceGetUuid"))?;
        let mut count = 0;
        let which = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as u32;
        // SAFETY: the driver writes one number.
        unsafe { api::cuDeviceGetAttribute(&mut count, which, context.cu_device()) }
            .map_err(driver("cuDeviceGetAttribute"))?;
        let mut pci = [0; 64];
        // SAFETY: the driver writes a zero-terminated string of at most 64 bytes.
        unsafe { api::cuDeviceGetPCIBusId(pci.as_mut_ptr().cast(), 64, context.cu_device()) }
            .map_err(driver("cuDeviceGetPCIBusId"))?;
        let pci = CStr::from_bytes_until_nul(&pci).map(|pci| pci.to_string_lossy().into_owned());
        Ok(Self {
            process,
            uuid: uuid.bytes.map(|byte| byte as u8),
            multiprocessors: u32::try_from(count).unwrap_or(0),
            communicator: COMMUNICATORS.fetch_add(1, Ordering::Relaxed),
            region,
            pci: pci.unwrap_or_default(),
        })
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = [self.process, self.uuid].concat();
        bytes.extend(self.multiprocessors.to_le_bytes());
        bytes.extend(self.communicator.to_le_bytes());
        bytes.extend(self.region.to_le_bytes());
        bytes.extend(self.pci.as_bytes());
        bytes
    }

    /// Decodes an identity received from `rank`.
    ///
    /// # Errors
    ///
    /// [`Error::Malformed`] naming `rank` if the bytes are not an identity.
    pub fn decode(rank: usize, bytes: &[u8]) -> Result<Self> {
        let malformed =
            || Error::Malformed { rank, reason: "its description of its GPU does not decode".into() };
        if bytes.len() > Self::LONGEST {
            return Err(malformed());
        }
        let (process, rest) = bytes.split_first_chunk().ok_or_else(malformed)?;
        let (uuid, rest) = rest.split_first_chunk().ok_or_else(malformed)?;
        let (count, rest) = rest.split_first_chunk().ok_or_else(malformed)?;
        let (number, rest) = rest.split_first_chunk().ok_or_else(malformed)?;
        let (region, pci) = rest.split_first_chunk().ok_or_else(malformed)?;
        let pci = std::str::from_utf8(pci).map_err(|_| malformed())?.to_owned();
        let (multiprocessors, communicator) = (u32::from_le_bytes(*count), u64::from_le_bytes(*number));
        let region = u64::from_le_bytes(*region);
        Ok(Self { process: *process, uuid: *uuid, multiprocessors, communicator, region, pci })
    }
}

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_gpu_identity, |bytes| Identity::decode(1, bytes));

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::damaged::damaged;

    proptest! {
        #[test]
        fn identities_round_trip(
            process: [u8; 16],
            uuid: [u8; 16],
            multiprocessors: u32,
            communicator: u64,
            region: u64,
            pci in "[0-9A-F:.]{0,16}",
        ) {
            let identity = Identity { process, uuid, multiprocessors, communicator, region, pci };
            prop_assert_eq!(Identity::decode(0, &identity.encode()), Ok(identity));
        }

        #[test]
        fn bytes_of_a_peer_never_panic(bytes in damaged(vec![b"0000:18:00.0".repeat(4), vec![7; 99]])) {
            let decoded = Identity::decode(2, &bytes);
            if bytes.len() < Identity::FIXED || bytes.len() > Identity::LONGEST {
                prop_assert!(matches!(decoded, Err(Error::Malformed { rank: 2, .. })), "length {}", bytes.len());
            }
            if let Ok(identity) = decoded {
                prop_assert_eq!(identity.encode(), bytes);
            }
        }
    }
}
