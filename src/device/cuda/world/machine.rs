//! Description of a machine with GPUs, by which tuning files identify it.

use std::ffi::{c_int, CStr};

use super::links::topology;
use crate::device::cuda::driver::{api, driver};
use crate::error::Result;
use crate::plan::Machine;
use crate::topology::LinkClass;

/// Returns the machine of the current context's GPU, as all ranks describe it. If NVML is unavailable, the GPUs are
/// those that this process sees, and the links between them count as PCIe.
pub(crate) fn machine_of_context() -> Result<Machine> {
    let (mut names, link) = match topology() {
        Ok(topology) => {
            let all: Vec<_> = (0..topology.gpus().len()).collect();
            let names = topology.gpus().iter().map(|gpu| gpu.name.clone().unwrap_or_default());
            (names.collect::<Vec<_>>(), topology.class(&all)?)
        }
        Err(_) => {
            let mut seen = 0;
            // SAFETY: writes one int.
            unsafe { api::cuDeviceGetCount(&mut seen) }.map_err(driver("cuDeviceGetCount"))?;
            let names = (0..seen).map(name).collect::<Result<Vec<_>>>()?;
            (names, if seen == 1 { LinkClass::SameDevice } else { LinkClass::default() })
        }
    };
    let gpus = names.len() as u32;
    names.sort_unstable();
    names.dedup();
    let mut version = 0;
    // SAFETY: writes one int.
    unsafe { api::cuDriverGetVersion(&mut version) }.map_err(driver("cuDriverGetVersion"))?;
    // The driver reports 12.8 as 12080.
    let driver = format!("{}.{}", version / 1000, version % 1000 / 10);
    Ok(Machine::Cuda { gpu: names.join(", "), gpus, link, driver })
}

/// Returns the name of a device.
fn name(ordinal: c_int) -> Result<String> {
    let (mut device, mut name) = (0, [0; 256]);
    // SAFETY: the driver writes one device, and its name as a zero-terminated string of at most 256 bytes.
    unsafe {
        api::cuDeviceGet(&mut device, ordinal).map_err(driver("cuDeviceGet"))?;
        api::cuDeviceGetName(name.as_mut_ptr().cast(), 256, device).map_err(driver("cuDeviceGetName"))?;
    }
    let name = CStr::from_bytes_until_nul(&name);
    Ok(name.map_or_else(|_| String::new(), |name| name.to_string_lossy().into_owned()))
}
