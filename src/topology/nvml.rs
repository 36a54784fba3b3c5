//! Asking NVML, which comes with the driver and is loaded when it is asked.

use nvml_wrapper::enum_wrappers::device::{P2pCapabilitiesIndex, P2pStatus, TopologyLevel};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::PciInfo;
use nvml_wrapper::{Device, Nvml};

use super::observed::{topology, ObservedGpu, ObservedPair};
use super::{PciAddress, PcieDistance, Topology, MAX_NVLINKS};
use crate::error::{Error, Result};

pub(super) fn discover() -> Result<Topology> {
    let nvml = Nvml::init().map_err(unavailable)?;
    let count = nvml.device_count().map_err(unavailable)?;
    let devices = (0..count).map(|index| nvml.device_by_index(index)).collect::<Result<Vec<_>, _>>();
    let devices = devices.map_err(unavailable)?;
    let gpus = devices.iter().map(observe).collect::<Result<Vec<_>, _>>().map_err(unavailable)?;
    Ok(topology(&gpus, |a, b| observe_pair(&nvml, &devices[a], &devices[b])))
}

fn observe(device: &Device<'_>) -> Result<ObservedGpu, NvmlError> {
    // A GPU without NVLink answers with an error to the question whether a link is active.
    let active = (0..MAX_NVLINKS)
        .map(|link| device.link_wrapper_for(link))
        .filter(|link| link.is_active().unwrap_or(false));
    Ok(ObservedGpu {
        name: device.name().ok(),
        pci: address(&device.pci_info()?),
        nvlinks: active.map(|link| link.remote_pci_info().ok().as_ref().map(address)).collect(),
    })
}

fn observe_pair(nvml: &Nvml, a: &Device<'_>, b: &Device<'_>) -> ObservedPair {
    let capable = |index| a.p2p_status(b, index).ok().map(|status| status == P2pStatus::Ok);
    let (read, write) = (capable(P2pCapabilitiesIndex::Read), capable(P2pCapabilitiesIndex::Write));
    ObservedPair {
        distance: nvml.topology_common_ancestor(a, b).ok().map(distance),
        nvlink: capable(P2pCapabilitiesIndex::NvLink).unwrap_or(false),
        access: read.zip(write).map(|(read, write)| read && write),
    }
}

fn distance(level: TopologyLevel) -> PcieDistance {
    match level {
        TopologyLevel::Internal => PcieDistance::Internal,
        TopologyLevel::Single => PcieDistance::SingleSwitch,
        TopologyLevel::Multiple => PcieDistance::MultipleSwitches,
        TopologyLevel::HostBridge => PcieDistance::HostBridge,
        TopologyLevel::Node => PcieDistance::Node,
        TopologyLevel::System => PcieDistance::System,
    }
}

fn address(info: &PciInfo) -> PciAddress {
    PciAddress { domain: info.domain, bus: info.bus as u8, device: info.device as u8, function: 0 }
}

fn unavailable(error: NvmlError) -> Error {
    Error::Unavailable { what: "the topology of this machine".into(), reason: format!("NVML: {error}") }
}
