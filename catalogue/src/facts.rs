//! Words of the tables that the library takes decisions by: it has a copy of these enums.

/// How many elements a rank reads or writes in a call of `count`, where `count` is NCCL's: one rank's share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
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
pub enum InPlace {
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
pub enum SwapsStaging {
    /// Ranks read what they have staged themselves, or nothing is staged.
    Never,
    /// They may.
    Always,
    /// As the allreduce's algorithm says.
    AsTheAlgorithm,
}

/// How the elements of a call are divided among its launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Division {
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
pub enum BusFactor {
    /// 2 (n - 1) / n.
    TwiceOthers,
    /// (n - 1) / n.
    Others,
    /// 1.
    One,
}

/// What a launch of an allreduce takes of a generation of a region, which bounds its message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CapacityRule {
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
pub enum Work {
    /// The message.
    Message,
    /// A slice of it: a part for each rank.
    Slice,
}

/// When an allreduce reads registered inputs where they are, instead of staging them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadsInputs {
    /// Never: it has no peers that read.
    Never,
    /// Unless the call is in place: results are written while peers still read.
    OutOfPlace,
    /// Always.
    Always,
}
