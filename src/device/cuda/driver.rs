//! The driver's errors as this crate's, and the few calls that cudarc has no safe form of.

use std::ffi::{c_void, CString};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute, CUpointer_attribute};
use cudarc::driver::{result, CudaContext, CudaStream, DriverError};

use crate::error::{Error, Result};
use crate::topology::PciAddress;

/// For `map_err` on a driver call's result.
pub(crate) fn driver(call: &'static str) -> impl FnOnce(DriverError) -> Error {
    move |error| {
        let name = error.error_name().map_or("an unknown error".into(), |name| name.to_string_lossy());
        let text = error.error_string().map_or("".into(), |text| text.to_string_lossy());
        Error::Driver { call, code: error.0 as u32, message: format!("{name}: {text}") }
    }
}

/// Whether there is a driver to call. Without one, cudarc panics.
pub(super) fn require() -> Result<()> {
    // SAFETY: tries to load the driver's library, whose initialisers are the driver's own.
    if unsafe { sys::is_culib_present() } {
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
    let current = result::ctx::get_current().map_err(driver("cuCtxGetCurrent"))?;
    if current != Some(context.cu_ctx()) {
        // SAFETY: the context is retained by its CudaContext.
        unsafe { result::ctx::set_current(context.cu_ctx()) }.map_err(driver("cuCtxSetCurrent"))?;
    }
    Ok(())
}

/// [`bind`] for giving something back: tried twice, as nobody tries again later.
pub(super) fn bind_to_free(context: &CudaContext) -> Result<()> {
    bind(context).or_else(|_| bind(context))
}

/// Waits for the work on a stream, with [`bind`] for its context.
pub(crate) fn synchronize(stream: &CudaStream) -> Result<()> {
    bind(stream.context())?;
    // SAFETY: the stream is live, and its context current.
    unsafe { result::stream::synchronize(stream.cu_stream()) }.map_err(driver("cuStreamSynchronize"))
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
pub(super) struct Relaxed(sys::CUstreamCaptureMode);

impl Relaxed {
    pub fn enter() -> Option<Self> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: sets this thread's mode, and writes the one before.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) }.result().ok()?;
        Some(Self(mode))
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: sets this thread's mode back. An error leaves it relaxed, in which more is allowed.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.0) };
    }
}

/// An event without a time.
#[derive(Debug)]
pub(super) struct Event {
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
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        Ok(Self { context: Arc::clone(context), event: event.map_err(driver("cuEventCreate"))? })
    }

    /// # Safety
    ///
    /// `stream` is a live stream of the event's context, which is current.
    pub unsafe fn record(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: the event is live; the stream is the caller's.
        unsafe { result::event::record(self.event, stream) }.map_err(driver("cuEventRecord"))
    }

    /// Makes a stream wait for what the event was last recorded after.
    ///
    /// # Safety
    ///
    /// As [`Event::record`].
    pub unsafe fn hold(&self, stream: sys::CUstream) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: as above.
        unsafe { result::stream::wait_event(stream, self.event, flags) }.map_err(driver("cuStreamWaitEvent"))
    }

    /// Success when it has come to pass. The context is current.
    pub fn query(&self) -> sys::CUresult {
        // SAFETY: the event is live.
        unsafe { sys::cuEventQuery(self.event) }
    }

    /// Waits for it. The context is current.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event is live.
        unsafe { sys::cuEventSynchronize(self.event) }.result().map_err(driver("cuEventSynchronize"))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // An error means that the context is gone, and the event with it. A stream that waits for it goes on doing so.
        let _ = bind_to_free(&self.context);
        // SAFETY: made by `new`.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}

/// A device attribute; 0 where the driver does not know it.
pub(super) fn attribute(context: &CudaContext, attribute: CUdevice_attribute) -> i32 {
    // SAFETY: the driver validates both.
    unsafe { result::device::get_attribute(context.cu_device(), attribute) }.unwrap_or(0)
}

