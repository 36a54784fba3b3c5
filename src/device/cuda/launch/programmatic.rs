//! Programmatic dependent launch: a kernel may begin while the kernel before it ends
//! (`csrc/core/dependent_launch.cuh`).

use std::ffi::c_int;

use cudarc::driver::sys::{
    CUfunction, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig, CUstream,
};

use super::kernels::Kernels;
use crate::device::cuda::driver::capture::is_captured;
use crate::device::cuda::driver::{api, driver};
use crate::error::Result;

/// First virtual architecture whose kernels contain the wait for the previous kernel, in the driver's notation.
const WAITS_SINCE: c_int = 90;
/// First driver whose graphs have programmatic edges (`CUgraphEdgeData`): a capture by an older one might reject the
/// launch.
const GRAPHS_SINCE: c_int = 12030;

/// Which launches have the attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Programmatic {
    #[default]
    Nowhere,
    Streams,
    StreamsAndGraphs,
}

impl Programmatic {
    /// Returns all launches that may have the attribute. The driver may have compiled the kernels for a new GPU from
    /// PTX of an old architecture, and such kernels do not wait.
    pub fn wherever_possible(kernels: &Kernels) -> Result<Self> {
        if kernels.virtual_architecture()? < WAITS_SINCE {
            return Ok(Self::Nowhere);
        }
        let mut version = 0;
        // SAFETY: writes one int.
        unsafe { api::cuDriverGetVersion(&mut version) }.map_err(driver("cuDriverGetVersion"))?;
        Ok(if version < GRAPHS_SINCE { Self::Streams } else { Self::StreamsAndGraphs })
    }

    /// Returns whether a launch on the stream has the attribute.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of the current context.
    pub unsafe fn is_for(self, stream: CUstream) -> Result<bool> {
        Ok(match self {
            Self::Nowhere => false,
            // SAFETY: by the caller's contract, the stream is live.
            Self::Streams => !unsafe { is_captured(stream) }?,
            Self::StreamsAndGraphs => true,
        })
    }
}

/// Launches a kernel with the attribute.
///
/// # Safety
///
/// As for `cuLaunchKernel`; the kernel waits for the launch before it.
pub(crate) unsafe fn launch(
    function: CUfunction,
    (blocks, threads): (u32, u32),
    stream: CUstream,
    parameters: *mut *mut std::ffi::c_void,
) -> std::result::Result<(), api::Code> {
    let mut attribute = CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    };
    let config = CUlaunchConfig {
        gridDimX: blocks,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        hStream: stream,
        attrs: &mut attribute,
        numAttrs: 1,
    };
    // SAFETY: by the caller's contract; the driver reads the configuration and its one attribute before it returns.
    unsafe { api::cuLaunchKernelEx(&config, function, parameters, std::ptr::null_mut()) }
}
