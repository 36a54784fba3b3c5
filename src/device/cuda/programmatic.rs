//! Programmatic dependent launch: launches that may begin while the one before them ends (`csrc/core/dependent_launch.cuh`).

use std::ffi::c_int;

use cudarc::driver::sys::{
    CUfunction, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig, CUstream,
};

use super::api;
use super::capture::is_captured;
use super::driver::driver;
use super::kernels::Kernels;
use crate::error::Result;

/// The virtual architecture from which on kernels wait for the launch before them, as the driver counts.
const WAITS_SINCE: c_int = 90;
/// The first driver whose graphs have edges of that kind (`CUgraphEdgeData`): a capture by an older one might refuse such a launch.
const GRAPHS_SINCE: c_int = 12030;

/// Where launches have the attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Programmatic {
    #[default]
    Nowhere,
    Streams,
    StreamsAndGraphs,
}

impl Programmatic {
    /// Where they may. The driver may have made the kernels for a new GPU from PTX for an old one, and those wait for nothing.
    pub fn wherever_possible(kernels: &Kernels) -> Result<Self> {
        if kernels.virtual_architecture()? < WAITS_SINCE {
            return Ok(Self::Nowhere);
        }
        let mut version = 0;
        // SAFETY: writes one int.
        unsafe { api::cuDriverGetVersion(&mut version) }.map_err(driver("cuDriverGetVersion"))?;
        Ok(if version < GRAPHS_SINCE { Self::Streams } else { Self::StreamsAndGraphs })
    }

    /// Whether a launch on the stream has it.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of the current context.
    pub unsafe fn is_for(self, stream: CUstream) -> Result<bool> {
        Ok(match self {
            Self::Nowhere => false,
            // SAFETY: the caller's.
            Self::Streams => !unsafe { is_captured(stream) }?,
            Self::StreamsAndGraphs => true,
        })
    }
}

/// A launch with the attribute.
///
/// # Safety
///
/// As `cuLaunchKernel`, of a kernel that waits for the launch before it.
pub(super) unsafe fn launch(
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
    // SAFETY: the caller's; the driver reads the configuration and its one attribute before it returns.
    unsafe { api::cuLaunchKernelEx(&config, function, parameters, std::ptr::null_mut()) }
}
