//! Generated from catalogue/ by `cargo run -p fast-allreduce-catalogue --example generate`: do not edit.

use serde::{Deserialize, Serialize};

use super::facts::{NormFacts, ScalingFacts, TypeFacts};
use crate::abi;
#[cfg(feature = "cuda")]
use super::facts::{KernelFacts, KernelFamily};
use crate::scale::Scale;

/// Number of elements that a rank reads or writes in a call of `count`, where `count` is NCCL's: one rank's share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// None.
    Nothing,
    /// `count`; with counts by rank, the rank's own count.
    Share,
    /// `count` for each rank; with counts by rank, their sum.
    AllShares,
    /// `count` on the root, none on other ranks.
    ShareOfRoot,
    /// `count` for each rank on the root, none on other ranks.
    AllSharesOfRoot,
}

/// Overlap of input and output that makes a call in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InPlace {
    /// Input and output are the same buffer.
    Same,
    /// The input is the rank's own share of the output.
    OwnShareOfOutput,
    /// The output is the rank's own share of the input.
    OwnShareOfInput,
    /// No overlap is permitted.
    Never,
}

/// Whether two ranks of the host may swap their staging, so that each reads only what the other has staged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SwapsStaging {
    /// No: ranks read what they have staged themselves, or nothing is staged.
    Never,
    /// Yes.
    Always,
    /// Depends on the algorithm of the allreduce.
    ByAlgorithm,
}

/// Division of a call's elements among its launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Division {
    /// Every rank has the whole message. It is divided into consecutive pieces.
    Whole,
    /// The message consists of a share for each rank. Each share is divided into pieces.
    Shares,
    /// No elements: the ranks synchronise.
    Empty,
    /// Messages between pairs of ranks.
    Transfers,
}

/// Ratio of bus bandwidth to algorithm bandwidth between n ranks, as defined in `doc/PERFORMANCE.md` of nccl-tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BusFactor {
    /// 2 (n - 1) / n.
    TwiceOthers,
    /// (n - 1) / n.
    Others,
    /// 1.
    One,
}

/// Memory that a launch of an allreduce uses in one generation of a region, which limits its message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CapacityRule {
    /// Staging for the whole message.
    Staging,
    /// One mailbox for each sender, for the whole message.
    Mailboxes,
    /// Two mailboxes for each sender, for a slice.
    TwoSliceMailboxes,
    /// One mailbox for each step of a ring, for a slice.
    StepMailboxes,
    /// Two mailboxes for each sender, for the whole message.
    TwoMailboxes,
}

/// Work that is divided among the blocks of a grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// The message.
    Message,
    /// A slice of the message: each rank has one.
    Slice,
}

/// When an allreduce reads registered inputs directly, instead of staging them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadsInputs {
    /// Never: peers do not read inputs.
    Never,
    /// Unless the call is in place: peers may still read the input while results are written.
    OutOfPlace,
    /// Always.
    Always,
}

/// Element type of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    /// 8-bit float with 4 bits of exponent and 3 bits of mantissa, without infinities (OCP OFP8 e4m3;
    /// `float8_e4m3fn`); accumulated in f32. A value that rounds beyond 448 becomes NaN.
    F8E4M3 = 10,
    /// 8-bit float with 5 bits of exponent and 2 bits of mantissa (OCP OFP8 e5m2; `float8_e5m2`); accumulated in f32.
    /// A value that rounds beyond 57344 becomes infinite.
    F8E5M2 = 11,
}

impl DType {
    /// All types, in the order of their codes.
    pub const ALL: [Self; 12] = [Self::F16, Self::Bf16, Self::F32, Self::F64, Self::I8, Self::U8, Self::I32,
        Self::U32, Self::I64, Self::U64, Self::F8E4M3, Self::F8E5M2];

