//! The calls that a table plans apart.

/// What a row of a [`Table`](super::Table) is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(usize)]
#[non_exhaustive]
pub enum PlannedCall {
    /// An allreduce: the only one with a choice of algorithms. Every table has rows for it.
    AllReduce,
    /// An all-gather, with shares of one size or of any.
    AllGather,
    /// A reduce-scatter, with shares of one size or of any.
    ReduceScatter,
    /// A broadcast.
    Broadcast,
    /// A reduce.
    Reduce,
    /// Messages, and what is made of them: gather, scatter, all-to-all. They have a grid, and no pieces.
    Messages,
}

impl PlannedCall {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::AllReduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Broadcast,
        Self::Reduce,
        Self::Messages,
    ];

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

impl std::fmt::Display for PlannedCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}
