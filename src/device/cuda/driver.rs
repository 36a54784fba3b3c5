//! The driver's errors as this crate's, and the few calls that cudarc has no safe form of.

use std::ffi::CString;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::{self, CUdevice_attribute, CUpointer_attribute};
use cudarc::driver::{CudaContext, CudaStream};

use super::api::{self, Code};
use crate::error::{Error, Result};
use crate::topology::PciAddress;
use crate::{interruption, thread};

/// For `map_err` on the result of a call of the driver or of cudarc.
pub(crate) fn driver<C: Into<Code>>(call: &'static str) -> impl FnOnce(C) -> Error {
    move |code| {
        let code = code.into();
        Error::Driver { call, code: code.0, message: code.to_string() }
    }
}

/// Whether there is a driver to call. Without one, cudarc panics.
pub(super) fn require() -> Result<()> {
    if api::is_present() {
        return Ok(());
    }
    Err(Error::Unavailable {
        what: "the CUDA device".into(),
        reason: "no CUDA driver (libcuda.so.1) is installed on this machine".into(),
    })
}

/// Makes a context current. Other than cudarc's function of that purpose it leaves the error that cudarc may have recorded, which
/// is none of the caller's.
pub(crate) fn bind(context: &CudaContext) -> Result<()> {
    let mut current = std::ptr::null_mut();
    // SAFETY: writes one handle.
    unsafe { api::cuCtxGetCurrent(&mut current) }.map_err(driver("cuCtxGetCurrent"))?;
    if current != context.cu_ctx() {
        // SAFETY: the context is retained by its CudaContext.
        unsafe { api::cuCtxSetCurrent(context.cu_ctx()) }.map_err(driver("cuCtxSetCurrent"))?;
    }
    Ok(())
}

/// [`bind`] for giving something back: tried twice, as nobody tries again later.
pub(super) fn bind_to_free(context: &CudaContext) -> Result<()> {
    bind(context).or_else(|_| bind(context))
}

/// The number of the current context. No other one has it as long as the program runs, also one with the same handle.
pub(super) fn context_id() -> Result<u64> {
    let mut id = 0;
    // SAFETY: writes one number; null stands for the current context.
    unsafe { api::cuCtxGetId(std::ptr::null_mut(), &mut id) }.map_err(driver("cuCtxGetId"))?;
    Ok(id)
}

/// Waits for the work on a stream, with [`bind`] for its context.
pub(crate) fn synchronize(stream: &CudaStream) -> Result<()> {
    bind(stream.context())?;
    // SAFETY: the stream is live, and its context current.
    unsafe { wait_for(stream.cu_stream()) }
}

/// Waits for the work on a stream. [`Error::Aborted`] where the program ends the wait.
///
/// # Safety
///
/// The stream is live, and of the current context.
pub(crate) unsafe fn wait_for(stream: sys::CUstream) -> Result<()> {
    /// Between two looks. It grows to the longest.
    const SHORTEST: Duration = Duration::from_micros(20);
    const LONGEST: Duration = Duration::from_millis(1);
    let mut turn = SHORTEST;
    // The driver's wait does nothing else.
    while interruption::has_callback() {
        let asked = {
            let _relaxed = Relaxed::enter();
            // SAFETY: the caller's.
            unsafe { api::cuStreamQuery(stream) }
        };
        match asked {
            Err(Code::NOT_READY) if interruption::goes_on() => thread::pause(turn),
            Err(Code::NOT_READY) => return Err(Error::Aborted),
            asked => return asked.map_err(driver("cuStreamQuery")),
        }
        turn = LONGEST.min(2 * turn);
    }
    // SAFETY: the caller's.
    unsafe { api::cuStreamSynchronize(stream) }.map_err(driver("cuStreamSynchronize"))
}

/// What `take` returns, unless cudarc has recorded an error meanwhile, which it does where it has no result to return. One that was
/// recorded before stays.
pub(crate) fn unless_recorded<R>(
    context: &CudaContext,
    call: &'static str,
    take: impl FnOnce() -> R,
) -> Result<R> {
    let before = context.check_err();
    let taken = take();
    let meanwhile = context.check_err();
    context.record_err(before);
    meanwhile.map(|()| taken).map_err(driver(call))
}

