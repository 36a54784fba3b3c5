//! [`AnyCommunicator`]: one type for the communicators of all devices, for bindings, adapters and programs that choose
//! the device at run time.

mod buffer;
mod calls;
mod events;
#[cfg(feature = "cuda")]
mod kept;

use std::time::Duration;

pub use self::buffer::AnyBuffer;
#[cfg(feature = "cuda")]
use self::kept::Kept;
use crate::bootstrap::UniqueId;
use crate::catalogue::{settings::DeviceId, DType};
use crate::communicator::{Communicator, Counters, Inherited, Progress, Suspended};
#[cfg(feature = "cuda")]
use crate::device::cuda::{driver::current::CallersContext, Cuda};
use crate::device::host::Binding;
use crate::device::Host;
use crate::error::{Error, Result};
use crate::liveness::FlightRecord;
use crate::plan::{Plan, PlanSource};

/// Without GPUs there is no context to keep.
#[cfg(not(feature = "cuda"))]
type CallersContext = ();

/// A rank's [`Communicator`] of any device.
///
/// [`Settings::build`](crate::Settings::build) creates one, and [`From`] converts a [`Communicator`]. Addresses and
/// streams are numbers. On a GPU a stream is a `CUstream` of the communicator's context, or the handle of a default
/// stream. On the host it is 0: calls have ended when they return.
///
/// Neither calls nor the drop of the communicator change the caller's current CUDA context.
///
/// ```
#[doc = include_str!("../example_ranks.txt")]
/// # ranks(2, |communicator| {
/// let communicator = AnyCommunicator::from(communicator);
/// let mut data = vec![communicator.rank() as f32; 1000];
/// let (address, sum) = (data.as_mut_ptr() as u64, Collective::AllReduce(ReduceOp::Sum));
/// // SAFETY: only this rank has these 1000 elements. The call has ended when it returns.
/// unsafe { communicator.collective(0, sum, [address, address], 1000, DType::F32)? };
/// assert_eq!(data, [1.0; 1000]);
///
/// communicator.barrier()?;
/// communicator.check()?;
/// println!("rank {} of {}", communicator.rank(), communicator.world_size());
/// println!("on {}, {:?}", communicator.device_id(), communicator.binding());
/// println!("{:?} by {}", communicator.plan(1000, DType::F32), communicator.plan_source());
/// println!("{:?}; behind: {:?}", communicator.counters(), communicator.behind());
///
/// let alone = communicator.split(Some(communicator.rank() as u32), 0)?;
/// assert_eq!(alone.unwrap().world_size(), 1);
/// # Ok(()) });
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

#[cfg(feature = "cuda")]
fn not_on_the_cpu() -> Error {
    Error::Unavailable {
        what: "a communicator of the CPU".into(),
        reason: "this one is on a GPU: use the Rust library's Hierarchical<Cuda, _>".into(),
    }
}