/// The device at a PCI address; `None` if this process does not see it.
pub(super) fn device_at(pci: PciAddress) -> Option<sys::CUdevice> {
    let PciAddress { domain, bus, device, function } = pci;
    let address = CString::new(format!("{domain:04x}:{bus:02x}:{device:02x}.{function}")).ok()?;
    let mut found = 0;
    // SAFETY: the driver reads the string and writes one device.
    unsafe { sys::cuDeviceGetByPCIBusId(&mut found, address.as_ptr()) }.result().ok()?;
    Some(found)
}

/// Whether `device` may access the memory of `peer`.
pub(super) fn can_access_peer(device: sys::CUdevice, peer: sys::CUdevice) -> Result<bool> {
    let mut can = 0;
    // SAFETY: the driver validates the devices and writes one int.
    unsafe { sys::cuDeviceCanAccessPeer(&mut can, device, peer) }
        .result()
        .map_err(driver("cuDeviceCanAccessPeer"))?;
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
    unsafe { sys::cuDeviceGetP2PAttribute(&mut value, attribute, device, peer) }
        .result()
        .map_err(driver("cuDeviceGetP2PAttribute"))?;
    Ok(value)
}

/// Lets this context reach memory of another one in this process.
pub(super) fn enable_peer_access(own: &CudaContext, peer: &CudaContext) -> Result<()> {
    const CALL: &str = "cuCtxEnablePeerAccess";
    if own.cu_ctx() == peer.cu_ctx() {
        return Ok(());
    }
    bind(own)?;
    // SAFETY: both contexts are retained by their CudaContext.
    match unsafe { sys::cuCtxEnablePeerAccess(peer.cu_ctx(), 0) } {
        sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
        code => code.result().map_err(driver(CALL)),
    }
}

/// The allocation that an address lies in: its base and size in bytes.
pub(super) fn allocation_of(address: u64) -> Result<(u64, usize)> {
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: the driver looks the address up and writes both results.
    unsafe { sys::cuMemGetAddressRange_v2(&mut base, &mut bytes, address) }
        .result()
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
    let found = unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, address) };
    match found {
        sys::CUresult::CUDA_ERROR_INVALID_VALUE => Ok(None),
        code => code.result().map(|()| Some(value)).map_err(driver("cuPointerGetAttribute")),
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
        sys::cuPointerGetAttribute((&raw mut capable).cast(), attribute, address)
    };
    found.result().is_ok() && capable & 0xFF != 0
}

/// The driver's number of the allocation that an address lies in, unique in this process; `None` where there is none. Allowed
/// while a stream is captured.
pub(super) fn allocation_number(address: u64) -> Result<Option<u64>> {
    // SAFETY: a number is a u64.
    unsafe { pointer_attribute(CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, address) }
}

/// A stream of our own, which no legacy default stream waits for, nor it for one.
#[derive(Debug)]
pub(super) struct RawStream {
    context: Arc<CudaContext>,
    stream: sys::CUstream,
}

// SAFETY: a handle of the driver, which may be used from any thread.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

impl RawStream {
    pub fn new(context: &Arc<CudaContext>) -> Result<Self> {
        bind(context)?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
        Ok(Self { context: Arc::clone(context), stream: stream.map_err(driver("cuStreamCreate"))? })
    }

    pub fn cu_stream(&self) -> sys::CUstream {
        self.stream
    }

    /// As cudarc's, without being counted among its streams: they would turn its event tracking on. Dropped before self.
    pub fn borrowed(&self) -> Arc<CudaStream> {
        // SAFETY: the stream is of that context; whoever asks drops what is returned first.
        unsafe { self.context.wrap_borrowed_stream(self.stream) }
    }
}

impl Drop for RawStream {
    fn drop(&mut self) {
        let _relaxed = Relaxed::enter();
        // An error means that the context is gone, and the stream with it.
        let _ = bind_to_free(&self.context);
        // SAFETY: made by `new`; the driver ends what is on it first.
        let _ = unsafe { result::stream::destroy(self.stream) };
    }
}

