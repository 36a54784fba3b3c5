//! Instruction sets of the host kernels.

use crate::abi::FaLaunch;

/// Function that runs one block of a launch.
pub(super) type Entry = unsafe extern "C" fn(launch: *const FaLaunch, block: u32);

/// An instruction set that the host kernels were compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// Instructions that every CPU of the architecture has.
    Baseline,
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX-512 F, BW, DQ, VL and BF16.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
}

unsafe extern "C" {
    fn fast_allreduce_host_baseline(launch: *const FaLaunch, block: u32);
    #[cfg(target_arch = "x86_64")]
    fn fast_allreduce_host_avx2(launch: *const FaLaunch, block: u32);
    #[cfg(target_arch = "x86_64")]
    fn fast_allreduce_host_avx512(launch: *const FaLaunch, block: u32);
    #[cfg(target_arch = "x86_64")]
    fn fast_allreduce_host_avx512_bf16(launch: *const FaLaunch, block: u32);
}

impl Isa {
    #[cfg(target_arch = "x86_64")]
    const ALL: &'static [Self] = &[Self::Baseline, Self::Avx2, Self::Avx512, Self::Avx512Bf16];
    #[cfg(not(target_arch = "x86_64"))]
    const ALL: &'static [Self] = &[Self::Baseline];

    /// Lists the instruction sets that this CPU supports, the best last. The first is always `Baseline`.
    ///
    /// ```
    /// use fast_allreduce::device::host::Isa;
    ///
    /// assert_eq!(Isa::supported().next(), Some(Isa::Baseline));
    /// ```
    pub fn supported() -> impl Iterator<Item = Self> {
        Self::ALL.iter().copied().filter(|isa| isa.is_supported())
    }

    /// Returns the best instruction set that this CPU supports.
    ///
    /// ```
    /// use fast_allreduce::device::host::Isa;
    ///
    /// assert_eq!(Isa::supported().last(), Some(Isa::best()));
    /// ```
    pub fn best() -> Self {
        Self::supported().last().unwrap_or(Self::Baseline)
    }

    /// Returns the name: `"baseline"`, `"avx2"`, `"avx512"` or `"avx512_bf16"`.
    ///
    /// ```
    /// use fast_allreduce::device::host::Isa;
    ///
    /// assert_eq!(Isa::Baseline.name(), "baseline");
    /// ```
    pub const fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => "avx512_bf16",
        }
    }

    pub(crate) fn all_names() -> Vec<&'static str> {
        Self::ALL.iter().map(|isa| isa.name()).collect()
    }

    fn is_supported(self) -> bool {
        match self {
            Self::Baseline => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("bmi2")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => Self::Avx512.is_supported() && is_x86_feature_detected!("avx512bf16"),
        }
    }

    pub(super) fn entry(self) -> Entry {
        match self {
            Self::Baseline => fast_allreduce_host_baseline,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => fast_allreduce_host_avx2,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => fast_allreduce_host_avx512,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => fast_allreduce_host_avx512_bf16,
        }
    }
}
