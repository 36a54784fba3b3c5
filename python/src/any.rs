//! A communicator of whichever device.

#[cfg(feature = "cuda")]
use fast_allreduce::Cuda;
use fast_allreduce::{Collective, Communicator, DType, Host, Result, Transfer};

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
            Self::Cuda(communicator, _) => unsafe { communicator.transfer_raw(stream as *mut _, transfers) },
        }
    }
}
