//! Generated from catalogue/ by `cargo run -p fast-allreduce-catalogue --example generate`: do not edit.

use super::facts::{NormFacts, ScalingFacts, TypeFacts};
#[cfg(feature = "cuda")]
use super::facts::{KernelFacts, KernelFamily};
use crate::scale::Scale;

/// How many elements a rank reads or writes in a call of `count`, where `count` is NCCL's: one rank's share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// None.
    Nothing,
    /// `count`; with counts by rank, the rank's own.
    Share,
    /// `count` for each rank; with counts by rank, their sum.
    AllShares,
    /// `count` at the root, none elsewhere.
    ShareOfRoot,
    /// `count` for each rank at the root, none elsewhere.
    AllSharesOfRoot,
}

/// Which overlap of input and output is a call in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InPlace {
    /// The buffers are one.
    Same,
    /// The input is the rank's own share of the output.
    OwnShareOfOutput,
    /// The output is the rank's own share of the input.
    OwnShareOfInput,
    /// No overlap.
    Never,
}

/// Whether two ranks of the host may swap the regions that they stage in: each reads what the other has staged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SwapsStaging {
    /// Ranks read what they have staged themselves, or nothing is staged.
    Never,
    /// They may.
    Always,
    /// As the allreduce's algorithm says.
    AsTheAlgorithm,
}

/// How the elements of a call are divided among its launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Division {
    /// Every rank has the whole message: pieces of it, one after the other.
    Whole,
    /// Every rank has shares of it: pieces of each share.
    Shares,
    /// Nothing is moved: the ranks meet.
    Empty,
    /// Messages between pairs of ranks.
    Transfers,
}

/// Bus bandwidth over algorithm bandwidth between n ranks, as `doc/PERFORMANCE.md` of nccl-tests defines it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BusFactor {
    /// 2 (n - 1) / n.
    TwiceOthers,
    /// (n - 1) / n.
    Others,
    /// 1.
    One,
}

/// What a launch of an allreduce takes of a generation of a region, which bounds its message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CapacityRule {
    /// Staging: the whole message.
    Staging,
    /// A mailbox for each sender: the whole message.
    Mailboxes,
    /// Two mailboxes for each sender: a slice.
    TwoSliceMailboxes,
    /// A mailbox for each step of a ring: a slice.
    StepMailboxes,
    /// Two mailboxes for each sender: the whole message.
    TwoMailboxes,
}

/// What the blocks of a grid share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// The message.
    Message,
    /// A slice of it: a part for each rank.
    Slice,
}

/// When an allreduce reads registered inputs where they are, instead of staging them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadsInputs {
    /// Never: it has no peers that read.
    Never,
    /// Unless the call is in place: results are written while peers still read.
    OutOfPlace,
    /// Always.
    Always,
}

/// The type of the elements of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum DType {
    /// IEEE binary16; accumulated in f32.
    F16 = 0,
    /// bfloat16; accumulated in f32.
    Bf16 = 1,
    /// IEEE binary32.
    F32 = 2,
    /// IEEE binary64.
    F64 = 3,
    /// Signed 8-bit integer.
    I8 = 4,
    /// Unsigned 8-bit integer.
    U8 = 5,
    /// Signed 32-bit integer.
    I32 = 6,
    /// Unsigned 32-bit integer.
    U32 = 7,
    /// Signed 64-bit integer.
    I64 = 8,
    /// Unsigned 64-bit integer.
    U64 = 9,
    /// 8-bit float with 4 bits of exponent and 3 of mantissa, without infinities (OCP OFP8 e4m3; `float8_e4m3fn`); accumulated in f32. What rounds beyond 448 is NaN.
    F8E4M3 = 10,
    /// 8-bit float with 5 bits of exponent and 2 of mantissa (OCP OFP8 e5m2; `float8_e5m2`); accumulated in f32. What rounds beyond 57344 is infinite.
    F8E5M2 = 11,
}

impl DType {
    /// All types, in the order of their codes.
    pub const ALL: [Self; 12] = [
        Self::F16,
        Self::Bf16,
        Self::F32,
        Self::F64,
        Self::I8,
        Self::U8,
        Self::I32,
        Self::U32,
        Self::I64,
        Self::U64,
        Self::F8E4M3,
        Self::F8E5M2,
    ];

