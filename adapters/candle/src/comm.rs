//! A rank's communicator as ops and layers hold it.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use candle_core::Error;
use fast_allreduce::{Collective, Communicator, DType, Host};

/// Collectives between buffers in this process's memory: a [`Communicator`], or what stands in for one (another library, one that
/// measures).
pub trait HostCollectives: Send + Sync {
    /// This rank, in `0..world_size`.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// Carries out a collective, and returns when the output holds the result.
    ///
    /// # Errors
    ///
    /// As [`Communicator::collective_raw`].
    ///
    /// # Safety
    ///
    /// As [`Communicator::collective_raw`]. After it has succeeded, all elements of the output that the collective has on this rank
    /// are initialised.
    unsafe fn collective(
        &self,
        collective: Collective<'_>,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: DType,
    ) -> fast_allreduce::Result<()>;
}

impl HostCollectives for Communicator<Host> {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn world_size(&self) -> usize {
        self.world_size()
    }

    unsafe fn collective(
        &self,
        collective: Collective<'_>,
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: DType,
    ) -> fast_allreduce::Result<()> {
        // SAFETY: the caller's, under the same contract.
        unsafe { self.collective_raw(collective, input, output, count, dtype) }
    }
}

/// A rank's communicator. A clone is the same communicator.
///
/// Every rank applies the same ops in the same order. Ops of several threads come one after the other, so threads see to it that the
/// order is the same on all ranks.
#[derive(Clone)]
pub struct Comm(pub(crate) Inner);

#[derive(Clone)]
pub(crate) enum Inner {
    Host(Arc<dyn HostCollectives>),
    #[cfg(feature = "cuda")]
    Cuda(Arc<Communicator<fast_allreduce::Cuda>>),
}

impl Comm {
    /// For tensors in the memory of the host.
    pub fn host(collectives: Arc<dyn HostCollectives>) -> Self {
        Self(Inner::Host(collectives))
    }

    /// For tensors of a GPU, made with [`Comm::gpu`]. Ops are put on the stream of the tensor's
    /// device: their results are there in its order, and an op that fails later makes a later one return the error.
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
    /// # use std::sync::Arc;
    /// # use candle_core::{CudaDevice, Error, Result};
    /// # use fast_allreduce::{bootstrap::Bootstrap, Communicator};
    /// # use fast_allreduce_candle::Comm;
    /// # fn comm<B: Bootstrap + 'static>(device: &CudaDevice, group: B) -> Result<Comm> {
    /// let gpu = Comm::gpu(device)?.one_at_a_time();
    /// let communicator = Communicator::builder().build(gpu, group).map_err(Error::wrap)?;
    /// let comm = Comm::cuda(Arc::new(communicator));
    /// # Ok(comm)
    /// # }
    /// ```
    #[cfg(feature = "cuda")]
    pub fn cuda(communicator: Arc<Communicator<fast_allreduce::Cuda>>) -> Self {
        Self(Inner::Cuda(communicator))
    }

    /// candle's device as one to make communicators with, in its context.
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
        match &self.0 {
            Inner::Host(host) => host.rank(),
            #[cfg(feature = "cuda")]
            Inner::Cuda(cuda) => cuda.rank(),
        }
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        match &self.0 {
            Inner::Host(host) => host.world_size(),
            #[cfg(feature = "cuda")]
            Inner::Cuda(cuda) => cuda.world_size(),
        }
    }

    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub(crate) fn as_host(&self, op: &str) -> candle_core::Result<&dyn HostCollectives> {
        match &self.0 {
            Inner::Host(host) => Ok(&**host),
            #[cfg(feature = "cuda")]
            Inner::Cuda(_) => {
                candle_core::bail!("{op}: the communicator is one of GPUs, the tensor is on the CPU")
            }
        }
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn as_cuda(&self, op: &str) -> candle_core::Result<&Communicator<fast_allreduce::Cuda>> {
        match &self.0 {
            Inner::Cuda(cuda) => Ok(cuda),
            Inner::Host(_) => {
                candle_core::bail!("{op}: the communicator is one of CPUs, the tensor is on a GPU")
            }
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
