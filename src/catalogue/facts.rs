//! Types of the rows of the generated tables.

use crate::abi::{FaScaleLayout, FaScaleRule};

/// Facts about an element type.
pub(crate) struct TypeFacts {
    pub name: &'static str,
    pub size: usize,
    pub is_float: bool,
    pub nccl_tests: &'static str,
    pub numpy: &'static str,
    pub torch: &'static str,
    pub dlpack: u8,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "names of GPU kernels"))]
    pub kernels: &'static str,
    pub is_hot: bool,
    pub nccl: Option<i32>,
}

/// Facts about a norm.
pub(crate) struct NormFacts {
    /// Code; 0 for no norm.
    pub code: u32,
    pub name: &'static str,
    pub takes_unit_offset: bool,
    pub takes_bias: bool,
}

/// Facts about a format of quantised rows.
pub(crate) struct ScalingFacts {
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    pub bits: usize,
    pub is_given: bool,
    /// Number of elements that share a scale; `None`: all elements of a row.
    pub group: Option<usize>,
    pub rule: FaScaleRule,
    pub layout: FaScaleLayout,
}

/// Facts about a kernel.
#[cfg(feature = "cuda")]
pub(crate) struct KernelFacts {
    pub name: &'static str,
    pub family: KernelFamily,
    /// Whether the hot set has specialised versions of it.
    pub is_hot: bool,
}

/// Family of kernels: decides which types a kernel is compiled for.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum KernelFamily {
    /// Reduces elements: one kernel for each kernel type.
    Reducing,
    /// Moves bytes of any type: one kernel.
    Moving,
    /// Has its own entry point: one kernel.
    Other,
    /// Sums, adds a residual and normalises: one kernel for each hot type.
    Norming,
    /// In-switch reduction (NVLS): one kernel for each hot type, on GPUs that have the instructions.
    Nvls,
}