    #[inline]
    pub(super) const fn facts(self) -> &'static TypeFacts {
        match self {
            Self::F16 => &TypeFacts { name: "f16", size: 2, is_float: true, nccl_tests: "half", numpy: "float16", torch: "float16", dlpack: 2, nccl: Some(6), kernels: "f16", is_hot: true },
            Self::Bf16 => &TypeFacts { name: "bf16", size: 2, is_float: true, nccl_tests: "bfloat16", numpy: "bfloat16", torch: "bfloat16", dlpack: 4, nccl: Some(9), kernels: "bf16", is_hot: true },
            Self::F32 => &TypeFacts { name: "f32", size: 4, is_float: true, nccl_tests: "float", numpy: "float32", torch: "float32", dlpack: 2, nccl: Some(7), kernels: "f32", is_hot: true },
            Self::F64 => &TypeFacts { name: "f64", size: 8, is_float: true, nccl_tests: "double", numpy: "float64", torch: "float64", dlpack: 2, nccl: Some(8), kernels: "f64", is_hot: false },
            Self::I8 => &TypeFacts { name: "i8", size: 1, is_float: false, nccl_tests: "int8", numpy: "int8", torch: "int8", dlpack: 0, nccl: Some(0), kernels: "integers", is_hot: false },
            Self::U8 => &TypeFacts { name: "u8", size: 1, is_float: false, nccl_tests: "uint8", numpy: "uint8", torch: "uint8", dlpack: 1, nccl: Some(1), kernels: "integers", is_hot: false },
            Self::I32 => &TypeFacts { name: "i32", size: 4, is_float: false, nccl_tests: "int32", numpy: "int32", torch: "int32", dlpack: 0, nccl: Some(2), kernels: "integers", is_hot: false },
            Self::U32 => &TypeFacts { name: "u32", size: 4, is_float: false, nccl_tests: "uint32", numpy: "uint32", torch: "uint32", dlpack: 1, nccl: Some(3), kernels: "integers", is_hot: false },
            Self::I64 => &TypeFacts { name: "i64", size: 8, is_float: false, nccl_tests: "int64", numpy: "int64", torch: "int64", dlpack: 0, nccl: Some(4), kernels: "integers", is_hot: false },
            Self::U64 => &TypeFacts { name: "u64", size: 8, is_float: false, nccl_tests: "uint64", numpy: "uint64", torch: "uint64", dlpack: 1, nccl: Some(5), kernels: "integers", is_hot: false },
            Self::F8E4M3 => &TypeFacts { name: "f8e4m3", size: 1, is_float: true, nccl_tests: "fp8_e4m3", numpy: "float8_e4m3fn", torch: "float8_e4m3fn", dlpack: 10, nccl: Some(10), kernels: "f8", is_hot: false },
            Self::F8E5M2 => &TypeFacts { name: "f8e5m2", size: 1, is_float: true, nccl_tests: "fp8_e5m2", numpy: "float8_e5m2", torch: "float8_e5m2", dlpack: 12, nccl: Some(11), kernels: "f8", is_hot: false },
        }
    }
}

pub(super) const DTYPES: &str = "one of f16, bf16, f32, f64, i8, u8, i32, u32, i64, u64, f8e4m3, f8e5m2";

/// Hands a macro the Rust types and their variants.
macro_rules! with_elements {
    ($then:ident) => { $then! { half::f16 => F16, half::bf16 => Bf16, f32 => F32, f64 => F64, i8 => I8, u8 => U8, i32 => I32, u32 => U32, i64 => I64, u64 => U64 } };
}
pub(crate) use with_elements;

/// Hands a macro the Rust integers and their variants.
#[cfg(feature = "mpi")]
macro_rules! with_integers {
    ($then:ident) => { $then! { i8 => I8, u8 => U8, i32 => I32, u32 => U32, i64 => I64, u64 => U64 } };
}
#[cfg(feature = "mpi")]
pub(crate) use with_integers;

/// How the ranks' elements are combined, always in rank order.
///
/// | op | floats | integers |
/// |---|---|---|
/// | `Sum` | from +0 in the accumulator type, rounded once | wraps |
/// | `Prod` | from 1, likewise | wraps |
/// | `Min`, `Max` | IEEE 754-2019 minimum and maximum: a NaN wins, -0 is below +0 | |
/// | `Avg` | the sum divided by the world size, then rounded once | the exact sum, divided toward zero |
/// | `BitAnd`, `BitOr`, `BitXor` | refused | bit by bit |
/// | `PreMulSum` | the sum of each rank's elements times its own [`Scale`] | refused |
///
/// Floats of 8 and 16 bits accumulate in f32 and round to nearest even. Nothing saturates: what rounds beyond the largest number is
/// infinite, or NaN in [`DType::F8E4M3`], which has no infinity. A result that is NaN has the sign bit clear and all other bits
/// set, on every device and rank.
///
/// A premultiplied sum is NCCL's (`ncclRedOpCreatePreMulSum`): the product is computed in the accumulator type, with the scale
/// rounded to it, and rounded to the element type; the products are then summed as by `Sum`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// Sum.
    Sum,
    /// Product.
    Prod,
    /// Minimum.
    Min,
    /// Maximum.
    Max,
    /// Average.
    Avg,
    /// Bitwise and.
    BitAnd,
    /// Bitwise or.
    BitOr,
    /// Bitwise exclusive or.
    BitXor,
    /// Sum of what each rank has times its own scale. Ranks need not have the same.
    PreMulSum(Scale),
}

