//! The allreduce between nodes by MPI, on the host's memory.

use std::time::Duration;

use ::mpi::traits::Communicator;
use half::{bf16, f16};

use super::wire::{combine, Wire};
use super::InterNode;
use crate::bootstrap::Peers;
use crate::device::Host;
use crate::dtype::DType;
use crate::error::Result;
use crate::op::ReduceOp;

/// The longest wait for the other nodes, unless another is chosen.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The ranks of one place on all nodes, which reduce by `MPI_Iallreduce`.
///
/// Needs the feature `mpi`. Calls to MPI follow the rules of [`bootstrap::Mpi`](crate::bootstrap::Mpi), on threads and
/// on the end too. Waits are bounded, though MPI's are not: who gives up leaves the message's memory to MPI for as long
/// as the process lives, and the others to their own limits.
///
/// f16 and bf16 go to the other nodes as f32, which MPI can add, and are rounded once: twice the bytes. Narrow integers
/// are widened too.
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

    fn reduce<T: Wire>(&self, elements: &mut [T], op: ReduceOp) -> Result<()> {
        let words = self.peers.all_reduce(T::encode(elements, op), combine(op), self.timeout)?;
        T::decode(&words, op, self.nodes(), elements);
        Ok(())
    }
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
        _stream: (),
    ) -> Result<()> {
        macro_rules! reduce {
            ($($name:ident => $element:ty),* $(,)?) => {
                match dtype {
                    $(DType::$name => {
                        // SAFETY: the caller's: so many elements of this type, which nothing else accesses.
                        let elements = unsafe { std::slice::from_raw_parts_mut(address as *mut $element, count) };
                        self.reduce(elements, op)
                    })*
                }
            };
        }
        reduce! {
            F16 => f16, Bf16 => bf16, F32 => f32, F64 => f64, I8 => i8, U8 => u8, I32 => i32, U32 => u32, I64 => i64,
            U64 => u64,
        }
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
