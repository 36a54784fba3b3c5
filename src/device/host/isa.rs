//! Which instruction set the host kernels use: the best that this CPU has, found once.

use crate::abi::FaLaunch;

/// Runs one block of a launch.
pub(super) type Entry = unsafe extern "C" fn(launch: *const FaLaunch, block: u32);

/// An instruction set that the host kernels were compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// What every CPU of the architecture has.
    Baseline,
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// The same, and AVX-512 BF16.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
}

extern "C" {
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

    /// Those that this CPU can run, the best last. The first is always `Baseline`.
    pub fn supported() -> impl Iterator<Item = Self> {
        Self::ALL.iter().copied().filter(|isa| isa.is_supported())
    }

    /// The best that this CPU can run.
    pub fn best() -> Self {
        Self::supported().last().unwrap_or(Self::Baseline)
    }

    /// `"baseline"`, `"avx2"`, `"avx512"`, `"avx512_bf16"`.
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
