//! The message by which nodes compare their calls on the host. It has one length for all calls, so that calls of
//! different lengths can be compared, and carries the data of small ones.

use super::arithmetic::{bytes_of, elements_at, is_reduced, reduce, Number};
use super::Call;
use crate::catalogue::{with_elements, DType, ReduceOp};
use crate::error::{Error, Result};

/// Words of data in a message, of all nodes together. Each node has an equal share.
const DATA_WORDS: usize = 1024;

const WORD_BYTES: usize = size_of::<i64>();

/// Numbers whose minima over the nodes are the calls of all nodes, and then their data: each node fills in its own
/// words, and leaves all others at the maximum.
pub(super) struct Gathered {
    pub words: Vec<i64>,
    node: usize,
    nodes: usize,
}

impl Gathered {
    /// Returns whether a message has space for this number of elements.
    pub fn fits(count: usize, dtype: DType, nodes: usize) -> bool {
        is_reduced(dtype) && count <= data_words(nodes) * WORD_BYTES / dtype.size()
    }

    /// Creates the message of a node, whose `data` fits.
    pub fn new(call: Call, node: usize, nodes: usize, data: &[u8]) -> Self {
        let mut words = call.to_minima(node, nodes);
        let (calls, share) = (words.len(), data_words(nodes));
        words.resize(calls + nodes * share, i64::MAX);
        for (word, bytes) in words[calls + node * share..].iter_mut().zip(data.chunks(WORD_BYTES)) {
            let mut whole = [0; WORD_BYTES];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = i64::from_ne_bytes(whole);
        }
        Self { words, node, nodes }
    }

    /// Compares the calls of all nodes, when `words` are the minima. If they `carry` data, all nodes must be there.
    pub fn compare(&self, call: Call, carry: bool) -> Result<()> {
        let calls = &self.words[..self.calls()];
        call.compare_all(self.node, calls)?;
        let mut of_nodes = calls.chunks_exact(calls.len() / self.nodes);
        match of_nodes.position(|words| words[0] == i64::MAX).filter(|_| carry) {
            Some(rank) => {
                let reason = "the engine's minima do not have its call".into();
                Err(Error::Malformed { rank, reason })
            }
            None => Ok(()),
        }
    }

    /// Reduces the data of all nodes in their order into `count` elements of `dtype` at `address`.
    ///
    /// # Safety
    ///
    /// `address` is valid for reads and writes of `count` elements of `dtype`, which nobody else accesses.
    pub unsafe fn reduce_into(&self, address: u64, count: usize, dtype: DType, op: ReduceOp) {
        macro_rules! by_type {
            ($($element:ty => $variant:ident),*) => {
                match dtype {
                    $(DType::$variant => {
                        // SAFETY: the caller guarantees `count` elements of this type that nothing else accesses.
                        let output = unsafe { elements_at::<$element>(address, count) };
                        self.reduce(op, output);
                    })*
                    // They do not fit.
                    DType::F8E4M3 | DType::F8E5M2 => {}
                }
            };
        }
        with_elements!(by_type);
    }

    fn reduce<T: Number>(&self, op: ReduceOp, output: &mut [T]) {
        let data = &self.words[self.calls()..];
        let parts: Vec<_> = data.chunks_exact(data_words(self.nodes)).map(bytes_of).collect();
        reduce(&parts, op, output);
    }

    fn calls(&self) -> usize {
        self.words.len() - self.nodes * data_words(self.nodes)
    }
}

/// Returns a node's share of the words of data.
fn data_words(nodes: usize) -> usize {
    (DATA_WORDS / nodes).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes what an engine makes of the messages of all nodes, on node 0.
    fn minima(mut messages: Vec<Gathered>) -> Gathered {
        let mut first = messages.remove(0);
        for message in messages {
            assert_eq!(message.words.len(), first.words.len(), "one length for all calls");
            first.words.iter_mut().zip(message.words).for_each(|(least, word)| *least = word.min(*least));
        }
        first
    }

    #[test]
    fn data_arrives_with_the_calls() {
        for nodes in [2, 3, 7, DATA_WORDS, DATA_WORDS + 1] {
            let most = data_words(nodes) * WORD_BYTES / size_of::<u32>();
            assert!(Gathered::fits(most, DType::U32, nodes) && !Gathered::fits(most + 1, DType::U32, nodes));
            for count in [0, 1, most] {
                let call = Call::new(count, DType::U32, ReduceOp::BitXor);
                let of = |node: usize| {
                    Gathered::new(call, node, nodes, bytes_of(&vec![!0u32 << (node % 32); count]))
                };
                let all = minima((0..nodes).map(of).collect());
                assert_eq!(all.compare(call, true), Ok(()));
                let expected = (0..nodes).fold(0, |bits: u32, node| bits ^ (!0 << (node % 32)));
                let mut output = vec![7; count];
                all.reduce(ReduceOp::BitXor, &mut output);
                assert_eq!(output, vec![expected; count]);
            }
        }
    }

    #[test]
    fn the_largest_word_is_data() {
        let call = Call::new(2, DType::I64, ReduceOp::Sum);
        let data = [[i64::MAX, i64::MIN], [0, i64::MAX]];
        let all = minima((0..2).map(|node| Gathered::new(call, node, 2, bytes_of(&data[node]))).collect());
        let mut output = [0; 2];
        all.reduce(ReduceOp::Sum, &mut output);
        assert_eq!(output, [i64::MAX, -1]);
    }

    #[test]
    fn a_node_that_is_left_out_is_named() {
        let call = Call::new(1, DType::F32, ReduceOp::Sum);
        let alone = Gathered::new(call, 1, 2, &[1; 4]);
        assert!(matches!(alone.compare(call, true), Err(Error::Malformed { rank: 0, .. })));
        assert_eq!(alone.compare(call, false), Ok(()));
    }

    #[test]
    fn a_small_call_differs_from_a_large_one() {
        let calls = [1, 1 << 20].map(|count| Call::new(count, DType::F32, ReduceOp::Sum));
        assert!(Gathered::fits(1, DType::F32, 2) && !Gathered::fits(1 << 20, DType::F32, 2));
        let all = minima(vec![Gathered::new(calls[0], 0, 2, &[1; 4]), Gathered::new(calls[1], 1, 2, &[])]);
        let error = all.compare(calls[0], true).unwrap_err().to_string();
        assert!(error.contains("1048576 f32"), "{error}");
    }
}