impl ReduceOp {
    /// Operations of every element type, in the order of their codes.
    pub const ARITHMETIC: [Self; 5] = [Self::Sum, Self::Prod, Self::Min, Self::Max, Self::Avg];

    /// Operations of integers alone, in the order of their codes.
    pub const INTEGER_ONLY: [Self; 3] = [Self::BitAnd, Self::BitOr, Self::BitXor];

    /// Every operation, in the order of the codes, with a scale of 1 where there is one.
    pub(crate) const ALL: [Self; 9] = [Self::Sum, Self::Prod, Self::Min, Self::Max, Self::Avg, Self::BitAnd, Self::BitOr, Self::BitXor, Self::PreMulSum(Scale::ONE)];

    /// The name that the field uses: `"sum"`, `"prod"`, ...
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Prod => "prod",
            Self::Min => "min",
            Self::Max => "max",
            Self::Avg => "avg",
            Self::BitAnd => "band",
            Self::BitOr => "bor",
            Self::BitXor => "bxor",
            Self::PreMulSum(_) => "premul_sum",
        }
    }

    /// The kernels' code. Ranks compare it; a scale is each rank's own.
    #[inline]
    pub(crate) const fn code(self) -> u32 {
        match self {
            Self::Sum => 0,
            Self::Prod => 1,
            Self::Min => 2,
            Self::Max => 3,
            Self::Avg => 4,
            Self::BitAnd => 5,
            Self::BitOr => 6,
            Self::BitXor => 7,
            Self::PreMulSum(_) => 8,
        }
    }

    /// Whether it is defined for elements of a type.
    pub const fn is_of(self, dtype: DType) -> bool {
        match self {
            Self::Sum => true,
            Self::Prod => true,
            Self::Min => true,
            Self::Max => true,
            Self::Avg => true,
            Self::BitAnd => !dtype.is_float(),
            Self::BitOr => !dtype.is_float(),
            Self::BitXor => !dtype.is_float(),
            Self::PreMulSum(_) => dtype.is_float(),
        }
    }

    /// `ncclRedOp_t`, where NCCL has the operation without making it first.
    pub const fn nccl(self) -> Option<i32> {
        match self {
            Self::Sum => Some(0),
            Self::Prod => Some(1),
            Self::Min => Some(3),
            Self::Max => Some(2),
            Self::Avg => Some(4),
            Self::BitAnd => None,
            Self::BitOr => None,
            Self::BitXor => None,
            Self::PreMulSum(_) => None,
        }
    }
}

pub(super) const OPS: &str = "one of sum, prod, min, max, avg, band, bor, bxor, premul_sum:SCALE";
pub(super) const OPS_OF_FLOATS: &str = "one of sum, prod, min, max, avg, premul_sum for floats";
pub(super) const OPS_OF_INTEGERS: &str = "one of sum, prod, min, max, avg, band, bor, bxor for integers";

/// How an allreduce is done. The direct ones agree bit for bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Algorithm {
    /// Every rank reads all inputs and reduces everything. One barrier for staged inputs, two for registered ones.
    OneShotPull = 0,
    /// Rank r reduces slice r, then everybody gathers all slices. Two barriers.
    TwoShotPull = 1,
    /// Every rank sends its input as packets into every peer's mailbox. No barrier.
    OneShotPush = 2,
    /// Slices to their owners as packets, reduced slices to everybody as packets. No barrier.
    TwoShotPush = 3,
    /// A reduce-scatter and an all-gather in which each rank sends packets to the next one only: 2 (n - 1) steps, for links that are not a full mesh.
    ///
    /// Partial sums travel as elements of the type and are rounded in each step, so that results do not have the bits of the direct algorithms; all ranks have the same ones, in every run.
    Ring = 4,
    /// Recursive halving and doubling, by packets: 2 log2(n) steps. A rank beyond the largest power of two has another that takes part for it. Results have the bits of [`Algorithm::Ring`]'s kind: partial sums are rounded.
    HalvingDoubling = 5,
    /// An in-switch reduction of all inputs for every rank (NVLS: `multimem.ld_reduce`). One barrier.
    ///
    /// Sums of f16, bf16 and f32 on GPUs of NVSwitch systems from Hopper on, one rank on each; other calls are done as without it. The switch chooses the order of additions: nothing says that all ranks have the same bits, or that another run has.
    OneShotNvls = 20,
    /// An in-switch reduction of slice r for rank r, which stores it to all ranks (`multimem.st`). Two barriers. It takes the calls of [`Algorithm::OneShotNvls`]. All ranks have the same bits, in the switch's order of additions.
    TwoShotNvls = 21,
}

