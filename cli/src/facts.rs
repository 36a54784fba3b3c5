//! `--version`, and facts of the build and of this machine.

use std::io::Write;
use std::sync::OnceLock;

use fast_allreduce::device::host::Isa;

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

/// Returns the cores that this process may use. Counted once, before the process is bound to some of them.
pub fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}
