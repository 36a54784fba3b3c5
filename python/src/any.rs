//! A communicator of whichever device.

use fast_allreduce::{Collective, Communicator, DType, Error, Host, Result, Transfer};
#[cfg(feature = "cuda")]
use fast_allreduce::{Cuda, RegisteredMemory};

use crate::buffer::Place;

pub enum Any {
    Host(Communicator<Host>),
    #[cfg(feature = "cuda")]
    Cuda(Communicator<Cuda>, usize),
}

/// Does the same with the communicator of whichever device.
macro_rules! on_any {
    ($any:expr, $communicator:ident => $done:expr) => {
        match $any {
            $crate::any::Any::Host($communicator) => $done,
            #[cfg(feature = "cuda")]
            $crate::any::Any::Cuda($communicator, _) => $done,
        }
    };
}
pub(crate) use on_any;

impl Any {
    /// Where its buffers are.
    pub fn place(&self) -> Place {
        match self {
            Self::Host(_) => Place::Cpu,
            #[cfg(feature = "cuda")]
            Self::Cuda(_, ordinal) => Place::Cuda(*ordinal),
        }
    }

    pub fn rank(&self) -> usize {
        on_any!(self, communicator => communicator.rank())
    }

    pub fn world_size(&self) -> usize {
        on_any!(self, communicator => communicator.world_size())
    }

    /// Where its plans come from, in words.
    pub fn plan_source(&self) -> String {
        on_any!(self, communicator => communicator.plan_source().to_string())
    }

    /// What its ranks are bound to, in words; on a GPU nothing is.
    pub fn binding(&self) -> Option<String> {
        match self {
            Self::Host(communicator) => Some(communicator.device().binding().to_string()),
            #[cfg(feature = "cuda")]
            Self::Cuda(..) => None,
        }
    }

    /// # Safety
    ///
    /// As `register_raw` of the CUDA device.
    #[cfg(feature = "cuda")]
    pub unsafe fn register(&self, address: u64, bytes: usize) -> Result<RegisteredMemory> {
        match self {
            Self::Host(_) => Err(not_registered()),
            // SAFETY: the caller's.
            Self::Cuda(communicator, _) => unsafe { communicator.register_raw(address, bytes) },
        }
    }

    /// # Safety
    ///
    /// As `collective_raw` of the device; the stream is not looked at on the host.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub unsafe fn collective(
        &self,
        stream: u64,
        collective: Collective<'_>,
        [input, output]: [u64; 2],
        count: usize,
        dtype: DType,
    ) -> Result<()> {
        match self {
            // SAFETY: the caller's.
            Self::Host(communicator) => unsafe {
                communicator.collective_raw(collective, input as *const _, output as *mut _, count, dtype)
            },
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's.
            Self::Cuda(communicator, _) => unsafe {
                communicator.check_raw_stream(stream as *mut _)?;
                communicator.collective_raw(stream as *mut _, collective, input, output, count, dtype)
            },
        }
    }

    /// # Safety
    ///
    /// As `transfer_raw` of the device; the stream is not looked at on the host.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub unsafe fn transfer(&self, stream: u64, transfers: &[Transfer]) -> Result<()> {
        match self {
            // SAFETY: the caller's.
            Self::Host(communicator) => unsafe { communicator.transfer_raw(transfers) },
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's.
            Self::Cuda(communicator, _) => unsafe {
                communicator.check_raw_stream(stream as *mut _)?;
                communicator.transfer_raw(stream as *mut _, transfers)
            },
        }
    }
}

/// Why memory of the host that a caller allocated has no registration.
pub fn not_registered() -> Error {
    Error::Unavailable {
        what: "registering memory of the host that is there already".into(),
        reason: "peers cannot map it: allocate it by Communicator.alloc, which registers it".into(),
    }
}