/// Until it is dropped this thread may make calls that a capture forbids because they are no part of it: freeing, say, what no
/// capture uses. `None` where the driver did not change the mode.
pub(super) struct Relaxed(u32);

impl Relaxed {
    pub fn enter() -> Option<Self> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32;
        // SAFETY: sets this thread's mode, and writes the one before.
        unsafe { api::cuThreadExchangeStreamCaptureMode(&mut mode) }.ok()?;
        Some(Self(mode))
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: sets this thread's mode back. An error leaves it relaxed, in which more is allowed.
        let _ = unsafe { api::cuThreadExchangeStreamCaptureMode(&mut self.0) };
    }
}

/// Makes an event without a time in the current context.
pub(crate) fn create_event() -> Result<sys::CUevent> {
    let mut event = std::ptr::null_mut();
    let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
    // SAFETY: writes one handle.
    unsafe { api::cuEventCreate(&mut event, flags) }.map_err(driver("cuEventCreate"))?;
    Ok(event)
}

/// An event without a time.
#[derive(Debug)]
pub(crate) struct Event {
    context: Arc<CudaContext>,
    event: sys::CUevent,
}

// SAFETY: a handle of the driver, which may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// The context is current.
    pub fn new(context: &Arc<CudaContext>) -> Result<Self> {
        Ok(Self { context: Arc::clone(context), event: create_event()? })
    }

    /// # Safety
    ///
    /// `stream` is a live stream of the event's context, which is current.
    pub unsafe fn record(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: the event is live; the stream is the caller's.
        unsafe { api::cuEventRecord(self.event, stream) }.map_err(driver("cuEventRecord"))
    }

    /// Makes a stream wait for what the event was last recorded after.
    ///
    /// # Safety
    ///
    /// As [`Event::record`].
    pub unsafe fn hold(&self, stream: sys::CUstream) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT as u32;
        // SAFETY: as above.
        unsafe { api::cuStreamWaitEvent(stream, self.event, flags) }.map_err(driver("cuStreamWaitEvent"))
    }

    /// Success when it has come to pass. The context is current.
    pub fn query(&self) -> Result<(), Code> {
        // SAFETY: the event is live.
        unsafe { api::cuEventQuery(self.event) }
    }

    /// Waits for it. The context is current.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event is live.
        unsafe { api::cuEventSynchronize(self.event) }.map_err(driver("cuEventSynchronize"))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // An error means that the context is gone, and the event with it. A stream that waits for it goes on doing so.
        let _ = bind_to_free(&self.context);
        // SAFETY: made by `new`.
        let _ = unsafe { api::cuEventDestroy_v2(self.event) };
    }
}

/// A device attribute; 0 where the driver does not know it.
pub(super) fn attribute(context: &CudaContext, attribute: CUdevice_attribute) -> i32 {
    attribute_of_number(context, attribute as u32)
}

/// The same of one that the bindings may not have.
pub(super) fn attribute_of_number(context: &CudaContext, attribute: u32) -> i32 {
    let mut value = 0;
    // SAFETY: the driver validates the attribute and the device, and writes one int.
    let known = unsafe { api::cuDeviceGetAttribute(&mut value, attribute, context.cu_device()) };
    known.map_or(0, |()| value)
}

/// The device at a PCI address; `None` if this process does not see it.
pub(super) fn device_at(pci: PciAddress) -> Option<sys::CUdevice> {
    let PciAddress { domain, bus, device, function } = pci;
    let address = CString::new(format!("{domain:04x}:{bus:02x}:{device:02x}.{function}")).ok()?;
    let mut found = 0;
    // SAFETY: the driver reads the string and writes one device.
    unsafe { api::cuDeviceGetByPCIBusId(&mut found, address.as_ptr()) }.ok()?;
    Some(found)
}

