//! Allreduce between several nodes: this crate's kernels inside each, another engine between them.
//!
//! In three steps: a reduce-scatter inside the node, after which each rank has the node's sum of one slice; an
//! allreduce of that slice among the ranks that have the same one on all nodes, by an [`InterNode`] engine; an
//! all-gather inside the node. So each byte crosses the network once for each node and not for each rank, and all
//! ranks' network interfaces work at the same time. `docs/scaling.md` models when that is faster than one flat world.
//!
//! There is no `all_reduce_fused`: a kernel normalises rows where it stores the sum over all ranks, and here the engine
//! completes that sum. What follows is an all-gather, of slices that are no whole rows.
//!
//! `MpiNodes` (feature `mpi`) is an engine for host memory, `NcclNodes` (feature `nccl`) one for GPUs'. Another takes an
//! implementation of [`InterNode`].

#[cfg(feature = "mpi")]
mod arithmetic;
mod call;
#[cfg(feature = "cuda")]
mod comparisons;
#[cfg(feature = "cuda")]
mod cuda;
mod host;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
mod text;

use std::sync::{Mutex, OnceLock};

pub use call::Call;
#[cfg(feature = "mpi")]
pub use mpi::MpiNodes;
#[cfg(feature = "nccl")]
#[doc(hidden)]
pub use nccl::library as nccl_library;
#[cfg(feature = "nccl")]
pub use nccl::NcclNodes;

use self::text::renumbered;
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;
use crate::communicator::Communicator;
use crate::device::Device;
use crate::error::{Error, Result};

/// An allreduce between nodes, among the ranks that have the same place in each.
///
/// A rank's node has the same number on all ranks of the node.
pub trait InterNode<D: Device>: Send + Sync {
    /// This rank's node, in `0..nodes`.
    fn node(&self) -> usize;

    /// Number of nodes.
    fn nodes(&self) -> usize;

    /// Reduces `count` elements at `address` in place, in the order of `stream` (which is `()` on the host). Collective
    /// among the ranks of this place, with the same count, type and operation. All of them get the same bits. It is
    /// never asked for an average of integers, nor on a stream that is captured.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] and the like if a rank does not come in time: waits must be bounded. The ranks that such an error names
    /// are numbers of nodes, also in its text where that says `rank 3` or `ranks 3, 4`. An engine that has failed stays failed.
    ///
    /// # Safety
    ///
    /// `address` points to `count` elements of `dtype` in memory of the device, which nothing else accesses until the
    /// reduction is done: on the host when this returns, on a GPU when the stream has come past it.
    unsafe fn all_reduce(
        &self,
        address: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: D::Stream<'_>,
    ) -> Result<()>;

    /// [`InterNode::all_reduce`] as the middle step of `call`, by an engine that compares calls along the way: if nodes
    /// differ in theirs, all ranks of the place get the [`Error::Disagreement`] of [`Call::compare`]. Here `count` may be 0.
    ///
    /// `None`, as by default, if the engine does not: nothing has been done then, and the calls are compared by an allreduce
    /// of their own.
    ///
    /// # Safety
    ///
    /// As [`InterNode::all_reduce`].
    unsafe fn compared_all_reduce(
        &self,
        call: Call,
        address: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: D::Stream<'_>,
    ) -> Option<Result<()>> {
        let _ = (call, address, count, dtype, op, stream);
        None
    }

    /// What has gone wrong since a call returned, on a device whose calls are in stream order: their waits are bounded too,
    /// so that the stream goes on, and by then the failure is known here.
    ///
    /// # Errors
    ///
    /// The first failure.
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

/// One rank of a world of several nodes with as many ranks each.
///
/// Ranks count node by node: the rank is the node's number times the ranks of a node, and the rank in the node.
///
/// # Results
///
/// As of [`Communicator`], all ranks get the same bits, but they depend on how ranks are spread over nodes, as the
/// order of additions and the roundings do: a node's result is rounded to the element type before it goes to the
/// others. Integers are exact, with one exception: there is no average of integers between nodes, since a node cannot
/// give the others its exact sum in the type itself. Averages of floats are the mean of the nodes' means, which do not
/// overflow where the sum would.
///
/// # Errors
///
/// Every step is bounded, by the limits of the communicator and of the engine. An error of either poisons this rank's
/// world as it does a communicator, and aborts the node's communicator, so that the node's other ranks need not wait
/// for theirs. Errors name ranks by their numbers among all nodes'.
///
/// Nodes compare their calls before they combine anything, whether calls are checked inside the nodes or not: if they
/// differ in count, type or operation, all ranks have an [`Error::Disagreement`]. On GPUs, whose streams go on, it comes
/// with the next call, [`Hierarchical::check`] or [`Hierarchical::synchronize`], and what the call wrote is not to be used.
///
/// On GPUs a failure that is found on the stream does not keep this rank's later steps there from running. The ranks of
/// its node learn of it; those of other nodes, whose results of the calls then under way may be wrong, from the limit of the
/// next call.
pub struct Hierarchical<D: Device, E: InterNode<D>> {
    local: Communicator<D>,
    engine: E,
    failed: OnceLock<Error>,
    /// Where slices are reduced on the host. Held during a call, so that calls come one after the other.
    scratch: Mutex<Vec<u64>>,
    /// Of calls that are on streams.
    #[cfg(feature = "cuda")]
    comparisons: OnceLock<comparisons::Comparisons>,
}

impl<D: Device, E: InterNode<D>> Hierarchical<D, E> {
    fn of(local: Communicator<D>, engine: E) -> Self {
        Self {
            local,
            engine,
            failed: OnceLock::new(),
            scratch: Mutex::default(),
            #[cfg(feature = "cuda")]
            comparisons: OnceLock::new(),
        }
    }

