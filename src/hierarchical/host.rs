//! Collectives of several nodes on the host: on slices; calls return when they are complete.
//!
//! A large message is reduced in pieces, so that a piece stays in the caches between the steps: the reduce-scatter in
//! the node writes what the engine sends next. Between two nodes of 2 ranks and links in memory, 16 MiB took two thirds
//! of the time without pieces (docs/machines.md). Each piece costs the delay of the engine once more, so pieces are
//! larger where that is long.
//!
//! One piece at a time is between the nodes. If the engine can start a reduction, the node gathers the piece before it
//! and reduces the piece after it meanwhile:
//!
//! ```text
//! node       scatter 0   scatter 1             gather 0   scatter 2             gather 1 ...
//! network               |       piece 0       |          piece 1               |  piece 2 ...
//! ```

use std::ffi::c_void;
use std::ops::Range;
use std::time::Instant;

use super::arithmetic::is_reduced;
use super::exchange::Messages;
use super::gathered::Gathered;
use super::{check_operation, slices, Call, Finish, Hierarchical, InterNode, Shape};
use crate::call::{Call as Arguments, Collective};
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;
use crate::communicator::Communicator;
use crate::device::Host;
use crate::element::Element;
use crate::error::{Error, Result};

/// Bytes of a rank's slice in a piece, for a short delay between the nodes.
const SLICE_BYTES: usize = 256 << 10;