impl Algorithm {
    /// Algorithms of every device, in the order of their codes. [`Self::NVLS`] has the others.
    pub const ALL: [Self; 6] = [Self::OneShotPull, Self::TwoShotPull, Self::OneShotPush, Self::TwoShotPush, Self::Ring, Self::HalvingDoubling];

    /// In-switch reductions, of GPUs with NVSwitch.
    pub const NVLS: [Self; 2] = [Self::OneShotNvls, Self::TwoShotNvls];

    /// Direct algorithms, which agree bit for bit.
    pub const DIRECT: [Self; 4] = [Self::OneShotPull, Self::TwoShotPull, Self::OneShotPush, Self::TwoShotPush];

    /// Its name on command lines: `"one-shot-pull"`, ...
    #[inline]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OneShotPull => "one-shot-pull",
            Self::TwoShotPull => "two-shot-pull",
            Self::OneShotPush => "one-shot-push",
            Self::TwoShotPush => "two-shot-push",
            Self::Ring => "ring",
            Self::HalvingDoubling => "halving-doubling",
            Self::OneShotNvls => "one-shot-nvls",
            Self::TwoShotNvls => "two-shot-nvls",
        }
    }

    /// Whether results have the bits that all direct algorithms give.
    #[inline]
    pub const fn is_direct(self) -> bool {
        match self {
            Self::OneShotPull | Self::TwoShotPull | Self::OneShotPush | Self::TwoShotPush => true,
            Self::Ring | Self::HalvingDoubling | Self::OneShotNvls | Self::TwoShotNvls => false,
        }
    }

    /// Whether it is an in-switch reduction.
    #[inline]
    pub const fn is_nvls(self) -> bool {
        match self {
            Self::OneShotPull | Self::TwoShotPull | Self::OneShotPush | Self::TwoShotPush | Self::Ring | Self::HalvingDoubling => false,
            Self::OneShotNvls | Self::TwoShotNvls => true,
        }
    }

    /// The code of the kernel that sums by it and then normalises by RMS, where there is one.
    #[inline]
    pub(crate) const fn norm_kernel(self) -> Option<u32> {
        match self {
            Self::OneShotPull => Some(14),
            Self::TwoShotPull => Some(15),
            Self::OneShotPush => Some(16),
            Self::TwoShotPush => Some(17),
            Self::Ring | Self::HalvingDoubling | Self::OneShotNvls | Self::TwoShotNvls => None,
        }
    }

    /// The code of the kernel that sums by it and then applies another norm, where there is one.
    #[inline]
    pub(crate) const fn other_norm_kernel(self) -> Option<u32> {
        match self {
            Self::OneShotPull => Some(18),
            Self::TwoShotPull => Some(19),
            Self::OneShotPush | Self::TwoShotPush | Self::Ring | Self::HalvingDoubling | Self::OneShotNvls | Self::TwoShotNvls => None,
        }
    }

    /// What a launch takes of a region.
    #[inline]
    pub(crate) const fn capacity_rule(self) -> CapacityRule {
        match self {
            Self::OneShotPull | Self::TwoShotPull | Self::OneShotNvls | Self::TwoShotNvls => CapacityRule::Staging,
            Self::OneShotPush => CapacityRule::Mailboxes,
            Self::TwoShotPush => CapacityRule::TwoSliceMailboxes,
            Self::Ring => CapacityRule::StepMailboxes,
            Self::HalvingDoubling => CapacityRule::TwoMailboxes,
        }
    }

    /// What the blocks of a grid share.
    #[inline]
    pub(crate) const fn work(self) -> Work {
        match self {
            Self::OneShotPull | Self::OneShotPush | Self::HalvingDoubling | Self::OneShotNvls => Work::Message,
            Self::TwoShotPull | Self::TwoShotPush | Self::Ring | Self::TwoShotNvls => Work::Slice,
        }
    }

    /// When it reads registered inputs where they are.
    #[inline]
    pub(crate) const fn reads_inputs(self) -> ReadsInputs {
        match self {
            Self::OneShotPull => ReadsInputs::OutOfPlace,
            Self::TwoShotPull => ReadsInputs::Always,
            Self::OneShotPush | Self::TwoShotPush | Self::Ring | Self::HalvingDoubling | Self::OneShotNvls | Self::TwoShotNvls => ReadsInputs::Never,
        }
    }

    /// Whether each of two ranks reads what the other has staged and nobody its own.
    #[inline]
    pub(crate) const fn swaps_staging(self) -> bool {
        match self {
            Self::OneShotPull => true,
            Self::TwoShotPull | Self::OneShotPush | Self::TwoShotPush | Self::Ring | Self::HalvingDoubling | Self::OneShotNvls | Self::TwoShotNvls => false,
        }
    }

}

