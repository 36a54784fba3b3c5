//! The communicator that ops and layers share.

use std::fmt;
use std::sync::Arc;

use candle_core::Error;
use fast_allreduce::{AnyCommunicator, Collective, DType, DeviceId};

/// Collectives between a rank's buffers: an [`AnyCommunicator`], or a replacement for one (another library, or one that
/// measures).
pub trait Collectives: Send + Sync {
    /// Returns this rank, in `0..world_size`.
    fn rank(&self) -> usize;

    /// Returns the number of ranks.
    fn world_size(&self) -> usize;

    /// Returns the device of its buffers.
    fn device_id(&self) -> DeviceId {
        DeviceId::Cpu
    }

    /// Runs a collective from the input to the output: on a GPU in the order of a stream, on the host before it
    /// returns.
    ///
    /// # Errors
    ///
    /// Those of [`AnyCommunicator::collective`].
    ///
    /// # Safety
    ///
    /// The contract of [`AnyCommunicator::collective`]. An implementation that returns `Ok` has initialised all
    /// elements of this rank's output.
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
/// Every rank applies the same ops in the same order. Ops of several threads run one after the other, and the threads
/// must ensure that their order is the same on all ranks.
///
/// On a GPU ops are enqueued on the stream of the tensor's device. If an op fails there, a later one returns the error.
#[derive(Clone)]
pub struct Comm(Arc<dyn Collectives>);

impl Comm {
    /// Wraps a communicator: of the host, or of a GPU, built with [`Comm::gpu`].
    pub fn new(communicator: impl Into<AnyCommunicator>) -> Self {
        Self(Arc::new(communicator.into()))
    }

    /// Wraps a replacement for a communicator.
    pub fn of(collectives: Arc<dyn Collectives>) -> Self {
        Self(collectives)
    }

    /// Returns the device to build communicators with, in the context of candle's device.
    ///
    /// A process with several communicators on a GPU (one for each group of ranks) chooses how they share it, the same
    /// on all ranks:
    ///
    /// * [`Cuda::max_blocks`](fast_allreduce::Cuda::max_blocks) limits the blocks that each launches. All may run at
    ///   the same time.
    /// * [`Cuda::one_at_a_time`](fast_allreduce::Cuda::one_at_a_time) promises that no two run on the GPU at the same
    ///   time, on any rank. It holds if all their ops are on one stream: on tensors of clones of one
    ///   [`candle_core::CudaDevice`] with its own stream (`new_with_stream`), or in one thread, because
    ///   `CudaDevice::new` has a stream for each thread. If the promise is broken, ops may wait for each other until
    ///   they time out.
    ///
    /// Without either, each takes half of the multiprocessors that the earlier ones have left, until none is left.
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
    /// Those of [`Cuda::new`](fast_allreduce::Cuda::new).
    #[cfg(feature = "cuda")]
    pub fn gpu(device: &candle_core::CudaDevice) -> candle_core::Result<fast_allreduce::Cuda> {
        fast_allreduce::Cuda::new(device.cuda_stream().context().clone()).map_err(error)
    }

    /// Returns this rank, in `0..world_size`.
    pub fn rank(&self) -> usize {
        self.0.rank()
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.0.world_size()
    }

    /// Returns the collectives for a tensor on a GPU or on the CPU.
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

/// Wraps an error of the communicator in one of candle's. Of the variants that keep their source, `Io` shows it
/// unchanged and belongs to no device. It has no backtrace, which would not explain a lost rank.
pub(crate) fn error(error: fast_allreduce::Error) -> Error {
    Error::Io(std::io::Error::other(error))
}

/// Returns the communicator's error, if it is the reason why an op failed.
pub fn failure(error: &Error) -> Option<&fast_allreduce::Error> {
    match error {
        Error::Io(error) => error.get_ref()?.downcast_ref(),
        Error::Context { inner, .. } | Error::WithPath { inner, .. } | Error::WithBacktrace { inner, .. } => {
            failure(inner)
        }
        _ => None,
    }
}
