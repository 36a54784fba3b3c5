//! The allreduce between nodes by MPI, in host memory.

use std::time::Duration;

use ::mpi::traits::Communicator;
use float8::{F8E4M3, F8E5M2};

use super::arithmetic::{bytes_of, elements_at, reduce, reduce_pair, Number};
use super::{check_operation, slices, Call, InterNode};
use crate::bootstrap::{Exchanges, Parts, Peers};
use crate::catalogue::{with_elements, DType, ReduceOp};
use crate::device::Host;
use crate::element::Element;
use crate::error::{Error, Result};

/// Default limit on the wait for the other nodes.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Size of a piece. A call exchanges its message in pieces, so that the memory it needs does not grow with the message.
const PIECE_BYTES: usize = 4 << 20;

/// Engine between nodes: the ranks with the same local rank on all nodes reduce by point-to-point MPI messages.
///
/// Needs the feature `mpi`. The rules of [`bootstrap::Mpi`](crate::bootstrap::Mpi) on threads and finalisation apply.
///
/// MPI's collectives are not used: they have no time limit, do not report missing ranks, and abort the program if nodes
/// make different calls. Instead, each rank sends its slice to all others (one-shot); or, if the slice is large, it
/// sends each node the share that this node reduces, and then its own reduced share to all (two-shot). The messages
/// also carry the call: if nodes make different calls, all get an [`Error::Disagreement`]. Each rank sends one or two
/// messages to every other node for each piece of a call, in segments that Open MPI sends over TCP without asking.
///
/// The memory of messages is kept for later calls: at most 4 MiB for each node.
///
/// The order of additions is the order of the nodes. Floats of 8 and 16 bits are accumulated in f32 and rounded once.
/// All nodes must have the same byte order.
///
/// ```no_run
/// use std::time::Duration;
///
/// use fast_allreduce::hierarchical::{Hierarchical, MpiNodes};
/// use fast_allreduce::{bootstrap::Mpi, Communicator, Host, ReduceOp};
/// use mpi::topology::SimpleCommunicator;
///
/// let (_universe, _) = mpi::initialize_with_threading(mpi::Threading::Serialized).expect("MPI starts once");
/// let world = SimpleCommunicator::world();
/// let local = Communicator::builder().build(Host::new(), Mpi::of_node(&world)?)?;
/// let nodes = MpiNodes::from_communicator(&world, local.rank())?.timeout(Duration::from_secs(10));
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
    /// Creates the engine of the ranks of `communicator` with the same `local_rank`, in their order. That must be the
    /// order of the nodes, so that all ranks of a node get the same node number. Collective over `communicator`, of
    /// which this uses a duplicate.
    ///
    /// # Errors
    ///
    /// * [`Error::Unavailable`] if this thread must not call MPI.
    /// * [`Error::Timeout`] if ranks do not come within `FAST_ALLREDUCE_JOIN_TIMEOUT` seconds (default 120).
    /// * [`Error::PeerLost`] if a rank gave up.
    /// * [`Error::InvalidSetting`] if `communicator` is an intercommunicator, or that variable is not a number.
    /// * [`Error::Mpi`] if an MPI call fails.
    pub fn from_communicator(communicator: &impl Communicator, local_rank: usize) -> Result<Self> {
        Ok(Self { peers: Peers::split(communicator, local_rank)?, timeout: TIMEOUT })
    }

    /// Sets the limit on a call's wait for the other nodes; 30 s by default.
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

    /// Returns whether the additional bytes of a one-shot cost less time than the second exchange of a two-shot.
    fn is_small(&self, bytes: usize) -> bool {
        const LATENCY_BYTES: usize = 16 << 10;
        let nodes = self.nodes();
        bytes * (nodes - 1) * nodes.saturating_sub(2) / nodes <= LATENCY_BYTES
    }

    /// Reduces a piece in one exchange: each rank sends all its elements to all others.
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
        let elements = self.compared(&parts, call, size_of_val(piece))?;
        match (self.node(), &elements[..]) {
            (0, &[_, theirs]) => reduce_pair(piece, theirs, true, op),
            (1, &[theirs, _]) => reduce_pair(piece, theirs, false, op),
            _ => reduce(&elements, op, piece),
        }
        exchanges.reuse(parts);
        Ok(())
    }

    /// Reduces a piece in two exchanges: each rank reduces one share, and sends it to all others.
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
        exchanges.reuse(parts);
        let parts = exchanges.all(|message| message.extend(bytes_of(own)))?;
        for (node, part) in parts.iter().enumerate() {
            let share = &mut piece[share(node)];
            check_length(node, part, size_of_val(share))?;
            bytes_of_mut(share).copy_from_slice(part);
        }
        exchanges.reuse(parts);
        Ok(())
    }

    /// Checks that all nodes make the same call, and returns the elements that they sent.
    fn compared<'a>(&self, parts: &'a Parts, call: Call, bytes: usize) -> Result<Vec<&'a [u8]>> {
        let split = |part: &'a [u8]| part.split_first_chunk().ok_or(part.len());
        // Calls are compared before lengths, since different calls have different lengths.
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

/// Checks the length of a node's message.
fn check_length(node: usize, part: &[u8], bytes: usize) -> Result<()> {
    if part.len() == bytes {
        return Ok(());
    }
    let reason = format!("its message of an allreduce has {} bytes, not {bytes}", part.len());
    Err(Error::Malformed { rank: node, reason })
}

fn bytes_of_mut<T: Element>(elements: &mut [T]) -> &mut [u8] {
    // SAFETY: elements are numbers without padding, and any bytes are valid elements.
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
        // SAFETY: the caller's guarantees are the same.
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
                // SAFETY: the caller guarantees `count` elements of this type that nothing else accesses.
                let elements = unsafe { elements_at::<$element>(address, count) };
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
