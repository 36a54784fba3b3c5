//! Who reaches whom, and by what link.
//!
//! A [`Topology`] is the matrix that `nvidia-smi topo -m` prints: found on this machine by [`Topology::discover`], or read
//! from such a printout by [`Topology::parse`]. A plan needs one fact of it, the [`LinkClass`] of the ranks' devices.
//!
//! ```
//! use fast_allreduce::topology::{LinkClass, Topology};
//!
//! # fn main() -> fast_allreduce::Result<()> {
//! let topology = Topology::parse(
//!     "        GPU0  GPU1  GPU2  CPU Affinity
//!      GPU0     X   NV4   SYS   0-31
//!      GPU1   NV4     X   SYS   0-31
//!      GPU2   SYS   SYS     X   32-63",
//! )?;
//! assert_eq!(topology.class(&[0, 1])?, LinkClass::NvLinkMesh);
//! assert_eq!(topology.class(&[0, 1, 2])?, LinkClass::Pcie);
//! # Ok(())
//! # }
//! ```

mod matrix;
#[cfg(feature = "cuda")]
mod nvml;
#[cfg(any(feature = "cuda", test))]
mod observed;
mod pci;
#[cfg(test)]
pub(crate) mod recorded;

pub(crate) use matrix::quoted;
pub use pci::PciAddress;

use crate::error::{Error, Result};

/// The most NVLinks that a GPU has (`NVML_NVLINK_MAX_LINKS`).
const MAX_NVLINKS: u32 = 18;

/// How far apart two PCIe devices are, nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PcieDistance {
    /// On one board (`PSB`).
    Internal,
    /// Below one PCIe switch (`PIX`).
    SingleSwitch,
    /// Below several PCIe switches of one host bridge (`PXB`).
    MultipleSwitches,
    /// Across a host bridge, the CPU (`PHB`).
    HostBridge,
    /// Across host bridges of one NUMA node (`NODE`).
    Node,
    /// Across NUMA nodes (`SYS`).
    System,
}

impl PcieDistance {
    const ALL: [Self; 6] = [
        Self::Internal,
        Self::SingleSwitch,
        Self::MultipleSwitches,
        Self::HostBridge,
        Self::Node,
        Self::System,
    ];

    /// Its name in nvidia-smi's matrix.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Internal => "PSB",
            Self::SingleSwitch => "PIX",
            Self::MultipleSwitches => "PXB",
            Self::HostBridge => "PHB",
            Self::Node => "NODE",
            Self::System => "SYS",
        }
    }
}

/// What connects two GPUs. Whether one may access the other's memory is a fact of its own: [`Topology::reachable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Link {
    /// They are the same GPU.
    SameDevice,
    /// NVLinks that end in the other GPU.
    NvLink {
        /// Links between the two.
        lanes: u32,
    },
    /// NVLinks that end in a switch, which gives all of them to any pair.
    NvSwitch {
        /// Links from each of the two to the switch.
        lanes: u32,
    },
    /// PCIe alone.
    Pcie {
        /// What the path crosses.
        distance: PcieDistance,
    },
    /// No path is known.
    None,
}

/// The worst link among a world's devices, best first: what a plan is made from. The default is for links that are not
/// known: [`LinkClass::Pcie`], for which a plan asks the least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum LinkClass {
    /// All ranks are on one GPU.
    SameDevice,
    /// Every pair has the full NVLink bandwidth of a GPU.
    NvSwitch,
    /// Every pair has NVLinks of its own.
    NvLinkMesh,
    /// Some pair has PCIe alone.
    #[default]
    Pcie,
    /// Some pair cannot access each other's memory.
    Unreachable,
}

impl LinkClass {
    /// All classes, best first.
    pub const ALL: [Self; 5] =
        [Self::SameDevice, Self::NvSwitch, Self::NvLinkMesh, Self::Pcie, Self::Unreachable];

    /// Its name in text: `"same-device"`, ...
    pub const fn name(self) -> &'static str {
        match self {
            Self::SameDevice => "same-device",
            Self::NvSwitch => "nvswitch",
            Self::NvLinkMesh => "nvlink-mesh",
            Self::Pcie => "pcie",
            Self::Unreachable => "unreachable",
        }
    }
}

impl std::fmt::Display for LinkClass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// One GPU of a [`Topology`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Gpu {
    /// Its number in nvidia-smi's matrix. CUDA numbers devices by another order unless told otherwise: compare
    /// [`Gpu::pci`].
    pub number: u32,
    /// Its product name; a printed matrix does not have it.
    pub name: Option<String>,
    /// Its PCI address; a printed matrix does not have it.
    pub pci: Option<PciAddress>,
}

