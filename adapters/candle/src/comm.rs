//! A rank's communicator as ops and layers hold it.

use std::fmt;
use std::sync::Arc;

use candle_core::Error;
use fast_allreduce::{AnyCommunicator, Collective, DType, DeviceId};

/// Collectives between a rank's buffers: an [`AnyCommunicator`], or what stands in for one (another library, one that measures).
pub trait Collectives: Send + Sync {
    /// This rank, in `0..world_size`.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// Where its buffers are.
    fn device_id(&self) -> DeviceId {
        DeviceId::Cpu
    }

    /// Carries out a collective, from the input to the output: on a GPU in the order of a stream, on the host before it returns.
    ///
    /// # Errors
    ///
    /// As [`AnyCommunicator::collective`].
    ///
    /// # Safety
    ///
    /// As [`AnyCommunicator::collective`]. After it has succeeded, all elements of the output that the collective has on this rank
    /// are initialised.
    unsafe fn collective(
        &self,
        stream: u64,
        collective: Collective<'_>,
        addresses: [u64; 2],
        count: usize,
        dtype: DType,
    ) -> fast_allreduce::Result<()>;
}

impl Collectives for AnyCommunicator {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn world_size(&self) -> usize {
        self.world_size()
    }

    fn device_id(&self) -> DeviceId {
        self.device_id()
    }

    unsafe fn collective(
        &self,
        stream: u64,
        collective: Collective<'_>,
        addresses: [u64; 2],
        count: usize,
        dtype: DType,
    ) -> fast_allreduce::Result<()> {
        // SAFETY: the caller's, under the same contract.
        unsafe { self.collective(stream, collective, addresses, count, dtype) }
    }
}

/// A rank's communicator. A clone is the same communicator.
///
/// Every rank applies the same ops in the same order. Ops of several threads come one after the other, so threads see to it that the
/// order is the same on all ranks.
///
/// On a GPU ops are put on the stream of the tensor's device: their results are there in its order, and an op that fails later makes
/// a later one return the error.
#[derive(Clone)]
pub struct Comm(Arc<dyn Collectives>);

impl Comm {
    /// For tensors in the memory of the host, or of a GPU, made with [`Comm::gpu`].
    pub fn new(communicator: impl Into<AnyCommunicator>) -> Self {
        Self(Arc::new(communicator.into()))
    }

    /// What stands in for a communicator.
    pub fn of(collectives: Arc<dyn Collectives>) -> Self {
        Self(collectives)
    }

    /// candle's device as one to make communicators with, in its context.
    ///
    /// A process that has several on a GPU (one for each group of ranks, of a model or of several) says how they share it, alike on
    /// all ranks:
    ///
    /// * [`Cuda::max_blocks`](fast_allreduce::Cuda::max_blocks) is the most that each of them launches. All may be in use at the same
    ///   time.
    /// * [`Cuda::one_at_a_time`](fast_allreduce::Cuda::one_at_a_time) promises that no two run on the GPU at the same time, on any rank.
    ///   The program keeps that if all their ops are on one stream: on tensors of clones of one [`candle_core::CudaDevice`], which
    ///   has a stream of its own (`new_with_stream`), or by one thread, since the stream of `CudaDevice::new` is another in
    ///   each thread. Where the promise is broken, ops may wait for each other until they time out.
    ///
    /// Without either, each takes half of the multiprocessors that those before it have left, until there is none.
    ///
    /// ```no_run
    /// # use candle_core::{CudaDevice, Error, Result};
    /// # use fast_allreduce::{bootstrap::Bootstrap, Communicator};
    /// # use fast_allreduce_candle::Comm;
    /// # fn comm<B: Bootstrap + 'static>(device: &CudaDevice, group: B) -> Result<Comm> {
    /// let gpu = Comm::gpu(device)?.one_at_a_time();
    /// let comm = Comm::new(Communicator::builder().build(gpu, group).map_err(Error::wrap)?);
    /// # Ok(comm)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Cuda::new`](fast_allreduce::Cuda::new).
    #[cfg(feature = "cuda")]
    pub fn gpu(device: &candle_core::CudaDevice) -> candle_core::Result<fast_allreduce::Cuda> {
        fast_allreduce::Cuda::new(device.cuda_stream().context().clone()).map_err(error)
    }

    /// This rank, in `0..world_size`.
    pub fn rank(&self) -> usize {
        self.0.rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.0.world_size()
    }

    /// What carries out an op on a tensor that is on a GPU, or on the CPU.
    pub(crate) fn for_tensor(&self, op: &str, on_gpu: bool) -> candle_core::Result<&dyn Collectives> {
        let place = |on_gpu| if on_gpu { "GPU" } else { "CPU" };
        match self.0.device_id() != DeviceId::Cpu {
            is_gpu if is_gpu == on_gpu => Ok(&*self.0),
            is_gpu => candle_core::bail!(
                "{op}: the communicator is one of {}s, the tensor is on a {}",
                place(is_gpu),
                place(on_gpu)
            ),
        }
    }
}

impl fmt::Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Comm").field("rank", &self.rank()).field("world_size", &self.world_size()).finish()
    }
}

/// An error of the communicator as one of candle. Of candle's variants that keep their source whole, this is the one that shows it
/// unchanged and is of no particular device.
/// Without a backtrace: a rank that has gone is nothing of this program's, and is to be told at once.
pub(crate) fn error(error: fast_allreduce::Error) -> Error {
    Error::Io(std::io::Error::other(error))
}

/// What the communicator reported, where that is what an op failed of.
pub fn failure(error: &Error) -> Option<&fast_allreduce::Error> {
    match error {
        Error::Io(error) => error.get_ref()?.downcast_ref(),
        Error::Context { inner, .. } | Error::WithPath { inner, .. } | Error::WithBacktrace { inner, .. } => {
            failure(inner)
        }
        _ => None,
    }
}
