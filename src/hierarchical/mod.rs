//! Allreduce on several nodes: this crate's kernels inside each node, another engine between nodes.
//!
//! An allreduce has three steps:
//!
//! 1. A reduce-scatter inside the node: each rank has the node's sum of one slice.
//! 2. An allreduce of that slice among the ranks with the same local rank on all nodes, by an [`InterNode`] engine.
//! 3. An all-gather inside the node.
//!
//! So each byte crosses the network once per node, not once per rank, and the network interfaces of all ranks work at
//! the same time. `docs/scaling.md` models when this is faster than one flat world.
//!
//! A small message on the host takes two steps, an allreduce inside the node and one between nodes by every rank, so
//! that it crosses the network once per rank.
//!
//! There is no `all_reduce_fused`: a kernel normalises whole rows when it stores the sum over all ranks. Here the
//! engine completes that sum, on slices that are not whole rows.
//!
//! `MpiNodes` (feature `mpi`) is an engine for host memory, and `NcclNodes` (feature `nccl`) one for GPU memory.
//! Implement [`InterNode`] for another engine.

mod arithmetic;
mod call;
#[cfg(feature = "cuda")]
mod comparisons;
#[cfg(feature = "cuda")]
mod cuda;
mod exchange;
mod float_state;
mod gathered;
mod host;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
mod text;

use std::sync::OnceLock;

pub use call::Call;
#[cfg(feature = "mpi")]
pub use mpi::MpiNodes;
#[cfg(feature = "nccl")]
#[doc(hidden)]
pub use nccl::library as nccl_library;
#[cfg(feature = "nccl")]
pub use nccl::NcclNodes;

use self::text::{mark_world_ranks, renumbered};
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;
use crate::communicator::Communicator;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::exclusive::Exclusive;

/// An engine for the allreduce between nodes, among the ranks with the same local rank on all nodes.
///
/// All ranks of a node have the same node number.
///
/// ```
/// use fast_allreduce::bootstrap::Threads;
/// use fast_allreduce::{Communicator, DType, Hierarchical, Host, InterNode, ReduceOp, Result};
///
/// /// The engine for a single node.
/// struct OneNode;
///
/// impl InterNode<Host> for OneNode {
///     fn node(&self) -> usize { 0 }
///     fn nodes(&self) -> usize { 1 }
///     unsafe fn all_reduce(&self, _: u64, _: usize, _: DType, _: ReduceOp, _: ()) -> Result<()> { Ok(()) }
/// }
///
/// let local = Communicator::builder().build(Host::new(), Threads::world(1)?.remove(0))?;
/// let world = Hierarchical::new(local, OneNode)?;
/// let mut data = [1.5f32; 100];
/// world.all_reduce_in_place(&mut data, ReduceOp::Sum)?;
/// assert_eq!((world.rank(), world.world_size(), data), (0, 1, [1.5; 100]));
/// # Ok::<(), fast_allreduce::Error>(())
/// ```
pub trait InterNode<D: Device>: Send + Sync {
    /// Returns the number of this rank's node, in `0..nodes`.
    fn node(&self) -> usize;

    /// Returns the number of nodes.
    fn nodes(&self) -> usize;

    /// Reduces `count` elements at `address` in place, in the order of `stream` (which is `()` on the host).
    ///
    /// Collective among the ranks with the same local rank, with equal counts, types and operations. All of them must
    /// get bitwise equal results. It is never called with an average of integers, nor on a stream that is being
    /// captured.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`], [`Error::PeerLost`] or another error if a rank does not come in time: all waits must have a
    /// limit. The ranks in such an error are node numbers, also in its text in the forms `rank 3` and `ranks 3, 4`. An
    /// engine that has failed stays failed.
    ///
    /// # Safety
    ///
    /// `address` points to `count` elements of `dtype` in memory of the device, which nothing else accesses until the
    /// reduction is done: on the host when this returns, on a GPU when the stream has passed it.
    unsafe fn all_reduce(
        &self,
        address: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: D::Stream<'_>,
    ) -> Result<()>;