    /// Returns the facts about the type.
    #[inline]
    pub(super) const fn facts(self) -> &'static TypeFacts {
        match self {
            Self::F16 => &TypeFacts { name: "f16", size: 2, is_float: true, nccl_tests: "half", numpy: "float16",
                torch: "float16", dlpack: 2, nccl: Some(6), kernels: "f16", is_hot: true },
            Self::Bf16 => &TypeFacts { name: "bf16", size: 2, is_float: true, nccl_tests: "bfloat16",
                numpy: "bfloat16", torch: "bfloat16", dlpack: 4, nccl: Some(9), kernels: "bf16", is_hot: true },
            Self::F32 => &TypeFacts { name: "f32", size: 4, is_float: true, nccl_tests: "float", numpy: "float32",
                torch: "float32", dlpack: 2, nccl: Some(7), kernels: "f32", is_hot: true },
            Self::F64 => &TypeFacts { name: "f64", size: 8, is_float: true, nccl_tests: "double", numpy: "float64",
                torch: "float64", dlpack: 2, nccl: Some(8), kernels: "f64", is_hot: false },
            Self::I8 => &TypeFacts { name: "i8", size: 1, is_float: false, nccl_tests: "int8", numpy: "int8",
                torch: "int8", dlpack: 0, nccl: Some(0), kernels: "integers", is_hot: false },
            Self::U8 => &TypeFacts { name: "u8", size: 1, is_float: false, nccl_tests: "uint8", numpy: "uint8",
                torch: "uint8", dlpack: 1, nccl: Some(1), kernels: "integers", is_hot: false },
            Self::I32 => &TypeFacts { name: "i32", size: 4, is_float: false, nccl_tests: "int32", numpy: "int32",
                torch: "int32", dlpack: 0, nccl: Some(2), kernels: "integers", is_hot: false },
            Self::U32 => &TypeFacts { name: "u32", size: 4, is_float: false, nccl_tests: "uint32", numpy: "uint32",
                torch: "uint32", dlpack: 1, nccl: Some(3), kernels: "integers", is_hot: false },
            Self::I64 => &TypeFacts { name: "i64", size: 8, is_float: false, nccl_tests: "int64", numpy: "int64",
                torch: "int64", dlpack: 0, nccl: Some(4), kernels: "integers", is_hot: false },
            Self::U64 => &TypeFacts { name: "u64", size: 8, is_float: false, nccl_tests: "uint64", numpy: "uint64",
                torch: "uint64", dlpack: 1, nccl: Some(5), kernels: "integers", is_hot: false },
            Self::F8E4M3 => &TypeFacts { name: "f8e4m3", size: 1, is_float: true, nccl_tests: "fp8_e4m3",
                numpy: "float8_e4m3fn", torch: "float8_e4m3fn", dlpack: 10, nccl: Some(10), kernels: "f8",
                is_hot: false },
            Self::F8E5M2 => &TypeFacts { name: "f8e5m2", size: 1, is_float: true, nccl_tests: "fp8_e5m2",
                numpy: "float8_e5m2", torch: "float8_e5m2", dlpack: 12, nccl: Some(11), kernels: "f8", is_hot: false },
        }
    }
}

pub(super) const DTYPES: &str = "one of f16, bf16, f32, f64, i8, u8, i32, u32, i64, u64, f8e4m3, f8e5m2";

/// Passes the Rust types and their variants to a macro.
macro_rules! with_elements {
    ($then:ident) => {
        $then! { half::f16 => F16, half::bf16 => Bf16, f32 => F32, f64 => F64, i8 => I8, u8 => U8, i32 => I32,
            u32 => U32, i64 => I64, u64 => U64 }
    };
}
pub(crate) use with_elements;

/// Passes the Rust integers and their variants to a macro.
macro_rules! with_integers {
    ($then:ident) => {
        $then! { i8 => I8, u8 => U8, i32 => I32, u32 => U32, i64 => I64, u64 => U64 }
    };
}
pub(crate) use with_integers;

/// Reduction operation. Elements are combined in rank order.
///
/// | op | floats | integers |
/// |---|---|---|
/// | `Sum` | starts at +0, in the accumulator type, rounded once | wraps |
/// | `Prod` | starts at 1, in the accumulator type, rounded once | wraps |
/// | `Min`, `Max` | IEEE 754-2019 minimum and maximum: a NaN wins, -0 is below +0 | |
/// | `Avg` | the sum divided by the world size, then rounded once | the exact sum, divided toward zero |
/// | `BitAnd`, `BitOr`, `BitXor` | refused | bit by bit |
/// | `PreMulSum` | the sum of each rank's elements times the rank's [`Scale`] | refused |
///
/// Floats of 8 and 16 bits accumulate in f32 and round to nearest, ties to even. Results do not saturate: a value that
/// rounds beyond the largest number becomes infinite, or NaN in [`DType::F8E4M3`], which has no infinity. A result that
/// is NaN has the sign bit clear and all other bits set, on every device and rank.
///
/// A premultiplied sum is that of NCCL (`ncclRedOpCreatePreMulSum`). The product is computed in the accumulator type,
/// with the scale rounded to this type, and is rounded to the element type. Then the products are summed as by `Sum`.
///
/// ```
/// use fast_allreduce::{DType, ReduceOp};
///
/// assert_eq!("max".parse(), Ok(ReduceOp::Max));
/// assert!(ReduceOp::BitAnd.is_of(DType::U8) && !ReduceOp::BitAnd.is_of(DType::F32));
/// assert_eq!(ReduceOp::PreMulSum(0.5.into()).to_string(), "premul_sum:0.5");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    /// Sum of each rank's elements times the rank's scale. Scales may differ among ranks.
    PreMulSum(Scale),
}

impl ReduceOp {
    /// Operations that support all element types, in the order of their codes.
    pub const ARITHMETIC: [Self; 5] = [Self::Sum, Self::Prod, Self::Min, Self::Max, Self::Avg];

    /// Operations that support integers only, in the order of their codes.
    pub const INTEGER_ONLY: [Self; 3] = [Self::BitAnd, Self::BitOr, Self::BitXor];

    /// All operations, in the order of their codes; a premultiplied sum with the scale 1.
    pub(crate) const ALL: [Self; 9] = [Self::Sum, Self::Prod, Self::Min, Self::Max, Self::Avg, Self::BitAnd,
        Self::BitOr, Self::BitXor, Self::PreMulSum(Scale::ONE)];

    /// Returns the name, for example `"sum"`.
    #[inline]
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

    /// Returns the kernels' code. Ranks compare it; scales may differ among ranks.
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

