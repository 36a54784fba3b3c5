//! Which of the host's built-in tables is for which CPU: by its name, or by what two ranks have measured.

use std::fmt;

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

/// What the choice between them was made by: what two ranks of a world have measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// From the store of one rank to the load by which another sees it, in nanoseconds.
    pub line_ns: f64,
    /// A copy of 1 KiB within the caches of a core, in nanoseconds.
    pub copy_ns: f64,
}

impl CpuMake {
    /// How many KiB a core copies while a line goes from core to core: 5 where AMD's table was measured. Where Intel's was, an
    /// allreduce of 4 KiB took 4 times as long, and so about 20.
    const LINES_APART: f64 = 10.0;

    /// By the name of its CPU.
    pub fn of(machine: &Machine) -> Self {
        match machine {
            Machine::Host { cpu, .. } if cpu.contains("Intel") => Self::Intel,
            _ => Self::Amd,
        }
    }

    /// The one whose costs are more like these. A two-shot has a barrier more than a one-shot, which costs transfers of lines, and it
    /// saves copying: so the size from which on it is faster grows with the ratio of the two.
    pub fn by(costs: &Costs) -> Self {
        match costs.line_ns > Self::LINES_APART * costs.copy_ns {
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
    pub(crate) fn to_bytes(self) -> [u8; 16] {
        let (line, copy) = (self.line_ns.to_le_bytes(), self.copy_ns.to_le_bytes());
        std::array::from_fn(|index| if index < 8 { line[index] } else { copy[index - 8] })
    }

    /// `None` for what is no cost.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (line, copy) = bytes.split_first_chunk()?;
        let (line_ns, copy_ns) = (f64::from_le_bytes(*line), f64::from_le_bytes(copy.try_into().ok()?));
        let is_cost = |ns: f64| ns.is_finite() && ns > 0.0;
        (is_cost(line_ns) && is_cost(copy_ns)).then_some(Self { line_ns, copy_ns })
    }
}

impl fmt::Display for CpuMake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Display for Costs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { line_ns, copy_ns } = self;
        write!(f, "a line takes {line_ns:.0} ns, a copy {copy_ns:.1} ns for a KiB")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_cpu_is_known_by_its_name() {
        let machine = |cpu: &str| Machine::Host { cpu: cpu.into(), cores: 2, instruction_set: "avx2".into() };
        assert_eq!(CpuMake::of(&machine("Intel(R) Xeon(R) Platinum 8481C")), CpuMake::Intel);
        assert_eq!(CpuMake::of(&machine("AMD EPYC 9B45")), CpuMake::Amd);
        assert_eq!(CpuMake::of(&machine("unknown")), CpuMake::Amd);
    }

    proptest! {
        #[test]
        fn any_costs_travel(line_ns in 0.1..1e6f64, copy_ns in 0.1..1e6f64) {
            let costs = Costs { line_ns, copy_ns };
            prop_assert_eq!(Costs::from_bytes(&costs.to_bytes()), Some(costs));
        }

        #[test]
        fn what_is_no_cost_is_none(bytes in prop::collection::vec(any::<u8>(), 0..24)) {
            if let Some(costs) = Costs::from_bytes(&bytes) {
                prop_assert!(bytes.len() == 16 && costs.line_ns > 0.0 && costs.copy_ns > 0.0);
            }
        }
    }
}
