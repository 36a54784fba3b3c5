//! The interface of devices for measurements: memory, calls, and their times. One file for each device.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod host;

use fast_allreduce::plan::Machine;
use fast_allreduce::{Communicator, DType, Device, Host};

use super::norm::Float;
use super::row::DeviceFacts;
use super::work::Work;
use crate::arguments::DeviceName;
use crate::failure::Failure;

/// Returns the facts of this machine that its tuning file contains.
pub fn machine(device: DeviceName) -> Result<Machine, Failure> {
    check(device)?;
    match device {
        DeviceName::Host => Ok(Machine::host()),
        #[cfg(feature = "cuda")]
        DeviceName::Cuda => {
            use fast_allreduce::Device as _;
            Ok(fast_allreduce::Cuda::open(0)?.machine()?)
        }
        #[cfg(not(feature = "cuda"))]
        DeviceName::Cuda => Err(crate::failure::without_cuda()),
    }
}

/// Refuses a device that this build or this machine lacks.
pub fn check(name: DeviceName) -> Result<(), Failure> {
    match name {
        DeviceName::Host => Ok(()),
        #[cfg(feature = "cuda")]
        DeviceName::Cuda => cuda::require(),
        #[cfg(not(feature = "cuda"))]
        DeviceName::Cuda => Err(crate::failure::without_cuda()),
    }
}

/// The buffers of a fused call. The weights are a row; the others are as long as the message.
pub struct RowBuffers<M> {
    pub input: M,
    /// The sum over ranks of an unfused sequence.
    pub sum: M,
    pub residual: M,
    pub output: M,
    pub weight: M,
}

/// A call to time.
pub type Call<'a> = &'a mut dyn FnMut() -> Result<(), Failure>;

/// A rank's communicator, with its memory and its clock.
pub trait MeasuredRank: Sized {
    /// The device of the ranks' memory.
    type Device: Device;

    /// A buffer, as bytes that are aligned for any element type.
    type Memory;

    /// Returns the communicator that is measured; on several nodes that of this node.
    fn communicator(&self) -> &Communicator<Self::Device>;

    /// Returns the number of nodes on which the ranks are.
    fn nodes(&self) -> usize {
        1
    }

    /// Returns the communicator if memory is the host's.
    fn on_host(&self) -> Option<&Communicator<Host>>;

    /// Returns facts of the device that the numbers depend on.
    fn facts(&self) -> DeviceFacts;

    /// Allocates private memory, or `registered` memory, which peers read directly. Registering is collective.
    fn allocate(&self, dtype: DType, count: usize, registered: bool) -> Result<Self::Memory, Failure>;

    /// Writes the memory by `fill`.
    fn write(&self, memory: &mut Self::Memory, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), Failure>;

    /// Waits for the calls so far, and passes the memory to `look`.
    fn read(&self, memory: &Self::Memory, look: &mut dyn FnMut(&[u8])) -> Result<(), Failure>;

    /// Starts a call out of place, with the data at the start of `input` and `output`.
    fn start(&self, work: &Work, input: &Self::Memory, output: &mut Self::Memory) -> Result<(), Failure>;

    /// Starts a call in place, at the positions of [`Work::in_place`].
    fn start_in_place(&self, work: &Work, data: &mut Self::Memory) -> Result<(), Failure>;

    /// Waits for the calls so far.
    fn finish(&self) -> Result<(), Failure>;

    /// Starts a copy of the whole memory.
    fn copy(&self, from: &Self::Memory, to: &mut Self::Memory) -> Result<(), Failure>;

    /// Prepares the unfused norm, and returns its description. Called before [`MeasuredRank::start_norm`].
    fn ready_norm(&self) -> Result<String, Failure>;

    /// Starts an `all_reduce_fused` of the input.
    fn start_fused<T: Float>(&self, buffers: &mut RowBuffers<Self::Memory>) -> Result<(), Failure>;

    /// Starts the unfused norm on this rank alone: adds the sum to the residual and normalises its rows.
    fn start_norm<T: Float>(&self, buffers: &mut RowBuffers<Self::Memory>) -> Result<(), Failure>;

    /// Prepares calls to be timed.
    fn batch<'a>(&'a self, call: Call<'a>) -> Result<Batch<'a>, Failure>;
}

/// Calls that are timed together.
pub struct Batch<'a> {
    /// Number of calls.
    pub calls: u64,
    run: Box<dyn FnMut(u64) -> Result<f64, Failure> + 'a>,
}

impl<'a> Batch<'a> {
    /// `run` runs a number of batches back to back, and returns the seconds from the start of the first call to the end
    /// of the last.
    pub fn new(calls: u64, run: impl FnMut(u64) -> Result<f64, Failure> + 'a) -> Self {
        Self { calls, run: Box::new(run) }
    }

    pub fn seconds(&mut self, batches: u64) -> Result<f64, Failure> {
        (self.run)(batches)
    }
}
