//! Builds a [`Topology`] from what NVML reports for each GPU and each pair.

use super::{Gpu, Link, PciAddress, PcieDistance, Topology};

/// NVML's information on one GPU.
pub(super) struct ObservedGpu {
    pub name: Option<String>,
    pub pci: PciAddress,
    /// The far end of each active NVLink, where it is known.
    pub nvlinks: Vec<Option<PciAddress>>,
}

/// NVML's information on a pair of GPUs.
#[derive(Clone, Copy)]
pub(super) struct ObservedPair {
    pub distance: Option<PcieDistance>,
    /// Peer access uses NVLink.
    pub nvlink: bool,
    /// Whether peer access is possible; `None` if NVML does not know.
    pub access: Option<bool>,
}

/// Builds the topology. `pair(a, b)` is called for ordered pairs of different GPUs.
pub(super) fn topology(gpus: &[ObservedGpu], pair: impl Fn(usize, usize) -> ObservedPair) -> Topology {
    let link = |a: usize, b: usize| {
        let direct = |from: usize, to: usize| {
            gpus[from].nvlinks.iter().filter(|&&end| end == Some(gpus[to].pci)).count() as u32
        };
        // A link that ends in none of these GPUs ends in a switch, or in a GPU that this process does not see. What the
        // driver says about NVLink between this pair decides.
        let switched = |gpu: usize| {
            let ends_in_gpu = |end: &PciAddress| gpus.iter().any(|gpu| gpu.pci == *end);
            gpus[gpu].nvlinks.iter().filter(|end| !end.as_ref().is_some_and(ends_in_gpu)).count() as u32
        };
        let observed = pair(a, b);
        let (between, lanes) = (direct(a, b).max(direct(b, a)), switched(a).min(switched(b)));
        match observed.distance {
            _ if between > 0 => Link::NvLink { lanes: between },
            _ if observed.nvlink && lanes > 0 => Link::NvSwitch { lanes },
            Some(distance) => Link::Pcie { distance },
            None => Link::None,
        }
    };
    let described = gpus.iter().enumerate().map(|(index, gpu)| Gpu {
        number: index as u32,
        name: gpu.name.clone(),
        pci: Some(gpu.pci),
    });
    let mut topology = Topology::new(described.collect(), link);
    for a in 0..gpus.len() {
        for b in (0..gpus.len()).filter(|&b| b != a) {
            if let Some(access) = pair(a, b).access {
                topology.reachable[a * gpus.len() + b] = access;
            }
        }
    }
    topology
}

#[cfg(test)]
mod tests {
    use super::super::LinkClass;
    use super::*;

    fn at(bus: u8) -> PciAddress {
        PciAddress { domain: 0, bus, device: 0, function: 0 }
    }

    fn gpu(bus: u8, nvlinks: impl IntoIterator<Item = u8>) -> ObservedGpu {
        let nvlinks = nvlinks.into_iter().map(|bus| Some(at(bus))).collect();
        ObservedGpu { name: Some("test".into()), pci: at(bus), nvlinks }
    }

    const PCIE: ObservedPair =
        ObservedPair { distance: Some(PcieDistance::Node), nvlink: false, access: Some(true) };

    #[test]
    fn links_that_end_in_no_gpu_end_in_a_switch() {
        let gpus = [gpu(1, [0xa0; 18]), gpu(2, [0xa0; 18]), gpu(3, [0xa0; 17])];
        let topology = topology(&gpus, |_, _| ObservedPair { nvlink: true, ..PCIE });
        assert_eq!(topology.link(0, 1), Some(Link::NvSwitch { lanes: 18 }));
        assert_eq!(topology.link(2, 1), Some(Link::NvSwitch { lanes: 17 }));
        assert_eq!(topology.class(&[0, 1, 2]).unwrap(), LinkClass::NvSwitch);
        assert_eq!(topology.find("0000:02:00.0".parse().unwrap()), Some(1));
        assert_eq!(topology.gpus()[1].name.as_deref(), Some("test"));
    }

    #[test]
    fn links_to_gpus_are_direct_and_counted_by_pair() {
        let gpus = [gpu(1, [2, 2, 2, 3]), gpu(2, [1, 1, 1]), gpu(3, [1])];
        let topology = topology(&gpus, |_, _| PCIE);
        assert_eq!(topology.link(0, 1), Some(Link::NvLink { lanes: 3 }));
        assert_eq!(topology.link(0, 2), Some(Link::NvLink { lanes: 1 }));
        assert_eq!(topology.link(1, 2), Some(Link::Pcie { distance: PcieDistance::Node }));
    }

    #[test]
    fn links_to_a_hidden_gpu_are_not_taken_for_a_switch() {
        let gpus = [gpu(1, [9, 9]), gpu(2, [9, 9])];
        let topology = topology(&gpus, |_, _| PCIE);
        assert_eq!(topology.link(0, 1), Some(Link::Pcie { distance: PcieDistance::Node }));
    }

    #[test]
    fn access_is_as_nvml_reports_it() {
        let gpus = [gpu(1, []), gpu(2, []), gpu(3, [])];
        let topology = topology(&gpus, |a, b| match (a, b) {
            (0, 1) => ObservedPair { access: Some(false), ..PCIE },
            (0, 2) | (2, 0) => ObservedPair { access: None, ..PCIE },
            (1, 2) | (2, 1) => ObservedPair { access: None, distance: None, nvlink: false },
            _ => PCIE,
        });
        assert!(!topology.reachable(0, 1) && topology.reachable(1, 0));
        assert!(topology.reachable(0, 2) && !topology.reachable(1, 2));
        assert_eq!(topology.class(&[1, 0]).unwrap(), LinkClass::Unreachable);
        assert_eq!(topology.class(&[0, 2]).unwrap(), LinkClass::Pcie);
    }
}
