//! The allreduce between nodes by NCCL, on GPUs' memory, in stream order.

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

/// The ranks of one place on all nodes, which reduce by `ncclAllReduce`.
///
/// Needs the feature `nccl`, and at run time a `libnccl.so.2` of NCCL 2.14 or newer. **It has been compiled; nothing of
/// it has run on a GPU.**
///
/// Results between nodes are NCCL's: how it rounds f16 and bf16, in which order it adds, and what it makes of NaNs and of
/// -0 in a minimum or maximum. Averages are `ncclAvg` of the nodes' averages. NCCL reduces 8-bit floats from 2.24 on, on GPUs of
/// compute capability 9.0 and above, and what is too large for them becomes their largest number; elsewhere it refuses them.
///
/// # Limits
///
/// NCCL's waits are unbounded; these are not. Its calls do not block, and are asked about until the limit. A thread
/// watches the kernels: one that has waited for the other nodes for longer than the limit is aborted with the whole
/// communicator, so that the stream goes on, and [`InterNode::check`] says why. What is not bounded is the time that
/// NCCL takes to start or to abort on this machine alone; it aborts on a thread that nobody waits for. To drop this waits
/// until the calls that are under way are done and the other nodes have what this one sends, each for the limit at most.
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
/// // Each place has an id of its own, which its rank on node 0 makes and the program brings to those on the others.
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
    /// An `ncclUniqueId`, for one place: its rank on one node makes it, and gives it to those on the others.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable) without the library or with one that is too old,
    /// [`Error::Nccl`](crate::Error::Nccl).
    pub fn unique_id() -> Result<[u8; 128]> {
        Nccl::get()?.unique_id().map(|id| id.0)
    }

    /// This rank among those of its place, on the GPU of `context`. Collective among them. `timeout` is the longest that
    /// this and each later call waits for the other nodes.
    ///
    /// # Errors
    ///
    /// As [`NcclNodes::unique_id`]; [`Error::RankOutOfRange`](crate::Error::RankOutOfRange) unless `node` is below
    /// `nodes`, [`Error::Driver`](crate::Error::Driver); [`Error::Timeout`](crate::Error::Timeout) where not all nodes come,
    /// or come with another number of nodes.
    pub fn new(
        context: &Arc<CudaContext>,
        id: [u8; 128],
        node: usize,
        nodes: usize,
        timeout: Duration,
    ) -> Result<Self> {
        // NCCL takes this thread's GPU.
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
                reason: "NCCL has no such operation or no such type".into(),
            });
        };
        // SAFETY: the memory and the stream are the caller's word.
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
