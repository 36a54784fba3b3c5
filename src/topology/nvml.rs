//! Queries of NVML. NVML is part of the driver, and is loaded on use.
//!
//! These few queries call the C library directly: a wrapper crate would add seconds to every build.

use std::ffi::CStr;

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlEnableState_enum_NVML_FEATURE_ENABLED, nvmlGpuLevel_enum_NVML_TOPOLOGY_HOSTBRIDGE,
    nvmlGpuLevel_enum_NVML_TOPOLOGY_INTERNAL, nvmlGpuLevel_enum_NVML_TOPOLOGY_MULTIPLE,
    nvmlGpuLevel_enum_NVML_TOPOLOGY_NODE, nvmlGpuLevel_enum_NVML_TOPOLOGY_SINGLE,
    nvmlGpuLevel_enum_NVML_TOPOLOGY_SYSTEM, nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_NVLINK,
    nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_READ, nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_WRITE,
    nvmlGpuP2PCapsIndex_t, nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_OK, nvmlGpuTopologyLevel_t, nvmlPciInfo_t,
    nvmlReturn_enum_NVML_SUCCESS, nvmlReturn_t, NvmlLib, NVML_DEVICE_NAME_V2_BUFFER_SIZE,
};

use super::observed::{topology, ObservedGpu, ObservedPair};
use super::{PciAddress, PcieDistance, Topology, MAX_NVLINKS};
use crate::error::{Error, Result};

pub(super) fn discover() -> Result<Topology> {
    let nvml = Nvml::open().map_err(unavailable)?;
    let devices = nvml.devices().map_err(unavailable)?;
    let gpus = devices.iter().map(|&device| nvml.observe(device)).collect::<Result<Vec<_>, _>>();
    let gpus = gpus.map_err(unavailable)?;
    Ok(topology(&gpus, |a, b| nvml.observe_pair(devices[a], devices[b])))
}

/// The initialised library.
struct Nvml(NvmlLib);

/// Calls a function of the library. The error is a text with the reason.
///
/// # Safety
///
/// The library is initialised, and the arguments are valid for the function.
macro_rules! ask {
    ($nvml:expr, $function:ident($($argument:expr),*)) => {
        match &$nvml.$function {
            Ok(function) => check(&$nvml, function($($argument),*)),
            Err(error) => Err(error.to_string()),
        }
    };
}

impl Nvml {
    fn open() -> Result<Self, String> {
        // SAFETY: loads the driver's library, whose initialisers may run at any time.
        let library = unsafe { NvmlLib::new("libnvidia-ml.so.1") }.map_err(|error| error.to_string())?;
        // SAFETY: this call initialises the library; it takes no arguments.
        unsafe { ask!(library, nvmlInit_v2()) }?;
        Ok(Self(library))
    }

    fn devices(&self) -> Result<Vec<nvmlDevice_t>, String> {
        let mut count = 0;
        // SAFETY: the library is initialised; the call writes one number.
        unsafe { ask!(self.0, nvmlDeviceGetCount_v2(&mut count)) }?;
        let device = |index| {
            let mut device = std::ptr::null_mut();
            // SAFETY: the library is initialised; the call writes one handle.
            unsafe { ask!(self.0, nvmlDeviceGetHandleByIndex_v2(index, &mut device)) }.map(|()| device)
        };
        (0..count).map(device).collect()
    }

    fn observe(&self, device: nvmlDevice_t) -> Result<ObservedGpu, String> {
        let mut info = NO_PCI_INFO;
        // SAFETY: the handle comes from the library; the call writes one struct.
        unsafe { ask!(self.0, nvmlDeviceGetPciInfo_v3(device, &mut info)) }?;
        let active = (0..MAX_NVLINKS).filter(|&link| self.is_active(device, link));
        Ok(ObservedGpu {
            name: self.name(device),
            pci: address(&info),
            nvlinks: active.map(|link| self.remote(device, link)).collect(),
        })
    }

    fn name(&self, device: nvmlDevice_t) -> Option<String> {
        let mut name = [0; NVML_DEVICE_NAME_V2_BUFFER_SIZE as usize];
        let length = NVML_DEVICE_NAME_V2_BUFFER_SIZE;
        // SAFETY: the handle comes from the library; the call writes at most `length` bytes, including a zero.
        unsafe { ask!(self.0, nvmlDeviceGetName(device, name.as_mut_ptr(), length)) }.ok()?;
        let name = name.map(|byte| byte as u8);
        Some(CStr::from_bytes_until_nul(&name).ok()?.to_str().ok()?.into())
    }

