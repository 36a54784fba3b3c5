//! Identifies the machine that a tuning file was measured on.

use std::hash::Hasher;

use fnv::FnvHasher;

use super::DeviceKind;
use crate::topology::LinkClass;

/// Facts about a machine that measured plans depend on.
///
/// ```
/// use fast_allreduce::plan::{DeviceKind, Machine};
///
/// let machine = Machine::host();
/// assert_eq!(machine.device(), DeviceKind::Host);
/// for (name, value) in machine.facts() {
///     println!("{name}: {value}");
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Machine {
    /// A machine whose CPUs are the device.
    Host {
        /// Model of the first CPU, as Linux reports it.
        cpu: String,
        /// Number of CPUs that are online, including those that this process may not use.
        cores: u32,
        /// Best instruction set that both the host kernels and the CPU have.
        instruction_set: String,
    },
    /// A machine whose GPUs are the device.
    Cuda {
        /// Product names of the GPUs, each once, separated by commas.
        gpu: String,
        /// Number of GPUs.
        gpus: u32,
        /// Worst link between any two GPUs.
        link: LinkClass,
        /// CUDA version of the driver, for example `"12.8"`.
        driver: String,
    },
}

impl Machine {
    /// Returns the kind of device that is described.
    pub fn device(&self) -> DeviceKind {
        match self {
            Self::Host { .. } => DeviceKind::Host,
            Self::Cuda { .. } => DeviceKind::Cuda,
        }
    }

    /// Returns the names and values of the facts, in the order of a tuning file.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::Host { cpu, cores, instruction_set } => vec![
                ("cpu", cpu.clone()),
                ("cores", cores.to_string()),
                ("instruction_set", instruction_set.clone()),
            ],
            Self::Cuda { gpu, gpus, link, driver } => vec![
                ("gpu", gpu.clone()),
                ("gpus", gpus.to_string()),
                ("link", link.to_string()),
                ("driver", driver.clone()),
            ],
        }
    }

    /// Returns a hash of the facts, for file names.
    pub(super) fn digest(&self) -> u64 {
        // FNV-1a. A collision does no harm: the facts are compared when the file is read.
        let mut hasher = FnvHasher::default();
        hasher.write(format!("{self:?}").as_bytes());
        hasher.finish()
    }

    /// Describes the first fact that differs on `here`. Returns `None` if all are equal.
    pub(super) fn difference(&self, here: &Self) -> Option<String> {
        if self.device() != here.device() {
            return Some(format!(
                "it is for the device {}, not {}",
                self.device().name(),
                here.device().name()
            ));
        }
        let facts = self.facts().into_iter().zip(here.facts());
        let mut others = facts.filter(|((_, there), (_, here))| there != here);
        let ((name, there), (_, here)) = others.next()?;
        Some(format!("its {name} is {there:?}, and {here:?} here"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_named() {
        let host = |cpu: &str, cores| Machine::Host {
            cpu: cpu.to_owned(),
            cores,
            instruction_set: "avx2".to_owned(),
        };
        assert_eq!(host("A", 2).difference(&host("A", 2)), None);
        let said = host("A", 2).difference(&host("A", 4)).unwrap();
        assert_eq!(said, r#"its cores is "2", and "4" here"#);
        assert!(host("A", 2).difference(&host("B", 2)).unwrap().contains("cpu"));
    }
}
