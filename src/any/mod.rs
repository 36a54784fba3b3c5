//! A communicator of whichever device: one type for bindings, adapters and programs that learn the device at run time.

mod buffer;
mod calls;
mod events;
#[cfg(feature = "cuda")]
mod kept;

use std::time::Duration;

pub use self::buffer::AnyBuffer;
#[cfg(feature = "cuda")]
use self::kept::Kept;
use crate::catalogue::{settings::DeviceId, DType};
use crate::communicator::{Communicator, Counters};
#[cfg(feature = "cuda")]
use crate::device::cuda::{driver::current::CallersContext, Cuda};
use crate::device::host::Binding;
use crate::device::Host;
use crate::error::{Error, Result};
use crate::plan::{Plan, Source};

/// Without GPUs there is no context to keep.
#[cfg(not(feature = "cuda"))]
type CallersContext = ();

/// A rank's [`Communicator`], whose device is known at run time only.
///
/// Addresses and streams are numbers. On a GPU a stream is a `CUstream` of the communicator's context, or the handle of a default
/// stream. On the host it is 0: calls have ended when they return.
///
/// The caller's current CUDA context stays current, in calls and when the communicator is dropped.
///
/// ```
/// use fast_allreduce::{bootstrap::Threads, AnyCommunicator, Collective, Communicator, DType, Host, ReduceOp};
///
/// # fn main() -> fast_allreduce::Result<()> {
/// let ranks = Threads::world(2)?.into_iter().map(|bootstrap| {
///     std::thread::spawn(move || -> fast_allreduce::Result<Vec<f32>> {
///         let communicator: AnyCommunicator = Communicator::builder().build(Host::new(), bootstrap)?.into();
///         let mut data = vec![communicator.rank() as f32; 1000];
///         let (address, sum) = (data.as_mut_ptr() as u64, Collective::AllReduce(ReduceOp::Sum));
///         // SAFETY: 1000 elements, which are this rank's alone; on the host the call has ended when it returns.
///         unsafe { communicator.collective(0, sum, [address, address], 1000, DType::F32)? };
///         Ok(data)
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     assert_eq!(rank.join().unwrap()?, vec![1.0; 1000]);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AnyCommunicator(Inner);

#[derive(Debug)]
enum Inner {
    Host(Communicator<Host>),
    #[cfg(feature = "cuda")]
    Cuda(Kept<Communicator<Cuda>>),
}

impl From<Communicator<Host>> for AnyCommunicator {
    fn from(communicator: Communicator<Host>) -> Self {
        Self(Inner::Host(communicator))
    }
}

#[cfg(feature = "cuda")]
impl From<Communicator<Cuda>> for AnyCommunicator {
    fn from(communicator: Communicator<Cuda>) -> Self {
        Self(Inner::Cuda(Kept::new(communicator)))
    }
}

/// Does the same with the communicator of whichever device.
macro_rules! on_any {
    ($any:expr, $communicator:ident => $done:expr) => {
        match &$any.0 {
            Inner::Host($communicator) => $done,
            #[cfg(feature = "cuda")]
            Inner::Cuda($communicator) => $done,
        }
    };
}

impl AnyCommunicator {
    /// What every method begins with that may make the GPU's context current.
    fn callers_context(&self) -> Option<CallersContext> {
        match self.0 {
            Inner::Host(_) => None,
            #[cfg(feature = "cuda")]
            Inner::Cuda(_) => CallersContext::keep(),
        }
    }

    /// This rank, in `0..world_size`.
    pub fn rank(&self) -> usize {
        on_any!(self, communicator => communicator.rank())
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        on_any!(self, communicator => communicator.world_size())
    }

    /// Where its buffers are.
    pub fn device_id(&self) -> DeviceId {
        match &self.0 {
            Inner::Host(_) => DeviceId::Cpu,
            #[cfg(feature = "cuda")]
            Inner::Cuda(communicator) => DeviceId::Cuda(communicator.device().context().ordinal()),
        }
    }

    /// What the ranks' threads are bound to; `None` on a GPU.
    pub fn binding(&self) -> Option<&Binding> {
        match &self.0 {
            Inner::Host(communicator) => Some(communicator.device().binding()),
            #[cfg(feature = "cuda")]
            Inner::Cuda(_) => None,
        }
    }

    /// See [`Communicator::plan_source`].
    pub fn plan_source(&self) -> &Source {
        on_any!(self, communicator => communicator.plan_source())
    }

    /// See [`Communicator::plan`].
    pub fn plan(&self, count: usize, dtype: DType) -> Plan {
        on_any!(self, communicator => communicator.plan(count, dtype))
    }

