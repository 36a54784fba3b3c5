//! `--version`, and facts of the build and of this machine.

use std::io::Write;
use std::sync::OnceLock;

use fast_allreduce::device::host::Isa;
use nix::sched::{sched_getaffinity, CpuSet};
use nix::unistd::Pid;

use crate::failure::Failure;

/// Prints the version, and with `verbose` the facts.
pub fn print(verbose: bool) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "fast-allreduce {}", env!("CARGO_PKG_VERSION"))?;
    if verbose {
        for (what, value) in fast_allreduce::build_facts() {
            writeln!(out, "built with {what}: {value}")?;
        }
        let supported: Vec<_> = Isa::supported().map(Isa::name).collect();
        writeln!(out, "this machine's instruction sets: {} (the last is used)", supported.join(", "))?;
        writeln!(out, "this machine's cores: {}", cores())?;
    }
    Ok(out.flush()?)
}

/// Returns the facts of this machine that results depend on, without its host name.
pub fn machine() -> Vec<(&'static str, String)> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let value = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.split_once(':').map(|(_, value)| value.trim().to_owned())
    };
    let mut facts = vec![
        ("CPU", value(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| std::env::consts::ARCH.into())),
        ("Cores", cores().to_string()),
    ];
    facts.extend(value(&read("/proc/meminfo"), "MemTotal").map(|memory| ("Memory", memory)));
    facts.push(("Kernel", format!("Linux {}", read("/proc/sys/kernel/osrelease").trim())));
    facts.extend(fast_allreduce::build_facts());
    facts
}

/// Returns the number of cores that this process may use.
pub fn cores() -> usize {
    known_cores().0
}

/// Returns the CPUs that this process may use, as a list with commas.
pub fn cpus() -> String {
    let numbers: Vec<_> = known_cores().1.iter().map(usize::to_string).collect();
    numbers.join(",")
}

/// Counts the cores once, before the process is bound to some of them.
fn known_cores() -> &'static (usize, Vec<usize>) {
    static CORES: OnceLock<(usize, Vec<usize>)> = OnceLock::new();
    CORES.get_or_init(|| {
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        let allowed = sched_getaffinity(Pid::this()).unwrap_or_default();
        (count, (0..CpuSet::count()).filter(|&cpu| allowed.is_set(cpu) == Ok(true)).collect())
    })
}