pub(super) const ALGORITHMS: &str = "one of one-shot-pull, two-shot-pull, one-shot-push, two-shot-push, ring, halving-doubling, one-shot-nvls, two-shot-nvls";

/// A collective or a call of messages, without its arguments. The codes are those that ranks compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum CallKind {
    /// `all_reduce`
    AllReduce = 1,
    /// `all_gather`
    AllGather = 2,
    /// `all_gather_v`
    AllGatherV = 3,
    /// `reduce_scatter`
    ReduceScatter = 4,
    /// `reduce_scatter_v`
    ReduceScatterV = 5,
    /// `broadcast`
    Broadcast = 6,
    /// `reduce`
    Reduce = 7,
    /// `gather`
    Gather = 8,
    /// `scatter`
    Scatter = 9,
    /// `all_to_all`
    AllToAll = 10,
    /// `all_to_all_v`
    AllToAllV = 11,
    /// `barrier`
    Barrier = 12,
    /// `send`
    Send = 13,
    /// `recv`
    Recv = 14,
    /// `send_recv`
    SendRecv = 15,
    /// `group`
    Group = 16,
    /// `all_reduce_fused`
    AllReduceFused = 17,
    /// `all_reduce_quantized`
    AllReduceQuantized = 18,
}

impl CallKind {
    /// All of them.
    pub const ALL: &'static [Self] = &[Self::AllReduce, Self::AllGather, Self::AllGatherV, Self::ReduceScatter, Self::ReduceScatterV, Self::Broadcast, Self::Reduce, Self::Gather, Self::Scatter, Self::AllToAll, Self::AllToAllV, Self::Barrier, Self::Send, Self::Recv, Self::SendRecv, Self::Group, Self::AllReduceFused, Self::AllReduceQuantized];

    /// Calls that nccl-tests measures.
    pub const MEASURED: [Self; 12] = [Self::AllReduce, Self::AllGather, Self::AllGatherV, Self::ReduceScatter, Self::ReduceScatterV, Self::Broadcast, Self::Reduce, Self::Gather, Self::Scatter, Self::AllToAll, Self::AllToAllV, Self::SendRecv];