    /// Starts to reduce like [`InterNode::all_reduce`], as a step of `call`, without waiting for other nodes: meanwhile
    /// the node works on other pieces of the call. The function that this returns waits, and completes the reduction.
    /// It is called before any other function of the engine, or dropped if the node has failed.
    ///
    /// The nodes compare their calls on the way. If they differ, all participating ranks return the
    /// [`Error::Disagreement`] of [`Call::compare`]. Here `count` may be 0. Ranks of one node may pass equal data for
    /// the same call; their results must have equal bits, too.
    ///
    /// Returns `None`, which is the default, if the engine does not compare calls, on any rank. It has then done
    /// nothing. The calls are compared by a separate allreduce, of `I64` minima; on the host, that carries the data of
    /// small calls.
    ///
    /// # Safety
    ///
    /// That of [`InterNode::all_reduce`], until the returned function has returned or has been dropped.
    unsafe fn start_all_reduce(
        &self,
        call: Call,
        address: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: D::Stream<'_>,
    ) -> Option<Result<Finish<'_>>> {
        let _ = (call, address, count, dtype, op, stream);
        None
    }

    /// Sends `message` to the other one of two nodes, and at the same time receives a message from it, of at most
    /// `space.len()` bytes, whose length it returns. Only called on the host, between two nodes, with the limits of
    /// [`InterNode::all_reduce`].
    ///
    /// Returns `None`, which is the default, if the engine has no such call on any rank; it has then done nothing, and
    /// may not be asked again. If one node has it and the other does not, both wait until their limits. With it, a call
    /// and the first 256 KiB of a piece are one message in each direction, the rest follows in messages of at most 1
    /// MiB, and this crate does the arithmetic, except that of 8-bit floats.
    fn exchange(&self, message: &[u8], space: &mut [u8]) -> Option<Result<usize>> {
        let _ = (message, space);
        None
    }

    /// Returns the first failure that occurred on a stream after its call had returned. Waits on the stream must have a
    /// limit as well, so that the stream goes on; the failure must be known here before it does. The default is for
    /// engines on the host.
    ///
    /// # Errors
    ///
    /// The first failure.
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

/// Completes an allreduce of [`InterNode::start_all_reduce`].
pub type Finish<'a> = Box<dyn FnOnce() -> Result<()> + 'a>;

/// One rank of a world of several nodes with equal numbers of ranks.
///
/// Ranks are numbered node by node: `rank = node * ranks per node + local rank`.
///
/// # Results
///
/// All ranks get bitwise equal results, as with [`Communicator`]. But the results depend on how the ranks are
/// distributed over nodes, which determines the order of additions and the rounding: a node's result is rounded to the
/// element type before it is sent to the other nodes. Integer results are exact. Averages of integers are not supported
/// between nodes, since a node cannot pass on its exact sum in the element type. Averages of floats are the mean of the
/// nodes' means, which do not overflow where the sum would.
///
/// # Errors
///
/// A large call on the host is made in pieces of 256 KiB or more for each rank (the last may be shorter), so that an
/// engine is called several times in it. Every step has the time limit of the communicator or of the engine. An error
/// of either, or a panic of the engine, poisons this rank's world. If the engine has failed, the node's communicator is
/// aborted, and the node's other ranks get an [`Error::PeerFailed`] with the engine's error as its reason. Errors name
/// ranks by their numbers in the whole world.
///
/// Nodes compare their calls before they combine data, even if calls are not checked inside the nodes. If count, type
/// or operation of whole nodes differ, all ranks get an [`Error::Disagreement`]. If the calls of the ranks of one node
/// differ, those ranks get it, with texts that may name a step of a call; ranks of other nodes get the error of an
/// engine whose limit has passed. On GPUs, the streams go on: the error is returned by the next call, by
/// `Hierarchical::check` or by `Hierarchical::synchronize`, and the output of the call must not be used.
///
/// On GPUs, a failure that is found on the stream does not stop this rank's later steps on it. The ranks of the same
/// node are notified of the failure; the ranks of other nodes notice it by the time limit of their next call. Their
/// results of the calls under way may be wrong.
pub struct Hierarchical<D: Device, E: InterNode<D>> {
    local: Communicator<D>,
    engine: E,
    failed: OnceLock<Error>,
    /// Bytes of a rank's slice from which on a call on the host is made in pieces: equal on all ranks.
    slice_bytes: usize,
    /// Locked during a call, which serialises calls.
    calls: Exclusive<exchange::Messages>,
    /// Comparisons of calls on streams.
    #[cfg(feature = "cuda")]
    comparisons: OnceLock<comparisons::Comparisons>,
}