    /// This rank, in `0..world_size`.
    pub fn rank(&self) -> usize {
        self.rank_of(self.engine.node(), self.local.rank())
    }

    /// Number of ranks of all nodes.
    pub fn world_size(&self) -> usize {
        self.engine.nodes() * self.local.world_size()
    }

    /// The communicator of this node's ranks.
    pub fn local(&self) -> &Communicator<D> {
        &self.local
    }

    /// The engine between the nodes.
    pub fn engine(&self) -> &E {
        &self.engine
    }

    fn rank_of(&self, node: usize, local: usize) -> usize {
        node * self.local.world_size() + local
    }

    /// What the ranks of a place find the minima of, to see the [shape of their place](Self::shape_of_place): on the first
    /// place, all nodes are asked.
    fn own_minima(&self) -> [i64; 4] {
        let (ranks, place) = (self.local.world_size() as i64, self.local.rank() as i64);
        [ranks, -ranks, place, -place]
    }

    fn shape_of_place(&self, [least, most, first, last]: [i64; 4]) -> Shape {
        let nodes = self.engine.nodes() as i64;
        Shape { ranks: [least, -most], nodes: [nodes, nodes], places: -last - first }
    }

    fn healthy(&self) -> Result<()> {
        self.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// After a step inside the node.
    fn inside<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| self.fail(renumbered(error, |local| self.rank_of(self.engine.node(), local))))
    }

    /// After a step between nodes, which the other ranks of this one need not wait for if it has failed.
    fn between<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| {
            self.local.abort();
            self.fail(renumbered(error, |node| self.rank_of(node, self.local.rank())))
        })
    }

    fn fail(&self, error: Error) -> Error {
        self.failed.get_or_init(|| error).clone()
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

/// The elements of each rank's slice: as many, but for a cache line. A slice begins with one, so that kernels take whole packs.
fn slices(count: usize, element_size: usize, ranks: usize) -> Vec<usize> {
    const LINE_BYTES: usize = 64;
    let line = LINE_BYTES / element_size;
    let lines = count.div_ceil(line);
    // Of the lines, the first ranks take one more; the last line may be a part of one.
    let end = |rank: usize| count.min(line * (rank * (lines / ranks) + rank.min(lines % ranks)));
    (0..ranks).map(|rank| end(rank + 1) - end(rank)).collect()
}

/// Refuses what has no exact result in three steps.
fn check_operation(dtype: DType, op: ReduceOp) -> Result<()> {
    op.check(dtype)?;
    if op.scale().is_some() {
        return Err(Error::Unavailable {
            what: "a premultiplied sum between nodes".into(),
            reason: "engines between nodes have no scales: multiply first, and sum".into(),
        });
    }
    if op != ReduceOp::Avg || dtype.is_float() {
        return Ok(());
    }
    Err(Error::Unavailable {
        what: format!("an average of {dtype} between nodes"),
        reason: "a node's sum may not fit the type: sum a wider type, and divide".into(),
    })
}

/// What ranks find out about the shape of their world: the least and the most of each, over all that were asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    /// Ranks of a node.
    ranks: [i64; 2],
    /// Nodes that one place is on.
    nodes: [i64; 2],
    /// The difference between the most and the least of the places that reduce with each other.
    places: i64,
}

impl Shape {
    /// Numbers of which the minimum over some ranks is their common shape.
    fn to_minima(self) -> [i64; 5] {
        [self.ranks[0], -self.ranks[1], self.nodes[0], -self.nodes[1], -self.places]
    }

    fn of_minima(minima: [i64; 5]) -> Self {
        let [least_ranks, most_ranks, least_nodes, most_nodes, places] = minima;
        Self { ranks: [least_ranks, -most_ranks], nodes: [least_nodes, -most_nodes], places: -places }
    }

    fn check(self) -> Result<()> {
        let unequal = |what: &str, [least, most]: [i64; 2]| {
            Err(Error::Unavailable {
                what: format!("a world of nodes with {least} to {most} {what}"),
                reason: "start as many ranks on each node, and give the engine each rank's place in its node"
                    .into(),
            })
        };
        if self.ranks[0] != self.ranks[1] {
            return unequal("ranks", self.ranks);
        }
        if self.nodes[0] != self.nodes[1] {
            return unequal("nodes for a place", self.nodes);
        }
        if self.places != 0 {
            return unequal("places that reduce with each other", [1, self.places + 1]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_take_all_begin_with_a_line_and_differ_by_one_at_most() {
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
        let even = Shape { ranks: [2, 2], nodes: [3, 3], places: 0 };
        assert_eq!(Shape::of_minima(even.to_minima()), even);
        assert_eq!(even.check(), Ok(()));
        let other = Shape { ranks: [1, 1], nodes: [3, 3], places: 0 };
        let minima = std::array::from_fn(|at| even.to_minima()[at].min(other.to_minima()[at]));
        let both = Shape::of_minima(minima);
        assert_eq!(both.ranks, [1, 2]);
        assert!(both.check().unwrap_err().to_string().contains("1 to 2 ranks"));
        let crossed = Shape { places: 1, ..even };
        assert!(crossed.check().unwrap_err().to_string().contains("1 to 2 places"));
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
