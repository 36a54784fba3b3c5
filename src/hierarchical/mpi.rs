//! The allreduce between nodes by MPI, in host memory.

use std::ops::Range;
use std::time::Duration;

use ::mpi::traits::Communicator;
use float8::{F8E4M3, F8E5M2};

use super::arithmetic::{bytes_of, elements_at, reduce, reduce_pair, Number};
use super::{check_operation, slices, Call, Finish, InterNode};
use crate::bootstrap::{Exchanges, Parts, Peers, Started};
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

    /// Starts to reduce elements. The function that this returns completes it.
    fn start<'a, T: Number>(&'a self, call: Call, elements: &'a mut [T], op: ReduceOp) -> Result<Finish<'a>> {
        check_operation(T::DTYPE, op)?;
        let mut exchanges = self.peers.begin()?;
        let (mut piece, mut rest) = elements.split_at_mut(elements.len().min(PIECE_BYTES / size_of::<T>()));
        let mut started = self.start_piece(&mut exchanges, call, piece)?;
        let steps = move |exchanges: &mut Exchanges<'_>| loop {
            self.finish_piece(exchanges, started, call, piece, op)?;
            if rest.is_empty() {
                return Ok(());
            }
            (piece, rest) = rest.split_at_mut(rest.len().min(PIECE_BYTES / size_of::<T>()));
            started = self.start_piece(exchanges, call, piece)?;
        };
        Ok(Box::new(move || exchanges.end(self.timeout, steps)))
    }

    /// Starts the first or only exchange of a piece: each rank sends all its elements to all others, or to each the
    /// share that it reduces.
    fn start_piece<T: Number>(
        &self,
        exchanges: &mut Exchanges<'_>,
        call: Call,
        piece: &[T],
    ) -> Result<Started> {
        if self.is_small(size_of_val(piece)) {
            return exchanges.start_all(|message| {
                message.extend(call.to_bytes());
                message.extend(bytes_of(piece));
            });
        }
        let shares = self.shares(piece);
        exchanges.start_each(|node, message| {
            message.extend(call.to_bytes());
            message.extend(bytes_of(&piece[shares[node].clone()]));
        })
    }

    fn finish_piece<T: Number>(
        &self,
        exchanges: &mut Exchanges<'_>,
        started: Started,
        call: Call,
        piece: &mut [T],
        op: ReduceOp,
    ) -> Result<()> {
        let parts = exchanges.finish(started)?;
        if self.is_small(size_of_val(piece)) {
            self.reduce_all(&parts, call, piece, op)?;
            exchanges.reuse(parts);
            return Ok(());
        }
        // Each rank reduces one share, and sends it to all others.
        let shares = self.shares(piece);
        let own = &mut piece[shares[self.node()].clone()];
        reduce(&self.compared(&parts, call, size_of_val(own))?, op, own);
        exchanges.reuse(parts);
        let started = exchanges.start_all(|message| message.extend(bytes_of(own)))?;
        let parts = exchanges.finish(started)?;
        for (node, part) in parts.iter().enumerate() {
            let share = &mut piece[shares[node].clone()];
            check_length(node, part, size_of_val(share))?;
            bytes_of_mut(share).copy_from_slice(part);
        }
        exchanges.reuse(parts);
        Ok(())
    }

    /// Returns the share of a piece that each node reduces.
    fn shares<T>(&self, piece: &[T]) -> Vec<Range<usize>> {
        let mut end = 0;
        let share = |count| {
            end += count;
            end - count..end
        };
        slices(piece.len(), size_of::<T>(), self.nodes()).into_iter().map(share).collect()
    }

    /// Returns whether the additional bytes of a one-shot cost less time than the second exchange of a two-shot.
    fn is_small(&self, bytes: usize) -> bool {
        const LATENCY_BYTES: usize = 16 << 10;
        let nodes = self.nodes();
        bytes * (nodes - 1) * nodes.saturating_sub(2) / nodes <= LATENCY_BYTES
    }

    /// Reduces the elements that all nodes have sent.
    fn reduce_all<T: Number>(&self, parts: &Parts, call: Call, piece: &mut [T], op: ReduceOp) -> Result<()> {
        let elements = self.compared(parts, call, size_of_val(piece))?;
        match (self.node(), &elements[..]) {
            (0, &[_, theirs]) => reduce_pair(piece, theirs, true, op),
            (1, &[theirs, _]) => reduce_pair(piece, theirs, false, op),
            _ => reduce(&elements, op, piece),
        }
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
        let started =
            unsafe { self.start_all_reduce(Call::new(count, dtype, op), address, count, dtype, op, stream) };
        started.map_or(Ok(()), |started| started?())
    }

    unsafe fn start_all_reduce(
        &self,
        call: Call,
        address: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        _stream: (),
    ) -> Option<Result<Finish<'_>>> {
        macro_rules! reduced {
            ($element:ty) => {{
                // SAFETY: the caller guarantees `count` elements of this type that nothing else accesses.
                let elements = unsafe { elements_at::<$element>(address, count) };
                self.start(call, elements, op)
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
