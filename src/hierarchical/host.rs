//! Collectives of several nodes on the host: on slices; calls return when they are complete.

use std::ffi::c_void;

use super::arithmetic::is_reduced;
use super::exchange::Messages;
use super::gathered::Gathered;
use super::{check_operation, slices, Call, Hierarchical, InterNode, Shape};
use crate::call::{Call as Arguments, Collective};
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
        let (from, to) = (input.as_ptr().cast(), output.as_mut_ptr().cast());
        // SAFETY: both have this number of elements of T; nobody else accesses the output, or writes the input.
        unsafe { self.all_reduce_raw(from, to, input.len(), T::DTYPE, op) }
    }

    /// Reduces the `data` of all ranks of all nodes element by element, in place. [`InterNode`] has an example.
    ///
    /// # Errors
    ///
    /// Those of [`Hierarchical::all_reduce`], except [`Error::LengthMismatch`].
    pub fn all_reduce_in_place<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        let address: *mut c_void = data.as_mut_ptr().cast();
        // SAFETY: the slice has this number of elements of T, and is exclusively borrowed.
        unsafe { self.all_reduce_raw(address, address, data.len(), T::DTYPE, op) }
    }

    /// Reduces like [`Hierarchical::all_reduce`], on raw pointers, for callers that know the element type only at run
    /// time. `input` and `output` have `count` elements and are equal or disjoint.
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
    /// let (input, mut output) = ([1.0f32, 2.0], [0.0f32; 2]);
    /// let (from, to) = (input.as_ptr().cast(), output.as_mut_ptr().cast());
    /// // SAFETY: 2 elements are read and 2 written, in arrays that only this thread has.
    /// unsafe { world.all_reduce_raw(from, to, 2, DType::F32, ReduceOp::Sum)? };
    /// # assert_eq!(output, input);
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidPointer`] for null and misaligned pointers; [`Error::Overlap`] for pointers that are neither
    /// equal nor of disjoint buffers; those of [`Hierarchical::all_reduce`].
    ///
    /// # Safety
    ///
    /// During the call, `input` is valid for reads and `output` for writes of `count` elements of `dtype`. No other
    /// thread writes the input or accesses the output.
    pub unsafe fn all_reduce_raw(
        &self,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        self.healthy()?;
        let local = &self.local;
        let call = Collective::AllReduce(op);
        // A refused argument does not end the world.
        Arguments { collective: call, input: input as u64, output: output as u64, count, dtype }
            .check(local.rank(), local.world_size())?;
        // The steps of a call are not interleaved with those of another.
        let mut messages = self.calls.enter()?;
        if self.engine.nodes() == 1 {
            // SAFETY: the caller's obligation.
            return self.in_node(unsafe { local.collective_raw(call, input, output, count, dtype) });
        }
        check_operation(dtype, op)?;
        if Gathered::fits(count, dtype, self.engine.nodes()) {
            // SAFETY: the caller's obligation.
            self.in_node(unsafe { local.collective_raw(call, input, output, count, dtype) })?;
            let call = Call::new(count, dtype, op);
            // SAFETY: the output has this number of elements.
            let reduced =
                unsafe { self.reduce_between(&mut messages, call, output as u64, count, dtype, op) };
            return self.between_nodes(reduced);
        }
        let counts = slices(count, dtype.size(), local.world_size());
        let rank = local.rank();
        let before: usize = counts[..rank].iter().sum();
        let slice = output.wrapping_byte_add(before * dtype.size());
        let scatter = Collective::ReduceScatterV(op, &counts);
        // SAFETY: the slice is this rank's share of the output. The output is the input or disjoint from it; the caller
        // guarantees the rest.
        self.in_node(unsafe { local.collective_raw(scatter, input, slice, 0, dtype) })?;
        let call = Call::new(count, dtype, op);
        // SAFETY: the slice is a part of the output with this number of elements.
        let reduced =
            unsafe { self.reduce_between(&mut messages, call, slice as u64, counts[rank], dtype, op) };
        self.between_nodes(reduced)?;
        // SAFETY: the input is this rank's share of the output; the caller guarantees the rest.
        self.in_node(unsafe {
            local.collective_raw(Collective::AllGatherV(&counts), slice, output, 0, dtype)
        })
    }

    /// Runs the allreduce between nodes, if all nodes make the same call.
    ///
    /// # Safety
    ///
    /// `address` is valid for reads and writes of `count` elements of `dtype`, which nobody else accesses.
    unsafe fn reduce_between(
        &self,
        messages: &mut Messages,
        call: Call,
        address: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        let engine = &self.engine;
        // SAFETY: the caller's obligation.
        if let Some(done) = unsafe { engine.compared_all_reduce(call, address, count, dtype, op, ()) } {
            return done;
        }
        // SAFETY: the caller's obligation.
        if let Some(done) = unsafe { messages.reduce_at(engine, call, address, count, dtype, op) } {
            if is_reduced(dtype) {
                return done;
            }
            done?;
        } else {
            let is_small = Gathered::fits(count, dtype, engine.nodes());
            // SAFETY: the caller's obligation; this memory is initialised. An empty one may be at no address.
            let bytes = || unsafe { std::slice::from_raw_parts(address as *const u8, count * dtype.size()) };
            let all = self.gather(call, if is_small && count > 0 { bytes() } else { &[] })?;
            if is_small {
                // SAFETY: the caller's obligation; nothing uses `bytes` any more.
                unsafe { all.reduce_into(address, count, dtype, op) };
                return Ok(());
            }
        }
        // Ranks with the same local rank have slices of equal length: if they are empty, none of them calls the engine.
        if count == 0 {
            return Ok(());
        }
        // SAFETY: the caller's obligation.
        unsafe { engine.all_reduce(address, count, dtype, op, ()) }
    }

    /// Checks that all nodes make this call, and gathers their `data`, which fit.
    fn gather(&self, call: Call, data: &[u8]) -> Result<Gathered> {
        let mut all = Gathered::new(call, self.engine.node(), self.engine.nodes(), data);
        self.minimum(&mut all.words)?;
        all.compare(call, !data.is_empty()).map(|()| all)
    }

    /// Computes the minima over the nodes, in place.
    fn minimum(&self, numbers: &mut [i64]) -> Result<()> {
        let address = numbers.as_mut_ptr() as u64;
        // SAFETY: the slice has this number of i64 on the host, and is exclusively borrowed.
        unsafe { self.engine.all_reduce(address, numbers.len(), DType::I64, ReduceOp::Min, ()) }
    }
}