/// Evaluates the same expression with the communicator of any device.
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
    /// Returns a guard that restores the caller's CUDA context, for methods that may make the GPU's context current.
    fn callers_context(&self) -> Option<CallersContext> {
        match self.0 {
            Inner::Host(_) => None,
            #[cfg(feature = "cuda")]
            Inner::Cuda(_) => CallersContext::keep(),
        }
    }

    /// Returns this rank's number, in `0..world_size`.
    pub fn rank(&self) -> usize {
        on_any!(self, communicator => communicator.rank())
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        on_any!(self, communicator => communicator.world_size())
    }

    /// Returns the device that buffers are on.
    pub fn device_id(&self) -> DeviceId {
        match &self.0 {
            Inner::Host(_) => DeviceId::Cpu,
            #[cfg(feature = "cuda")]
            Inner::Cuda(communicator) => DeviceId::Cuda(communicator.device().context().ordinal()),
        }
    }

    /// Returns the communicator, if it is one of the CPU.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] on a GPU.
    pub fn as_host(&self) -> Result<&Communicator<Host>> {
        match &self.0 {
            Inner::Host(communicator) => Ok(communicator),
            #[cfg(feature = "cuda")]
            Inner::Cuda(_) => Err(not_on_the_cpu()),
        }
    }

    /// Converts this into the communicator, if it is one of the CPU.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] on a GPU; the communicator is dropped then.
    pub fn into_host(self) -> Result<Communicator<Host>> {
        match self.0 {
            Inner::Host(communicator) => Ok(communicator),
            #[cfg(feature = "cuda")]
            Inner::Cuda(_) => Err(not_on_the_cpu()),
        }
    }

    /// Returns the cores that the rank's threads are bound to; `None` on a GPU.
    pub fn binding(&self) -> Option<&Binding> {
        match &self.0 {
            Inner::Host(communicator) => Some(communicator.device().binding()),
            #[cfg(feature = "cuda")]
            Inner::Cuda(_) => None,
        }
    }

    /// Returns where the plans come from: see [`Communicator::plan_source`].
    pub fn plan_source(&self) -> &PlanSource {
        on_any!(self, communicator => communicator.plan_source())
    }

    /// Returns the plan of an allreduce: see [`Communicator::plan`].
    pub fn plan(&self, count: usize, dtype: DType) -> Plan {
        on_any!(self, communicator => communicator.plan(count, dtype))
    }

    /// Returns `Ok` if in-switch reductions (NVLS) are used: see [`Communicator::nvls`].
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] or [`Error::Driver`] with the reason why not.
    pub fn nvls(&self) -> Result<()> {
        on_any!(self, communicator => communicator.nvls())
    }

    /// Returns counts of what this rank has done so far: see [`Communicator::counters`].
    pub fn counters(&self) -> Counters {
        let _context = self.callers_context();
        on_any!(self, communicator => communicator.counters())
    }

    /// Returns the latest calls of all ranks: see [`Communicator::flight_record`].
    pub fn flight_record(&self) -> FlightRecord {
        let _context = self.callers_context();
        on_any!(self, communicator => communicator.flight_record())
    }

    /// Returns this rank's metrics: see [`Communicator::metrics`].
    pub fn metrics(&self) -> String {
        let _context = self.callers_context();
        on_any!(self, communicator => communicator.metrics())
    }

    /// Writes this rank's metrics to a file: see [`Communicator::write_metrics`].
    ///
    /// # Errors
    ///
    /// [`Error::System`], if the file cannot be written.
    pub fn write_metrics(&self, path: impl AsRef<std::path::Path>) -> Result<()> {
        let _context = self.callers_context();
        on_any!(self, communicator => communicator.write_metrics(path))
    }

    /// Sets the limit on waits of later calls: see [`Communicator::set_timeout`].
    pub fn set_timeout(&self, timeout: impl Into<Option<Duration>>) {
        on_any!(self, communicator => communicator.set_timeout(timeout));
    }

    /// Returns the ranks that have begun fewer calls than this one: see [`Communicator::behind`].
    pub fn behind(&self) -> Vec<usize> {
        on_any!(self, communicator => communicator.behind())
    }

    /// Returns the surviving ranks, in ascending order: see [`Communicator::survivors`].
    pub fn survivors(&self) -> Vec<usize> {
        on_any!(self, communicator => communicator.survivors())
    }

    /// Returns whether this thread is inside a call of this communicator.
    #[doc(hidden)]
    pub fn is_in_call(&self) -> bool {
        on_any!(self, communicator => communicator.is_in_call())
    }

    /// Returns `Ok` if nothing has failed so far: see [`Communicator::check`].
    ///
    /// # Errors
    ///
    /// The error that poisoned the communicator, or the first that a kernel of this rank has recorded;
    /// [`Error::Forked`].
    pub fn check(&self) -> Result<()> {
        let _context = self.callers_context();
        on_any!(self, communicator => communicator.check())
    }

    /// Ends a call that waits in another thread, and poisons the communicator: see [`Communicator::abort`].
    pub fn abort(&self) {
        let _context = self.callers_context();
        on_any!(self, communicator => communicator.abort());
    }

    /// Waits until every rank has called it. It does not wait for work on streams.
    ///
    /// # Errors
    ///
    /// On the host [errors of every call](Communicator#errors-of-every-call); on a GPU [errors of every
    /// step](Communicator#errors-of-every-step).
    pub fn barrier(&self) -> Result<()> {
        let _context = self.callers_context();
        on_any!(self, communicator => communicator.barrier())
    }

    /// Makes a communicator of the ranks that give the same `color`. Collective: see [`Communicator::split`].
    ///
    /// # Errors
    ///
    /// [Errors of every step](Communicator#errors-of-every-step), and the errors of
    /// [`Builder::build`](crate::Builder::build).
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        let _context = self.callers_context();
        on_any!(self, communicator => communicator.split(color, key).map(|part| part.map(Self::from)))
    }

    /// Makes a communicator of `survivors`. Collective among them: see [`Communicator::shrink`].
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`], if the list is not in ascending order, has a rank out of range or lacks this rank;
    /// [`Error::PeerLost`], if a rank of the list has gone; [`Error::Timeout`], which names the survivors that did not
    /// come or gave another list; and the errors of [`Builder::build`](crate::Builder::build).
    pub fn shrink(&self, survivors: &[usize]) -> Result<Self> {
        let _context = self.callers_context();
        on_any!(self, communicator => communicator.shrink(survivors).map(Self::from))
    }

    /// Makes a larger communicator, with new processes: see [`Communicator::grow`].
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::grow`].
    pub fn grow(&self, world_size: usize, timeout: Duration) -> Result<Self> {
        let _context = self.callers_context();
        on_any!(self, communicator => communicator.grow(world_size, timeout).map(Self::from))
    }

    /// Leaves the world and gives back its shared memory: see [`Communicator::suspend`].
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::suspend`].
    pub fn suspend(&self) -> Result<Suspended> {
        on_any!(self, communicator => communicator.suspend())
    }

    /// Returns whether the communicator is suspended.
    pub fn is_suspended(&self) -> bool {
        on_any!(self, communicator => communicator.is_suspended())
    }

    /// Returns into the world: see [`Communicator::resume`].
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::resume`].
    pub fn resume(&self, timeout: Duration) -> Result<Progress> {
        on_any!(self, communicator => communicator.resume(timeout))
    }

    /// Returns the id by which new processes join or take the places of ranks: see [`Communicator::join_id`].
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::join_id`].
    pub fn join_id(&self) -> Result<UniqueId> {
        on_any!(self, communicator => communicator.join_id())
    }

    /// Replaces the ranks that have gone by new processes: see [`Communicator::join`].
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::join`].
    pub fn join(&self, survivors: &[usize], timeout: Duration) -> Result<Progress> {
        on_any!(self, communicator => communicator.join(survivors, timeout))
    }

    /// Returns how far the ranks had come when this communicator was formed: see [`Communicator::progress`].
    pub fn progress(&self) -> Progress {
        on_any!(self, communicator => communicator.progress())
    }

    /// Returns the memory that this rank has found in its place and not taken yet: see [`Communicator::inherited`].
    pub fn inherited(&self) -> Vec<Inherited> {
        on_any!(self, communicator => communicator.inherited())
    }

    /// Takes the registered buffer of that number: see [`Communicator::inherit_buffer`].
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`], if there is no such buffer.
    pub fn inherit(&self, number: u64) -> Result<AnyBuffer> {
        let facts = self.inherited().into_iter().find(|one| one.number == number);
        let bytes = facts.map_or(0, |facts| facts.bytes);
        match &self.0 {
            Inner::Host(communicator) => {
                let buffer = communicator.inherit_buffer::<u8>(number)?;
                Ok(AnyBuffer::new(buffer.address(), bytes, buffer))
            }
            #[cfg(feature = "cuda")]
            Inner::Cuda(communicator) => {
                let buffer = communicator.inherit_buffer::<u8>(number)?;
                Ok(AnyBuffer::new(buffer.address(), bytes, Kept::new(buffer)))
            }
        }
    }

    /// Allocates `bytes` bytes of registered memory on every rank, filled with zeros. Collective.
    ///
    /// Peers read inputs in this memory where they are, without a copy.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// let communicator = AnyCommunicator::from(communicator);
    /// let buffer = communicator.alloc(4 << 10)?;
    /// assert_eq!(buffer.bytes(), 4096);
    /// let (sum, address) = (Collective::AllReduce(ReduceOp::Sum), buffer.address());
    /// // SAFETY: the buffer has 1024 elements, and only this thread uses it.
    /// unsafe { communicator.collective(0, sum, [address; 2], 1024, DType::F32)? };
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Allocation`]; [`Error::Disagreement`], if ranks asked for another length; [`Error::Unavailable`], if
    /// too many buffers are registered; [errors of every step](Communicator#errors-of-every-step).
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

    /// Registers `bytes` bytes of existing GPU memory. Collective.
    ///
    /// Peers read inputs in this memory where they are, without a copy.
    ///
    /// ```no_run
    /// # use fast_allreduce::*;
    /// # unsafe fn example(communicator: &AnyCommunicator, address: u64) -> Result<()> {
    /// let registered = communicator.register(address, 1 << 20)?;
    /// // Calls with inputs in this memory pull without a copy.
    /// drop(registered);
    /// communicator.barrier()?; // Now it may be freed.
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] on the host, where peers cannot map existing memory, and for memory that cannot be
    /// exported, as that of stream-ordered pools; [`Error::InvalidPointer`] for memory of another device (on GPUs, the
    /// other ranks get [`Error::PeerFailed`] in these cases); [errors of every
    /// step](Communicator#errors-of-every-step).
    ///
    /// # Safety
    ///
    /// The bytes are memory of this GPU. They stay allocated until every rank has dropped its registration or got an
    /// error, and where ranks are processes, until all ranks have met in an [`AnyCommunicator::barrier`] after that.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub unsafe fn register(&self, address: u64, bytes: usize) -> Result<AnyBuffer> {
        let _context = self.callers_context();
        match &self.0 {
            Inner::Host(_) => Err(Error::Unavailable {
                what: "registering existing memory of the host".into(),
                reason: "peers cannot map it: allocate it by `alloc`, which registers it".into(),
            }),
            #[cfg(feature = "cuda")]
            Inner::Cuda(communicator) => {
                // SAFETY: the caller's obligation.
                let registered = unsafe { communicator.register_raw(address, bytes) }?;
                Ok(AnyBuffer::new(address, bytes, Kept::new(registered)))
            }
        }
    }
}
