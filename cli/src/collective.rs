//! The calls that are measured, and what nccl-tests says of each.

use fast_allreduce::{CallKind, ReduceOp};

/// What `bench`, `compare` and `soak` make. `send_recv` goes to the right neighbour, and comes from the left one.
pub const MEASURED: [CallKind; 12] = [
    CallKind::AllReduce,
    CallKind::AllGather,
    CallKind::AllGatherV,
    CallKind::ReduceScatter,
    CallKind::ReduceScatterV,
    CallKind::Broadcast,
    CallKind::Reduce,
    CallKind::Gather,
    CallKind::Scatter,
    CallKind::AllToAll,
    CallKind::AllToAllV,
    CallKind::SendRecv,
];

/// Facts of a measured call.
pub trait CallFacts: Copy {
    /// Whether elements are combined.
    fn reduces(self) -> bool;

    /// Whether one rank has another part than the others.
    fn has_root(self) -> bool;

    /// The name of the operation in results, as nccl-tests has it.
    fn redop(self, op: ReduceOp) -> &'static str {
        match self.reduces() {
            true => op.name(),
            false => "none",
        }
    }

    /// Whether a buffer is one message for all, not a share for each rank.
    fn is_whole(self) -> bool;

    /// Whether shares may differ.
    fn is_uneven(self) -> bool;

    /// Bus bandwidth by algorithm bandwidth: what one rank's link carries of the size, as `doc/PERFORMANCE.md` of nccl-tests has
    /// it, and its `gather.cu`, `scatter.cu` and `sendrecv.cu`.
    fn bus_factor(self, world_size: usize) -> f64;
}

impl CallFacts for CallKind {
    fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::ReduceScatterV | Self::Reduce)
    }

    fn has_root(self) -> bool {
        matches!(self, Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter)
    }

    fn is_whole(self) -> bool {
        matches!(self, Self::AllReduce | Self::Broadcast | Self::Reduce | Self::SendRecv)
    }

    fn is_uneven(self) -> bool {
        matches!(self, Self::AllGatherV | Self::ReduceScatterV | Self::AllToAllV)
    }

    fn bus_factor(self, world_size: usize) -> f64 {
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
        use CallKind::{
            AllGather, AllGatherV, AllReduce, AllToAll, AllToAllV, Broadcast, Gather, Reduce, ReduceScatter,
            ReduceScatterV, Scatter, SendRecv,
        };
        assert_eq!([AllReduce, AllGather, SendRecv].map(|kind| kind.bus_factor(4)), [1.5, 0.75, 1.0]);
        for kind in [Broadcast, Reduce] {
            assert_eq!(kind.bus_factor(4), 1.0);
        }
        for kind in [AllGatherV, AllToAll, AllToAllV, Gather, ReduceScatter, ReduceScatterV, Scatter] {
            assert_eq!((kind.bus_factor(4), kind.bus_factor(1)), (0.75, 0.0));
        }
    }
}
