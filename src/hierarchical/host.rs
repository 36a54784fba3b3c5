//! Collectives of several nodes on the host: on slices; calls return when they are complete.

use std::sync::PoisonError;

use super::{check_operation, slices, Call, Hierarchical, InterNode, Shape};
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;
use crate::communicator::Communicator;
use crate::device::Host;
use crate::element::Element;
use crate::error::{Error, Result};

impl<E: InterNode<Host>> Hierarchical<Host, E> {
    /// Creates a rank of a world of several nodes, from the communicator of its node and an engine between the ranks
    /// with the same local rank. Collective among all ranks, which check that all nodes have the same number of ranks.
    ///
    /// # Errors
    ///
    /// * [`Error::Unavailable`] on all ranks if nodes have different numbers of ranks.
    /// * The errors of the communicator and of the engine.
    ///
    /// See [`InterNode`] for an example.
    pub fn new(local: Communicator<Host>, engine: E) -> Result<Self> {
        let world = Self::of(local, engine);
        world.find_shape().and_then(Shape::check).map(|()| world)
    }

    fn find_shape(&self) -> Result<Shape> {
        let mut minima = self.own_minima();
        if self.engine.nodes() > 1 {
            self.between_nodes(self.minimum(&mut minima))?;
        }
        let mut minima = self.shape_of_minima(minima).to_minima();
        self.in_node(self.local.all_reduce_in_place(&mut minima, ReduceOp::Min))?;
        Ok(Shape::of_minima(minima))
    }

    /// Reduces the `input`s of all ranks of all nodes element by element into every rank's `output`.
    ///
    /// # Errors
    ///
    /// * [`Error::LengthMismatch`] if `input` and `output` differ in length.
    /// * [`Error::Unavailable`] between several nodes for an average of integers and for a premultiplied sum.
    /// * [`Error::Disagreement`] if nodes make different calls.
    /// * [`Error::Timeout`], [`Error::PeerLost`], [`Error::PeerFailed`] and other errors of the communicator and of the
    ///   engine. They poison this world: see [`Hierarchical`].
    ///
    /// ```
    /// # use fast_allreduce::bootstrap::Threads;
    /// # use fast_allreduce::{Communicator, DType, Hierarchical, Host, InterNode, ReduceOp, Result};
    /// # struct OneNode;
    /// # impl InterNode<Host> for OneNode {
    /// #     fn node(&self) -> usize { 0 }
    /// #     fn nodes(&self) -> usize { 1 }
    /// #     unsafe fn all_reduce(&self, _: u64, _: usize, _: DType, _: ReduceOp, _: ()) -> Result<()> { Ok(()) }
    /// # }
    /// # let local = Communicator::builder().build(Host::new(), Threads::world(1)?.remove(0))?;
    /// # let world = Hierarchical::new(local, OneNode)?;
    /// let (input, mut output) = ([1.0f32, 2.0], [0.0; 2]);
    /// world.all_reduce(&input, &mut output, ReduceOp::Sum)?;
    /// # assert_eq!(output, input);
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    pub fn all_reduce<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        if input.len() != output.len() {
            return Err(Error::LengthMismatch { input: input.len(), output: output.len() });
        }
        self.healthy()?;
        if self.engine.nodes() == 1 {
            return self.in_node(self.local.all_reduce(input, output, op));
        }
        check_operation(T::DTYPE, op)?;
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = slices(input.len(), size_of::<T>(), self.local.world_size());
        let slice = self.reduce_slice(&mut scratch, input, &counts, op)?;
        self.in_node(self.local.all_gather_v(slice, output, &counts))
    }

    /// Reduces the `data` of all ranks of all nodes element by element, in place. [`InterNode`] has an example.
    ///
    /// # Errors
    ///
    /// Those of [`Hierarchical::all_reduce`], except [`Error::LengthMismatch`].
    pub fn all_reduce_in_place<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        self.healthy()?;
        if self.engine.nodes() == 1 {
            return self.in_node(self.local.all_reduce_in_place(data, op));
        }
        check_operation(T::DTYPE, op)?;
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = slices(data.len(), size_of::<T>(), self.local.world_size());
        let slice = self.reduce_slice(&mut scratch, data, &counts, op)?;
        self.in_node(self.local.all_gather_v(slice, data, &counts))
    }

    /// Runs the first two steps, and returns this rank's slice, reduced over all ranks.
    fn reduce_slice<'a, T: Element>(
        &self,
        scratch: &'a mut Vec<u64>,
        input: &[T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<&'a [T]> {
        let slice = elements(scratch, counts[self.local.rank()]);
        self.in_node(self.local.reduce_scatter_v(input, slice, counts, op))?;
        let call = Call::new(input.len(), T::DTYPE, op);
        self.between_nodes(self.reduce_between(call, slice, op))?;
        Ok(slice)
    }

    /// Runs the allreduce between nodes, if all nodes make the same call.
    fn reduce_between<T: Element>(&self, call: Call, slice: &mut [T], op: ReduceOp) -> Result<()> {
        let (engine, address, count) = (&self.engine, slice.as_mut_ptr() as u64, slice.len());
        // SAFETY: the slice has `count` elements of T on the host, and is exclusively borrowed.
        let compared = unsafe { engine.compared_all_reduce(call, address, count, T::DTYPE, op, ()) };
        if let Some(done) = compared {
            return done;
        }
        self.compare(call)?;
        // Ranks with the same local rank have slices of equal length: if they are empty, none of them calls the engine.
        if slice.is_empty() {
            return Ok(());
        }
        // SAFETY: the slice has `count` elements of T on the host, and is exclusively borrowed.
        unsafe { engine.all_reduce(address, count, T::DTYPE, op, ()) }
    }

    /// Checks that all nodes make this call.
    fn compare(&self, call: Call) -> Result<()> {
        let node = self.engine.node();
        let mut calls = call.to_minima(node, self.engine.nodes());
        self.minimum(&mut calls)?;
        call.compare_all(node, &calls)
    }

    /// Computes the minima over the nodes, in place.
    fn minimum(&self, numbers: &mut [i64]) -> Result<()> {
        let address = numbers.as_mut_ptr() as u64;
        // SAFETY: the slice has this number of i64 on the host, and is exclusively borrowed.
        unsafe { self.engine.all_reduce(address, numbers.len(), DType::I64, ReduceOp::Min, ()) }
    }
}

/// Returns space for `count` elements in `scratch`, which grows if needed.
fn elements<T: Element>(scratch: &mut Vec<u64>, count: usize) -> &mut [T] {
    const { assert!(align_of::<T>() <= align_of::<u64>()) };
    let words = (count * size_of::<T>()).div_ceil(size_of::<u64>());
    if scratch.len() < words {
        scratch.resize(words, 0);
    }
    // SAFETY: the words have at least the bytes of `count` elements, are aligned for T (see the assertion), and are
    // exclusively borrowed; every bit pattern is a valid T.
    unsafe { std::slice::from_raw_parts_mut(scratch.as_mut_ptr().cast(), count) }
}
