//! Selects the host's built-in table: by the CPU's name or, if its make is unknown, by a measurement between two ranks.
//! The name comes first because a measurement depends on the load of the machine.

use std::fmt;
use std::ops::Range;

use super::thresholds::{INTEL_SHARES_READ, INTEL_STREAM_FROM_BYTES, MOST_NEAR_LINE_NS, STREAM_FROM_BYTES};
use super::Machine;

/// Make of CPU that has a built-in table.
///
/// ```
/// use fast_allreduce::plan::{CpuMake, Machine};
///
/// let machine = Machine::Host { cpu: "AMD EPYC 9B45".into(), cores: 2, instruction_set: "avx2".into() };
/// assert_eq!(CpuMake::of(&machine), Some(CpuMake::Amd));
/// assert_eq!(CpuMake::Amd.name(), "AMD");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CpuMake {
    /// AMD: cores that share a third-level cache exchange cache lines in a few tens of nanoseconds.
    Amd,
    /// Intel: cache lines cross a mesh from core to core.
    Intel,
}

/// Costs that two ranks have measured on a CPU of an unknown make, to choose a built-in table. The time of a copy is
/// not among them: relative to it, the time of a line is the same on CPUs of both makes (`docs/tuning.md`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// Time in nanoseconds from the store of one rank to the load by which another rank sees it.
    pub line_ns: f64,
}

impl CpuMake {
    /// All makes.
    pub(super) const ALL: [Self; 2] = [Self::Amd, Self::Intel];

    /// Make whose table is used if neither a name nor a measurement selects one.
    pub const DEFAULT: Self = Self::Amd;

    /// Returns the make by the CPU's name; `None` for other makes.
    pub fn of(machine: &Machine) -> Option<Self> {
        let Machine::Host { cpu, .. } = machine else { return None };
        Self::ALL.into_iter().find(|make| cpu.contains(make.name()))
    }

    /// Returns the size of the smallest allreduce out of place whose results bypass the caches of the machine's CPU;
    /// the largest number where the kernels have no such stores.
    pub(crate) fn stream_from(machine: &Machine) -> usize {
        match Self::of(machine) {
            _ if !cfg!(target_arch = "x86_64") => usize::MAX,
            Some(Self::Intel) => INTEL_STREAM_FROM_BYTES,
            _ => STREAM_FROM_BYTES,
        }
    }

    /// Returns the sizes, in bytes, of shares of an all-gather that ranks read faster from each other's processes.
    pub(crate) fn shares_read(machine: &Machine, world_size: usize) -> Range<u64> {
        match (Self::of(machine), world_size) {
            (Some(Self::Intel), 2) => INTEL_SHARES_READ,
            _ => 0..0,
        }
    }

    /// Returns the make whose costs are closer to the measured ones. A two-shot has one barrier more than a one-shot,
    /// and a barrier is transfers of cache lines. So the slower a line is, the larger are the messages for which a
    /// one-shot wins.
    pub fn from_costs(costs: &Costs) -> Self {
        match costs.line_ns > MOST_NEAR_LINE_NS {
            true => Self::Intel,
            false => Self::Amd,
        }
    }

    /// Returns the name: `"AMD"` or `"Intel"`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Amd => "AMD",
            Self::Intel => "Intel",
        }
    }
}

impl Costs {
    /// Encodes the costs for other ranks.
    pub(crate) fn to_bytes(self) -> [u8; 8] {
        self.line_ns.to_le_bytes()
    }

    /// Decodes costs; `None` for bytes that are not a positive, finite time.
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

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_plan_costs, |bytes| Costs::from_bytes(bytes));

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
            let from = if make == Some(CpuMake::Intel) { 1 << 20 } else { 16 << 20 };
            assert_eq!(CpuMake::stream_from(&machine(name)), from, "{name}");
        }
    }

    /// The times were measured on one CPU of each make.
    #[test]
    fn a_cpu_is_known_by_the_time_of_a_line() {
        for (line_ns, make) in [(42.0, CpuMake::Amd), (57.0, CpuMake::Amd), (114.0, CpuMake::Intel)] {
            assert_eq!(CpuMake::from_costs(&Costs { line_ns }), make, "{line_ns}");
        }
    }

    proptest! {
        #[test]
        fn costs_are_encoded_and_decoded(line_ns in 0.1..1e6f64) {
            let costs = Costs { line_ns };
            prop_assert_eq!(Costs::from_bytes(&costs.to_bytes()), Some(costs));
        }

        #[test]
        fn bytes_that_are_no_cost_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..12)) {
            if let Some(costs) = Costs::from_bytes(&bytes) {
                prop_assert!(bytes.len() == 8 && costs.line_ns > 0.0);
            }
        }
    }
}
