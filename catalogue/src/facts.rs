//! Enums that the tables use and the library decides by. The generator copies them into the library.

/// Number of elements that a rank reads or writes in a call of `count`, where `count` is NCCL's: one rank's share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
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
pub enum InPlace {
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
pub enum SwapsStaging {
    /// No: ranks read what they have staged themselves, or nothing is staged.
    Never,
    /// Yes.
    Always,
    /// Depends on the algorithm of the allreduce.
    ByAlgorithm,
}

/// Division of a call's elements among its launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Division {
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
pub enum BusFactor {
    /// 2 (n - 1) / n.
    TwiceOthers,
    /// (n - 1) / n.
    Others,
    /// 1.
    One,
}

/// Memory that a launch of an allreduce uses in one generation of a region, which limits its message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CapacityRule {
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
pub enum Work {
    /// The message.
    Message,
    /// A slice of the message: each rank has one.
    Slice,
}

/// When an allreduce reads registered inputs directly, instead of staging them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadsInputs {
    /// Never: peers do not read inputs.
    Never,
    /// Unless the call is in place: peers may still read the input while results are written.
    OutOfPlace,
    /// Always.
    Always,
}
