//! Selects the built-in table for GPUs by the GPU's name.

use std::fmt;

use super::Machine;

/// Generation of GPUs that has a built-in table. Ordered by the speed of the links, slowest first.
///
/// ```
/// use fast_allreduce::plan::GpuGeneration;
///
/// assert_eq!(GpuGeneration::Hopper.name(), "Hopper");
/// assert!(GpuGeneration::Ampere < GpuGeneration::Blackwell);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum GpuGeneration {
    /// Ampere, Ada and older GPUs: the NVLink of an A100, or PCIe 4.
    Ampere,
    /// Hopper and unknown GPUs: the NVLink of an H100, or PCIe 5.
    Hopper,
    /// Blackwell: the NVLink of a B200, or PCIe 5.
    Blackwell,
}

impl GpuGeneration {
    pub(super) const ALL: [Self; 3] = [Self::Ampere, Self::Hopper, Self::Blackwell];

    /// Returns the generation by the names of the GPUs. If they differ, it is the oldest one.
    pub fn of(machine: &Machine) -> Self {
        let Machine::Cuda { gpu, .. } = machine else { return Self::Hopper };
        gpu.split(", ").filter_map(Self::named).min().unwrap_or(Self::Hopper)
    }

    /// Returns the generation of a product, for example of `"NVIDIA A100-SXM4-80GB"`.
    fn named(product: &str) -> Option<Self> {
        let words = || product.split(|letter: char| !letter.is_ascii_alphanumeric());
        // Names of professional cards give the generation in words: "NVIDIA RTX 6000 Ada Generation".
        for (name, generation) in [("Blackwell", Self::Blackwell), ("Ada", Self::Ampere)] {
            if words().any(|word| word == name) {
                return Some(generation);
            }
        }
        if words().any(|word| word == "GeForce") {
            let is_new = words().any(|word| word.starts_with("50") && word.len() == 4);
            return Some(if is_new { Self::Blackwell } else { Self::Ampere });
        }
        words().find_map(|word| {
            let number = word.trim_start_matches(|letter: char| letter.is_ascii_uppercase());
            if !number.starts_with(|letter: char| letter.is_ascii_digit()) {
                return None;
            }
            match &word[..word.len() - number.len()] {
                "A" | "L" | "P" | "T" | "V" => Some(Self::Ampere),
                "H" | "GH" => Some(Self::Hopper),
                "B" | "GB" => Some(Self::Blackwell),
                _ => None,
            }
        })
    }

    /// Returns the name, for example `"Hopper"`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ampere => "Ampere",
            Self::Hopper => "Hopper",
            Self::Blackwell => "Blackwell",
        }
    }

    /// Finds a generation by its [name](Self::name).
    pub(super) fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.name() == name)
    }
}

impl fmt::Display for GpuGeneration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::LinkClass;

    #[test]
    fn a_gpu_is_known_by_its_name() {
        use GpuGeneration::{Ampere, Blackwell, Hopper};
        for (gpu, generation) in [
            ("NVIDIA A100-SXM4-80GB", Ampere),
            ("NVIDIA A100 80GB PCIe", Ampere),
            ("Tesla V100-SXM2-32GB", Ampere),
            ("NVIDIA L40S", Ampere),
            ("NVIDIA RTX A6000", Ampere),
            ("NVIDIA RTX 6000 Ada Generation", Ampere),
            ("NVIDIA GeForce RTX 4090", Ampere),
            ("NVIDIA GeForce RTX 5090", Blackwell),
            ("NVIDIA H100 80GB HBM3", Hopper),
            ("NVIDIA H100 NVL", Hopper),
            ("NVIDIA GH200 480GB", Hopper),
            ("NVIDIA B200", Blackwell),
            ("NVIDIA GB200", Blackwell),
            ("NVIDIA RTX PRO 6000 Blackwell Server Edition", Blackwell),
            ("NVIDIA H100 PCIe, NVIDIA L4", Ampere),
            ("a device of tomorrow", Hopper),
            ("", Hopper),
        ] {
            let (gpu, driver) = (gpu.to_owned(), "12.8".to_owned());
            let machine = Machine::Cuda { gpu, gpus: 8, link: LinkClass::NvSwitch, driver };
            assert_eq!(GpuGeneration::of(&machine), generation, "{machine:?}");
        }
        assert!(
            GpuGeneration::ALL.map(|known| GpuGeneration::by_name(known.name()))
                == GpuGeneration::ALL.map(Some)
        );
    }
}