    /// Returns whether the operation is defined for a type.
    #[inline]
    pub const fn is_of(self, dtype: DType) -> bool {
        match self {
            Self::Sum | Self::Prod | Self::Min | Self::Max | Self::Avg => true,
            Self::BitAnd | Self::BitOr | Self::BitXor => !dtype.is_float(),
            Self::PreMulSum(_) => dtype.is_float(),
        }
    }

    /// Returns the value of `ncclRedOp_t`, if NCCL has the operation as a constant.
    #[inline]
    pub const fn nccl(self) -> Option<i32> {
        match self {
            Self::Sum => Some(0),
            Self::Prod => Some(1),
            Self::Min => Some(3),
            Self::Max => Some(2),
            Self::Avg => Some(4),
            Self::BitAnd | Self::BitOr | Self::BitXor | Self::PreMulSum(_) => None,
        }
    }
}

pub(super) const OPS: &str = "one of sum, prod, min, max, avg, band, bor, bxor, premul_sum:SCALE";

pub(super) const OPS_OF_FLOATS: &str = "one of sum, prod, min, max, avg, premul_sum for floats";

pub(super) const OPS_OF_INTEGERS: &str = "one of sum, prod, min, max, avg, band, bor, bxor for integers";

/// Algorithm of an allreduce. All direct algorithms give the same bits.
///
/// ```
/// use fast_allreduce::Algorithm;
///
/// assert_eq!("two-shot-push".parse(), Ok(Algorithm::TwoShotPush));
/// assert!(Algorithm::TwoShotPush.is_direct() && !Algorithm::Ring.is_direct());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Algorithm {
    /// Every rank reads all inputs and reduces the whole message. One barrier for staged inputs, two for registered
    /// ones.
    OneShotPull = 0,
    /// Rank r reduces slice r, then all ranks gather all slices. Two barriers.
    TwoShotPull = 1,
    /// Every rank sends its input as packets to the mailboxes of all peers. No barrier.
    OneShotPush = 2,
    /// Every rank sends slices as packets to their owners. The owners reduce them and send the results as packets to
    /// all ranks. No barrier.
    TwoShotPush = 3,
    /// Reduce-scatter and all-gather around a ring: each rank sends packets only to the next rank, in 2 (n - 1)
    /// steps. For links that are not a full mesh.
    ///
    /// Partial sums are sent as elements, so they are rounded in each step. Results differ from those of direct
    /// algorithms, but are the same on all ranks and in every run.
    Ring = 4,
    /// Recursive halving and doubling by packets, in 2 log2(n) steps. A rank beyond the largest power of two has a
    /// partner that takes part for it. Partial sums are rounded, as in [`Algorithm::Ring`].
    HalvingDoubling = 5,
    /// In-switch reduction of all inputs for every rank (NVLS: `multimem.ld_reduce`). One barrier.
    ///
    /// It supports sums of f16, bf16 and f32 on NVSwitch systems with Hopper or newer GPUs, one rank on each; other
    /// calls use another algorithm. The switch chooses the order of additions: the bits may differ among ranks and
    /// from run to run.
    OneShotNvls = 20,
    /// In-switch reduction of slice r by rank r, which stores the result to all ranks (`multimem.st`). Two barriers.
    /// It supports the calls of [`Algorithm::OneShotNvls`]. All ranks get the same bits, in the switch's order of
    /// additions.
    TwoShotNvls = 21,
}

impl Algorithm {
    /// Algorithms of all devices, in the order of their codes. [`Self::NVLS`] has the others.
    pub const ALL: [Self; 6] = [Self::OneShotPull, Self::TwoShotPull, Self::OneShotPush, Self::TwoShotPush,
        Self::Ring, Self::HalvingDoubling];

    /// In-switch reductions, for GPUs with NVSwitch.
    pub const NVLS: [Self; 2] = [Self::OneShotNvls, Self::TwoShotNvls];

    /// Direct algorithms, which all give the same bits.
    pub const DIRECT: [Self; 4] = [Self::OneShotPull, Self::TwoShotPull, Self::OneShotPush, Self::TwoShotPush];

    /// Returns the name in settings and on command lines, for example `"one-shot-pull"`.
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

    /// Returns whether the algorithm is direct. All direct algorithms give the same bits.
    #[inline]
    pub const fn is_direct(self) -> bool {
        match self {
            Self::OneShotPull | Self::TwoShotPull | Self::OneShotPush | Self::TwoShotPush => true,
            Self::Ring | Self::HalvingDoubling | Self::OneShotNvls | Self::TwoShotNvls => false,
        }
    }

    /// Returns whether the algorithm is an in-switch reduction.
    #[inline]
    pub const fn is_nvls(self) -> bool {
        match self {
            Self::OneShotPull | Self::TwoShotPull | Self::OneShotPush | Self::TwoShotPush | Self::Ring
                | Self::HalvingDoubling => false,
            Self::OneShotNvls | Self::TwoShotNvls => true,
        }
    }

    /// Returns the code of the kernel that sums by the algorithm and applies a norm, if there is one.
    #[inline]
    pub(crate) const fn norm_kernel(self) -> Option<u32> {
        match self {
            Self::OneShotPull => Some(15),
            Self::TwoShotPull => Some(16),
            Self::OneShotPush => Some(17),
            Self::TwoShotPush => Some(18),
            Self::Ring | Self::HalvingDoubling | Self::OneShotNvls | Self::TwoShotNvls => None,
        }
    }

