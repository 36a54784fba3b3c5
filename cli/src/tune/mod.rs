//! `tune`: measures the best plan on this machine for each number of ranks, and installs or writes it as a tuning file.
//!
//! The launcher starts the ranks of one world after another. The first rank of each adds the results of its world
//! to the plan, in a memory file of the launcher.

mod candidates;
mod rank;
mod report;
mod select;
mod times;

use std::ffi::OsString;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use fast_allreduce::plan::Tuning;
use nix::sys::memfd::{memfd_create, MFdFlags};

pub use self::rank::measure;
use crate::arguments::{check_memory, DeviceName, Tune};
use crate::environment;
use crate::failure::Failure;
use crate::launch;
use crate::output::Output;

/// Measures all worlds, and writes the file.
pub fn run(options: &Tune) -> Result<(), Failure> {
    options.validate()?;
    crate::harness::device::check(options.device)?;
    if environment::is_rank() {
        return Err(Failure::Usage("tune starts its own ranks: run it without a launcher".into()));
    }
    let worlds = options.ranks.up_to(most_ranks(options.device)?);
    check_memory(options.max_bytes, worlds.iter().copied().max().unwrap_or(0))?;
    options.launch.export();
    let output = options.output.as_deref().map(Output::check).transpose()?;
    let part = Part::new()?;
    if output.is_none() {
        Tuning::check_install(&crate::harness::device::machine(options.device)?)?;
        part.take_installed(options.device)?;
    }
    for &ranks in &worlds {
        launch::launch(ranks, arguments(options, ranks, worlds.len(), &part))?;
    }
    let tuning = Tuning::load(part.path())?;
    let mut out = std::io::stdout().lock();
    match (&output, &options.output) {
        (Some(output), Some(path)) => {
            output.write(&tuning.to_string())?;
            writeln!(out, "# wrote {0}: have it used by FAST_ALLREDUCE_TUNING={0}", path.display())?;
        }
        _ => {
            let path = tuning.install()?;
            writeln!(out, "# installed {}: communicators on this machine use it", path.display())?;
        }
    }
    Ok(out.flush()?)
}

/// Returns the number of cores or GPUs.
fn most_ranks(device: DeviceName) -> Result<usize, Failure> {
    match device {
        DeviceName::Host => Ok(crate::facts::cores()),
        #[cfg(feature = "cuda")]
        DeviceName::Cuda => crate::harness::device::cuda::gpus(),
        #[cfg(not(feature = "cuda"))]
        DeviceName::Cuda => Err(crate::failure::without_cuda()),
    }
}

/// Returns the command line of the ranks of one world.
fn arguments(options: &Tune, ranks: usize, worlds: usize, part: &Part) -> Vec<OsString> {
    // At least a millisecond, which is much less than a round takes.
    let share = (options.budget.as_secs_f64() / worlds as f64).max(1e-3);
    let mut arguments: Vec<OsString> = vec!["tune".into()];
    let mut add = |name: &str, value: OsString| arguments.extend([name.into(), value]);
    add("--part", part.path().into());
    add("--device", options.device.kind().name().into());
    add("--ranks", ranks.to_string().into());
    add("--budget", share.to_string().into());
    add("--minbytes", options.min_bytes.to_string().into());
    add("--maxbytes", options.max_bytes.to_string().into());
    if let [one] = options.calls()[..] {
        add("--calls", one.name().into());
    }
    add("--bind", options.launch.bind.name().into());
    add("--timeout", options.communicator.timeout.as_secs_f64().to_string().into());
    for (name, value) in &options.communicator.settings {
        add("--set", format!("{name}={value}").into());
    }
    arguments
}

/// The plan so far: a memory file of this process.
struct Part(File);

impl Part {
    fn new() -> Result<Self, Failure> {
        let memory = memfd_create(c"fast-allreduce-tune", MFdFlags::MFD_CLOEXEC);
        Ok(Self(memory.map_err(|errno| Failure::System("memfd_create", errno.into()))?.into()))
    }

    /// Starts with the plan that is installed for this machine: worlds that are not measured keep their plan.
    fn take_installed(&self, device: DeviceName) -> Result<(), Failure> {
        if let Some(installed) = Tuning::installed(&crate::harness::device::machine(device)?) {
            let failed = |error| Failure::File(self.path(), error);
            std::fs::write(self.path(), installed.to_string()).map_err(failed)?;
        }
        Ok(())
    }

    /// Returns the path of the file for this process and its ranks.
    fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }
}
