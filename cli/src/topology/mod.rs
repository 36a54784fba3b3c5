//! `topology`: the matrix of links between GPUs, with the plan for it; CPUs, caches and NUMA nodes.

mod cpus;

use std::io::Write;
use std::path::Path;

use fast_allreduce::plan::{DeviceKind, Table};
use fast_allreduce::topology::{Cpus, Topology};
use fast_allreduce::{Error, MAX_RANKS};

use crate::arguments;
use crate::failure::Failure;
use crate::input;

/// Prints a recorded matrix, or the topology of this machine.
pub fn print(options: &arguments::Topology) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    if let Some(file) = &options.parse {
        let bytes = input::read(file)?.ok_or_else(|| input::failure(file, "it does not exist"))?;
        let text = String::from_utf8(bytes).map_err(|_| input::failure(file, "it is not UTF-8 text"))?;
        print_gpus(&mut out, &Topology::parse(&text)?)?;
        return Ok(out.flush()?);
    }
    if let Some(folder) = &options.sys {
        return print_cpus(&mut out, folder);
    }
    #[cfg(feature = "cuda")]
    let topology = fast_allreduce::Cuda::topology();
    #[cfg(not(feature = "cuda"))]
    let topology = Topology::discover();
    match topology {
        Ok(topology) => print_gpus(&mut out, &topology)?,
        Err(Error::Unavailable { reason, .. }) => writeln!(out, "no GPUs: {reason}")?,
        Err(error) => return Err(error.into()),
    }
    writeln!(out)?;
    print_cpus(&mut out, Path::new("/sys"))
}

fn print_cpus(out: &mut impl Write, sys: &Path) -> Result<(), Failure> {
    let folder = sys.join("devices/system");
    let described = cpus::describe(&folder);
    let described =
        described.map_err(|error| Failure::System("reading devices/system/cpu of sysfs", error))?;
    write!(out, "{described}\n{}", cpus::placements(&Cpus::read(sys, None)))?;
    Ok(out.flush()?)
}

fn print_gpus(out: &mut impl Write, topology: &Topology) -> Result<(), Failure> {
    write!(out, "{topology}")?;
    let table = match crate::harness::device::machine(crate::arguments::DeviceName::Cuda) {
        Ok(machine) => Table::built_in_for(&machine),
        Err(_) => Table::built_in(DeviceKind::Cuda),
    };
    for world_size in 2..=topology.gpus().len().min(MAX_RANKS) {
        let ranks: Vec<_> = (0..world_size).collect();
        let class = topology.class(&ranks)?;
        writeln!(out, "\n{world_size} ranks on GPUs 0 to {} ({class}):", world_size - 1)?;
        for line in table.describe(world_size, class).lines() {
            writeln!(out, "  {line}")?;
        }
    }
    Ok(())
}
