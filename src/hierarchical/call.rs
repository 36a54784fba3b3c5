//! What the nodes are about to do, for them to compare.

use crate::abi::FaCall;
use crate::call::{CallId, CallKind};
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;
use crate::error::{Error, Result};

/// A call of a world of several nodes: all that must be the same on all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call(CallId);

impl Call {
    pub(super) fn new(count: usize, dtype: DType, op: ReduceOp) -> Self {
        let kind = CallKind::AllReduce;
        Self(CallId { kind, dtype, op: Some(op), algorithm: None, root: None, digest: 0, count })
    }

    /// The call as the other nodes may be told it.
    pub fn to_bytes(self) -> [u8; 16] {
        // An allreduce has no counts by rank to digest.
        let FaCall { what, count, .. } = self.0.encode();
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&what.to_le_bytes());
        bytes[8..].copy_from_slice(&count.to_le_bytes());
        bytes
    }

    /// Compares it with what another node's [`Call::to_bytes`] gave.
    ///
    /// # Errors
    ///
    /// [`Error::Disagreement`] with both, in which ranks are numbers of nodes.
    pub fn compare(self, own_node: usize, node: usize, theirs: [u8; 16]) -> Result<()> {
        if theirs == self.to_bytes() {
            return Ok(());
        }
        let [what, count] = words(theirs);
        Err(Error::Disagreement {
            what: "the call",
            rank: node,
            theirs: CallId::describe(FaCall { what, count, digest: 0 }),
            own_rank: own_node,
            ours: self.0.to_string(),
        })
    }

    /// Numbers of which the minimum over the nodes is each node's call, in their order.
    pub(super) fn in_place_of(self, node: usize, nodes: usize) -> Vec<i64> {
        let mut minima = vec![i64::MAX; 2 * nodes];
        let words = words(self.to_bytes()).map(|word| word as i64);
        minima[2 * node..][..2].copy_from_slice(&words);
        minima
    }

    /// Compares it with what all nodes gave of [`Call::in_place_of`]; those that gave nothing are not compared.
    pub(super) fn compare_all(self, own_node: usize, minima: &[i64]) -> Result<()> {
        let given = minima.chunks_exact(2).enumerate().filter(|(_, words)| words[0] != i64::MAX);
        given.into_iter().try_for_each(|(node, words)| {
            let mut theirs = [0; 16];
            theirs[..8].copy_from_slice(&words[0].to_le_bytes());
            theirs[8..].copy_from_slice(&words[1].to_le_bytes());
            self.compare(own_node, node, theirs)
        })
    }
}

fn words(bytes: [u8; 16]) -> [u64; 2] {
    let word = |at: usize| bytes[at..at + 8].iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    [word(0), word(8)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minima_tell_whether_calls_differ_and_how() {
        let call = Call::new(5, DType::F32, ReduceOp::Sum);
        let minimum = |one: &[i64], other: &[i64]| -> Vec<i64> {
            one.iter().zip(other).map(|(one, other)| *one.min(other)).collect()
        };
        for other in [
            Call::new(6, DType::F32, ReduceOp::Sum),
            Call::new(usize::MAX >> 1, DType::F32, ReduceOp::Sum),
            Call::new(0, DType::F32, ReduceOp::Sum),
            Call::new(5, DType::I32, ReduceOp::Sum),
            Call::new(5, DType::F32, ReduceOp::Prod),
        ] {
            let both = minimum(&call.in_place_of(0, 2), &other.in_place_of(1, 2));
            let error = call.compare_all(0, &both).unwrap_err();
            let Error::Disagreement { rank: 1, theirs, own_rank: 0, ours, .. } = &error else {
                panic!("{error}")
            };
            assert_eq!((ours, theirs), (&call.0.to_string(), &other.0.to_string()));
            assert!(other.compare_all(1, &both).is_err());
        }
        let both = minimum(&call.in_place_of(0, 2), &call.in_place_of(1, 2));
        assert_eq!(call.compare_all(1, &both), Ok(()));
        assert_eq!(call.compare_all(0, &call.in_place_of(0, 3)), Ok(()), "the others gave nothing");
    }
}