    /// Returns the memory of a region that a launch uses.
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

    /// Returns the work that is divided among the blocks of a grid.
    #[inline]
    pub(crate) const fn work(self) -> Work {
        match self {
            Self::OneShotPull | Self::OneShotPush | Self::HalvingDoubling | Self::OneShotNvls => Work::Message,
            Self::TwoShotPull | Self::TwoShotPush | Self::Ring | Self::TwoShotNvls => Work::Slice,
        }
    }

    /// Returns when registered inputs are read directly.
    #[inline]
    pub(crate) const fn reads_inputs(self) -> ReadsInputs {
        match self {
            Self::OneShotPull => ReadsInputs::OutOfPlace,
            Self::TwoShotPull => ReadsInputs::Always,
            Self::OneShotPush | Self::TwoShotPush | Self::Ring | Self::HalvingDoubling | Self::OneShotNvls
                | Self::TwoShotNvls => ReadsInputs::Never,
        }
    }

    /// Returns whether each of two ranks reads only what the other has staged.
    #[inline]
    pub(crate) const fn swaps_staging(self) -> bool {
        match self {
            Self::OneShotPull => true,
            Self::TwoShotPull | Self::OneShotPush | Self::TwoShotPush | Self::Ring | Self::HalvingDoubling
                | Self::OneShotNvls | Self::TwoShotNvls => false,
        }
    }
}

pub(super) const ALGORITHMS: &str = "one of one-shot-pull, two-shot-pull, one-shot-push, two-shot-push, ring, \
    halving-doubling, one-shot-nvls, two-shot-nvls";

/// Kind of a call: a collective without its arguments, or a call of messages. Ranks compare the codes.
///
/// ```
/// use fast_allreduce::CallKind;
///
/// assert_eq!(CallKind::AllGather.name(), "all_gather");
/// assert!(CallKind::Broadcast.has_root() && CallKind::ReduceScatter.reduces());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
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
    /// `reduce_scatter_fused`
    ReduceScatterFused = 19,
    /// `reduce_scatter_fused_v`
    ReduceScatterFusedV = 20,
    /// `all_gather_rows`
    AllGatherRows = 21,
    /// `all_gather_rows_v`
    AllGatherRowsV = 22,
    /// `sharded_rms_norm`
    ShardedRmsNorm = 23,
}