    /// Returns whether an NVLink is active. NVML returns an error for a GPU without NVLink.
    fn is_active(&self, device: nvmlDevice_t, link: u32) -> bool {
        let mut state = 0;
        // SAFETY: the handle comes from the library; the call writes one number.
        let answer = unsafe { ask!(self.0, nvmlDeviceGetNvLinkState(device, link, &mut state)) };
        answer.is_ok() && state == nvmlEnableState_enum_NVML_FEATURE_ENABLED
    }

    /// Returns the address of the device at the far end of a link.
    fn remote(&self, device: nvmlDevice_t, link: u32) -> Option<PciAddress> {
        let mut info = NO_PCI_INFO;
        // SAFETY: the handle comes from the library; the call writes one struct.
        let answer = unsafe { ask!(self.0, nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, &mut info)) };
        answer.ok().map(|()| address(&info))
    }

    fn observe_pair(&self, a: nvmlDevice_t, b: nvmlDevice_t) -> ObservedPair {
        let read = self.is_capable(a, b, nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_READ);
        let write = self.is_capable(a, b, nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_WRITE);
        let nvlink = self.is_capable(a, b, nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_NVLINK);
        ObservedPair {
            distance: self.distance(a, b),
            nvlink: nvlink.unwrap_or(false),
            access: read.zip(write).map(|(read, write)| read && write),
        }
    }

    fn is_capable(&self, a: nvmlDevice_t, b: nvmlDevice_t, of: nvmlGpuP2PCapsIndex_t) -> Option<bool> {
        let mut status = 0;
        // SAFETY: the handles come from the library; the call writes one number.
        let answer = unsafe { ask!(self.0, nvmlDeviceGetP2PStatus(a, b, of, &mut status)) };
        answer.ok().map(|()| status == nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_OK)
    }

    fn distance(&self, a: nvmlDevice_t, b: nvmlDevice_t) -> Option<PcieDistance> {
        let mut level = 0;
        // SAFETY: the handles come from the library; the call writes one number.
        unsafe { ask!(self.0, nvmlDeviceGetTopologyCommonAncestor(a, b, &mut level)) }.ok()?;
        distance(level)
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: initialised by `open`; no handle is used after this. An error changes nothing.
        let _ = unsafe { ask!(self.0, nvmlShutdown()) };
    }
}

const NO_PCI_INFO: nvmlPciInfo_t = nvmlPciInfo_t {
    busIdLegacy: [0; 16],
    domain: 0,
    bus: 0,
    device: 0,
    pciDeviceId: 0,
    pciSubSystemId: 0,
    busId: [0; 32],
};

/// Converts a status to a result, with the library's description of the error.
fn check(nvml: &NvmlLib, status: nvmlReturn_t) -> Result<(), String> {
    if status == nvmlReturn_enum_NVML_SUCCESS {
        return Ok(());
    }
    let Ok(words) = &nvml.nvmlErrorString else {
        return Err(format!("status {status}"));
    };
    // SAFETY: the function accepts any number, even before initialisation, and returns a constant string.
    let words = unsafe { CStr::from_ptr(words(status)) };
    Err(words.to_string_lossy().into_owned())
}

fn distance(level: nvmlGpuTopologyLevel_t) -> Option<PcieDistance> {
    #[allow(non_upper_case_globals)] // as the header has them
    Some(match level {
        nvmlGpuLevel_enum_NVML_TOPOLOGY_INTERNAL => PcieDistance::Internal,
        nvmlGpuLevel_enum_NVML_TOPOLOGY_SINGLE => PcieDistance::SingleSwitch,
        nvmlGpuLevel_enum_NVML_TOPOLOGY_MULTIPLE => PcieDistance::MultipleSwitches,
        nvmlGpuLevel_enum_NVML_TOPOLOGY_HOSTBRIDGE => PcieDistance::HostBridge,
        nvmlGpuLevel_enum_NVML_TOPOLOGY_NODE => PcieDistance::Node,
        nvmlGpuLevel_enum_NVML_TOPOLOGY_SYSTEM => PcieDistance::System,
        _ => return None,
    })
}

fn address(info: &nvmlPciInfo_t) -> PciAddress {
    PciAddress { domain: info.domain, bus: info.bus as u8, device: info.device as u8, function: 0 }
}

fn unavailable(reason: String) -> Error {
    Error::Unavailable { what: "the topology of this machine".into(), reason: format!("NVML: {reason}") }
}
