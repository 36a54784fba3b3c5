//! A communicator of whichever device.

#[cfg(feature = "cuda")]
use std::mem::ManuallyDrop;

#[cfg(feature = "cuda")]
use fast_allreduce::device::cuda::current::CallersContext;
use fast_allreduce::{Collective, Communicator, DType, Error, Host, Result, Transfer};
#[cfg(feature = "cuda")]
use fast_allreduce::{Cuda, RegisteredMemory};

use crate::buffer::Place;

pub enum Any {
    Host(Communicator<Host>),
    #[cfg(feature = "cuda")]
    Cuda(Gpu),
}

/// A communicator of a GPU. Whoever drops it keeps the context that is current.
#[cfg(feature = "cuda")]
pub struct Gpu {
    communicator: ManuallyDrop<Communicator<Cuda>>,
    ordinal: usize,
}

#[cfg(feature = "cuda")]
impl Gpu {
    pub fn new(communicator: Communicator<Cuda>, ordinal: usize) -> Self {
        Self { communicator: ManuallyDrop::new(communicator), ordinal }
    }

    /// One of some of its ranks.
    pub fn part(&self, communicator: Communicator<Cuda>) -> Self {
        Self::new(communicator, self.ordinal)
    }
}

#[cfg(feature = "cuda")]
impl std::ops::Deref for Gpu {
    type Target = Communicator<Cuda>;

    fn deref(&self) -> &Communicator<Cuda> {
        &self.communicator
    }
}

#[cfg(feature = "cuda")]
impl Drop for Gpu {
    fn drop(&mut self) {
        let _context = CallersContext::keep();
        // SAFETY: once, and nobody has it any more.
        unsafe { ManuallyDrop::drop(&mut self.communicator) };
    }
}

/// Does the same with the communicator of whichever device.
macro_rules! on_any {
    ($any:expr, $communicator:ident => $done:expr) => {
        match $any {
            $crate::any::Any::Host($communicator) => $done,
            #[cfg(feature = "cuda")]
            $crate::any::Any::Cuda($communicator) => $done,
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
            Self::Cuda(gpu) => Place::Cuda(gpu.ordinal),
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
            Self::Cuda(_) => None,
        }
    }

    /// Returns when every rank has called it.
    pub fn barrier(&self) -> Result<()> {
        on_any!(self, communicator => communicator.barrier())
    }

    /// Waits for what is on a stream, and says whether the calls so far succeeded. On the host they have ended.
    ///
    /// # Safety
    ///
    /// The stream is a live one of any GPU.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub unsafe fn synchronize(&self, stream: u64) -> Result<()> {
        match self {
            Self::Host(communicator) => communicator.check(),
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's.
            Self::Cuda(gpu) => unsafe { gpu.synchronize_raw(stream as *mut _) },
        }
    }

    /// Makes what comes on a stream wait for what is on another by now. On the host nothing is on streams.
    ///
    /// # Safety
    ///
    /// The streams are live ones of any GPU.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub unsafe fn order(&self, earlier: u64, stream: u64) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's.
            Self::Cuda(gpu) => unsafe { gpu.order_raw_streams(earlier as *mut _, stream as *mut _) },
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
            Self::Cuda(gpu) => unsafe { gpu.register_raw(address, bytes) },
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
            Self::Cuda(gpu) => unsafe {
                gpu.check_raw_stream(stream as *mut _)?;
                gpu.collective_raw(stream as *mut _, collective, input, output, count, dtype)
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
            Self::Cuda(gpu) => unsafe {
                gpu.check_raw_stream(stream as *mut _)?;
                gpu.transfer_raw(stream as *mut _, transfers)
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