impl CallKind {
    /// All kinds.
    pub const ALL: &'static [Self] = &[Self::AllReduce, Self::AllGather, Self::AllGatherV, Self::ReduceScatter,
        Self::ReduceScatterV, Self::Broadcast, Self::Reduce, Self::Gather, Self::Scatter, Self::AllToAll,
        Self::AllToAllV, Self::Barrier, Self::Send, Self::Recv, Self::SendRecv, Self::Group, Self::AllReduceFused,
        Self::AllReduceQuantized, Self::ReduceScatterFused, Self::ReduceScatterFusedV, Self::AllGatherRows,
        Self::AllGatherRowsV, Self::ShardedRmsNorm];

    /// Calls that `bench` measures, as nccl-tests does.
    pub const MEASURED: [Self; 12] = [Self::AllReduce, Self::AllGather, Self::AllGatherV, Self::ReduceScatter,
        Self::ReduceScatterV, Self::Broadcast, Self::Reduce, Self::Gather, Self::Scatter, Self::AllToAll,
        Self::AllToAllV, Self::SendRecv];

    /// Returns the name of the method, for example `"all_gather"`.
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
            Self::ReduceScatterFused => "reduce_scatter_fused",
            Self::ReduceScatterFusedV => "reduce_scatter_fused_v",
            Self::AllGatherRows => "all_gather_rows",
            Self::AllGatherRowsV => "all_gather_rows_v",
            Self::ShardedRmsNorm => "sharded_rms_norm",
        }
    }

    /// Returns the name as a C string.
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
            Self::ReduceScatterFused => c"reduce_scatter_fused",
            Self::ReduceScatterFusedV => c"reduce_scatter_fused_v",
            Self::AllGatherRows => c"all_gather_rows",
            Self::AllGatherRowsV => c"all_gather_rows_v",
            Self::ShardedRmsNorm => c"sharded_rms_norm",
        }
    }

    /// Returns the elements that a rank reads.
    #[inline]
    pub(crate) const fn reads(self) -> Extent {
        match self {
            Self::AllReduce | Self::AllGather | Self::AllGatherV | Self::Reduce | Self::Gather | Self::Send
                | Self::SendRecv | Self::Group | Self::AllReduceFused | Self::AllReduceQuantized | Self::AllGatherRows
                | Self::AllGatherRowsV => Extent::Share,
            Self::ReduceScatter | Self::ReduceScatterV | Self::AllToAll | Self::AllToAllV | Self::ReduceScatterFused
                | Self::ReduceScatterFusedV => Extent::AllShares,
            Self::Broadcast => Extent::ShareOfRoot,
            Self::Scatter => Extent::AllSharesOfRoot,
            Self::Barrier | Self::Recv | Self::ShardedRmsNorm => Extent::Nothing,
        }
    }

    /// Returns the elements that a rank writes.
    #[inline]
    pub(crate) const fn writes(self) -> Extent {
        match self {
            Self::AllReduce | Self::ReduceScatter | Self::ReduceScatterV | Self::Broadcast | Self::Scatter
                | Self::Recv | Self::SendRecv | Self::Group | Self::AllReduceFused | Self::AllReduceQuantized
                | Self::ReduceScatterFused | Self::ReduceScatterFusedV => Extent::Share,
            Self::AllGather | Self::AllGatherV | Self::AllToAll | Self::AllToAllV | Self::AllGatherRows
                | Self::AllGatherRowsV => Extent::AllShares,
            Self::Reduce => Extent::ShareOfRoot,
            Self::Gather => Extent::AllSharesOfRoot,
            Self::Barrier | Self::Send | Self::ShardedRmsNorm => Extent::Nothing,
        }
    }

    /// Returns the overlap of input and output that makes the call in place.
    #[inline]
    pub(crate) const fn in_place(self) -> InPlace {
        match self {
            Self::AllReduce | Self::Broadcast | Self::Reduce | Self::AllReduceFused
                | Self::AllReduceQuantized => InPlace::Same,
            Self::AllGather | Self::AllGatherV | Self::Gather | Self::AllGatherRows
                | Self::AllGatherRowsV => InPlace::OwnShareOfOutput,
            Self::ReduceScatter | Self::ReduceScatterV | Self::Scatter | Self::ReduceScatterFused
                | Self::ReduceScatterFusedV => InPlace::OwnShareOfInput,
            Self::AllToAll | Self::AllToAllV | Self::Barrier | Self::Send | Self::Recv | Self::SendRecv | Self::Group
                | Self::ShardedRmsNorm => InPlace::Never,
        }
    }

    /// Returns the division of the call among launches.
    #[inline]
    pub(crate) const fn division(self) -> Division {
        match self {
            Self::AllReduce | Self::Broadcast | Self::Reduce | Self::AllReduceFused | Self::AllReduceQuantized
                | Self::ShardedRmsNorm => Division::Whole,
            Self::AllGather | Self::AllGatherV | Self::ReduceScatter | Self::ReduceScatterV | Self::ReduceScatterFused
                | Self::ReduceScatterFusedV | Self::AllGatherRows | Self::AllGatherRowsV => Division::Shares,
            Self::Gather | Self::Scatter | Self::AllToAll | Self::AllToAllV | Self::Send | Self::Recv | Self::SendRecv
                | Self::Group => Division::Transfers,
            Self::Barrier => Division::Empty,
        }
    }

    /// Returns the kernel's code, if all calls of the kind have the same kernel.
    #[inline]
    pub(crate) const fn kernel(self) -> Option<u32> {
        match self {
            Self::AllReduce | Self::AllReduceFused => None,
            Self::AllGather | Self::AllGatherV => Some(8),
            Self::ReduceScatter | Self::ReduceScatterV => Some(6),
            Self::Broadcast => Some(9),
            Self::Reduce => Some(7),
            Self::Gather | Self::Scatter | Self::AllToAll | Self::AllToAllV | Self::Send | Self::Recv | Self::SendRecv
                | Self::Group => Some(12),
            Self::Barrier => Some(11),
            Self::AllReduceQuantized => Some(13),
            Self::ReduceScatterFused | Self::ReduceScatterFusedV => Some(19),
            Self::AllGatherRows | Self::AllGatherRowsV => Some(14),
            Self::ShardedRmsNorm => Some(22),
        }
    }

    /// Returns the code of another kernel for large messages between more than two GPUs.
    #[inline]
    pub(crate) const fn kernel_of_large(self) -> Option<u32> {
        match self {
            Self::AllReduce | Self::AllGather | Self::AllGatherV | Self::ReduceScatter | Self::ReduceScatterV
                | Self::Reduce | Self::Gather | Self::Scatter | Self::AllToAll | Self::AllToAllV | Self::Barrier
                | Self::Send | Self::Recv | Self::SendRecv | Self::Group | Self::AllReduceFused
                | Self::AllReduceQuantized | Self::ReduceScatterFused | Self::ReduceScatterFusedV
                | Self::AllGatherRows | Self::AllGatherRowsV | Self::ShardedRmsNorm => None,
            Self::Broadcast => Some(10),
        }
    }

    /// Returns whether two ranks may swap their staging.
    #[inline]
    pub(crate) const fn swaps_staging(self) -> SwapsStaging {
        match self {
            Self::AllReduce | Self::AllReduceFused => SwapsStaging::ByAlgorithm,
            Self::AllGather | Self::AllGatherV | Self::ReduceScatter | Self::ReduceScatterV | Self::ReduceScatterFused
                | Self::ReduceScatterFusedV | Self::AllGatherRows | Self::AllGatherRowsV => SwapsStaging::Always,
            Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter | Self::AllToAll | Self::AllToAllV
                | Self::Barrier | Self::Send | Self::Recv | Self::SendRecv | Self::Group | Self::AllReduceQuantized
                | Self::ShardedRmsNorm => SwapsStaging::Never,
        }
    }

    /// Returns whether elements are reduced.
    #[inline]
    pub const fn reduces(self) -> bool {
        match self {
            Self::AllReduce | Self::ReduceScatter | Self::ReduceScatterV | Self::Reduce | Self::AllReduceFused
                | Self::AllReduceQuantized | Self::ReduceScatterFused | Self::ReduceScatterFusedV => true,
            Self::AllGather | Self::AllGatherV | Self::Broadcast | Self::Gather | Self::Scatter | Self::AllToAll
                | Self::AllToAllV | Self::Barrier | Self::Send | Self::Recv | Self::SendRecv | Self::Group
                | Self::AllGatherRows | Self::AllGatherRowsV | Self::ShardedRmsNorm => false,
        }
    }

    /// Returns whether the call has a root.
    #[inline]
    pub const fn has_root(self) -> bool {
        match self {
            Self::AllReduce | Self::AllGather | Self::AllGatherV | Self::ReduceScatter | Self::ReduceScatterV
                | Self::AllToAll | Self::AllToAllV | Self::Barrier | Self::Send | Self::Recv | Self::SendRecv
                | Self::Group | Self::AllReduceFused | Self::AllReduceQuantized | Self::ReduceScatterFused
                | Self::ReduceScatterFusedV | Self::AllGatherRows | Self::AllGatherRowsV
                | Self::ShardedRmsNorm => false,
            Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter => true,
        }
    }

    /// Returns whether shares have counts by rank.
    #[inline]
    pub const fn has_counts(self) -> bool {
        match self {
            Self::AllReduce | Self::AllGather | Self::ReduceScatter | Self::Broadcast | Self::Reduce | Self::Gather
                | Self::Scatter | Self::AllToAll | Self::Barrier | Self::Send | Self::Recv | Self::SendRecv
                | Self::Group | Self::AllReduceFused | Self::AllReduceQuantized | Self::ReduceScatterFused
                | Self::AllGatherRows | Self::ShardedRmsNorm => false,
            Self::AllGatherV | Self::ReduceScatterV | Self::AllToAllV | Self::ReduceScatterFusedV
                | Self::AllGatherRowsV => true,
        }
    }

    /// Returns the rows of a plan's table that are for the call.
    #[inline]
    pub(crate) const fn planned_as(self) -> PlannedCall {
        match self {
            Self::AllReduce | Self::AllReduceFused | Self::AllReduceQuantized => PlannedCall::AllReduce,
            Self::AllGather | Self::AllGatherV | Self::AllGatherRows | Self::AllGatherRowsV => PlannedCall::AllGather,
            Self::ReduceScatter | Self::ReduceScatterV | Self::ReduceScatterFused
                | Self::ReduceScatterFusedV => PlannedCall::ReduceScatter,
            Self::Broadcast => PlannedCall::Broadcast,
            Self::Reduce => PlannedCall::Reduce,
            Self::Gather | Self::Scatter | Self::AllToAll | Self::AllToAllV | Self::Barrier | Self::Send | Self::Recv
                | Self::SendRecv | Self::Group | Self::ShardedRmsNorm => PlannedCall::Messages,
        }
    }

    /// Returns the ratio of bus bandwidth to algorithm bandwidth.
    #[inline]
    pub(super) const fn bus(self) -> BusFactor {
        match self {
            Self::AllReduce | Self::AllReduceFused | Self::AllReduceQuantized => BusFactor::TwiceOthers,
            Self::AllGather | Self::AllGatherV | Self::ReduceScatter | Self::ReduceScatterV | Self::Gather
                | Self::Scatter | Self::AllToAll | Self::AllToAllV | Self::Barrier | Self::ReduceScatterFused
                | Self::ReduceScatterFusedV | Self::AllGatherRows | Self::AllGatherRowsV => BusFactor::Others,
            Self::Broadcast | Self::Reduce | Self::Send | Self::Recv | Self::SendRecv | Self::Group
                | Self::ShardedRmsNorm => BusFactor::One,
        }
    }
}

