//! `--version`: what was found at build time and what this machine has.

use std::io::Write;

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

/// Cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
