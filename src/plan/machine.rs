//! The facts by which a tuning file knows the machine that it was measured on.

use super::DeviceKind;
use crate::device::host::Isa;
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
    /// This one, with its CPUs as the device.
    pub fn host() -> Self {
        // Without it nothing is known; then any machine of which as little is known is taken for this one.
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let (cpu, cores) = cpus(&cpuinfo);
        Self::Host { cpu, cores, instruction_set: Isa::best().name().to_owned() }
    }

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

/// The first CPU's model, and how many there are, from the text of `/proc/cpuinfo`.
fn cpus(cpuinfo: &str) -> (String, u32) {
    let field = |name: &str| {
        let mut values = cpuinfo.lines().filter_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == name).then(|| value.trim().to_owned())
        });
        values.next().filter(|value| !value.is_empty())
    };
    // AArch64 has numbers instead of a name.
    let numbers = || Some(format!("implementer {} part {}", field("CPU implementer")?, field("CPU part")?));
    let model = field("model name").or_else(numbers).unwrap_or_else(|| "unknown".to_owned());
    let is_cpu = |line: &&str| line.split_once(':').is_some_and(|(key, _)| key.trim() == "processor");
    (model, cpuinfo.lines().filter(is_cpu).count() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_of_both_architectures() {
        let x86 = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 9B45: 128\n\n\
                   processor\t: 1\nmodel name\t: AMD EPYC 9B45: 128\n";
        assert_eq!(cpus(x86), ("AMD EPYC 9B45: 128".to_owned(), 2));
        let arm = "processor\t: 0\nBogoMIPS\t: 243\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n";
        assert_eq!(cpus(arm), ("implementer 0x41 part 0xd0c".to_owned(), 1));
        assert_eq!(cpus("nonsense"), ("unknown".to_owned(), 0));
    }

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
        assert_eq!(Machine::host().difference(&Machine::host()), None);
    }
}