    /// The name of its method: `"all_gather"`, ...
    #[inline]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::AllGatherV => "all_gather_v",
            Self::ReduceScatter => "reduce_scatter",
            Self::ReduceScatterV => "reduce_scatter_v",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAll => "all_to_all",
            Self::AllToAllV => "all_to_all_v",
            Self::Barrier => "barrier",
            Self::Send => "send",
            Self::Recv => "recv",
            Self::SendRecv => "send_recv",
            Self::Group => "group",
            Self::AllReduceFused => "all_reduce_fused",
            Self::AllReduceQuantized => "all_reduce_quantized",
        }
    }

    /// The name as C strings are.
    #[inline]
    #[cfg(feature = "nvtx")]
    pub(crate) const fn c_name(self) -> &'static std::ffi::CStr {
        match self {
            Self::AllReduce => c"all_reduce",
            Self::AllGather => c"all_gather",
            Self::AllGatherV => c"all_gather_v",
            Self::ReduceScatter => c"reduce_scatter",
            Self::ReduceScatterV => c"reduce_scatter_v",
            Self::Broadcast => c"broadcast",
            Self::Reduce => c"reduce",
            Self::Gather => c"gather",
            Self::Scatter => c"scatter",
            Self::AllToAll => c"all_to_all",
            Self::AllToAllV => c"all_to_all_v",
            Self::Barrier => c"barrier",
            Self::Send => c"send",
            Self::Recv => c"recv",
            Self::SendRecv => c"send_recv",
            Self::Group => c"group",
            Self::AllReduceFused => c"all_reduce_fused",
            Self::AllReduceQuantized => c"all_reduce_quantized",
        }
    }

    /// What a rank reads.
    #[inline]
    pub(crate) const fn reads(self) -> Extent {
        match self {
            Self::AllReduce | Self::AllGather | Self::AllGatherV | Self::Reduce | Self::Gather | Self::Send | Self::SendRecv | Self::Group | Self::AllReduceFused | Self::AllReduceQuantized => Extent::Share,
            Self::ReduceScatter | Self::ReduceScatterV | Self::AllToAll | Self::AllToAllV => Extent::AllShares,
            Self::Broadcast => Extent::ShareOfRoot,
            Self::Scatter => Extent::AllSharesOfRoot,
            Self::Barrier | Self::Recv => Extent::Nothing,
        }
    }

    /// What a rank writes.
    #[inline]
    pub(crate) const fn writes(self) -> Extent {
        match self {
            Self::AllReduce | Self::ReduceScatter | Self::ReduceScatterV | Self::Broadcast | Self::Scatter | Self::Recv | Self::SendRecv | Self::Group | Self::AllReduceFused | Self::AllReduceQuantized => Extent::Share,
            Self::AllGather | Self::AllGatherV | Self::AllToAll | Self::AllToAllV => Extent::AllShares,
            Self::Reduce => Extent::ShareOfRoot,
            Self::Gather => Extent::AllSharesOfRoot,
            Self::Barrier | Self::Send => Extent::Nothing,
        }
    }

    /// When it is in place.
    #[inline]
    pub(crate) const fn in_place(self) -> InPlace {
        match self {
            Self::AllReduce | Self::Broadcast | Self::Reduce | Self::AllReduceFused | Self::AllReduceQuantized => InPlace::Same,
            Self::AllGather | Self::AllGatherV | Self::Gather => InPlace::OwnShareOfOutput,
            Self::ReduceScatter | Self::ReduceScatterV | Self::Scatter => InPlace::OwnShareOfInput,
            Self::AllToAll | Self::AllToAllV | Self::Barrier | Self::Send | Self::Recv | Self::SendRecv | Self::Group => InPlace::Never,
        }
    }

    /// How it is divided among launches.
    #[inline]
    pub(crate) const fn division(self) -> Division {
        match self {
            Self::AllReduce | Self::Broadcast | Self::Reduce | Self::AllReduceFused | Self::AllReduceQuantized => Division::Whole,
            Self::AllGather | Self::AllGatherV | Self::ReduceScatter | Self::ReduceScatterV => Division::Shares,
            Self::Gather | Self::Scatter | Self::AllToAll | Self::AllToAllV | Self::Send | Self::Recv | Self::SendRecv | Self::Group => Division::Transfers,
            Self::Barrier => Division::Empty,
        }
    }

    /// Its kernel's code, where every call has the same.
    #[inline]
    pub(crate) const fn kernel(self) -> Option<u32> {
        match self {
            Self::AllReduce | Self::AllReduceFused => None,
            Self::AllGather | Self::AllGatherV => Some(8),
            Self::ReduceScatter | Self::ReduceScatterV => Some(6),
            Self::Broadcast => Some(9),
            Self::Reduce => Some(7),
            Self::Gather | Self::Scatter | Self::AllToAll | Self::AllToAllV | Self::Send | Self::Recv | Self::SendRecv | Self::Group => Some(12),
            Self::Barrier => Some(11),
            Self::AllReduceQuantized => Some(13),
        }
    }

    /// The code of another kernel, for large messages between more than two GPUs.
    #[inline]
    pub(crate) const fn kernel_of_large(self) -> Option<u32> {
        match self {
            Self::AllReduce | Self::AllGather | Self::AllGatherV | Self::ReduceScatter | Self::ReduceScatterV | Self::Reduce | Self::Gather | Self::Scatter | Self::AllToAll | Self::AllToAllV | Self::Barrier | Self::Send | Self::Recv | Self::SendRecv | Self::Group | Self::AllReduceFused | Self::AllReduceQuantized => None,
            Self::Broadcast => Some(10),
        }
    }

    /// Whether two ranks may swap their staging.
    #[inline]
    pub(crate) const fn swaps_staging(self) -> SwapsStaging {
        match self {
            Self::AllReduce | Self::AllReduceFused => SwapsStaging::AsTheAlgorithm,
            Self::AllGather | Self::AllGatherV | Self::ReduceScatter | Self::ReduceScatterV => SwapsStaging::Always,
            Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter | Self::AllToAll | Self::AllToAllV | Self::Barrier | Self::Send | Self::Recv | Self::SendRecv | Self::Group | Self::AllReduceQuantized => SwapsStaging::Never,
        }
    }

    /// Whether elements are combined.
    #[inline]
    pub const fn reduces(self) -> bool {
        match self {
            Self::AllReduce | Self::ReduceScatter | Self::ReduceScatterV | Self::Reduce | Self::AllReduceFused | Self::AllReduceQuantized => true,
            Self::AllGather | Self::AllGatherV | Self::Broadcast | Self::Gather | Self::Scatter | Self::AllToAll | Self::AllToAllV | Self::Barrier | Self::Send | Self::Recv | Self::SendRecv | Self::Group => false,
        }
    }

    /// Whether one rank has another part than the others.
    #[inline]
    pub const fn has_root(self) -> bool {
        match self {
            Self::AllReduce | Self::AllGather | Self::AllGatherV | Self::ReduceScatter | Self::ReduceScatterV | Self::AllToAll | Self::AllToAllV | Self::Barrier | Self::Send | Self::Recv | Self::SendRecv | Self::Group | Self::AllReduceFused | Self::AllReduceQuantized => false,
            Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter => true,
        }
    }

    /// Whether shares have counts by rank.
    #[inline]
    pub const fn has_counts(self) -> bool {
        match self {
            Self::AllReduce | Self::AllGather | Self::ReduceScatter | Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter | Self::AllToAll | Self::Barrier | Self::Send | Self::Recv | Self::SendRecv | Self::Group | Self::AllReduceFused | Self::AllReduceQuantized => false,
            Self::AllGatherV | Self::ReduceScatterV | Self::AllToAllV => true,
        }
    }

    /// The rows of a plan's table that are for it.
    #[inline]
    pub(crate) const fn planned_as(self) -> PlannedCall {
        match self {
            Self::AllReduce | Self::AllReduceFused | Self::AllReduceQuantized => PlannedCall::AllReduce,
            Self::AllGather | Self::AllGatherV => PlannedCall::AllGather,
            Self::ReduceScatter | Self::ReduceScatterV => PlannedCall::ReduceScatter,
            Self::Broadcast => PlannedCall::Broadcast,
            Self::Reduce => PlannedCall::Reduce,
            Self::Gather | Self::Scatter | Self::AllToAll | Self::AllToAllV | Self::Barrier | Self::Send | Self::Recv | Self::SendRecv | Self::Group => PlannedCall::Messages,
        }
    }

    /// Its bus bandwidth.
    #[inline]
    pub(super) const fn bus(self) -> BusFactor {
        match self {
            Self::AllReduce | Self::AllReduceFused | Self::AllReduceQuantized => BusFactor::TwiceOthers,
            Self::AllGather | Self::AllGatherV | Self::ReduceScatter | Self::ReduceScatterV | Self::Gather | Self::Scatter | Self::AllToAll | Self::AllToAllV | Self::Barrier => BusFactor::Others,
            Self::Broadcast | Self::Reduce | Self::Send | Self::Recv | Self::SendRecv | Self::Group => BusFactor::One,
        }
    }

}

