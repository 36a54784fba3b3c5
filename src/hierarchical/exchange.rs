//! The allreduce between two nodes by messages of the engine: a call and its first 256 KiB are one message in each
//! direction, and the rest follows in messages of at most 1 MiB.

use super::arithmetic::{bytes_of, elements_at, reduce_pair, Number};
use super::{Call, InterNode};
use crate::catalogue::{with_elements, DType, ReduceOp};
use crate::device::Host;
use crate::error::{Error, Result};

const CALL_BYTES: usize = 16;

/// Data of the first message, which is copied behind the call.
const FIRST_BYTES: usize = 256 << 10;

/// Data of each later message: what is received is still in a second-level cache when it is reduced.
const PIECE_BYTES: usize = 1 << 20;

/// Memory of messages, which later calls use again.
#[derive(Debug, Default)]
pub(super) struct Messages {
    sent: Vec<u8>,
    received: Vec<u8>,
    /// The engine has no messages, on any rank.
    are_unavailable: bool,
}

impl Messages {
    /// Compares `call` with that of the other one of two nodes, and reduces `count` elements of `dtype` at `address`
    /// with the other node's in place; 8-bit floats are left as they are. Returns `None` if the engine cannot exchange
    /// messages, and between more nodes.
    ///
    /// # Safety
    ///
    /// `address` is valid for reads and writes of `count` elements of `dtype`, which nobody else accesses.
    pub unsafe fn reduce_at(
        &mut self,
        engine: &impl InterNode<Host>,
        call: Call,
        address: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Option<Result<()>> {
        if engine.nodes() != 2 || self.are_unavailable {
            return None;
        }
        macro_rules! by_type {
            ($($element:ty => $variant:ident),*) => {
                match dtype {
                    $(DType::$variant => {
                        // SAFETY: the caller guarantees it.
                        let elements = unsafe { elements_at::<$element>(address, count) };
                        self.reduce(engine, call, elements, op)
                    })*
                    DType::F8E4M3 | DType::F8E5M2 => self.reduce::<u8>(engine, call, &mut [], op),
                }
            };
        }
        with_elements!(by_type)
    }

    /// Compares `call` with that of the other node, and reduces `elements` with the other node's in place. Returns
    /// `None` if the engine cannot exchange messages.
    fn reduce<T: Number>(
        &mut self,
        engine: &impl InterNode<Host>,
        call: Call,
        elements: &mut [T],
        op: ReduceOp,
    ) -> Option<Result<()>> {
        let (first, rest) = elements.split_at_mut(elements.len().min(FIRST_BYTES / size_of::<T>()));
        self.sent.clear();
        self.sent.extend(call.to_bytes());
        self.sent.extend(bytes_of(first));
        // Another call may have longer messages than this one: there is space for the longest.
        let space = if rest.is_empty() { CALL_BYTES + FIRST_BYTES } else { PIECE_BYTES };
        if self.received.len() < space {
            self.received.resize(space, 0);
        }
        let exchanged = engine.exchange(&self.sent, &mut self.received[..CALL_BYTES + FIRST_BYTES]);
        let Some(exchanged) = exchanged else {
            // Later calls copy nothing, and need no memory here.
            *self = Self { are_unavailable: true, ..Self::default() };
            return None;
        };
        Some(exchanged.and_then(|bytes| self.finish(engine, call, (first, rest), bytes, op)))
    }

    /// Evaluates the first message, of `bytes`, and exchanges the `rest`.
    fn finish<T: Number>(
        &mut self,
        engine: &impl InterNode<Host>,
        call: Call,
        (first, rest): (&mut [T], &mut [T]),
        bytes: usize,
        op: ReduceOp,
    ) -> Result<()> {
        let (node, other) = (engine.node(), 1 - engine.node());
        let message = self.received.get(..bytes).unwrap_or_default();
        let Some((theirs, data)) = message.split_first_chunk::<CALL_BYTES>() else {
            return Err(malformed(other, bytes, CALL_BYTES + size_of_val(first)));
        };
        // Calls are compared before lengths, since different calls have different lengths.
        call.compare(node, other, *theirs)?;
        if data.len() != size_of_val(first) {
            return Err(malformed(other, bytes, CALL_BYTES + size_of_val(first)));
        }
        reduce_pair(first, data, node == 0, op);
        for piece in rest.chunks_mut(PIECE_BYTES / size_of::<T>()) {
            let length = size_of_val(piece);
            let exchanged = engine.exchange(bytes_of(piece), &mut self.received[..length]);
            let bytes = exchanged.unwrap_or_else(|| Err(malformed(other, 0, length)))?;
            if bytes != length {
                return Err(malformed(other, bytes, length));
            }
            reduce_pair(piece, &self.received[..length], node == 0, op);
        }
        Ok(())
    }
}

fn malformed(node: usize, bytes: usize, expected: usize) -> Error {
    let reason = format!("its message of an allreduce has {bytes} bytes, not {expected}");
    Error::Malformed { rank: node, reason }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// An engine without messages, which counts how often it is asked.
    struct Without(AtomicUsize);

    impl InterNode<Host> for Without {
        fn node(&self) -> usize {
            0
        }

        fn nodes(&self) -> usize {
            2
        }

        unsafe fn all_reduce(&self, _: u64, _: usize, _: DType, _: ReduceOp, (): ()) -> Result<()> {
            Ok(())
        }

        fn exchange(&self, message: &[u8], _: &mut [u8]) -> Option<Result<usize>> {
            assert_eq!(message.len(), CALL_BYTES + 12);
            self.0.fetch_add(1, Ordering::Relaxed);
            None
        }
    }

    #[test]
    fn an_engine_without_messages_is_asked_once() {
        let (engine, mut messages) = (Without(AtomicUsize::new(0)), Messages::default());
        for _ in 0..2 {
            let mut data = [1.5f32; 3];
            let call = Call::new(3, DType::F32, ReduceOp::Sum);
            let address = data.as_mut_ptr() as u64;
            // SAFETY: this is the address of 3 elements, which nothing else uses.
            let reduced = unsafe { messages.reduce_at(&engine, call, address, 3, DType::F32, ReduceOp::Sum) };
            assert_eq!((reduced, data), (None, [1.5; 3]));
        }
        assert_eq!((engine.0.into_inner(), messages.sent.capacity() + messages.received.capacity()), (1, 0));
    }
}
