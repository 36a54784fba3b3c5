//! Rows of the generated tables.

/// An element type's row.
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

/// A norm's row.
pub(crate) struct NormFacts {
    pub code: u32,
    pub name: &'static str,
    pub takes_unit_offset: bool,
    pub takes_bias: bool,
}

/// A format's row.
pub(crate) struct ScalingFacts {
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    pub bits: usize,
    pub is_given: bool,
    /// Elements that have a scale in common; `None`: all of a row.
    pub group: Option<usize>,
    pub is_tiled: bool,
}

/// A kernel's row.
#[cfg(feature = "cuda")]
pub(crate) struct KernelFacts {
    pub name: &'static str,
    pub family: KernelFamily,
    /// Whether the hot set has kernels of its own for it.
    pub is_hot: bool,
}

/// What a kernel computes.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum KernelFamily {
    /// Reduces elements: a kernel for each kernel type.
    Reducing,
    /// Moves bytes of any type: one kernel.
    Moving,
    /// Anything else, with an entry point of its own: one kernel.
    Other,
    /// A sum with a residual and a norm: a kernel for each hot type.
    Norming,
    /// An in-switch reduction: a kernel for each hot type, on GPUs that have the instructions.
    Nvls,
}