/// The calls that a row of a plan's [`Table`](crate::plan::Table) is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(usize)]
#[non_exhaustive]
pub enum PlannedCall {
    /// `all_reduce`, `all_reduce_fused`, `all_reduce_quantized`
    AllReduce,
    /// `all_gather`, `all_gather_v`
    AllGather,
    /// `reduce_scatter`, `reduce_scatter_v`
    ReduceScatter,
    /// `broadcast`
    Broadcast,
    /// `reduce`
    Reduce,
    /// `gather`, `scatter`, `all_to_all`, `all_to_all_v`, `barrier`, `send`, `recv`, `send_recv`, `group`
    Messages,
}

impl PlannedCall {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::AllReduce, Self::AllGather, Self::ReduceScatter, Self::Broadcast, Self::Reduce, Self::Messages];

    /// Its name in files: `"all_reduce"`, ..., `"messages"`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::Messages => "messages",
        }
    }
}

/// How the rows of a sum are normalised. `docs/fused.md` has the arithmetic, to the bit.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub enum Norm {
    /// Not at all.
    #[default]
    None,
    /// RMSNorm: `x / sqrt(mean(x * x) + epsilon) * weight`.
    Rms {
        /// Is added before the square root.
        epsilon: f32,
        /// The weight is 1 more than what stands in memory.
        unit_offset: bool,
    },
    /// LayerNorm: `(x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) * weight + bias`.
    Layer {
        /// Is added before the square root.
        epsilon: f32,
    },
}

impl Norm {
    /// Its code; 0 for none.
    pub const fn code(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Rms { .. } => 1,
            Self::Layer { .. } => 2,
        }
    }

    /// The norm of a code, with the parameters that it takes.
    pub(super) const fn known(code: u32, epsilon: f32, unit_offset: bool) -> Option<Self> {
        match code {
            0 => Some(Self::None),
            1 => Some(Self::Rms { epsilon, unit_offset }),
            2 => Some(Self::Layer { epsilon }),
            _ => None,
        }
    }

    /// What it has of that, if anything.
    pub(crate) const fn epsilon(self) -> f32 {
        match self {
            Self::Rms { epsilon, .. } | Self::Layer { epsilon, .. } => epsilon,
            _ => 0.0,
        }
    }

    /// What it has of that, if anything.
    pub(crate) const fn unit_offset(self) -> bool {
        match self {
            Self::Rms { unit_offset, .. } => unit_offset,
            _ => false,
        }
    }

}

/// All norms, and the absence of one.
pub(super) const NORMS: [NormFacts; 3] = [
    NormFacts { code: 0, name: "none", takes_unit_offset: false, takes_bias: false },
    NormFacts { code: 1, name: "rms", takes_unit_offset: true, takes_bias: false },
    NormFacts { code: 2, name: "layer", takes_unit_offset: false, takes_bias: true },
];

