//! What a tuning file says of a machine with GPUs.

use cudarc::driver::{result, sys};

use super::driver::driver;
use super::Cuda;
use crate::error::Result;
use crate::plan::Machine;
use crate::topology::LinkClass;

/// The machine of a rank's GPU. Where NVML says nothing of the GPUs, they are those that this process sees, and the links
/// between them count as PCIe.
pub(super) fn of(device: &Cuda) -> Result<Machine> {
    let gpu = device.context().name().map_err(driver("cuDeviceGetName"))?;
    let (gpus, link) = match Cuda::topology() {
        Ok(topology) => {
            let all: Vec<_> = (0..topology.gpus().len()).collect();
            (all.len() as u32, topology.class(&all)?)
        }
        Err(_) => {
            let seen = result::device::get_count().map_err(driver("cuDeviceGetCount"))?;
            let link = if seen == 1 { LinkClass::SameDevice } else { LinkClass::default() };
            (u32::try_from(seen).unwrap_or(0), link)
        }
    };
    let mut version = 0;
    // SAFETY: writes one int.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(driver("cuDriverGetVersion"))?;
    // 12080 is 12.8.
    let driver = format!("{}.{}", version / 1000, version % 1000 / 10);
    Ok(Machine::Cuda { gpu, gpus, link, driver })
}
