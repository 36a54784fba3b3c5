//! The allreduce between nodes by NCCL, in GPU memory, in stream order.

pub mod library;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUstream;
use cudarc::driver::CudaContext;

use self::library::{Comm, Nccl};
use self::watch::Watched;
use super::{check_operation, InterNode};
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;
use crate::device::cuda::driver::driver;
use crate::device::cuda::Cuda;
use crate::error::{Error, Result};

/// Engine between nodes: the ranks with the same local rank on all nodes reduce by `ncclAllReduce`.
///
/// Needs the feature `nccl` and, at run time, `libnccl.so.2` of NCCL 2.14 or newer. **It compiles, but has never run on
/// a GPU.**
///
/// Results between nodes are those of NCCL: the rounding of f16 and bf16, the order of additions, and the treatment of
/// NaN and -0 in minima and maxima. Averages are `ncclAvg` of the nodes' averages. NCCL 2.24 and newer reduces 8-bit
/// floats on GPUs of compute capability 9.0 and above, and saturates values that are too large; otherwise it refuses
/// them.
///
/// # Time limits
///
/// NCCL's own waits have no limit. This engine uses nonblocking calls, and polls them until the limit. A thread watches
/// the kernels: if one has waited for the other nodes longer than the limit, the thread aborts the communicator, so
/// that the stream goes on, and [`InterNode::check`] returns the reason. There is no limit on the time that NCCL itself
/// takes to start or to abort; it aborts on a thread that nobody waits for. Dropping this waits for the calls under
/// way, and for the other nodes to receive what this one sends, each for at most the limit.
///
/// ```no_run
/// use std::time::Duration;
///
/// use cudarc::driver::CudaContext;
/// use fast_allreduce::bootstrap::Local;
/// use fast_allreduce::hierarchical::{Hierarchical, NcclNodes};
/// use fast_allreduce::{Communicator, Cuda, ReduceOp};
///
/// # fn from_node_0(_id: Option<[u8; 128]>) -> [u8; 128] { [0; 128] }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (node, nodes) = (0, 2);
/// let local = Local::from_env()?.ok_or("not started by a launcher")?;
/// let context = CudaContext::new(0)?;
/// let local = Communicator::builder().build(Cuda::new(context.clone())?, local)?;
/// // Each local rank has its own id: the rank on node 0 creates it, and the program passes it to those on other nodes.
/// let id = from_node_0(if node == 0 { Some(NcclNodes::unique_id()?) } else { None });
/// let nodes = NcclNodes::new(&context, id, node, nodes, Duration::from_secs(30))?;
/// let stream = context.new_stream()?;
/// let all = Hierarchical::on_stream(local, nodes, &stream)?;
/// let mut data = stream.clone_htod(&[all.rank() as f32; 1000])?;
/// all.all_reduce_in_place(&stream, &mut data, ReduceOp::Sum)?;
/// all.synchronize(&stream)?;
/// # Ok(())
/// # }
/// ```
pub struct NcclNodes {
    node: usize,
    nodes: usize,
    watched: Watched,
}

impl NcclNodes {
    /// Creates an `ncclUniqueId` for one local rank. The rank on one node creates it, and passes it to those on the
    /// other nodes.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable) if the library is missing or too old,
    /// [`Error::Nccl`](crate::Error::Nccl) if the call fails.
    pub fn unique_id() -> Result<[u8; 128]> {
        Nccl::get()?.unique_id().map(|id| id.0)
    }

    /// Creates the engine on the GPU of `context`. Collective among the ranks with the same local rank. `timeout`
    /// limits the wait for the other nodes in this and in each later call.
    ///
    /// # Errors
    ///
    /// * [`Error::Unavailable`](crate::Error::Unavailable) if the library is missing or too old.
    /// * [`Error::RankOutOfRange`](crate::Error::RankOutOfRange) unless `node` is below `nodes`.
    /// * [`Error::Timeout`](crate::Error::Timeout) if not all nodes come, or if they have a different `nodes`.
    /// * [`Error::Nccl`](crate::Error::Nccl) and [`Error::Driver`](crate::Error::Driver) if a call fails.
    pub fn new(
        context: &Arc<CudaContext>,
        id: [u8; 128],
        node: usize,
        nodes: usize,
        timeout: Duration,
    ) -> Result<Self> {
        // NCCL uses this thread's current GPU.
        context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))?;
        let comm = Comm::connect(id, node, nodes, timeout)?;
        Ok(Self { node, nodes, watched: Watched::new(context, comm, timeout)? })
    }
}

impl InterNode<Cuda> for NcclNodes {
    fn node(&self) -> usize {
        self.node
    }

    fn nodes(&self) -> usize {
        self.nodes
    }

    unsafe fn all_reduce(
        &self,
        address: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: CUstream,
    ) -> Result<()> {
        check_operation(dtype, op)?;
        let (Some(dtype), Some(op)) = (dtype.nccl(), op.nccl()) else {
            return Err(Error::Unavailable {
                what: format!("{op} of {dtype} between nodes"),
                reason: "NCCL does not have this operation or this type".into(),
            });
        };
        // SAFETY: the caller guarantees the memory and the stream.
        unsafe {
            self.watched
                .call(stream, |comm, limit| comm.all_reduce(address, count, dtype, op, stream.cast(), limit))
        }
    }

    fn check(&self) -> Result<()> {
        self.watched.check()
    }
}

impl std::fmt::Debug for NcclNodes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NcclNodes")
            .field("node", &self.node)
            .field("nodes", &self.nodes)
            .finish_non_exhaustive()
    }
}
