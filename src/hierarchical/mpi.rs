//! The allreduce between nodes by MPI, on the host's memory.

use std::time::Duration;

use ::mpi::traits::Communicator;
use float8::{F8E4M3, F8E5M2};

use super::arithmetic::{reduce, Number};
use super::{check_operation, slices, Call, InterNode};
use crate::bootstrap::{Exchanges, Parts, Peers};
use crate::catalogue::{with_elements, DType, ReduceOp};
use crate::device::Host;
use crate::element::Element;
use crate::error::{Error, Result};

/// The longest wait for the other nodes, unless another is chosen.
const TIMEOUT: Duration = Duration::from_secs(30);

/// What goes through the exchanges at once: the memory that a call needs does not grow with its message.
const PIECE_BYTES: usize = 4 << 20;

/// The ranks of one place on all nodes, which reduce by messages of MPI between pairs.
///
/// Needs the feature `mpi`. Calls to MPI follow the rules of [`bootstrap::Mpi`](crate::bootstrap::Mpi), on threads and
/// on the end too. MPI's collectives are not used, as they have no limit in time, do not say who is missing, and end the
/// program where nodes differ in what they call. Here each rank sends to every other of its place: its slice, or if that
/// were many bytes, first to each node the share that this one reduces, and then what came of its own. With it goes the
/// call, at no further message: if nodes differ, all of them have an [`Error::Disagreement`]. For many nodes the messages
/// are many too: as many as there are nodes, twice, for each rank.
///
/// The order of additions is that of the nodes. Floats of 8 and 16 bits are added in f32 and rounded once. Nodes have the same order of
/// bytes.
///
/// ```no_run
/// use fast_allreduce::hierarchical::{Hierarchical, MpiNodes};
/// use fast_allreduce::{bootstrap::Mpi, Communicator, Host, ReduceOp};
/// use mpi::topology::SimpleCommunicator;
///
/// let (_universe, _) = mpi::initialize_with_threading(mpi::Threading::Serialized).expect("MPI starts once");
/// let world = SimpleCommunicator::world();
/// let local = Communicator::builder().build(Host::new(), Mpi::of_node(&world)?)?;
/// let nodes = MpiNodes::from_communicator(&world, local.rank())?;
/// let all = Hierarchical::new(local, nodes)?;
/// let mut data = vec![all.rank() as f32; 1000];
/// all.all_reduce_in_place(&mut data, ReduceOp::Sum)?;
/// # Ok::<(), fast_allreduce::Error>(())
/// ```
pub struct MpiNodes {
    peers: Peers,
    timeout: Duration,
}

impl MpiNodes {
    /// The ranks of `communicator` that have the same place in their nodes as this one, in its order, which must be
    /// that of the nodes: then all ranks of a node find the same number for it. Collective over the communicator, which
    /// stays the caller's.
    ///
    /// # Errors
    ///
    /// As [`bootstrap::Mpi::from_communicator`](crate::bootstrap::Mpi::from_communicator), but ranks may be on several
    /// nodes.
    pub fn from_communicator(communicator: &impl Communicator, place: usize) -> Result<Self> {
        Ok(Self { peers: Peers::split(communicator, place)?, timeout: TIMEOUT })
    }

    /// The longest that a call waits for the other nodes (30 s by default).
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    fn reduce<T: Number>(&self, call: Call, elements: &mut [T], op: ReduceOp) -> Result<()> {
        check_operation(T::DTYPE, op)?;
        self.peers.call(self.timeout, |exchanges| {
            let mut rest = elements;
            loop {
                let (piece, later) = rest.split_at_mut(rest.len().min(PIECE_BYTES / size_of::<T>()));
                if self.is_small(size_of_val(piece)) {
                    self.one_shot(exchanges, call, piece, op)?;
                } else {
                    self.two_shot(exchanges, call, piece, op)?;
                }
                rest = later;
                if rest.is_empty() {
                    return Ok(());
                }
            }
        })
    }

    /// Whether what a one-shot sends more than a two-shot takes less time than another exchange.
    fn is_small(&self, bytes: usize) -> bool {
        const LATENCY_BYTES: usize = 16 << 10;
        let nodes = self.nodes();
        bytes * (nodes - 1) * nodes.saturating_sub(2) / nodes <= LATENCY_BYTES
    }

