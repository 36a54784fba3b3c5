//! Recorded matrices in nvidia-smi's format, for tests of topologies and plans.

use super::Topology;

/// Eight H100 with NVSwitches, and network cards.
pub(crate) const H100_NVSWITCH: &str = include_str!("recorded/h100-8-nvswitch.txt");
/// Four A100 for PCIe, bridged in pairs.
pub(crate) const A100_BRIDGED: &str = include_str!("recorded/a100-4-bridged.txt");
/// Four A100, each with four links to every other.
pub(crate) const A100_MESH: &str = include_str!("recorded/a100-4-mesh.txt");
/// Four GPUs below PCIe switches of one CPU.
pub(crate) const PCIE: &str = include_str!("recorded/pcie-4.txt");
/// Two GPUs on different sockets.
pub(crate) const SOCKETS: &str = include_str!("recorded/pcie-2-sockets.txt");
/// Two NVLink pairs, and a GPU with only PCIe.
pub(crate) const MIXED: &str = include_str!("recorded/mixed-5.txt");

pub(crate) fn read(text: &str) -> Topology {
    Topology::parse(text).unwrap()
}