    /// See [`Communicator::nvls`].
    ///
    /// # Errors
    ///
    /// As [`Communicator::nvls`].
    pub fn nvls(&self) -> Result<()> {
        on_any!(self, communicator => communicator.nvls())
    }

    /// See [`Communicator::counters`].
    pub fn counters(&self) -> Counters {
        let _context = self.callers_context();
        on_any!(self, communicator => communicator.counters())
    }

    /// See [`Communicator::set_timeout`].
    pub fn set_timeout(&self, timeout: impl Into<Option<Duration>>) {
        on_any!(self, communicator => communicator.set_timeout(timeout));
    }

    /// See [`Communicator::behind`].
    pub fn behind(&self) -> Vec<usize> {
        on_any!(self, communicator => communicator.behind())
    }

    /// See [`Communicator::survivors`].
    pub fn survivors(&self) -> Vec<usize> {
        on_any!(self, communicator => communicator.survivors())
    }

    /// Whether this thread is in a call of it.
    #[doc(hidden)]
    pub fn is_entered_here(&self) -> bool {
        on_any!(self, communicator => communicator.is_entered_here())
    }

    /// See [`Communicator::check`].
    ///
    /// # Errors
    ///
    /// As [`Communicator::check`].
    pub fn check(&self) -> Result<()> {
        let _context = self.callers_context();
        on_any!(self, communicator => communicator.check())
    }

    /// See [`Communicator::abort`].
    pub fn abort(&self) {
        let _context = self.callers_context();
        on_any!(self, communicator => communicator.abort());
    }

    /// Returns when every rank has called it. What is on streams is not waited for.
    ///
    /// # Errors
    ///
    /// As `barrier` of the device's communicator.
    pub fn barrier(&self) -> Result<()> {
        let _context = self.callers_context();
        on_any!(self, communicator => communicator.barrier())
    }

    /// See [`Communicator::split`].
    ///
    /// # Errors
    ///
    /// As [`Communicator::split`].
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        let _context = self.callers_context();
        on_any!(self, communicator => communicator.split(color, key).map(|part| part.map(Self::from)))
    }

    /// See [`Communicator::shrink`].
    ///
    /// # Errors
    ///
    /// As [`Communicator::shrink`].
    pub fn shrink(&self, survivors: &[usize]) -> Result<Self> {
        let _context = self.callers_context();
        on_any!(self, communicator => communicator.shrink(survivors).map(Self::from))
    }

    /// Allocates `bytes` zeros on every rank, registered: calls from within pull without a copy. Collective, as
    /// [`Communicator::alloc`].
    ///
    /// # Errors
    ///
    /// As [`Communicator::alloc`].
    pub fn alloc(&self, bytes: usize) -> Result<AnyBuffer> {
        let _context = self.callers_context();
        match &self.0 {
            Inner::Host(communicator) => {
                let buffer = communicator.alloc::<u8>(bytes)?;
                Ok(AnyBuffer::new(buffer.address(), bytes, buffer))
            }
            #[cfg(feature = "cuda")]
            Inner::Cuda(communicator) => {
                let buffer = communicator.alloc::<u8>(bytes)?;
                Ok(AnyBuffer::new(buffer.address(), bytes, Kept::new(buffer)))
            }
        }
    }

    /// Registers `bytes` bytes of a GPU's memory that is there already: calls from within pull without a copy. Collective.
    ///
    /// # Errors
    ///
    /// As `register` of a GPU's communicator; [`Error::Unavailable`] on the host, where peers cannot map such memory.
    ///
    /// # Safety
    ///
    /// As `register_raw` of a GPU's communicator: the bytes are this GPU's, and stay allocated until every rank has dropped its
    /// registration or has an error, and where ranks are processes, until they have met in a [`AnyCommunicator::barrier`] after that.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub unsafe fn register(&self, address: u64, bytes: usize) -> Result<AnyBuffer> {
        let _context = self.callers_context();
        match &self.0 {
            Inner::Host(_) => Err(Error::Unavailable {
                what: "registering memory of the host that is there already".into(),
                reason: "peers cannot map it: allocate it by `alloc`, which registers it".into(),
            }),
            #[cfg(feature = "cuda")]
            Inner::Cuda(communicator) => {
                // SAFETY: the caller's.
                let registered = unsafe { communicator.register_raw(address, bytes) }?;
                Ok(AnyBuffer::new(address, bytes, Kept::new(registered)))
            }
        }
    }
}