/// The longest such delay, in nanoseconds: about a tenth of the time in which TCP sends a slice.
const SHORT_DELAY: i64 = 25_000;

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
        let mut world = Self::of(local, engine);
        world.find_shape().and_then(Shape::check)?;
        world.slice_bytes = world.find_slice_bytes()?;
        Ok(world)
    }

    /// Measures the delay between nodes, and returns the size of slices that all ranks use.
    fn find_slice_bytes(&self) -> Result<usize> {
        // More samples find a short delay between ranks that share their cores with others.
        const SAMPLES: [usize; 2] = [1, 10];
        if self.engine.nodes() == 1 {
            return Ok(usize::MAX);
        }
        let mut delay = [i64::MAX];
        for samples in SAMPLES {
            for _ in 0..samples {
                let begin = Instant::now();
                // Of two rounds: a rank that is late in one finds the other's message there, and is early in the next.
                self.between_nodes(self.minimum(&mut [0]))?;
                self.between_nodes(self.minimum(&mut [0]))?;
                delay[0] = delay[0].min(i64::try_from(begin.elapsed().as_nanos() / 2).unwrap_or(i64::MAX));
            }
            // Now all ranks have the same.
            self.between_nodes(self.minimum(&mut delay))?;
            self.in_node(self.local.all_reduce_in_place(&mut delay, ReduceOp::Min))?;
            if delay[0] > 200 * SHORT_DELAY {
                break;
            }
        }
        Ok(SLICE_BYTES.saturating_mul((delay[0] / SHORT_DELAY).max(1) as usize))
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
        let collective = Collective::AllReduce(op);
        // A refused argument does not end the world.
        Arguments { collective, input: input as u64, output: output as u64, count, dtype }
            .check(local.rank(), local.world_size())?;
        // The steps of a call are not interleaved with those of another.
        let mut messages = self.calls.enter()?;
        if self.engine.nodes() == 1 {
            // SAFETY: the caller's obligation.
            return self.in_node(unsafe { local.collective_raw(collective, input, output, count, dtype) });
        }
        check_operation(dtype, op)?;
        // SAFETY: the caller's obligation.
        self.run_steps(|| unsafe { self.reduce_on_nodes(&mut messages, input, output, count, (dtype, op)) })
    }

    /// Reduces on several nodes.
    ///
    /// # Safety
    ///
    /// That of [`Hierarchical::all_reduce_raw`].
    unsafe fn reduce_on_nodes(
        &self,
        messages: &mut Messages,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        (dtype, op): (DType, ReduceOp),
    ) -> Result<()> {
        let (local, collective) = (&self.local, Collective::AllReduce(op));
        let call = Call::new(count, dtype, op);
        if Gathered::fits(count, dtype, self.engine.nodes()) {
            // SAFETY: the caller's obligation.
            self.in_node(unsafe { local.collective_raw(collective, input, output, count, dtype) })?;
            // SAFETY: the output has this number of elements.
            let started =
                unsafe { self.start_between(messages, (call, true), output as u64, count, dtype, op) };
            return self.finish(self.between_nodes(started)?);
        }
        let most = self.slice_bytes.saturating_mul(local.world_size()) / dtype.size();
        // Two pieces overlap in one step of each, which is less than the second one's messages cost.
        let most = if count.div_ceil(2) <= most { count.max(1) } else { most };
        if count > most {
            self.in_node(self.compare_in_node(call))?;
        }
        let mut earlier: Option<(Piece, Finish<'_>)> = None;
        // A call of no elements is compared as well.
        for first in (0..count.max(1)).step_by(most) {
            let elements = first..count.min(first.saturating_add(most));
            let piece = Piece::new(local, input, output, elements, dtype);
            // SAFETY: the caller's obligation.
            self.in_node(unsafe { piece.reduce_scatter(local, op) })?;
            let reduced = match earlier.take() {
                Some((piece, finish)) => self.finish(Some(finish)).map(|()| Some(piece))?,
                None => None,
            };
            let (slice, count) = (piece.slice as u64, piece.counts[local.rank()]);
            // SAFETY: the slice has this number of elements, and no step in the node uses it before the end.
            let started =
                unsafe { self.start_between(messages, (call, first == 0), slice, count, dtype, op) };
            let started = self.between_nodes(started)?;
            if let Some(reduced) = reduced {
                // SAFETY: the caller's obligation.
                self.in_node(unsafe { reduced.all_gather(local) })?;
            }
            match started {
                Some(finish) => earlier = Some((piece, finish)),
                // SAFETY: the caller's obligation.
                None => self.in_node(unsafe { piece.all_gather(local) })?,
            }
        }
        let Some((piece, finish)) = earlier else { return Ok(()) };
        self.finish(Some(finish))?;
        // SAFETY: the caller's obligation.
        self.in_node(unsafe { piece.all_gather(local) })
    }

    /// Completes a step between nodes, if it is under way.
    fn finish(&self, started: Option<Finish<'_>>) -> Result<()> {
        started.map_or(Ok(()), |finish| self.between_nodes(finish()))
    }

    /// Checks that all ranks of the node make this call. Pieces have equal lengths in calls of different lengths.
    fn compare_in_node(&self, call: Call) -> Result<()> {
        let (rank, own) = (self.local.rank(), call.to_bytes());
        let mut calls = vec![own; self.local.world_size()];
        self.local.all_gather(&own, calls.as_flattened_mut())?;
        calls.into_iter().enumerate().try_for_each(|(other, theirs)| call.compare(rank, other, theirs))
    }

    /// Starts the allreduce between nodes of the first or another piece of a call, if all nodes make the same call, or
    /// runs it and returns `None` if the engine cannot start one. An engine that needs a separate message for the
    /// comparison has it with the first piece alone.
    ///
    /// # Safety
    ///
    /// `address` is valid for reads and writes of `count` elements of `dtype`, which nobody else accesses before the
    /// returned function has returned or has been dropped.
    unsafe fn start_between(
        &self,
        messages: &mut Messages,
        (call, is_first): (Call, bool),
        address: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<Option<Finish<'_>>> {
        let engine = &self.engine;
        // SAFETY: the caller's obligation.
        if let Some(started) = unsafe { engine.start_all_reduce(call, address, count, dtype, op, ()) } {
            return started.map(Some);
        }
        // SAFETY: the caller's obligation.
        if let Some(done) = unsafe { messages.reduce_at(engine, call, address, count, dtype, op) } {
            done?;
            if is_reduced(dtype) {
                return Ok(None);
            }
        } else if is_first {
            let is_small = Gathered::fits(count, dtype, engine.nodes());
            // SAFETY: the caller's obligation; this memory is initialised. An empty one may be at no address.
            let bytes = || unsafe { std::slice::from_raw_parts(address as *const u8, count * dtype.size()) };
            let all = self.gather(call, if is_small && count > 0 { bytes() } else { &[] })?;
            if is_small {
                // SAFETY: the caller's obligation; nothing uses `bytes` any more.
                unsafe { all.reduce_into(address, count, dtype, op) };
                return Ok(None);
            }
        }
        // Ranks with the same local rank have slices of equal length: if they are empty, none of them calls the engine.
        if count == 0 {
            return Ok(None);
        }
        // SAFETY: the caller's obligation.
        unsafe { engine.all_reduce(address, count, dtype, op, ()) }.map(|()| None)
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

/// Elements of a call that pass through the three steps together.
struct Piece {
    input: *const c_void,
    output: *mut c_void,
    /// This rank's part of the output, which it reduces between the nodes.
    slice: *mut c_void,
    /// Number of elements of each rank's slice.
    counts: Vec<usize>,
    dtype: DType,
}

impl Piece {
    /// Describes these elements of a call's input and output.
    fn new(
        local: &Communicator<Host>,
        input: *const c_void,
        output: *mut c_void,
        elements: Range<usize>,
        dtype: DType,
    ) -> Self {
        let (at, size) = (elements.start * dtype.size(), dtype.size());
        let (input, output) = (input.wrapping_byte_add(at), output.wrapping_byte_add(at));
        let counts = slices(elements.len(), size, local.world_size());
        let before: usize = counts[..local.rank()].iter().sum();
        Self { input, output, slice: output.wrapping_byte_add(before * size), counts, dtype }
    }

    /// Reduces the node's inputs to each rank's slice.
    ///
    /// # Safety
    ///
    /// That of [`Hierarchical::all_reduce_raw`], for these elements.
    unsafe fn reduce_scatter(&self, local: &Communicator<Host>, op: ReduceOp) -> Result<()> {
        let scatter = Collective::ReduceScatterV(op, &self.counts);
        // SAFETY: the slice is this rank's share of the output. The output is the input or disjoint from it; the caller
        // guarantees the rest.
        unsafe { local.collective_raw(scatter, self.input, self.slice, 0, self.dtype) }
    }

    /// Gathers all ranks' slices in the output.
    ///
    /// # Safety
    ///
    /// That of [`Hierarchical::all_reduce_raw`], for these elements.
    unsafe fn all_gather(&self, local: &Communicator<Host>) -> Result<()> {
        let gather = Collective::AllGatherV(&self.counts);
        // SAFETY: the input is this rank's share of the output; the caller guarantees the rest.
        unsafe { local.collective_raw(gather, self.slice, self.output, 0, self.dtype) }
    }
}
