//! The collectives of several nodes whose ranks are on the host: on slices, run to their end within the call.

use std::sync::PoisonError;

use super::{check_operation, slices, Call, Hierarchical, InterNode, Shape};
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;
use crate::communicator::Communicator;
use crate::device::Host;
use crate::element::Element;
use crate::error::{Error, Result};

impl<E: InterNode<Host>> Hierarchical<Host, E> {
    /// A rank of a world of several nodes, from the communicator of its node and an engine between the ranks that have
    /// its place. Collective among all ranks, which see whether the nodes are equal.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] on all ranks if nodes have different numbers of ranks; the errors of either.
    pub fn new(local: Communicator<Host>, engine: E) -> Result<Self> {
        let world = Self::of(local, engine);
        world.find_shape().and_then(Shape::check).map(|()| world)
    }

    fn find_shape(&self) -> Result<Shape> {
        let mut minima = self.own_minima();
        if self.engine.nodes() > 1 {
            self.between(self.minimum(&mut minima))?;
        }
        let mut minima = self.shape_of_place(minima).to_minima();
        self.inside(self.local.all_reduce_in_place(&mut minima, ReduceOp::Min))?;
        Ok(Shape::of_minima(minima))
    }

    /// Reduces all nodes' ranks' `input`s element by element into every rank's `output`.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`]; [`Error::Unavailable`] for an average of integers between nodes; those of the communicator and
    /// of the engine: see [`Hierarchical`] on what follows.
    pub fn all_reduce<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        if input.len() != output.len() {
            return Err(Error::LengthMismatch { input: input.len(), output: output.len() });
        }
        self.healthy()?;
        if self.engine.nodes() == 1 {
            return self.inside(self.local.all_reduce(input, output, op));
        }
        check_operation(T::DTYPE, op)?;
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = slices(input.len(), size_of::<T>(), self.local.world_size());
        let slice = self.reduce_slice(&mut scratch, input, &counts, op)?;
        self.inside(self.local.all_gather_v(slice, output, &counts))
    }

    /// Reduces all nodes' ranks' `data` element by element, in place.
    ///
    /// # Errors
    ///
    /// As [`Hierarchical::all_reduce`].
    pub fn all_reduce_in_place<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        self.healthy()?;
        if self.engine.nodes() == 1 {
            return self.inside(self.local.all_reduce_in_place(data, op));
        }
        check_operation(T::DTYPE, op)?;
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = slices(data.len(), size_of::<T>(), self.local.world_size());
        let slice = self.reduce_slice(&mut scratch, data, &counts, op)?;
        self.inside(self.local.all_gather_v(slice, data, &counts))
    }

    /// The first two steps: this rank's slice, reduced over all ranks.
    fn reduce_slice<'a, T: Element>(
        &self,
        scratch: &'a mut Vec<u64>,
        input: &[T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<&'a [T]> {
        let slice = elements(scratch, counts[self.local.rank()]);
        self.inside(self.local.reduce_scatter_v(input, slice, counts, op))?;
        let call = Call::new(input.len(), T::DTYPE, op);
        self.between(self.reduce_between(call, slice, op))?;
        Ok(slice)
    }

    /// The allreduce between nodes, if all have the same call.
    fn reduce_between<T: Element>(&self, call: Call, slice: &mut [T], op: ReduceOp) -> Result<()> {
        let (engine, address, count) = (&self.engine, slice.as_mut_ptr() as u64, slice.len());
        // SAFETY: the slice has that many elements of T, exclusively borrowed, on the host.
        let compared = unsafe { engine.compared_all_reduce(call, address, count, T::DTYPE, op, ()) };
        if let Some(done) = compared {
            return done;
        }
        self.compare(call)?;
        // A place has a slice of the same length on all nodes: where it is empty, nobody calls.
        if slice.is_empty() {
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { engine.all_reduce(address, count, T::DTYPE, op, ()) }
    }

    /// Refuses a call that is another one on other nodes.
    fn compare(&self, call: Call) -> Result<()> {
        let node = self.engine.node();
        let mut calls = call.in_place_of(node, self.engine.nodes());
        self.minimum(&mut calls)?;
        call.compare_all(node, &calls)
    }

    /// Between nodes.
    fn minimum(&self, numbers: &mut [i64]) -> Result<()> {
        let address = numbers.as_mut_ptr() as u64;
        // SAFETY: as many i64, exclusively borrowed, on the host.
        unsafe { self.engine.all_reduce(address, numbers.len(), DType::I64, ReduceOp::Min, ()) }
    }
}

/// Room for `count` elements; it grows with the largest call.
fn elements<T: Element>(scratch: &mut Vec<u64>, count: usize) -> &mut [T] {
    const { assert!(align_of::<T>() <= align_of::<u64>()) };
    let words = (count * size_of::<T>()).div_ceil(size_of::<u64>());
    if scratch.len() < words {
        scratch.resize(words, 0);
    }
    // SAFETY: the words have at least that many bytes, are aligned for T, as was asserted, and exclusively borrowed;
    // every bit pattern is a value of T.
    unsafe { std::slice::from_raw_parts_mut(scratch.as_mut_ptr().cast(), count) }
}