/// Copies between host and device memory that are done when they return, on a stream of their own: the legacy default stream
/// would wait for kernels of other ranks in this context, which may wait for this rank.
#[derive(Debug)]
pub(super) struct Copies(RawStream);

impl Copies {
    pub fn new(context: &Arc<CudaContext>) -> Result<Self> {
        RawStream::new(context).map(Self)
    }

    /// What is copied is no part of a capture, whose mode may forbid even waiting for it. Until the guard is dropped.
    fn begin(&self) -> Result<Option<Relaxed>> {
        bind(&self.0.context)?;
        Ok(Relaxed::enter())
    }

    /// Waits for what is on the stream.
    fn finish(&self) -> Result<()> {
        // SAFETY: the stream is ours, and live.
        let wait = || unsafe { result::stream::synchronize(self.0.stream) };
        wait().map_err(|error| {
            // Whoever hears of the error may free what the copy is still at.
            let _ = wait();
            driver("cuStreamSynchronize")(error)
        })
    }

    /// # Safety
    ///
    /// `bytes` bytes at `address` are device memory that no kernel uses now.
    pub unsafe fn zero(&self, address: u64, bytes: usize) -> Result<()> {
        let _relaxed = self.begin()?;
        // SAFETY: the caller's.
        unsafe { result::memset_d8_async(address, 0, bytes, self.0.stream) }
            .map_err(driver("cuMemsetD8Async"))?;
        self.finish()
    }

    /// # Safety
    ///
    /// `values` fit at `address`, which is device memory that no kernel uses now.
    pub unsafe fn write<T: Copy>(&self, address: u64, values: &[T]) -> Result<()> {
        let _relaxed = self.begin()?;
        // SAFETY: the caller's; `values` is borrowed until the copy is done.
        unsafe { result::memcpy_htod_async(address, values, self.0.stream) }
            .map_err(driver("cuMemcpyHtoDAsync"))?;
        self.finish()
    }

    /// # Safety
    ///
    /// As many bytes at `address` are device memory that no kernel writes now, and any bits are a value of T.
    pub unsafe fn read<T: Copy>(&self, address: u64, values: &mut [T]) -> Result<()> {
        let _relaxed = self.begin()?;
        // SAFETY: the caller's; `values` is borrowed until the copy is done.
        unsafe { result::memcpy_dtoh_async(values, address, self.0.stream) }
            .map_err(driver("cuMemcpyDtoHAsync"))?;
        self.finish()
    }
}

/// Pinned host memory that kernels reach too.
#[derive(Debug)]
pub(crate) struct Pinned {
    context: Arc<CudaContext>,
    host: *mut c_void,
    device: u64,
}

// SAFETY: plain memory of this process, valid from any thread until drop; its users access it atomically.
unsafe impl Send for Pinned {}
// SAFETY: as above; a shared Pinned only gives out its addresses.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Zeroed.
    pub fn allocate(context: &Arc<CudaContext>, bytes: usize) -> Result<Self> {
        bind(context)?;
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: a context is current.
        let host = unsafe { result::malloc_host(bytes, flags) }.map_err(driver("cuMemHostAlloc"))?;
        let mut pinned = Self { context: Arc::clone(context), host, device: 0 };
        // SAFETY: `bytes` bytes were allocated at `host`, and the driver writes the address of the same memory.
        unsafe {
            host.cast::<u8>().write_bytes(0, bytes);
            sys::cuMemHostGetDevicePointer_v2(&mut pinned.device, host, 0)
        }
        .result()
        .map_err(driver("cuMemHostGetDevicePointer"))?;
        Ok(pinned)
    }

    pub fn host_pointer(&self) -> *mut c_void {
        self.host
    }

    pub fn device_address(&self) -> u64 {
        self.device
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _relaxed = Relaxed::enter();
        // An error here means that the context is gone, and its memory with it.
        let _ = bind_to_free(&self.context);
        // SAFETY: allocated by `allocate`; the region's owner has waited for the kernels that use it.
        let _ = unsafe { result::free_host(self.host) };
    }
}