    /// Each rank gives all others all that it has.
    fn one_shot<T: Number>(
        &self,
        exchanges: &mut Exchanges<'_>,
        call: Call,
        piece: &mut [T],
        op: ReduceOp,
    ) -> Result<()> {
        let parts = exchanges.all(|message| {
            message.extend(call.to_bytes());
            message.extend(bytes_of(piece));
        })?;
        reduce(&self.compared(&parts, call, size_of_val(piece))?, op, piece);
        Ok(())
    }

    /// Each rank reduces one share, and gives it to all others.
    fn two_shot<T: Number>(
        &self,
        exchanges: &mut Exchanges<'_>,
        call: Call,
        piece: &mut [T],
        op: ReduceOp,
    ) -> Result<()> {
        let counts = slices(piece.len(), size_of::<T>(), self.nodes());
        let share = |node: usize| {
            let begin = counts[..node].iter().sum();
            begin..begin + counts[node]
        };
        let parts = exchanges.each(|node, message| {
            message.extend(call.to_bytes());
            message.extend(bytes_of(&piece[share(node)]));
        })?;
        let own = &mut piece[share(self.node())];
        reduce(&self.compared(&parts, call, size_of_val(own))?, op, own);
        let parts = exchanges.all(|message| message.extend(bytes_of(own)))?;
        for (node, part) in parts.iter().enumerate() {
            let share = &mut piece[share(node)];
            check_length(node, part, size_of_val(share))?;
            bytes_of_mut(share).copy_from_slice(part);
        }
        Ok(())
    }

    /// The elements that nodes sent with a call, if it is the same on all of them.
    fn compared<'a>(&self, parts: &'a Parts, call: Call, bytes: usize) -> Result<Vec<&'a [u8]>> {
        let split = |part: &'a [u8]| part.split_first_chunk().ok_or(part.len());
        // Before the lengths, which are other ones if calls are.
        for (node, part) in parts.iter().enumerate() {
            if let Ok((theirs, _)) = split(part) {
                call.compare(self.node(), node, *theirs)?;
            }
        }
        let elements = |(node, part): (usize, &'a [u8])| {
            let elements = split(part).map_or(&[][..], |(_, elements)| elements);
            check_length(node, elements, bytes).map(|()| elements)
        };
        parts.iter().enumerate().map(elements).collect()
    }
}

/// Refuses what a node of the same call cannot have sent.
fn check_length(node: usize, part: &[u8], bytes: usize) -> Result<()> {
    if part.len() == bytes {
        return Ok(());
    }
    let reason = format!("its part of an allreduce has {} bytes, and not {bytes}", part.len());
    Err(Error::Malformed { rank: node, reason })
}

/// Elements as they are in memory.
pub(super) fn bytes_of<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: elements are plain numbers, without padding.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

fn bytes_of_mut<T: Element>(elements: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and any bytes are elements.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(elements)) }
}

impl InterNode<Host> for MpiNodes {
    fn node(&self) -> usize {
        self.peers.rank()
    }

    fn nodes(&self) -> usize {
        self.peers.size()
    }

    unsafe fn all_reduce(
        &self,
        address: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: (),
    ) -> Result<()> {
        // SAFETY: the caller's.
        let reduced = unsafe {
            self.compared_all_reduce(Call::new(count, dtype, op), address, count, dtype, op, stream)
        };
        reduced.unwrap_or(Ok(()))
    }

    unsafe fn compared_all_reduce(
        &self,
        call: Call,
        address: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        _stream: (),
    ) -> Option<Result<()>> {
        macro_rules! reduced {
            ($element:ty) => {{
                // SAFETY: the caller's: so many elements of this type, which nothing else accesses.
                let elements = unsafe { std::slice::from_raw_parts_mut(address as *mut $element, count) };
                self.reduce(call, elements, op)
            }};
        }
        macro_rules! by_type {
            ($($element:ty => $variant:ident),*) => {
                match dtype {
                    $(DType::$variant => reduced!($element),)*
                    DType::F8E4M3 => reduced!(F8E4M3),
                    DType::F8E5M2 => reduced!(F8E5M2),
                }
            };
        }
        Some(with_elements!(by_type))
    }
}

impl std::fmt::Debug for MpiNodes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MpiNodes")
            .field("node", &self.node())
            .field("nodes", &self.nodes())
            .finish_non_exhaustive()
    }
}