/// Calls that a row of a plan's [`Table`](crate::plan::Table) is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(usize)]
#[non_exhaustive]
pub enum PlannedCall {
    /// `all_reduce`, `all_reduce_fused`, `all_reduce_quantized`
    AllReduce,
    /// `all_gather`, `all_gather_v`, `all_gather_rows`, `all_gather_rows_v`
    AllGather,
    /// `reduce_scatter`, `reduce_scatter_v`, `reduce_scatter_fused`, `reduce_scatter_fused_v`
    ReduceScatter,
    /// `broadcast`
    Broadcast,
    /// `reduce`
    Reduce,
    /// `gather`, `scatter`, `all_to_all`, `all_to_all_v`, `barrier`, `send`, `recv`, `send_recv`, `group`,
    /// `sharded_rms_norm`
    Messages,
}

impl PlannedCall {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::AllReduce, Self::AllGather, Self::ReduceScatter, Self::Broadcast, Self::Reduce,
        Self::Messages];

    /// Returns the name in tuning files: `"all_reduce"`, ..., `"messages"`.
    #[inline]
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

/// Norm of the rows of a sum. `docs/fused.md` defines the arithmetic, to the bit.
///
/// ```
/// use fast_allreduce::Norm;
///
/// let norm = Norm::Rms { epsilon: 1e-5, unit_offset: false };
/// assert_eq!((norm.name(), norm.takes_bias()), ("rms", false));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Norm {
    /// No norm.
    #[default]
    None,
    /// RMSNorm: `x / sqrt(mean(x * x) + epsilon) * weight`.
    Rms {
        /// Number that is added before the square root.
        epsilon: f32,
        /// Whether 1 is added to each weight.
        unit_offset: bool,
    },
    /// LayerNorm: `(x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) * weight + bias`.
    Layer {
        /// Number that is added before the square root.
        epsilon: f32,
        /// Whether 1 is added to each weight.
        unit_offset: bool,
    },
}

