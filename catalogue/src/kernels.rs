//! The kernels, and the algorithms of an allreduce among them. The order is that of the codes.

use crate::facts::{CapacityRule, ReadsInputs, Work};

/// What a kernel computes, which decides the types that it is compiled for and the operands of its entry point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Reduces elements: a kernel for each kernel type, which takes any operation.
    Reducing,
    /// Moves bytes of any type: one kernel.
    Moving,
    /// Anything else, with an entry point of its own: one kernel.
    Other,
    /// A sum by the algorithm named here, then the residual and the RMSNorm: a kernel for each hot type.
    Norming(&'static str),
    /// Such a one with every other norm.
    OtherNorming(&'static str),
    /// An in-switch reduction (NVLS) of a sum: a kernel for each hot type, on GPUs that have the instructions.
    Nvls,
}

/// An allreduce's algorithm, as users name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Algorithm {
    /// The variant of `Algorithm`, and of C's enum.
    pub variant: &'static str,
    /// Its name on command lines.
    pub name: &'static str,
    /// Whether it reduces in rank order with one rounding: all direct algorithms give the same bits.
    pub direct: bool,
    /// Whether the hot set has kernels of its own for it.
    pub hot: bool,
    /// What a launch takes of a region, which bounds its message.
    pub capacity: CapacityRule,
    /// What the blocks of a grid share.
    pub work: Work,
    /// When it reads registered inputs where they are.
    pub reads_inputs: ReadsInputs,
    /// Whether each of two ranks reads what the other has staged and nobody its own, so that they may swap their
    /// staging.
    pub swaps_staging: bool,
    /// Paragraphs of documentation for Rust.
    pub doc: &'static [&'static str],
    /// Barriers of a launch.
    pub barriers: &'static str,
    /// Bytes to or from each rank, for a message of S between n ranks.
    pub bytes: &'static str,
}

/// A kernel.
#[derive(Debug)]
pub struct Kernel {
    /// Its name, and with a suffix for the type that of its entry points: `one_shot_pull`. The code's is
    /// `FA_ONE_SHOT_PULL`.
    pub name: &'static str,
    /// The file of `csrc/algorithms/` that has it, without the extension.
    pub file: &'static str,
    /// What it computes.
    pub family: Family,
    /// The algorithm of an allreduce that it is.
    pub algorithm: Option<Algorithm>,
}

impl Kernel {
    /// Whether the hot set has kernels of its own for it.
    pub fn is_hot(&self) -> bool {
        self.algorithm.is_some_and(|algorithm| algorithm.hot)
    }
}

