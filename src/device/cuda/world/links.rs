//! Links between GPUs, from NVML or the driver.

use cudarc::driver::sys;

use super::identity::Identity;
use crate::device::cuda::driver::{self, api, driver};
use crate::error::Result;
use crate::topology::{Gpu, LinkClass, PciAddress, Topology};

/// Returns the GPUs of this machine and their links: see [`Cuda::topology`](crate::device::cuda::Cuda::topology).
pub(crate) fn topology() -> Result<Topology> {
    let topology = Topology::discover()?;
    if driver::require().is_err() {
        return Ok(topology);
    }
    // SAFETY: the call is allowed at any time and any number of times.
    unsafe { api::cuInit(0) }.map_err(driver("cuInit"))?;
    let visible = |gpu: &Gpu| gpu.pci.and_then(driver::device_at);
    let devices = topology.gpus().iter().map(visible).collect::<Vec<_>>();
    let known = topology.clone();
    topology.with_peer_access(|a, b| match (devices[a], devices[b]) {
        (Some(a), Some(b)) => driver::can_access_peer(a, b),
        _ => Ok(known.reachable(a, b)),
    })
}

/// Returns the worst link between the ranks' GPUs, as far as this process can tell: from NVML, and if that is
/// unavailable, from the driver. Unknown links count as PCIe, for which every plan works; whether memory can be
/// shared at all is found out when it is shared.
pub(super) fn link_class(ranks: &[Identity]) -> LinkClass {
    if ranks.iter().all(|rank| rank.uuid == ranks[0].uuid) {
        return LinkClass::SameDevice;
    }
    let Ok(gpus) = ranks.iter().map(|rank| rank.pci.parse::<PciAddress>()).collect::<Result<Vec<_>>>() else {
        return LinkClass::Pcie;
    };
    let by_nvml = topology().ok().and_then(|topology| {
        let gpus = gpus.iter().map(|&pci| topology.find(pci)).collect::<Option<Vec<_>>>()?;
        topology.class(&gpus).ok()
    });
    by_nvml.or_else(|| by_driver(&gpus)).unwrap_or(LinkClass::Pcie)
}

/// Returns the first two ranks whose GPUs this process sees and one of which has no access to the other's memory.
pub(super) fn first_unreachable_pair(ranks: &[Identity]) -> Option<[(usize, String); 2]> {
    let device = |rank: usize| driver::device_at(ranks[rank].pci.parse().ok()?);
    let all = 0..ranks.len();
    let mut pairs = all.clone().flat_map(|a| all.clone().map(move |b| (a, b)));
    let is_unreachable = |&(a, b): &(usize, usize)| {
        let pair = device(a).zip(device(b)).filter(|(a, b)| a != b);
        pair.is_some_and(|(a, b)| matches!(driver::can_access_peer(a, b), Ok(false)))
    };
    let (a, b) = pairs.find(is_unreachable)?;
    Some([a, b].map(|rank| (rank, ranks[rank].pci.clone())))
}

/// Returns the worst link according to the driver; `None` unless this process sees all of the GPUs.
fn by_driver(gpus: &[PciAddress]) -> Option<LinkClass> {
    let mut devices = gpus.iter().map(|&pci| driver::device_at(pci)).collect::<Option<Vec<_>>>()?;
    devices.sort_unstable();
    devices.dedup();
    let ordered = devices.iter().flat_map(|&a| devices.iter().map(move |&b| (a, b)));
    let pairs = ordered.filter(|(a, b)| a != b).map(|(a, b)| PeerAttributes::of(a, b));
    Some(PeerAttributes::worst_class(&pairs.collect::<Option<Vec<_>>>()?))
}

/// Attributes of the link from one GPU to another (`cuDeviceGetP2PAttribute`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PeerAttributes {
    /// `ACCESS_SUPPORTED`: the first GPU can access the memory of the second.
    access: bool,
    /// `NATIVE_ATOMIC_SUPPORTED`: the link carries atomic operations.
    native_atomics: bool,
    /// `PERFORMANCE_RANK`: orders the links of one machine; it cannot be compared between machines.
    performance_rank: i32,
}

