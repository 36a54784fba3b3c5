//! What measuring needs of a device: memory, calls, and the time that calls take. One file for each device.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod host;

use fast_allreduce::plan::Machine;
use fast_allreduce::{Communicator, DType, Device};

use super::norm::Float;
use super::row::DeviceFacts;
use super::work::Work;
use crate::arguments::DeviceName;
use crate::failure::Failure;

/// This machine, as its tuning file describes it.
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

/// Refuses a device that this build or this machine does not have.
pub fn check(name: DeviceName) -> Result<(), Failure> {
    match name {
        DeviceName::Host => Ok(()),
        #[cfg(feature = "cuda")]
        DeviceName::Cuda => cuda::require(),
        #[cfg(not(feature = "cuda"))]
        DeviceName::Cuda => Err(crate::failure::without_cuda()),
    }
}

/// What rows with a residual and a norm are in. The weights are a row, the others as many rows as the message has.
pub struct RowBuffers<M> {
    pub input: M,
    /// Over all ranks, where it is not added at once.
    pub sum: M,
    pub residual: M,
    pub output: M,
    pub weight: M,
}

/// Something to time.
pub type Call<'a> = &'a mut dyn FnMut() -> Result<(), Failure>;

/// A rank's communicator, with its memory and its clock.
pub trait MeasuredRank: Sized {
    /// Where the ranks' memory lives.
    type Device: Device;

    /// Elements that a call reads or writes, as bytes that are aligned for any of them.
    type Memory;

    /// The communicator that is measured.
    fn communicator(&self) -> &Communicator<Self::Device>;

    /// What the numbers depend on besides the options that all devices share.
    fn facts(&self) -> DeviceFacts;

    /// Memory of this rank alone; or `registered`: that the peers read where it is. Registering is collective.
    fn allocate(&self, dtype: DType, count: usize, registered: bool) -> Result<Self::Memory, Failure>;

    /// Lets `fill` write all of it.
    fn write(&self, memory: &mut Self::Memory, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), Failure>;

    /// Lets `look` read all of it, after the calls made so far.
    fn read(&self, memory: &Self::Memory, look: &mut dyn FnMut(&[u8])) -> Result<(), Failure>;

    /// Starts a call from the beginning of `input` to that of `output`.
    fn start(&self, work: &Work, input: &Self::Memory, output: &mut Self::Memory) -> Result<(), Failure>;

    /// Starts a call in place, as [`Work::in_place`] has it.
    fn start_in_place(&self, work: &Work, data: &mut Self::Memory) -> Result<(), Failure>;

    /// Starts a copy of all elements, as far as the device has one that is not an allreduce.
    fn copy(&self, from: &Self::Memory, to: &mut Self::Memory) -> Result<(), Failure>;

    /// Readies what an unfused norm needs, and says what does it. It is called before [`MeasuredRank::start_norm`].
    fn ready_norm(&self) -> Result<String, Failure>;

    /// Starts an `all_reduce_fused` of the input.
    fn start_fused<T: Float>(&self, buffers: &mut RowBuffers<Self::Memory>) -> Result<(), Failure>;

    /// Adds the sum to the residual and normalises its rows, on this rank alone.
    fn start_norm<T: Float>(&self, buffers: &mut RowBuffers<Self::Memory>) -> Result<(), Failure>;

    /// Makes calls ready to be timed.
    fn batch<'a>(&'a self, call: Call<'a>) -> Result<Box<dyn Batch + 'a>, Failure>;
}

/// Calls that are timed together.
pub trait Batch {
    /// How many.
    fn calls(&self) -> u64;

    /// Seconds from the start of the first to the end of the last call of so many batches one after the other.
    fn seconds(&mut self, batches: u64) -> Result<f64, Failure>;
}
