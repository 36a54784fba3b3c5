//! `topology`: the matrix of links, and what the plan makes of it.

use std::io::Write;

use fast_allreduce::plan::{DeviceKind, Table};
use fast_allreduce::topology::Topology;
use fast_allreduce::MAX_RANKS;

use crate::arguments;
use crate::failure::Failure;

#[cfg(feature = "cuda")]
fn discover() -> fast_allreduce::Result<Topology> {
    fast_allreduce::Cuda::topology()
}

#[cfg(not(feature = "cuda"))]
fn discover() -> fast_allreduce::Result<Topology> {
    Topology::discover()
}

/// Prints both.
pub fn print(options: &arguments::Topology) -> Result<(), Failure> {
    let topology = match &options.parse {
        None => discover()?,
        Some(file) => {
            let text = std::fs::read_to_string(file)
                .map_err(|error| Failure::Usage(format!("cannot read {}: {error}", file.display())))?;
            Topology::parse(&text)?
        }
    };
    let mut out = std::io::stdout().lock();
    write!(out, "{topology}")?;
    for world_size in 2..=topology.gpus().len().min(MAX_RANKS) {
        let ranks: Vec<_> = (0..world_size).collect();
        let class = topology.class(&ranks)?;
        writeln!(out, "\n{world_size} ranks on GPUs 0 to {} ({class}):", world_size - 1)?;
        for line in Table::built_in(DeviceKind::Cuda).describe(world_size, class).lines() {
            writeln!(out, "  {line}")?;
        }
    }
    Ok(out.flush()?)
}