impl PeerAttributes {
    fn of(from: sys::CUdevice, to: sys::CUdevice) -> Option<Self> {
        use sys::CUdevice_P2PAttribute as Attribute;
        let value = |attribute| driver::peer_attribute(from, to, attribute).ok();
        Some(Self {
            access: value(Attribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)? != 0,
            native_atomics: value(Attribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)? != 0,
            performance_rank: value(Attribute::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK)?,
        })
    }

    /// Returns the class of the link. The driver does not name the link, but says whether it supports native atomic
    /// operations on the peer's memory, which NVLink does and PCIe between GPUs does not (CUDA Driver API,
    /// `cuDeviceGetP2PAttribute`). It does not say whether NVLinks end in a switch, so the lower class is taken.
    fn class(self) -> LinkClass {
        match (self.access, self.native_atomics) {
            (false, _) => LinkClass::Unreachable,
            (true, true) => LinkClass::NvLinkMesh,
            (true, false) => LinkClass::Pcie,
        }
    }

    /// Returns the worst class among all ordered pairs of different GPUs. If pairs with atomics differ in
    /// performance, the links are not an even mesh: some pairs have fewer links, or are routed through another GPU. A
    /// plan for NVLink is still valid there.
    fn worst_class(pairs: &[Self]) -> LinkClass {
        pairs.iter().map(|pair| pair.class()).max().unwrap_or(LinkClass::SameDevice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every ordered pair of `gpus` GPUs.
    fn pairs(gpus: usize, of: impl Fn(usize, usize) -> PeerAttributes) -> Vec<PeerAttributes> {
        let ordered = (0..gpus).flat_map(|a| (0..gpus).map(move |b| (a, b)));
        ordered.filter(|(a, b)| a != b).map(|(a, b)| of(a, b)).collect()
    }

    const fn attributes(access: bool, native_atomics: bool, performance_rank: i32) -> PeerAttributes {
        PeerAttributes { access, native_atomics, performance_rank }
    }

    const NVLINK: PeerAttributes = attributes(true, true, 0);
    const PCIE: PeerAttributes = attributes(true, false, 0);
    const NONE: PeerAttributes = attributes(false, false, 0);

    #[test]
    fn the_worst_pair_decides() {
        let class =
            |gpus, of: fn(usize, usize) -> PeerAttributes| PeerAttributes::worst_class(&pairs(gpus, of));
        assert_eq!(class(1, |_, _| NVLINK), LinkClass::SameDevice);
        assert_eq!(class(8, |_, _| NVLINK), LinkClass::NvLinkMesh);
        assert_eq!(class(4, |_, _| PCIE), LinkClass::Pcie);
        assert_eq!(class(2, |_, _| NONE), LinkClass::Unreachable);
        // Pairs of bridged GPUs, with PCIe between the pairs.
        assert_eq!(class(4, |a, b| if a / 2 == b / 2 { NVLINK } else { PCIE }), LinkClass::Pcie);
        // Links of different performance are still NVLinks.
        assert_eq!(class(4, |a, b| attributes(true, true, ((a + b) % 2) as i32)), LinkClass::NvLinkMesh);
        // One direction alone is not enough.
        assert_eq!(class(2, |a, _| if a == 0 { NVLINK } else { NONE }), LinkClass::Unreachable);
    }

    #[test]
    fn performance_rank_alone_decides_nothing() {
        for rank in [-1, 0, 1, i32::MAX] {
            assert_eq!(attributes(true, false, rank).class(), LinkClass::Pcie);
            assert_eq!(attributes(true, true, rank).class(), LinkClass::NvLinkMesh);
            assert_eq!(attributes(false, true, rank).class(), LinkClass::Unreachable);
        }
    }
}
