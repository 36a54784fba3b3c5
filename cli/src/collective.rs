//! Names of calls in results.

use fast_allreduce::{CallKind, ReduceOp};

/// Returns the name of the operation in results, as nccl-tests prints it.
pub fn redop(kind: CallKind, op: ReduceOp) -> &'static str {
    match kind.reduces() {
        true => op.name(),
        false => "none",
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