impl<D: Device, E: InterNode<D>> Hierarchical<D, E> {
    fn of(local: Communicator<D>, engine: E) -> Self {
        Self {
            local,
            engine,
            failed: OnceLock::new(),
            slice_bytes: usize::MAX,
            calls: Exclusive::default(),
            #[cfg(feature = "cuda")]
            comparisons: OnceLock::new(),
        }
    }

    /// Returns this rank, in `0..world_size`.
    pub fn rank(&self) -> usize {
        self.rank_of(self.engine.node(), self.local.rank())
    }

    /// Returns the number of ranks of all nodes.
    pub fn world_size(&self) -> usize {
        self.engine.nodes() * self.local.world_size()
    }

    /// Returns whether the calling thread is in a call of this world, as an engine is. A nested call fails.
    pub fn is_in_call(&self) -> bool {
        self.calls.is_mine()
    }

    /// Returns the communicator of this node's ranks.
    pub fn local(&self) -> &Communicator<D> {
        &self.local
    }

    /// Returns the engine between the nodes.
    pub fn engine(&self) -> &E {
        &self.engine
    }

    fn rank_of(&self, node: usize, local: usize) -> usize {
        node * self.local.world_size() + local
    }

    /// Returns this rank's numbers for a minimum over the nodes, from which [`Self::shape_of_minima`] finds the shape
    /// of the ranks that reduce with each other.
    fn own_minima(&self) -> [i64; 4] {
        let (ranks, local_rank) = (self.local.world_size() as i64, self.local.rank() as i64);
        [ranks, -ranks, local_rank, -local_rank]
    }

    fn shape_of_minima(&self, [least, most, first, last]: [i64; 4]) -> Shape {
        let nodes = self.engine.nodes() as i64;
        Shape { ranks: [least, -most], nodes: [nodes, nodes], local_ranks: -last - first }
    }

    fn healthy(&self) -> Result<()> {
        self.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Handles the result of a step inside the node.
    fn in_node<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| self.fail(renumbered(error, |local| self.rank_of(self.engine.node(), local))))
    }

    /// Handles the result of a step between nodes. An error aborts the node's communicator, so that the other ranks of
    /// the node do not wait, and learn why.
    fn between_nodes<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| {
            let error = renumbered(error, |node| self.rank_of(node, self.local.rank()));
            self.local.abort_because(mark_world_ranks(&error.to_string()));
            self.fail(error)
        })
    }

    fn fail(&self, error: Error) -> Error {
        self.failed.get_or_init(|| error).clone()
    }

    /// Runs the steps of a call. If the engine panics, the world fails: the other nodes would take this rank's next
    /// call for the rest of this one.
    fn run_steps<T>(&self, steps: impl FnOnce() -> Result<T>) -> Result<T> {
        let unfinished = Unfinished(self);
        let done = steps();
        std::mem::forget(unfinished);
        done
    }
}

/// A call whose steps have not all returned. Dropped by a panic alone.
struct Unfinished<'a, D: Device, E: InterNode<D>>(&'a Hierarchical<D, E>);

impl<D: Device, E: InterNode<D>> Drop for Unfinished<'_, D, E> {
    fn drop(&mut self) {
        self.0.local.abort_because("its engine between nodes has panicked in a call".into());
        self.0.fail(Error::Unavailable {
            what: "a world whose engine between nodes has panicked in a call".into(),
            reason: "the other nodes may be at another step: make a new world".into(),
        });
    }
}

impl<D: Device, E: InterNode<D>> std::fmt::Debug for Hierarchical<D, E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hierarchical")
            .field("rank", &self.rank())
            .field("nodes", &self.engine.nodes())
            .field("local", &self.local)
            .field("failed", &self.failed.get())
            .finish_non_exhaustive()
    }
}

/// Returns the number of elements of each rank's slice; slices differ by less than two cache lines. Each slice begins
/// at a cache line, so that kernels process whole packs.
fn slices(count: usize, element_size: usize, ranks: usize) -> Vec<usize> {
    const LINE_BYTES: usize = 64;
    let line = LINE_BYTES / element_size;
    let lines = count.div_ceil(line);
    // The first ranks take one more line if needed; the last line may be incomplete.
    let end = |rank: usize| count.min(line * (rank * (lines / ranks) + rank.min(lines % ranks)));
    (0..ranks).map(|rank| end(rank + 1) - end(rank)).collect()
}

