//! The collectives by name, and what nccl-tests says of each.

use fast_allreduce::ReduceOp;

/// The collectives by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    AllReduce,
    AllGather,
    AllGatherV,
    ReduceScatter,
    ReduceScatterV,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    AllToAll,
    AllToAllV,
    /// To the right neighbour, from the left one.
    SendRecv,
}

impl Kind {
    pub const ALL: [Self; 12] = [
        Self::AllReduce,
        Self::AllGather,
        Self::AllGatherV,
        Self::ReduceScatter,
        Self::ReduceScatterV,
        Self::Broadcast,
        Self::Reduce,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::AllToAllV,
        Self::SendRecv,
    ];

    /// As it is on the command line and in the results: that of its method.
    pub fn name(self) -> &'static str {
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
            Self::SendRecv => "send_recv",
        }
    }

    pub fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::ReduceScatterV | Self::Reduce)
    }

    pub fn has_root(self) -> bool {
        matches!(self, Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter)
    }

    /// The name of the operation in results, as nccl-tests has it.
    pub fn redop(self, op: ReduceOp) -> &'static str {
        if self.reduces() {
            op.name()
        } else {
            "none"
        }
    }

    /// Whether a buffer is one message for all, not a share for each rank.
    pub fn is_whole(self) -> bool {
        matches!(self, Self::AllReduce | Self::Broadcast | Self::Reduce | Self::SendRecv)
    }

    /// Whether shares may differ.
    pub fn is_uneven(self) -> bool {
        matches!(self, Self::AllGatherV | Self::ReduceScatterV | Self::AllToAllV)
    }

    /// Bus bandwidth by algorithm bandwidth: what one rank's link carries of the size, as `doc/PERFORMANCE.md` of nccl-tests has
    /// it, and its `gather.cu`, `scatter.cu` and `sendrecv.cu`.
    pub fn bus_factor(self, world_size: usize) -> f64 {
        let n = world_size as f64;
        match self {
            Self::AllReduce => 2.0 * (n - 1.0) / n,
            Self::Broadcast | Self::Reduce | Self::SendRecv => 1.0,
            _ => (n - 1.0) / n,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        let factor = |kind: Kind| kind.bus_factor(4);
        assert_eq!(
            (factor(Kind::AllReduce), factor(Kind::AllGather), factor(Kind::SendRecv)),
            (1.5, 0.75, 1.0)
        );
        for kind in [Kind::Broadcast, Kind::Reduce] {
            assert_eq!(factor(kind), 1.0);
        }
        use Kind::{AllGatherV, AllToAll, AllToAllV, Gather, ReduceScatter, ReduceScatterV, Scatter};
        for kind in [AllGatherV, AllToAll, AllToAllV, Gather, ReduceScatter, ReduceScatterV, Scatter] {
            assert_eq!((factor(kind), kind.bus_factor(1)), (0.75, 0.0));
        }
    }
}
