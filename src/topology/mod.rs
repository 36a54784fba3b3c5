//! Links between the GPUs of a machine, and which GPU can access which; how its CPUs are grouped ([`Cpus`]).
//!
//! A [`Topology`] is the matrix that `nvidia-smi topo -m` prints. [`Topology::discover`] queries it on this machine;
//! [`Topology::parse`] reads such a printout. Plans depend only on the [`LinkClass`] of the ranks' devices.
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

mod cpus;
mod matrix;
#[cfg(feature = "cuda")]
mod nvml;
#[cfg(any(feature = "cuda", test))]
mod observed;
mod pci;
#[cfg(test)]
pub(crate) mod recorded;

pub(crate) use cpus::formatted;
pub use cpus::Cpus;
pub(crate) use matrix::quoted;
pub use pci::PciAddress;

use crate::error::{Error, Result};

/// The most NVLinks that a GPU has (`NVML_NVLINK_MAX_LINKS`).
const MAX_NVLINKS: u32 = 18;

/// Distance between two PCIe devices, nearest first.
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

    /// Returns its name in nvidia-smi's matrix.
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

/// Connection between two GPUs. [`Topology::reachable`] says whether one may access the other's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Link {
    /// They are the same GPU.
    SameDevice,
    /// NVLinks that end in the other GPU.
    NvLink {
        /// Links between the two.
        lanes: u32,
    },
    /// NVLinks to a switch: every pair has the bandwidth of all of them.
    NvSwitch {
        /// Links from each of the two to the switch.
        lanes: u32,
    },
    /// Only PCIe.
    Pcie {
        /// Length of the path.
        distance: PcieDistance,
    },
    /// No path is known.
    None,
}

/// Class of the worst link among a world's devices, best first. Plans depend on it. The default, for unknown links, is
/// [`LinkClass::Pcie`], whose plans require the least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum LinkClass {
    /// All ranks are on one GPU.
    SameDevice,
    /// Every pair has the full NVLink bandwidth of a GPU.
    NvSwitch,
    /// Every pair has direct NVLinks.
    NvLinkMesh,
    /// Some pair has only PCIe.
    #[default]
    Pcie,
    /// In some pair, a GPU cannot access the other's memory, or the ranks do not use that access: they share pinned
    /// host memory.
    Unreachable,
}

impl LinkClass {
    /// All classes, best first.
    pub const ALL: [Self; 5] =
        [Self::SameDevice, Self::NvSwitch, Self::NvLinkMesh, Self::Pcie, Self::Unreachable];

    /// Returns its name: `"same-device"`, `"nvswitch"`, `"nvlink-mesh"`, `"pcie"` or `"unreachable"`.
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
    /// Its number in nvidia-smi's matrix. CUDA's device ordinals have a different order by default: identify a GPU by
    /// [`Gpu::pci`].
    pub number: u32,
    /// Product name; `None` if the matrix was parsed from text.
    pub name: Option<String>,
    /// PCI address; `None` if the matrix was parsed from text.
    pub pci: Option<PciAddress>,
}

/// The GPUs of a machine and their links.
///
/// GPUs are identified by their index, which is their position in the matrix. `Display` writes the format of
/// `nvidia-smi topo -m`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    gpus: Vec<Gpu>,
    /// `[a * gpus + b]`, symmetric.
    links: Vec<Link>,
    /// `[a * gpus + b]`: GPU a may access the memory of GPU b.
    reachable: Vec<bool>,
}

impl Topology {
    /// Creates a topology. `link(a, b)` is called once for each pair a < b. Every pair with a link is taken as
    /// reachable.
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

    /// Queries NVML for this machine's GPUs. NVML is loaded by this call.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] with NVML's reason, such as a missing driver or permission, and in a build without the
    /// feature `cuda`.
    ///
    /// ```no_run
    /// use fast_allreduce::topology::Topology;
    ///
    /// let topology = Topology::discover()?;
    /// println!("{} GPUs:\n{topology}", topology.gpus().len());
    /// # Ok::<_, fast_allreduce::Error>(())
    /// ```
    pub fn discover() -> Result<Self> {
        #[cfg(feature = "cuda")]
        return nvml::discover();
        #[cfg(not(feature = "cuda"))]
        Err(Error::Unavailable {
            what: "the topology of this machine".into(),
            reason: "this build is without the feature `cuda`".into(),
        })
    }

    /// Replaces the information on peer access. `can_access(a, b)` returns whether GPU a may access the memory of GPU
    /// b; it is called for every ordered pair of different GPUs.
    ///
    /// # Errors
    ///
    /// The first error of `can_access`.
    ///
    /// ```
    /// use fast_allreduce::topology::{LinkClass, Topology};
    ///
    /// let topology = Topology::parse("  GPU0 GPU1\nGPU0 X PIX\nGPU1 PIX X")?;
    /// let isolated = topology.with_peer_access(|_, _| Ok(false))?;
    /// assert!(!isolated.reachable(0, 1));
    /// assert_eq!(isolated.class(&[0, 1])?, LinkClass::Unreachable);
    /// # Ok::<_, fast_allreduce::Error>(())
    /// ```
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

    /// Returns the GPUs, by index.
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// Returns the index of the GPU at a PCI address.
    pub fn find(&self, pci: PciAddress) -> Option<usize> {
        self.gpus.iter().position(|gpu| gpu.pci == Some(pci))
    }

    /// Returns the connection between two GPUs; `None` if an index is out of range.
    pub fn link(&self, a: usize, b: usize) -> Option<Link> {
        Some(self.links[self.pair(a, b)?])
    }

    /// Returns whether GPU `a` may access the memory of GPU `b`; false if an index is out of range.
    pub fn reachable(&self, a: usize, b: usize) -> bool {
        self.pair(a, b).is_some_and(|pair| self.reachable[pair])
    }

    fn pair(&self, a: usize, b: usize) -> Option<usize> {
        let count = self.gpus.len();
        (a < count && b < count).then(|| a * count + b)
    }

    /// Returns the class of the worst link among the GPUs of a world, given the index of each rank's GPU. It is
    /// [`LinkClass::SameDevice`] for a world of one rank or none.
    ///
    /// Ranks that see different parts of a machine may get different classes: use the worst of them for planning.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] if an index is out of range.
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
            // The driver may know a path that NVML cannot describe; it is not NVLink.
            Some(Link::Pcie { .. } | Link::None) => LinkClass::Pcie,
            None => LinkClass::Unreachable,
        }
    }
}
