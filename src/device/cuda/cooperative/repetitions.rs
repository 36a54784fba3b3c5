//! Repetitions of a call within one launch, by the code of the hot set: what `gpu-check` measures and verifies.

use std::ffi::c_void;

use cudarc::driver::sys::CUdeviceptr;

use crate::abi::FaLaunch;
use crate::device::cuda::launch::kernels::repeated_kernel_name;
use crate::error::{Error, Result};

/// Number of repetitions in each launch, and where the kernel adds its times.
pub(super) struct Repetitions {
    /// Name of the kernel, if one kernel can run all launches of the call.
    name: Option<String>,
    /// 0 if the call is not repeated and the usual kernel is launched.
    count: u32,
    sums: CUdeviceptr,
}

impl Repetitions {
    pub fn of(launches: &[FaLaunch]) -> Self {
        let mut names = launches.iter().map(repeated_kernel_name);
        let name = names.next().flatten().filter(|first| names.all(|name| name.as_ref() == Some(first)));
        Self { name, count: 0, sums: 0 }
    }

    /// Sets the kernel parameters that follow the launch.
    pub fn set_parameters(&mut self, parameters: &mut [*mut c_void; 3]) {
        if self.count != 0 {
            (parameters[1], parameters[2]) = ((&raw mut self.count).cast(), (&raw mut self.sums).cast());
        }
    }

    /// Makes each launch run the call `count` times and add its times to `sums`. Returns the kernel's name.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if the hot set has no kernel for the call.
    pub fn enable(&mut self, count: u32, sums: CUdeviceptr) -> Result<&str> {
        let name = self.name.as_deref().ok_or_else(|| Error::Unavailable {
            what: "this call by the code of the hot set".into(),
            reason: "it is not a sum of whole packs, for a type and a number of ranks that the hot set has"
                .into(),
        })?;
        (self.count, self.sums) = (count.max(1), sums);
        Ok(name)
    }
}