/// Refuses operations that the three steps do not support.
fn check_operation(dtype: DType, op: ReduceOp) -> Result<()> {
    op.check(dtype)?;
    if op.scale().is_some() {
        return Err(Error::Unavailable {
            what: "a premultiplied sum between nodes".into(),
            reason: "engines between nodes do not support scales: multiply first, then sum".into(),
        });
    }
    if op != ReduceOp::Avg || dtype.is_float() {
        return Ok(());
    }
    Err(Error::Unavailable {
        what: format!("an average of {dtype} between nodes"),
        reason: "a node's sum may not fit the type: sum in a wider type, then divide".into(),
    })
}

/// Shape of the world, as the minimum and the maximum over some ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    /// Number of ranks of a node.
    ranks: [i64; 2],
    /// Number of nodes of an engine.
    nodes: [i64; 2],
    /// Difference between the largest and the smallest local rank among ranks that reduce with each other.
    local_ranks: i64,
}

impl Shape {
    /// Converts the shape to numbers whose minima over some ranks are the shape of all of them together.
    fn to_minima(self) -> [i64; 5] {
        [self.ranks[0], -self.ranks[1], self.nodes[0], -self.nodes[1], -self.local_ranks]
    }

    fn of_minima(minima: [i64; 5]) -> Self {
        let [least_ranks, most_ranks, least_nodes, most_nodes, local_ranks] = minima;
        Self {
            ranks: [least_ranks, -most_ranks],
            nodes: [least_nodes, -most_nodes],
            local_ranks: -local_ranks,
        }
    }

    fn check(self) -> Result<()> {
        let unequal = |what: &str, [least, most]: [i64; 2]| {
            Err(Error::Unavailable {
                what: format!("a world of nodes with {least} to {most} {what}"),
                reason: "start the same number of ranks on each node, and pass each rank's local rank to the engine"
                    .into(),
            })
        };
        if self.ranks[0] != self.ranks[1] {
            return unequal("ranks", self.ranks);
        }
        if self.nodes[0] != self.nodes[1] {
            return unequal("nodes for a local rank", self.nodes);
        }
        if self.local_ranks != 0 {
            return unequal("local ranks that reduce with each other", [1, self.local_ranks + 1]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_all_elements_begin_at_lines_and_differ_by_less_than_two() {
        for (count, size, ranks) in [
            (0, 4, 3),
            (2, 8, 3),
            (48, 4, 3),
            (49, 4, 3),
            (4099, 2, 7),
            (1 << 20, 1, 7),
            (5, 8, 1),
            (usize::MAX / 8, 8, 16),
        ] {
            let slices = slices(count, size, ranks);
            assert_eq!((slices.len(), slices.iter().sum::<usize>()), (ranks, count));
            let (least, most) = (slices.iter().min().unwrap(), slices.iter().max().unwrap());
            assert!((most - least) * size <= 2 * 64, "{slices:?}");
            let mut first = 0;
            for slice in slices.into_iter().filter(|&slice| slice > 0) {
                assert_eq!(first * size % 64, 0, "{count} of {size} bytes between {ranks}");
                first += slice;
            }
        }
    }

    #[test]
    fn shapes_are_compared_by_minima() {
        let even = Shape { ranks: [2, 2], nodes: [3, 3], local_ranks: 0 };
        assert_eq!(Shape::of_minima(even.to_minima()), even);
        assert_eq!(even.check(), Ok(()));
        let other = Shape { ranks: [1, 1], nodes: [3, 3], local_ranks: 0 };
        let minima = std::array::from_fn(|at| even.to_minima()[at].min(other.to_minima()[at]));
        let both = Shape::of_minima(minima);
        assert_eq!(both.ranks, [1, 2]);
        assert!(both.check().unwrap_err().to_string().contains("1 to 2 ranks"));
        let crossed = Shape { local_ranks: 1, ..even };
        assert!(crossed.check().unwrap_err().to_string().contains("1 to 2 local ranks"));
        let short = Shape { nodes: [2, 3], ..even };
        assert!(short.check().unwrap_err().to_string().contains("2 to 3 nodes"));
    }

    #[test]
    fn averages_of_integers_are_refused() {
        for dtype in DType::ALL {
            for op in ReduceOp::ARITHMETIC {
                let is_average_of_integers = op == ReduceOp::Avg && !dtype.name().contains('f');
                assert_eq!(check_operation(dtype, op).is_err(), is_average_of_integers, "{op} of {dtype}");
            }
        }
    }
}