impl Norm {
    /// Returns the code; 0 for no norm.
    pub const fn code(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Rms { .. } => 1,
            Self::Layer { .. } => 2,
        }
    }

    /// Returns the norm of a code, with the parameters that it takes.
    pub(super) const fn known(code: u32, epsilon: f32, unit_offset: bool) -> Option<Self> {
        match code {
            0 => Some(Self::None),
            1 => Some(Self::Rms { epsilon, unit_offset }),
            2 => Some(Self::Layer { epsilon, unit_offset }),
            _ => None,
        }
    }

    /// Returns the parameter, or 0.0 for norms without it.
    pub(crate) const fn epsilon(self) -> f32 {
        match self {
            Self::Rms { epsilon, .. } | Self::Layer { epsilon, .. } => epsilon,
            _ => 0.0,
        }
    }

    /// Returns the parameter, or false for norms without it.
    pub(crate) const fn unit_offset(self) -> bool {
        match self {
            Self::Rms { unit_offset, .. } | Self::Layer { unit_offset, .. } => unit_offset,
            _ => false,
        }
    }
}

/// Facts about the norms, and about the absence of one.
pub(super) const NORMS: [NormFacts; 3] = [
    NormFacts { code: 0, name: "none", takes_unit_offset: false, takes_bias: false },
    NormFacts { code: 1, name: "rms", takes_unit_offset: true, takes_bias: false },
    NormFacts { code: 2, name: "layer", takes_unit_offset: true, takes_bias: true },
];

pub(super) const NORM_NAMES: &str = "one of none, rms, layer";

/// Format of quantised rows: bits of a number, and elements that share a scale. `docs/quantized-rows.md` has the
/// formulas.
///
/// ```
/// use fast_allreduce::{DType, Scaling};
///
/// let scaling: Scaling = "per_token".parse()?;
/// assert_eq!((scaling, scaling.bits(), scaling.scale_type()), (Scaling::PerRow, 8, DType::F32));
/// assert_eq!(Scaling::Nvfp4.number_bytes(4096), 2048);
/// # Ok::<(), fast_allreduce::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u32)]
#[non_exhaustive]
pub enum Scaling {
    /// 8-bit numbers; one scale for all elements, an f32 that is given and equal on all ranks.
    Given = 1,
    /// 8-bit numbers; one f32 scale for each row.
    PerRow = 2,
    /// 8-bit numbers; one f32 scale for each 128 elements of a row; the last group may be shorter.
    PerGroup = 3,
    /// NVFP4: e2m1 numbers, two in a byte; one e4m3 scale for each 16 elements of a row, row after row.
    Nvfp4 = 4,
    /// NVFP4 with scales in tiles of 128 rows and 4 groups, as matrix products read them (cuBLAS: 1D block scaling
    /// factors layout; CUTLASS, TensorRT-LLM: 128x4).
    Nvfp4Tiled = 5,
    /// `per_group` with scales column after column, aligned for the TMA (DeepGEMM on Hopper).
    PerGroupColumns = 6,
    /// 8-bit floats; one E8M0 scale, rounded up, for each 128 elements of a row; in words of four, column after
    /// column (DeepGEMM on Blackwell).
    PerGroupUe8m0 = 7,
    /// MXFP8: 8-bit floats; one E8M0 scale, by OCP's rule, for each 32 elements of a row, in rows.
    Mxfp8 = 8,
    /// MXFP8 with scales in the tiles of `nvfp4_tiled`.
    Mxfp8Tiled = 9,
    /// MXFP4: e2m1 numbers, two in a byte; one E8M0 scale, by OCP's rule, for each 32 elements of a row, in rows.
    Mxfp4 = 10,
    /// MXFP4 with scales in the tiles of `nvfp4_tiled`.
    Mxfp4Tiled = 11,
    /// NVFP4 with scales in tiles of 8 rows and 4 groups, as TensorRT-LLM's matrix products of few rows read them.
    Nvfp4Tiled8x4 = 12,
    /// MXFP8 with scales in the tiles of `nvfp4_8x4`.
    Mxfp8Tiled8x4 = 13,
    /// `per_group_ue8m0` with a scale for each 32 elements of a row.
    Per32Ue8m0 = 14,
}

impl Scaling {
    /// All formats, in the order of their codes.
    pub const ALL: [Self; 14] = [Self::Given, Self::PerRow, Self::PerGroup, Self::Nvfp4, Self::Nvfp4Tiled,
        Self::PerGroupColumns, Self::PerGroupUe8m0, Self::Mxfp8, Self::Mxfp8Tiled, Self::Mxfp4, Self::Mxfp4Tiled,
        Self::Nvfp4Tiled8x4, Self::Mxfp8Tiled8x4, Self::Per32Ue8m0];

