//! The description of a call that nodes compare.

use crate::abi::FaCall;
use crate::call::{CallId, CallKind};
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;
use crate::error::{Error, Result};

/// An allreduce on several nodes: everything that must be equal on all nodes. Engines that compare calls get it in
/// [`InterNode::start_all_reduce`](super::InterNode::start_all_reduce).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call(CallId);

impl Call {
    pub(super) fn new(count: usize, dtype: DType, op: ReduceOp) -> Self {
        let kind = CallKind::AllReduce;
        Self(CallId { kind, dtype, op: Some(op), algorithm: None, root: None, digest: 0, count, counts: 0 })
    }

    /// Encodes the call for the other nodes.
    pub fn to_bytes(self) -> [u8; 16] {
        // An allreduce has no counts by rank, and so no digest.
        let FaCall { what, count, .. } = self.0.encode();
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&what.to_le_bytes());
        bytes[8..].copy_from_slice(&count.to_le_bytes());
        bytes
    }

    /// Compares the call with that of another node, encoded by [`Call::to_bytes`].
    ///
    /// # Errors
    ///
    /// [`Error::Disagreement`] with both calls. The ranks in it are node numbers.
    ///
    /// ```
    /// # use fast_allreduce::hierarchical::Call;
    /// /// What an engine does with the calls that all nodes sent.
    /// fn compare_all(own: Call, own_node: usize, received: &[[u8; 16]]) -> fast_allreduce::Result<()> {
    ///     received.iter().enumerate().try_for_each(|(node, &theirs)| own.compare(own_node, node, theirs))
    /// }
    /// ```
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

    /// Converts the call to numbers whose element-wise minima over the nodes are the calls of all nodes, in node order:
    /// each node fills in its own words, and leaves all others at the maximum.
    pub(super) fn to_minima(self, node: usize, nodes: usize) -> Vec<i64> {
        let mut minima = vec![i64::MAX; 2 * nodes];
        let words = words(self.to_bytes()).map(|word| word as i64);
        minima[2 * node..][..2].copy_from_slice(&words);
        minima
    }

    /// Compares the call with the minima over all nodes' [`Call::to_minima`]. Nodes that contributed nothing are
    /// skipped.
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
    fn minima_show_different_calls() {
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
            let both = minimum(&call.to_minima(0, 2), &other.to_minima(1, 2));
            let error = call.compare_all(0, &both).unwrap_err();
            let Error::Disagreement { rank: 1, theirs, own_rank: 0, ours, .. } = &error else {
                panic!("{error}")
            };
            assert_eq!((ours, theirs), (&call.0.to_string(), &other.0.to_string()));
            assert!(other.compare_all(1, &both).is_err());
        }
        let both = minimum(&call.to_minima(0, 2), &call.to_minima(1, 2));
        assert_eq!(call.compare_all(1, &both), Ok(()));
        assert_eq!(call.compare_all(0, &call.to_minima(0, 3)), Ok(()), "the others gave nothing");
    }
}
