//! What a rank learns when it meets the others: who shares its process and its GPU, and what connects the GPUs.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;

use super::api;
use super::driver::{self, driver};
use super::identity::Identity;
use super::residency::{Reservation, Room, Sharers};
use crate::bootstrap::{all_succeeded, Bootstrap};
use crate::error::{Error, Result};
use crate::topology::{Gpu, LinkClass, PciAddress, Topology};

/// What a rank learns of the others when it joins them.
#[derive(Debug)]
pub(super) struct DeviceLinks {
    pub same_process: bool,
    pub world_size: usize,
    /// Ranks on the most crowded GPU.
    pub ranks_per_device: usize,
    /// The most of a launch, which all ranks have room for.
    pub blocks: usize,
    pub link: LinkClass,
    /// Two ranks, with their GPUs, of which one GPU cannot access the other's memory, as far as this process sees them.
    apart: Option<[(usize, String); 2]>,
    /// The room for them.
    pub reservation: Option<Arc<Reservation>>,
}

impl Default for DeviceLinks {
    fn default() -> Self {
        let link = LinkClass::SameDevice;
        let (apart, reservation) = (None, None);
        Self { same_process: true, world_size: 1, ranks_per_device: 1, blocks: 1, link, apart, reservation }
    }
}

impl DeviceLinks {
    /// Collective. `own` is this rank's identity; `most`, the blocks of a launch that it was given.
    pub fn meet(
        own: Result<Identity>,
        most: Option<usize>,
        one_at_a_time: bool,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<Self> {
        let own = all_succeeded(own, bootstrap, timeout)?;
        let all = bootstrap.all_gather(&own.encode(), timeout)?.into_iter().enumerate();
        let all = all.map(|(rank, bytes)| Identity::decode(rank, &bytes)).collect::<Result<Vec<_>>>()?;
        let link = link_class(&all);
        let on = |uuid: &[u8; 16]| all.iter().filter(|other| other.uuid == *uuid).count();
        let sharers = Sharers {
            gpu: own.uuid,
            multiprocessors: own.multiprocessors as usize,
            communicator: (all[0].process, all[0].communicator),
            ranks: on(&own.uuid),
        };
        let most = most.unwrap_or(usize::MAX);
        let (reservation, room) = match one_at_a_time {
            true => (
                None,
                Room { blocks: (sharers.multiprocessors / sharers.ranks).clamp(1, most), communicators: 0 },
            ),
            false => {
                let (reservation, room) = Reservation::take(sharers, most);
                (Some(reservation), room)
            }
        };
        // Ranks may see different parts of the machine, and have different room: the worst of any holds for all.
        let found = Found { link: link as u8, multiprocessors: own.multiprocessors, room };
        let found = bootstrap.all_gather(&found.encode(), timeout)?.into_iter().enumerate();
        let found = found.map(|(rank, bytes)| Found::decode(rank, &bytes)).collect::<Result<Vec<_>>>()?;
        if let Some((rank, found)) = found.iter().enumerate().find(|(_, found)| found.room.blocks == 0) {
            return Err(found.refusal(rank, on(&all[rank].uuid)));
        }
        let worst = found.iter().map(|found| found.link).max().unwrap_or(link as u8);
        let link =
            LinkClass::ALL.into_iter().find(|&class| class as u8 == worst).unwrap_or(LinkClass::Unreachable);
        let blocks = found.iter().map(|found| found.room.blocks).min().unwrap_or(1);
        if let Some(reservation) = &reservation {
            reservation.keep(blocks);
        }
        Ok(Self {
            same_process: all.iter().all(|other| other.process == own.process),
            world_size: all.len(),
            ranks_per_device: all.iter().map(|other| on(&other.uuid)).max().unwrap_or(1),
            blocks,
            link,
            apart: if link == LinkClass::Unreachable { first_pair_apart(&all) } else { None },
            reservation,
        })
    }

    /// Whether a GPU of the world cannot access another one's memory.
    pub fn is_apart(&self) -> bool {
        self.link == LinkClass::Unreachable
    }

    /// What that means, and what to do.
    pub fn why_apart(&self) -> String {
        let which = match &self.apart {
            Some([(a, of_a), (b, of_b)]) => {
                format!("rank {a}'s GPU ({of_a}) cannot access the memory of rank {b}'s ({of_b})")
            }
            None => "some rank's GPU cannot access the memory of another's".into(),
        };
        format!(
            "{which}, which calls need: there is no NVLink between them, and peer access over PCIe is not supported, or disabled by \
             the virtual machine, the IOMMU or access control services (ACS). `nvidia-smi topo -p2p r` shows which pairs have it: \
             give ranks such GPUs, or use a library that goes through host memory, such as NCCL"
        )
    }

    /// Whether every pointer of a rank is good on every rank as it is.
    pub fn same_device_and_process(&self) -> bool {
        self.same_process && self.ranks_per_device == self.world_size
    }
}

/// What a rank has found when it knows who the others are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Found {
    /// A [`LinkClass`].
    link: u8,
    /// Of its GPU.
    multiprocessors: u32,
    room: Room,
}

