//! Description of a machine whose CPUs are the device, by which tuning files identify it.

use super::Isa;
use crate::plan::Machine;

impl Machine {
    /// Returns this machine, with its CPUs as the device.
    ///
    /// ```
    /// use fast_allreduce::plan::Machine;
    ///
    /// println!("{:?}", Machine::host());
    /// ```
    pub fn host() -> Self {
        // If it cannot be read, the CPU is unknown: all such machines compare equal.
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let (cpu, cores) = cpus(&cpuinfo);
        Self::Host { cpu, cores, instruction_set: Isa::best().name().to_owned() }
    }
}

/// Returns the first CPU's model and the number of CPUs, from the text of `/proc/cpuinfo`.
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
    let mut model = field("model name").or_else(numbers).unwrap_or_else(|| "unknown".to_owned());
    // In virtual machines, the model name may lack the vendor: "QEMU Virtual CPU version 2.5+".
    if let Some(vendor) =
        field("vendor_id").filter(|_| !["AMD", "Intel"].iter().any(|make| model.contains(make)))
    {
        model = format!("{model} ({vendor})");
    }
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
        let virtual_cpu = x86.replace("AMD EPYC 9B45: 128", "QEMU Virtual CPU version 2.5+");
        assert_eq!(cpus(&virtual_cpu), ("QEMU Virtual CPU version 2.5+ (AuthenticAMD)".to_owned(), 2));
        let arm = "processor\t: 0\nBogoMIPS\t: 243\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n";
        assert_eq!(cpus(arm), ("implementer 0x41 part 0xd0c".to_owned(), 1));
        assert_eq!(cpus("nonsense"), ("unknown".to_owned(), 0));
    }

    #[test]
    fn this_machine_is_always_the_same() {
        assert_eq!(Machine::host(), Machine::host());
    }
}
