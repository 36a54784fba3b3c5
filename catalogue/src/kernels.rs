//! Kernels, some of which are algorithms of allreduces. The code of a kernel is its position in the table.

use crate::facts::{CapacityRule, ReadsInputs, Work};

/// Family of kernels. It decides the types that a kernel is compiled for and the operands of its entry point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Reduces elements: one kernel for each kernel type, which supports all operations.
    Reducing,
    /// Moves bytes of any type: one kernel.
    Moving,
    /// Has its own entry point: one kernel.
    Other,
    /// Sums by the algorithm of this name, adds a residual and applies a norm: one kernel for each hot type.
    Norming(&'static str),
    /// In-switch reduction (NVLS): one kernel for each hot type, on GPUs that have the instructions.
    Nvls,
    /// Normalises rows whose elements are divided among the ranks: one kernel for each hot type.
    Sharded,
}

/// Algorithm of allreduces that users can select.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Algorithm {
    /// Variant of `Algorithm`.
    pub variant: &'static str,
    /// Name in settings and on command lines.
    pub name: &'static str,
    /// Whether it reduces in rank order and rounds once: all direct algorithms give the same bits.
    pub direct: bool,
    /// Whether the hot set has specialised kernels for it.
    pub hot: bool,
    /// Memory of the region that a launch uses, which limits its message.
    pub capacity: CapacityRule,
    /// Work that is divided among the blocks of a grid.
    pub work: Work,
    /// When it reads registered inputs directly.
    pub reads_inputs: ReadsInputs,
    /// Whether two ranks may swap their staging: each reads only what the other has staged.
    pub swaps_staging: bool,
    /// Documentation for Rust, one string for each paragraph.
    pub doc: &'static [&'static str],
    /// Number of barriers of a launch.
    pub barriers: &'static str,
    /// Bytes to or from each rank, for a message of S bytes between n ranks.
    pub bytes: &'static str,
}

/// Kernel.
#[derive(Debug)]
pub struct Kernel {
    /// Name, for example `one_shot_pull`. The constant of the code is `FA_ONE_SHOT_PULL`.
    pub name: &'static str,
    /// File in `csrc/algorithms/`, without the extension.
    pub file: &'static str,
    /// Family.
    pub family: Family,
    /// Algorithm that the kernel implements, if users can select it.
    pub algorithm: Option<Algorithm>,
}

impl Kernel {
    /// Returns the name of its entry points on GPUs, which have a suffix for the type. Pushes with a norm share theirs,
    /// since most of their code is the same.
    pub fn entry(&self) -> &'static str {
        match self.family {
            Family::Norming("one_shot_push" | "two_shot_push") => "push_norm",
            _ => self.name,
        }
    }

    /// Returns whether the hot set has specialised versions of the kernel.
    pub fn is_hot(&self) -> bool {
        self.algorithm.is_some_and(|algorithm| algorithm.hot)
    }
}

const fn without_algorithm(name: &'static str, file: &'static str, family: Family) -> Kernel {
    Kernel { name, file, family, algorithm: None }
}

