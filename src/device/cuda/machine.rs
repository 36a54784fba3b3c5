//! What a tuning file says of a machine with GPUs.

use cudarc::driver::{result, sys};

use super::driver::driver;
use super::Cuda;
use crate::error::Result;
use crate::plan::Machine;
use crate::topology::LinkClass;

/// The machine of a rank's GPU, as all its ranks describe it. Where NVML says nothing of the GPUs, they are those that this
/// process sees, and the links between them count as PCIe.
pub(super) fn of(device: &Cuda) -> Result<Machine> {
    device.bind()?;
    let (mut names, link) = match Cuda::topology() {
        Ok(topology) => {
            let all: Vec<_> = (0..topology.gpus().len()).collect();
            let names = topology.gpus().iter().map(|gpu| gpu.name.clone().unwrap_or_default());
            (names.collect::<Vec<_>>(), topology.class(&all)?)
        }
        Err(_) => {
            let seen = result::device::get_count().map_err(driver("cuDeviceGetCount"))?;
            let name = |ordinal| result::device::get(ordinal).and_then(result::device::get_name);
            let names =
                (0..seen).map(name).collect::<Result<Vec<_>, _>>().map_err(driver("cuDeviceGetName"))?;
            (names, if seen == 1 { LinkClass::SameDevice } else { LinkClass::default() })
        }
    };
    let gpus = names.len() as u32;
    names.sort_unstable();
    names.dedup();
    let mut version = 0;
    // SAFETY: writes one int.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(driver("cuDriverGetVersion"))?;
    // 12080 is 12.8.
    let driver = format!("{}.{}", version / 1000, version % 1000 / 10);
    Ok(Machine::Cuda { gpu: names.join(", "), gpus, link, driver })
}