impl Found {
    const BYTES: usize = 1 + 3 * 4;

    fn encode(self) -> Vec<u8> {
        let mut bytes = vec![self.link];
        // A GPU's blocks, and communicators that have some of them, are no more than its multiprocessors.
        for word in [self.multiprocessors, self.room.blocks as u32, self.room.communicators as u32] {
            bytes.extend(word.to_le_bytes());
        }
        bytes
    }

    /// # Errors
    ///
    /// [`Error::Malformed`] naming `rank` if the bytes are nothing of the kind.
    fn decode(rank: usize, bytes: &[u8]) -> Result<Self> {
        let malformed =
            || Error::Malformed { rank, reason: "what it found of its GPU does not decode".into() };
        let bytes: &[u8; Self::BYTES] = bytes.try_into().map_err(|_| malformed())?;
        let word = |index: usize| {
            let at = 1 + 4 * index;
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let room = Room { blocks: word(1) as usize, communicators: word(2) as usize };
        Ok(Self { link: bytes[0], multiprocessors: word(0), room })
    }

    /// Why there is no communicator.
    fn refusal(self, rank: usize, ranks: usize) -> Error {
        let Self { multiprocessors, room: Room { communicators, .. }, .. } = self;
        Error::Unavailable {
            what: "a communicator whose blocks all run at the same time".into(),
            reason: format!(
                "{communicators} communicators of rank {rank}'s process have so many of the {multiprocessors} blocks \
                 that its GPU runs at once that {ranks} more are not left; drop one of them, give each fewer blocks \
                 (Cuda::max_blocks), or promise that no two are in use at the same time (Cuda::one_at_a_time)"
            ),
        }
    }
}

/// See [`Cuda::topology`](super::Cuda::topology).
pub(super) fn topology() -> Result<Topology> {
    let topology = Topology::discover()?;
    if driver::require().is_err() {
        return Ok(topology);
    }
    // SAFETY: it may be called at any time, and again.
    unsafe { api::cuInit(0) }.map_err(driver("cuInit"))?;
    let visible = |gpu: &Gpu| gpu.pci.and_then(driver::device_at);
    let devices = topology.gpus().iter().map(visible).collect::<Vec<_>>();
    let known = topology.clone();
    topology.with_peer_access(|a, b| match (devices[a], devices[b]) {
        (Some(a), Some(b)) => driver::can_access_peer(a, b),
        _ => Ok(known.reachable(a, b)),
    })
}

/// The worst link among the ranks' GPUs, as far as this process can tell: by NVML, and where that is not to be had, by the
/// driver. What neither tells is taken as PCIe, which every plan works on; whether memory can be shared at all is found out
/// by sharing it.
fn link_class(ranks: &[Identity]) -> LinkClass {
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

/// The first two ranks whose GPUs this process sees, of which one has no access to the other's memory.
fn first_pair_apart(ranks: &[Identity]) -> Option<[(usize, String); 2]> {
    let device = |rank: usize| driver::device_at(ranks[rank].pci.parse().ok()?);
    let all = 0..ranks.len();
    let mut pairs = all.clone().flat_map(|a| all.clone().map(move |b| (a, b)));
    let is_apart = |&(a, b): &(usize, usize)| {
        let pair = device(a).zip(device(b)).filter(|(a, b)| a != b);
        pair.is_some_and(|(a, b)| matches!(driver::can_access_peer(a, b), Ok(false)))
    };
    let (a, b) = pairs.find(is_apart)?;
    Some([a, b].map(|rank| (rank, ranks[rank].pci.clone())))
}

/// `None` unless this process sees all of the GPUs.
fn by_driver(gpus: &[PciAddress]) -> Option<LinkClass> {
    let mut devices = gpus.iter().map(|&pci| driver::device_at(pci)).collect::<Option<Vec<_>>>()?;
    devices.sort_unstable();
    devices.dedup();
    let ordered = devices.iter().flat_map(|&a| devices.iter().map(move |&b| (a, b)));
    let pairs = ordered.filter(|(a, b)| a != b).map(|(a, b)| PeerAttributes::of(a, b));
    Some(PeerAttributes::worst_class(&pairs.collect::<Option<Vec<_>>>()?))
}

/// What the driver says of the way from one GPU to another (`cuDeviceGetP2PAttribute`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PeerAttributes {
    /// `ACCESS_SUPPORTED`: the one may access the other's memory.
    access: bool,
    /// `NATIVE_ATOMIC_SUPPORTED`: the link carries atomic operations.
    native_atomics: bool,
    /// `PERFORMANCE_RANK`: orders the ways of a machine, and means nothing between machines.
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

    /// The driver does not name the link. It does say whether atomic operations on the peer's memory are done there, which
    /// NVLink carries and PCIe between GPUs does not ("the link between the devices supports native atomic operations":
    /// CUDA Driver API, `cuDeviceGetP2PAttribute`). Whether NVLinks end in a switch it does not say: the lesser class.
    fn class(self) -> LinkClass {
        match (self.access, self.native_atomics) {
            (false, _) => LinkClass::Unreachable,
            (true, true) => LinkClass::NvLinkMesh,
            (true, false) => LinkClass::Pcie,
        }
    }

    /// Of all ordered pairs of different GPUs. Pairs with atomics whose performance differs are no mesh of equal links, but a
    /// part of them goes another way: over a second GPU, or over fewer links. A plan for NVLink still holds there.
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
    fn what_a_rank_found_travels() {
        let found = Found { link: 3, multiprocessors: 132, room: Room { blocks: 64, communicators: 9 } };
        assert_eq!(Found::decode(1, &found.encode()), Ok(found));
        for bytes in [0, Found::BYTES - 1, Found::BYTES + 1] {
            assert!(matches!(Found::decode(1, &vec![0; bytes]), Err(Error::Malformed { rank: 1, .. })));
        }
    }

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
        // Links that differ are NVLinks all the same.
        assert_eq!(class(4, |a, b| attributes(true, true, ((a + b) % 2) as i32)), LinkClass::NvLinkMesh);
        // One direction alone is not enough.
        assert_eq!(class(2, |a, _| if a == 0 { NVLINK } else { NONE }), LinkClass::Unreachable);
    }

    #[test]
    fn a_rank_of_performance_alone_tells_nothing() {
        for rank in [-1, 0, 1, i32::MAX] {
            assert_eq!(attributes(true, false, rank).class(), LinkClass::Pcie);
            assert_eq!(attributes(true, true, rank).class(), LinkClass::NvLinkMesh);
            assert_eq!(attributes(false, true, rank).class(), LinkClass::Unreachable);
        }
    }
}
