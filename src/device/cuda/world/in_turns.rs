//! A world's call by the code of the hot set, many times in a launch: what `gpu-check` measures and checks.

use std::ffi::c_void;

use cudarc::driver::sys::CUdeviceptr;

use crate::abi::FaLaunch;
use crate::device::cuda::kernels::name_in_turns;
use crate::error::{Error, Result};

/// How often a launch of the hot set's code does the call, where it does.
pub(super) struct InTurns {
    /// Of the kernel, if it can do all of the call's launches.
    name: Option<String>,
    /// 0: another kernel is launched.
    turns: u32,
    sums: CUdeviceptr,
}

impl InTurns {
    pub fn of(launches: &[FaLaunch]) -> Self {
        let mut names = launches.iter().map(name_in_turns);
        let name = names.next().flatten().filter(|first| names.all(|name| name.as_ref() == Some(first)));
        Self { name, turns: 0, sums: 0 }
    }

    /// The parameters after the launch.
    pub fn put(&mut self, parameters: &mut [*mut c_void; 3]) {
        if self.turns != 0 {
            (parameters[1], parameters[2]) = ((&raw mut self.turns).cast(), (&raw mut self.sums).cast());
        }
    }

    /// Has each launch do the call `turns` times, and add its times to `sums`. The kernel's name.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] where the hot set has no kernel for the call.
    pub fn enable(&mut self, turns: u32, sums: CUdeviceptr) -> Result<&str> {
        let name = self.name.as_deref().ok_or_else(|| Error::Unavailable {
            what: "this call by the code of the hot set".into(),
            reason: "it is no sum of whole packs, of a type and a number of ranks that the hot set has"
                .into(),
        })?;
        (self.turns, self.sums) = (turns.max(1), sums);
        Ok(name)
    }
}