    /// Returns the facts about the format.
    #[inline]
    pub(super) const fn facts(self) -> &'static ScalingFacts {
        match self {
            Self::Given => &ScalingFacts { name: "given", aliases: &["per_tensor"], bits: 8, is_given: true,
                group: None, rule: abi::FA_RULE_F32, layout: abi::FA_LAYOUT_ROWS },
            Self::PerRow => &ScalingFacts { name: "per_row", aliases: &["per_token"], bits: 8, is_given: false,
                group: None, rule: abi::FA_RULE_F32, layout: abi::FA_LAYOUT_ROWS },
            Self::PerGroup => &ScalingFacts { name: "per_group", aliases: &["per_128"], bits: 8, is_given: false,
                group: Some(128), rule: abi::FA_RULE_F32, layout: abi::FA_LAYOUT_ROWS },
            Self::Nvfp4 => &ScalingFacts { name: "nvfp4", aliases: &[], bits: 4, is_given: false, group: Some(16),
                rule: abi::FA_RULE_E4M3, layout: abi::FA_LAYOUT_ROWS },
            Self::Nvfp4Tiled => &ScalingFacts { name: "nvfp4_tiled", aliases: &["nvfp4_128x4"], bits: 4,
                is_given: false, group: Some(16), rule: abi::FA_RULE_E4M3, layout: abi::FA_LAYOUT_128X4 },
            Self::PerGroupColumns => &ScalingFacts { name: "per_group_columns", aliases: &["per_128_columns"],
                bits: 8, is_given: false, group: Some(128), rule: abi::FA_RULE_F32, layout: abi::FA_LAYOUT_COLUMNS },
            Self::PerGroupUe8m0 => &ScalingFacts { name: "per_group_ue8m0", aliases: &["per_128_ue8m0"], bits: 8,
                is_given: false, group: Some(128), rule: abi::FA_RULE_E8M0_UP, layout: abi::FA_LAYOUT_COLUMNS },
            Self::Mxfp8 => &ScalingFacts { name: "mxfp8", aliases: &[], bits: 8, is_given: false, group: Some(32),
                rule: abi::FA_RULE_E8M0_FLOOR, layout: abi::FA_LAYOUT_ROWS },
            Self::Mxfp8Tiled => &ScalingFacts { name: "mxfp8_tiled", aliases: &["mxfp8_128x4"], bits: 8,
                is_given: false, group: Some(32), rule: abi::FA_RULE_E8M0_FLOOR, layout: abi::FA_LAYOUT_128X4 },
            Self::Mxfp4 => &ScalingFacts { name: "mxfp4", aliases: &[], bits: 4, is_given: false, group: Some(32),
                rule: abi::FA_RULE_E8M0_FLOOR, layout: abi::FA_LAYOUT_ROWS },
            Self::Mxfp4Tiled => &ScalingFacts { name: "mxfp4_tiled", aliases: &["mxfp4_128x4"], bits: 4,
                is_given: false, group: Some(32), rule: abi::FA_RULE_E8M0_FLOOR, layout: abi::FA_LAYOUT_128X4 },
            Self::Nvfp4Tiled8x4 => &ScalingFacts { name: "nvfp4_8x4", aliases: &[], bits: 4, is_given: false,
                group: Some(16), rule: abi::FA_RULE_E4M3, layout: abi::FA_LAYOUT_8X4 },
            Self::Mxfp8Tiled8x4 => &ScalingFacts { name: "mxfp8_8x4", aliases: &[], bits: 8, is_given: false,
                group: Some(32), rule: abi::FA_RULE_E8M0_FLOOR, layout: abi::FA_LAYOUT_8X4 },
            Self::Per32Ue8m0 => &ScalingFacts { name: "per_32_ue8m0", aliases: &[], bits: 8, is_given: false,
                group: Some(32), rule: abi::FA_RULE_E8M0_UP, layout: abi::FA_LAYOUT_COLUMNS },
        }
    }
}

pub(super) const SCALINGS: &str = "one of given, per_row, per_group, nvfp4, nvfp4_tiled, per_group_columns, \
    per_group_ue8m0, mxfp8, mxfp8_tiled, mxfp4, mxfp4_tiled, nvfp4_8x4, mxfp8_8x4, per_32_ue8m0";

/// Kernels, by code.
#[cfg(feature = "cuda")]
pub(crate) const KERNELS: [KernelFacts; 23] = [
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
    KernelFacts { name: "all_gather_rows", family: KernelFamily::Other, is_hot: false },
    KernelFacts { name: "one_shot_pull_norm", family: KernelFamily::Norming, is_hot: false },
    KernelFacts { name: "two_shot_pull_norm", family: KernelFamily::Norming, is_hot: false },
    KernelFacts { name: "push_norm", family: KernelFamily::Norming, is_hot: false },
    KernelFacts { name: "push_norm", family: KernelFamily::Norming, is_hot: false },
    KernelFacts { name: "reduce_scatter_norm", family: KernelFamily::Norming, is_hot: false },
    KernelFacts { name: "one_shot_nvls", family: KernelFamily::Nvls, is_hot: false },
    KernelFacts { name: "two_shot_nvls", family: KernelFamily::Nvls, is_hot: false },
    KernelFacts { name: "sharded_rms_norm", family: KernelFamily::Norming, is_hot: false },
];

/// World sizes that the hot set has kernels for.
#[cfg(feature = "cuda")]
pub(crate) const HOT_WORLDS: [usize; 6] = [2, 3, 4, 5, 6, 8];
