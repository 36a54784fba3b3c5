//! Which of the host's built-in tables is for which CPU: by its name, and only where that names no known make, by what two ranks have
//! measured. A measurement depends on what else the machine does at that moment; a name does not.

use std::fmt;

use super::thresholds::MOST_NEAR_LINE_NS;
use super::Machine;

/// The makes of CPU that the host has a built-in table for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CpuMake {
    /// Cores that share a third-level cache are a few nanoseconds apart.
    Amd,
    /// Lines cross a mesh from core to core.
    Intel,
}

/// What the choice between them was made by for a CPU of another make: what two ranks of a world have measured. Not by what a copy
/// takes: in relation to that a line takes as long on CPUs of both makes (docs/tuning.md).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// From the store of one rank to the load by which another sees it, in nanoseconds.
    pub line_ns: f64,
}

impl CpuMake {
    /// All.
    pub(super) const ALL: [Self; 2] = [Self::Amd, Self::Intel];

    /// The one whose table is taken where nothing speaks for another.
    pub const DEFAULT: Self = Self::Amd;

    /// By the name of its CPU; `None` for other makes.
    pub fn of(machine: &Machine) -> Option<Self> {
        let Machine::Host { cpu, .. } = machine else { return None };
        Self::ALL.into_iter().find(|make| cpu.contains(make.name()))
    }

    /// The one whose costs are more like these. A two-shot has a barrier more than a one-shot, which costs transfers of lines: so the
    /// size from which on it is faster grows with what one takes.
    pub fn by(costs: &Costs) -> Self {
        match costs.line_ns > MOST_NEAR_LINE_NS {
            true => Self::Intel,
            false => Self::Amd,
        }
    }

    /// `"AMD"`, `"Intel"`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Amd => "AMD",
            Self::Intel => "Intel",
        }
    }
}

impl Costs {
    /// As ranks send them.
    pub(crate) fn to_bytes(self) -> [u8; 8] {
        self.line_ns.to_le_bytes()
    }

    /// `None` for what is no cost.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let line_ns = f64::from_le_bytes(bytes.try_into().ok()?);
        (line_ns.is_finite() && line_ns > 0.0).then_some(Self { line_ns })
    }
}

impl fmt::Display for CpuMake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Display for Costs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a line takes {:.0} ns", self.line_ns)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_cpu_is_known_by_its_name() {
        let machine = |cpu: &str| Machine::Host { cpu: cpu.into(), cores: 2, instruction_set: "avx2".into() };
        let names = [
            ("Intel(R) Xeon(R) Platinum 8481C", Some(CpuMake::Intel)),
            ("Intel Xeon Processor (Skylake, IBRS)", Some(CpuMake::Intel)),
            ("Common KVM processor (GenuineIntel)", Some(CpuMake::Intel)),
            ("AMD EPYC 9B45", Some(CpuMake::Amd)),
            ("QEMU Virtual CPU version 2.5+ (AuthenticAMD)", Some(CpuMake::Amd)),
            ("Hygon C86 7285 32-core Processor (HygonGenuine)", None),
            ("implementer 0x41 part 0xd40", None),
            ("unknown", None),
        ];
        for (name, make) in names {
            assert_eq!(CpuMake::of(&machine(name)), make, "{name}");
        }
    }

    /// As measured on one of each.
    #[test]
    fn a_cpu_is_known_by_what_a_line_takes() {
        for (line_ns, make) in [(42.0, CpuMake::Amd), (57.0, CpuMake::Amd), (114.0, CpuMake::Intel)] {
            assert_eq!(CpuMake::by(&Costs { line_ns }), make, "{line_ns}");
        }
    }

    proptest! {
        #[test]
        fn any_costs_travel(line_ns in 0.1..1e6f64) {
            let costs = Costs { line_ns };
            prop_assert_eq!(Costs::from_bytes(&costs.to_bytes()), Some(costs));
        }

        #[test]
        fn what_is_no_cost_is_none(bytes in prop::collection::vec(any::<u8>(), 0..12)) {
            if let Some(costs) = Costs::from_bytes(&bytes) {
                prop_assert!(bytes.len() == 8 && costs.line_ns > 0.0);
            }
        }
    }
}
