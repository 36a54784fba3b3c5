//! The facts by which a tuning file knows the machine that it was measured on.

use std::hash::Hasher;

use fnv::FnvHasher;

use super::DeviceKind;
use crate::topology::LinkClass;

/// A machine, as far as measured plans depend on it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Machine {
    /// One whose CPUs are the device.
    Host {
        /// Model of the first CPU, as the kernel names it.
        cpu: String,
        /// CPUs that are online, whether this process may use them or not.
        cores: u32,
        /// The best instruction set that the host kernels were compiled for and the CPU has.
        instruction_set: String,
    },
    /// One whose GPUs are.
    Cuda {
        /// Product names of its GPUs, each once.
        gpu: String,
        /// GPUs of the machine.
        gpus: u32,
        /// The worst link between any two of them.
        link: LinkClass,
        /// CUDA version of the driver: `"12.8"`.
        driver: String,
    },
}

impl Machine {
    /// The kind of device that it is described for.
    pub fn device(&self) -> DeviceKind {
        match self {
            Self::Host { .. } => DeviceKind::Host,
            Self::Cuda { .. } => DeviceKind::Cuda,
        }
    }

    /// Names and values, in the order of a file.
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

    /// A number that differs between machines whose facts differ, but for rare accidents.
    pub(super) fn digest(&self) -> u64 {
        // FNV-1a: the name of a file, whose facts are compared when it is read.
        let mut hasher = FnvHasher::default();
        hasher.write(format!("{self:?}").as_bytes());
        hasher.finish()
    }

    /// The first fact that is another on `here`, in words.
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