/// The GPUs of a machine and their links.
///
/// GPUs are named by their index here, which is their position in the matrix. `Display` prints what `nvidia-smi topo -m`
/// does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    gpus: Vec<Gpu>,
    /// `[a * gpus + b]`, symmetric.
    links: Vec<Link>,
    /// `[a * gpus + b]`: a may access b's memory.
    reachable: Vec<bool>,
}

impl Topology {
    /// `link(a, b)` is asked once for each pair a < b. Whatever has a link is taken as reachable.
    fn new(gpus: Vec<Gpu>, mut link: impl FnMut(usize, usize) -> Link) -> Self {
        let count = gpus.len();
        let mut links = vec![Link::SameDevice; count * count];
        for a in 0..count {
            for b in a + 1..count {
                links[a * count + b] = link(a, b);
                links[b * count + a] = links[a * count + b];
            }
        }
        let reachable = links.iter().map(|&link| link != Link::None).collect();
        Self { gpus, links, reachable }
    }

    /// Asks NVML for this machine's GPUs. It is loaded when this is called.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] with NVML's reason: no driver, no permission; and in a build without the feature `cuda`.
    pub fn discover() -> Result<Self> {
        #[cfg(feature = "cuda")]
        return nvml::discover();
        #[cfg(not(feature = "cuda"))]
        Err(Error::Unavailable {
            what: "the topology of this machine".into(),
            reason: "this build is without the feature `cuda`".into(),
        })
    }

    /// Replaces what is known of peer access: `can_access(a, b)` says whether a may access b's memory, and is asked for
    /// every ordered pair of different GPUs.
    ///
    /// # Errors
    ///
    /// Those of `can_access`.
    pub fn with_peer_access(
        mut self,
        mut can_access: impl FnMut(usize, usize) -> Result<bool>,
    ) -> Result<Self> {
        let count = self.gpus.len();
        for a in 0..count {
            for b in (0..count).filter(|&b| b != a) {
                self.reachable[a * count + b] = can_access(a, b)?;
            }
        }
        Ok(self)
    }

    /// The GPUs, by index.
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// The index of the GPU at a PCI address.
    pub fn find(&self, pci: PciAddress) -> Option<usize> {
        self.gpus.iter().position(|gpu| gpu.pci == Some(pci))
    }

    /// What connects two GPUs; `None` for an index that no GPU has.
    pub fn link(&self, a: usize, b: usize) -> Option<Link> {
        Some(self.links[self.pair(a, b)?])
    }

    /// Whether `a` may access the memory of `b`; false for an index that no GPU has.
    pub fn reachable(&self, a: usize, b: usize) -> bool {
        self.pair(a, b).is_some_and(|pair| self.reachable[pair])
    }

    fn pair(&self, a: usize, b: usize) -> Option<usize> {
        let count = self.gpus.len();
        (a < count && b < count).then(|| a * count + b)
    }

    /// The worst link among the GPUs of a world, given the index of each rank's GPU. A world of one rank, or of none, is
    /// [`LinkClass::SameDevice`].
    ///
    /// Ranks that see different parts of a machine can come to different classes: agree on the worst before planning.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for an index that no GPU has.
    pub fn class(&self, ranks: &[usize]) -> Result<LinkClass> {
        if let Some(index) = ranks.iter().find(|&&index| index >= self.gpus.len()) {
            return Err(Error::InvalidSetting {
                name: "index of a rank's GPU",
                value: format!("{index} (of {} GPUs)", self.gpus.len()),
                expected: "an index below the number of GPUs",
            });
        }
        let pairs = ranks.iter().flat_map(|&a| ranks.iter().map(move |&b| (a, b)));
        Ok(pairs.map(|(a, b)| self.pair_class(a, b)).max().unwrap_or(LinkClass::SameDevice))
    }

    fn pair_class(&self, a: usize, b: usize) -> LinkClass {
        if !self.reachable(a, b) {
            return LinkClass::Unreachable;
        }
        match self.link(a, b) {
            Some(Link::SameDevice) => LinkClass::SameDevice,
            Some(Link::NvSwitch { .. }) => LinkClass::NvSwitch,
            Some(Link::NvLink { .. }) => LinkClass::NvLinkMesh,
            // The driver may know a way that NVML has no name for; then it is not NVLink.
            Some(Link::Pcie { .. } | Link::None) => LinkClass::Pcie,
            None => LinkClass::Unreachable,
        }
    }
}