/// All kernels.
#[rustfmt::skip]
pub const KERNELS: [Kernel; 22] = [
    Kernel { name: "one_shot_pull", file: "one_shot_pull", family: Family::Reducing, algorithm: Some(Algorithm {
        variant: "OneShotPull", name: "one-shot-pull", direct: true, hot: true,
        capacity: CapacityRule::Staging, work: Work::Message, reads_inputs: ReadsInputs::OutOfPlace, swaps_staging: true,
        doc: &["Every rank reads all inputs and reduces everything. One barrier for staged inputs, two for registered ones."],
        barriers: "1 staged, 2 registered", bytes: "(n - 1) S" }) },
    Kernel { name: "two_shot_pull", file: "two_shot_pull", family: Family::Reducing, algorithm: Some(Algorithm {
        variant: "TwoShotPull", name: "two-shot-pull", direct: true, hot: true,
        capacity: CapacityRule::Staging, work: Work::Slice, reads_inputs: ReadsInputs::Always, swaps_staging: false,
        doc: &["Rank r reduces slice r, then everybody gathers all slices. Two barriers."],
        barriers: "2", bytes: "2 (n - 1)/n S" }) },
    Kernel { name: "one_shot_push", file: "one_shot_push", family: Family::Reducing, algorithm: Some(Algorithm {
        variant: "OneShotPush", name: "one-shot-push", direct: true, hot: true,
        capacity: CapacityRule::Mailboxes, work: Work::Message, reads_inputs: ReadsInputs::Never, swaps_staging: false,
        doc: &["Every rank sends its input as packets into every peer's mailbox. No barrier."],
        barriers: "0", bytes: "(n - 1) S as packets" }) },
    Kernel { name: "two_shot_push", file: "two_shot_push", family: Family::Reducing, algorithm: Some(Algorithm {
        variant: "TwoShotPush", name: "two-shot-push", direct: true, hot: true,
        capacity: CapacityRule::TwoSliceMailboxes, work: Work::Slice, reads_inputs: ReadsInputs::Never, swaps_staging: false,
        doc: &["Slices to their owners as packets, reduced slices to everybody as packets. No barrier."],
        barriers: "0", bytes: "2 (n - 1)/n S as packets" }) },
    Kernel { name: "ring", file: "ring", family: Family::Reducing, algorithm: Some(Algorithm {
        variant: "Ring", name: "ring", direct: false, hot: false,
        capacity: CapacityRule::StepMailboxes, work: Work::Slice, reads_inputs: ReadsInputs::Never, swaps_staging: false,
        doc: &["A reduce-scatter and an all-gather in which each rank sends packets to the next one only: 2 (n - 1) steps, for \
                links that are not a full mesh.",
               "Partial sums travel as elements of the type and are rounded in each step, so that results do not have the bits \
                of the direct algorithms; all ranks have the same ones, in every run."],
        barriers: "0", bytes: "2 (n - 1)/n S as packets, to one neighbour" }) },
    Kernel { name: "halving_doubling", file: "halving_doubling", family: Family::Reducing, algorithm: Some(Algorithm {
        variant: "HalvingDoubling", name: "halving-doubling", direct: false, hot: false,
        capacity: CapacityRule::TwoMailboxes, work: Work::Message, reads_inputs: ReadsInputs::Never, swaps_staging: false,
        doc: &["Recursive halving and doubling, by packets: 2 log2(n) steps. A rank beyond the largest power of two has another \
                that takes part for it. Results have the bits of [`Algorithm::Ring`]'s kind: partial sums are rounded."],
        barriers: "0", bytes: "2 (n - 1)/n S as packets, n a power of two" }) },
    Kernel { name: "reduce_scatter", file: "reduce_scatter", family: Family::Reducing, algorithm: None },
    Kernel { name: "reduce", file: "reduce", family: Family::Reducing, algorithm: None },
    Kernel { name: "all_gather", file: "all_gather", family: Family::Moving, algorithm: None },
    Kernel { name: "broadcast", file: "broadcast", family: Family::Moving, algorithm: None },
    Kernel { name: "scattered_broadcast", file: "broadcast", family: Family::Moving, algorithm: None },
    Kernel { name: "barrier", file: "barrier", family: Family::Other, algorithm: None },
    Kernel { name: "transfer", file: "transfer", family: Family::Other, algorithm: None },
    Kernel { name: "two_shot_quantized", file: "two_shot_quantized", family: Family::Other, algorithm: None },
    Kernel { name: "one_shot_pull_norm", file: "one_shot_pull", family: Family::Norming("one_shot_pull"), algorithm: None },
    Kernel { name: "two_shot_pull_norm", file: "two_shot_pull", family: Family::Norming("two_shot_pull"), algorithm: None },
    Kernel { name: "one_shot_push_norm", file: "one_shot_push", family: Family::Norming("one_shot_push"), algorithm: None },
    Kernel { name: "two_shot_push_norm", file: "two_shot_push", family: Family::Norming("two_shot_push"), algorithm: None },
    Kernel { name: "one_shot_pull_other_norm", file: "one_shot_pull", family: Family::OtherNorming("one_shot_pull"), algorithm: None },
    Kernel { name: "two_shot_pull_other_norm", file: "two_shot_pull", family: Family::OtherNorming("two_shot_pull"), algorithm: None },
    Kernel { name: "one_shot_nvls", file: "one_shot_nvls", family: Family::Nvls, algorithm: Some(Algorithm {
        variant: "OneShotNvls", name: "one-shot-nvls", direct: false, hot: false,
        capacity: CapacityRule::Staging, work: Work::Message, reads_inputs: ReadsInputs::Never, swaps_staging: false,
        doc: &["An in-switch reduction of all inputs for every rank (NVLS: `multimem.ld_reduce`). One barrier.",
               "Sums of f16, bf16 and f32 on GPUs of NVSwitch systems from Hopper on, one rank on each; other calls are done as \
                without it. The switch chooses the order of additions: nothing says that all ranks have the same bits, or that \
                another run has."],
        barriers: "1", bytes: "n S to the switch, S from it" }) },
    Kernel { name: "two_shot_nvls", file: "two_shot_nvls", family: Family::Nvls, algorithm: Some(Algorithm {
        variant: "TwoShotNvls", name: "two-shot-nvls", direct: false, hot: false,
        capacity: CapacityRule::Staging, work: Work::Slice, reads_inputs: ReadsInputs::Never, swaps_staging: false,
        doc: &["An in-switch reduction of slice r for rank r, which stores it to all ranks (`multimem.st`). Two barriers. It \
                takes the calls of [`Algorithm::OneShotNvls`]. All ranks have the same bits, in the switch's order of additions."],
        barriers: "2", bytes: "(1 + 1/n) S" }) },
];