/// All kernels.
#[rustfmt::skip]
pub const KERNELS: [Kernel; 23] = [
    Kernel { name: "one_shot_pull", file: "one_shot_pull", family: Family::Reducing, algorithm: Some(Algorithm {
        variant: "OneShotPull", name: "one-shot-pull", direct: true, hot: true,
        capacity: CapacityRule::Staging, work: Work::Message,
        reads_inputs: ReadsInputs::OutOfPlace, swaps_staging: true,
        doc: &["Every rank reads all inputs and reduces the whole message. One barrier for staged inputs, two for \
                registered ones."],
        barriers: "1 staged, 2 registered", bytes: "(n - 1) S" }) },
    Kernel { name: "two_shot_pull", file: "two_shot_pull", family: Family::Reducing, algorithm: Some(Algorithm {
        variant: "TwoShotPull", name: "two-shot-pull", direct: true, hot: true,
        capacity: CapacityRule::Staging, work: Work::Slice,
        reads_inputs: ReadsInputs::Always, swaps_staging: false,
        doc: &["Rank r reduces slice r, then all ranks gather all slices. Two barriers."],
        barriers: "2", bytes: "2 (n - 1)/n S" }) },
    Kernel { name: "one_shot_push", file: "one_shot_push", family: Family::Reducing, algorithm: Some(Algorithm {
        variant: "OneShotPush", name: "one-shot-push", direct: true, hot: true,
        capacity: CapacityRule::Mailboxes, work: Work::Message,
        reads_inputs: ReadsInputs::Never, swaps_staging: false,
        doc: &["Every rank sends its input as packets to the mailboxes of all peers. No barrier."],
        barriers: "0", bytes: "(n - 1) S as packets" }) },
    Kernel { name: "two_shot_push", file: "two_shot_push", family: Family::Reducing, algorithm: Some(Algorithm {
        variant: "TwoShotPush", name: "two-shot-push", direct: true, hot: true,
        capacity: CapacityRule::TwoSliceMailboxes, work: Work::Slice,
        reads_inputs: ReadsInputs::Never, swaps_staging: false,
        doc: &["Every rank sends slices as packets to their owners. The owners reduce them and send the results as \
                packets to all ranks. No barrier."],
        barriers: "0", bytes: "2 (n - 1)/n S as packets" }) },
    Kernel { name: "ring", file: "ring", family: Family::Reducing, algorithm: Some(Algorithm {
        variant: "Ring", name: "ring", direct: false, hot: false,
        capacity: CapacityRule::StepMailboxes, work: Work::Slice,
        reads_inputs: ReadsInputs::Never, swaps_staging: false,
        doc: &["Reduce-scatter and all-gather around a ring: each rank sends packets only to the next rank, in \
                2 (n - 1) steps. For links that are not a full mesh.",
               "Partial sums are sent as elements, so they are rounded in each step. Results differ from those of \
                direct algorithms, but are the same on all ranks and in every run."],
        barriers: "0", bytes: "2 (n - 1)/n S as packets, to one neighbour" }) },
    Kernel { name: "halving_doubling", file: "halving_doubling", family: Family::Reducing, algorithm: Some(Algorithm {
        variant: "HalvingDoubling", name: "halving-doubling", direct: false, hot: false,
        capacity: CapacityRule::TwoMailboxes, work: Work::Message,
        reads_inputs: ReadsInputs::Never, swaps_staging: false,
        doc: &["Recursive halving and doubling by packets, in 2 log2(n) steps. A rank beyond the largest power of two \
                has a partner that takes part for it. Partial sums are rounded, as in [`Algorithm::Ring`]."],
        barriers: "0", bytes: "2 (n - 1)/n S as packets, n a power of two" }) },
    without_algorithm("reduce_scatter", "reduce_scatter", Family::Reducing),
    without_algorithm("reduce", "reduce", Family::Reducing),
    without_algorithm("all_gather", "all_gather", Family::Moving),
    without_algorithm("broadcast", "broadcast", Family::Moving),
    without_algorithm("scattered_broadcast", "broadcast", Family::Moving),
    without_algorithm("barrier", "barrier", Family::Other),
    without_algorithm("transfer", "transfer", Family::Other),
    without_algorithm("two_shot_quantized", "two_shot_quantized", Family::Other),
    without_algorithm("all_gather_rows", "all_gather_rows", Family::Other),
    without_algorithm("one_shot_pull_norm", "one_shot_pull", Family::Norming("one_shot_pull")),
    without_algorithm("two_shot_pull_norm", "two_shot_pull", Family::Norming("two_shot_pull")),
    without_algorithm("one_shot_push_norm", "one_shot_push", Family::Norming("one_shot_push")),
    without_algorithm("two_shot_push_norm", "two_shot_push", Family::Norming("two_shot_push")),
    without_algorithm("reduce_scatter_norm", "reduce_scatter", Family::Norming("reduce_scatter")),
    Kernel { name: "one_shot_nvls", file: "one_shot_nvls", family: Family::Nvls, algorithm: Some(Algorithm {
        variant: "OneShotNvls", name: "one-shot-nvls", direct: false, hot: false,
        capacity: CapacityRule::Staging, work: Work::Message,
        reads_inputs: ReadsInputs::Never, swaps_staging: false,
        doc: &["In-switch reduction of all inputs for every rank (NVLS: `multimem.ld_reduce`). One barrier.",
               "It supports sums of f16, bf16 and f32 on NVSwitch systems with Hopper or newer GPUs, one rank on each; \
                other calls use another algorithm. The switch chooses the order of additions: the bits may differ \
                among ranks and from run to run."],
        barriers: "1", bytes: "n S to the switch, S from it" }) },
    Kernel { name: "two_shot_nvls", file: "two_shot_nvls", family: Family::Nvls, algorithm: Some(Algorithm {
        variant: "TwoShotNvls", name: "two-shot-nvls", direct: false, hot: false,
        capacity: CapacityRule::Staging, work: Work::Slice,
        reads_inputs: ReadsInputs::Never, swaps_staging: false,
        doc: &["In-switch reduction of slice r by rank r, which stores the result to all ranks (`multimem.st`). Two \
                barriers. It supports the calls of [`Algorithm::OneShotNvls`]. All ranks get the same bits, in the \
                switch's order of additions."],
        barriers: "2", bytes: "(1 + 1/n) S" }) },
    without_algorithm("sharded_rms_norm", "sharded_norm", Family::Sharded),
];
