//! Turns cudarc's slices into addresses. All typed calls do so.

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};

use crate::communicator::Communicator;
use crate::device::cuda::driver::capture::is_captured;
use crate::device::cuda::driver::unless_recorded;
use crate::device::cuda::Cuda;
use crate::element::Element;
use crate::error::{Error, Result};

/// Addresses of a call's slices; 0 for a slice that it does not have. Valid until the work on the call's stream is
/// done.
pub(super) struct Addresses {
    pub input: CUdeviceptr,
    pub output: CUdeviceptr,
    /// Whether the call's stream is being captured.
    pub captured: bool,
}

impl Communicator<Cuda> {
    /// Passes the slices' addresses to `start`, which launches on `stream` with the device's context current. With
    /// event tracking the launch comes after the slices' last uses, and before what cudarc orders after this use.
    /// Without slices nothing is checked.
    pub(super) fn with_slices<T: Element, I: DevicePtr<T> + ?Sized, O: DevicePtrMut<T> + ?Sized>(
        &self,
        stream: &Arc<CudaStream>,
        input: Option<&I>,
        mut output: Option<&mut O>,
        start: impl FnOnce(Addresses) -> Result<()>,
    ) -> Result<()> {
        if input.is_none() && output.is_none() {
            return start(Addresses { input: 0, output: 0, captured: false });
        }
        self.healthy()?;
        self.check_stream(stream)?;
        if let Some(input) = input {
            self.check_device::<T>("input", input.stream(), |stream| input.device_ptr(stream).0)?;
        }
        if let Some(output) = &mut output {
            let elsewhere = Arc::clone(output.stream());
            self.check_device::<T>("output", &elsewhere, |stream| output.device_ptr_mut(stream).0)?;
        }
        if self.is_captured(stream)? {
            let captured = stream.cu_stream();
            let mut addresses = Addresses { input: 0, output: 0, captured: true };
            // SAFETY: the stream is of this context, kept alive, and captured. The program that launches the graph
            // keeps its memory valid.
            unsafe {
                if let Some(input) = input {
                    let take = |helper: &CudaStream| untracked(input.device_ptr(helper));
                    addresses.input =
                        self.or_poison(self.device().helper_streams.address_in_capture(captured, take))?;
                }
                if let Some(output) = output {
                    let take = |helper: &CudaStream| untracked(output.device_ptr_mut(helper));
                    addresses.output =
                        self.or_poison(self.device().helper_streams.address_in_capture(captured, take))?;
                }
            }
            return start(addresses);
        }
        let (input, output) = self.recorded(|| {
            let input = input.map(|input| input.device_ptr(stream));
            (input, output.map(|output| output.device_ptr_mut(stream)))
        })?;
        let address =
            |slice: &Option<(CUdeviceptr, SyncOnDrop<'_>)>| slice.as_ref().map_or(0, |slice| slice.0);
        let started = start(Addresses { input: address(&input), output: address(&output), captured: false });
        // Dropping the guards records the use for cudarc: it must come after the launch.
        let used = self.recorded(|| drop((input, output)));
        started.and(used)
    }

    /// Refuses a stream of another context.
    pub(super) fn check_stream(&self, stream: &CudaStream) -> Result<()> {
        if **stream.context() == **self.device().context() {
            return Ok(());
        }
        let (stream, device) = (stream.context().ordinal(), self.device().context().ordinal());
        Err(Error::InvalidStream { stream, device })
    }

    /// Refuses a slice of another device, according to the slice's own stream. cudarc guarantees that a slice is on the
    /// device of its stream.
    pub(super) fn check_device<T: Element>(
        &self,
        which: &'static str,
        own: &CudaStream,
        address: impl FnOnce(&CudaStream) -> CUdeviceptr,
    ) -> Result<()> {
        if own.context().ordinal() == self.device().context().ordinal() {
            return Ok(());
        }
        // On the slice's own stream: the communicator's would wait for an event of the other device.
        let address = address(own) as usize;
        Err(Error::InvalidPointer {
            which,
            address,
            problem: "memory of another device",
            element_size: size_of::<T>(),
        })
    }

    /// Returns whether a stream of this context is being captured. It makes the context current.
    pub(crate) fn is_captured(&self, stream: &CudaStream) -> Result<bool> {
        self.or_poison(self.device().bind())?;
        // SAFETY: the stream is live, and `check_stream` has found it to be of this context.
        self.or_poison(unsafe { is_captured(stream.cu_stream()) })
    }

    /// Returns what `take` gets from slices. cudarc records failures of event tracking in the context, rather than
    /// return them; here they become errors.
    pub(crate) fn recorded<R>(&self, take: impl FnOnce() -> R) -> Result<R> {
        let context = self.device().context();
        // Without tracking there are no events, and the check is measurable in small calls.
        if !context.is_managing_stream_synchronization() {
            return Ok(take());
        }
        self.or_poison(unless_recorded(context, "an event of a slice's use", take))
    }

    /// Refuses an address that is not memory of this device.
    pub(crate) fn check_address(
        &self,
        which: &'static str,
        address: CUdeviceptr,
        element_size: usize,
    ) -> Result<()> {
        match self.device().check_address(which, address, element_size) {
            Err(error @ Error::Driver { .. }) => Err(self.poison(error)),
            checked => checked,
        }
    }
}

/// Returns the address alone. The event of its use is not recorded: one recorded within a capture is useless
/// afterwards.
fn untracked((address, used): (CUdeviceptr, SyncOnDrop<'_>)) -> CUdeviceptr {
    std::mem::forget(used);
    address
}