/// Whether `device` may access the memory of `peer`.
pub(super) fn can_access_peer(device: sys::CUdevice, peer: sys::CUdevice) -> Result<bool> {
    let mut can = 0;
    // SAFETY: the driver validates the devices and writes one int.
    unsafe { api::cuDeviceCanAccessPeer(&mut can, device, peer) }.map_err(driver("cuDeviceCanAccessPeer"))?;
    Ok(can != 0)
}

/// What the driver says of the way from `device` to `peer`, another one.
pub(super) fn peer_attribute(
    device: sys::CUdevice,
    peer: sys::CUdevice,
    attribute: sys::CUdevice_P2PAttribute,
) -> Result<i32> {
    let mut value = 0;
    // SAFETY: the driver validates the attribute and the devices, and writes one int.
    unsafe { api::cuDeviceGetP2PAttribute(&mut value, attribute, device, peer) }
        .map_err(driver("cuDeviceGetP2PAttribute"))?;
    Ok(value)
}

/// Lets this context reach memory of another one in this process.
pub(super) fn enable_peer_access(own: &CudaContext, peer: &CudaContext) -> Result<()> {
    if own.cu_ctx() == peer.cu_ctx() {
        return Ok(());
    }
    bind(own)?;
    // SAFETY: both contexts are retained by their CudaContext.
    match unsafe { api::cuCtxEnablePeerAccess(peer.cu_ctx(), 0) } {
        Err(Code::PEER_ACCESS_ALREADY_ENABLED) => Ok(()),
        enabled => enabled.map_err(driver("cuCtxEnablePeerAccess")),
    }
}

/// The allocation that an address lies in: its base and size in bytes.
pub(super) fn allocation_of(address: u64) -> Result<(u64, usize)> {
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: the driver looks the address up and writes both results.
    unsafe { api::cuMemGetAddressRange_v2(&mut base, &mut bytes, address) }
        .map_err(driver("cuMemGetAddressRange of a registered buffer"))?;
    Ok((base, bytes))
}

/// What the driver says of the memory at an address; `None` where it knows of none.
///
/// # Safety
///
/// The attribute is a `T`.
unsafe fn pointer_attribute<T: Default>(attribute: CUpointer_attribute, address: u64) -> Result<Option<T>> {
    let mut value = T::default();
    // SAFETY: the driver writes one T, by the caller's word.
    match unsafe { api::cuPointerGetAttribute((&raw mut value).cast(), attribute, address) } {
        Err(Code::INVALID_VALUE) => Ok(None),
        found => found.map(|()| Some(value)).map_err(driver("cuPointerGetAttribute")),
    }
}

/// The ordinal of the device whose memory an address is; `None` if it is not device memory.
pub(super) fn device_of(address: u64) -> Result<Option<usize>> {
    use CUpointer_attribute::{CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE};
    // SAFETY: a CUmemorytype is a u32.
    let kind = unsafe { pointer_attribute::<u32>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) }?;
    if kind != Some(sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32) {
        return Ok(None);
    }
    // SAFETY: an ordinal is an i32.
    let ordinal = unsafe { pointer_attribute::<i32>(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address) }?;
    Ok(ordinal.and_then(|ordinal| usize::try_from(ordinal).ok()))
}

/// Whether `cuIpcGetMemHandle` has a handle for the memory at an address. Allowed while a stream is captured.
pub(super) fn is_exportable(address: u64) -> bool {
    use sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
    let mut capable = 0u32;
    // SAFETY: the driver writes one boolean, of at most 4 bytes.
    let found = unsafe {
        let attribute = CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
        api::cuPointerGetAttribute((&raw mut capable).cast(), attribute, address)
    };
    found.is_ok() && capable & 0xFF != 0
}

/// The driver's number of the allocation that an address lies in, unique in this process; `None` where there is none. Allowed
/// while a stream is captured.
pub(super) fn allocation_number(address: u64) -> Result<Option<u64>> {
    // SAFETY: a number is a u64.
    unsafe { pointer_attribute(CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, address) }
}