pub(super) const NORM_NAMES: &str = "one of none, rms, layer";

/// A format of quantised rows: bits of a number, and which elements have a scale in common. `docs/fused.md` has the formulas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Scaling {
    /// 8-bit numbers; all elements have one scale, a float that is given, the same on all ranks.
    Given = 1,
    /// 8-bit numbers; each row has a scale, a float.
    PerRow = 2,
    /// 8-bit numbers; each 128 elements of a row, and what is left at its end, have a scale, a float.
    PerGroup = 3,
    /// NVFP4: e2m1, two in a byte; each 16 elements of a row have a scale, an e4m3, row after row.
    Nvfp4 = 4,
    /// NVFP4 with scales in tiles of 128 rows and 4 blocks, as matrix products take them (cuBLAS: 1D block scaling factors layout; CUTLASS, TensorRT-LLM: 128x4).
    Nvfp4Tiled = 5,
}

impl Scaling {
    /// All formats, in the order of their codes.
    pub const ALL: [Self; 5] = [Self::Given, Self::PerRow, Self::PerGroup, Self::Nvfp4, Self::Nvfp4Tiled];

    pub(super) const fn facts(self) -> &'static ScalingFacts {
        match self {
            Self::Given => &ScalingFacts { name: "given", aliases: &["per_tensor"], bits: 8, is_given: true, group: None, is_tiled: false },
            Self::PerRow => &ScalingFacts { name: "per_row", aliases: &["per_token"], bits: 8, is_given: false, group: None, is_tiled: false },
            Self::PerGroup => &ScalingFacts { name: "per_group", aliases: &["per_128"], bits: 8, is_given: false, group: Some(128), is_tiled: false },
            Self::Nvfp4 => &ScalingFacts { name: "nvfp4", aliases: &[], bits: 4, is_given: false, group: Some(16), is_tiled: false },
            Self::Nvfp4Tiled => &ScalingFacts { name: "nvfp4_tiled", aliases: &["nvfp4_128x4"], bits: 4, is_given: false, group: Some(16), is_tiled: true },
        }
    }
}

pub(super) const SCALINGS: &str = "one of given, per_row, per_group, nvfp4, nvfp4_tiled";

/// The kernels, by code.
#[cfg(feature = "cuda")]
pub(crate) const KERNELS: [KernelFacts; 22] = [
    KernelFacts { name: "one_shot_pull", family: KernelFamily::Reducing, is_hot: true },
    KernelFacts { name: "two_shot_pull", family: KernelFamily::Reducing, is_hot: true },
    KernelFacts { name: "one_shot_push", family: KernelFamily::Reducing, is_hot: true },
    KernelFacts { name: "two_shot_push", family: KernelFamily::Reducing, is_hot: true },
    KernelFacts { name: "ring", family: KernelFamily::Reducing, is_hot: false },
    KernelFacts { name: "halving_doubling", family: KernelFamily::Reducing, is_hot: false },
    KernelFacts { name: "reduce_scatter", family: KernelFamily::Reducing, is_hot: false },
    KernelFacts { name: "reduce", family: KernelFamily::Reducing, is_hot: false },
    KernelFacts { name: "all_gather", family: KernelFamily::Moving, is_hot: false },
    KernelFacts { name: "broadcast", family: KernelFamily::Moving, is_hot: false },
    KernelFacts { name: "scattered_broadcast", family: KernelFamily::Moving, is_hot: false },
    KernelFacts { name: "barrier", family: KernelFamily::Other, is_hot: false },
    KernelFacts { name: "transfer", family: KernelFamily::Other, is_hot: false },
    KernelFacts { name: "two_shot_quantized", family: KernelFamily::Other, is_hot: false },
    KernelFacts { name: "one_shot_pull_norm", family: KernelFamily::Norming, is_hot: false },
    KernelFacts { name: "two_shot_pull_norm", family: KernelFamily::Norming, is_hot: false },
    KernelFacts { name: "one_shot_push_norm", family: KernelFamily::Norming, is_hot: false },
    KernelFacts { name: "two_shot_push_norm", family: KernelFamily::Norming, is_hot: false },
    KernelFacts { name: "one_shot_pull_other_norm", family: KernelFamily::Norming, is_hot: false },
    KernelFacts { name: "two_shot_pull_other_norm", family: KernelFamily::Norming, is_hot: false },
    KernelFacts { name: "one_shot_nvls", family: KernelFamily::Nvls, is_hot: false },
    KernelFacts { name: "two_shot_nvls", family: KernelFamily::Nvls, is_hot: false },
];

/// Numbers of ranks that the hot set has kernels for.
#[cfg(feature = "cuda")]
pub(crate) const HOT_WORLDS: [usize; 7] = [2, 3, 4, 5, 6, 7, 8];
