//! Calls of the CUDA driver with this crate's errors: contexts, waits, captures, events, and queries of devices and
//! memory.

pub mod api;
pub(crate) mod capture;
pub(crate) mod current;
mod event;
mod queries;

use std::time::Duration;

use cudarc::driver::{sys, CudaContext, CudaStream};

use self::api::Code;
pub(crate) use self::event::{create_event, Event};
pub(super) use self::queries::{
    allocation_number, allocation_of, attribute, attribute_of_number, can_access_peer, check_context,
    device_at, device_of, is_exportable, is_stream_ordered, peer_attribute,
};
use crate::error::{Error, Result};
use crate::{interruption, thread};

/// Returns a closure for `map_err` that turns an error of the driver or of cudarc into [`Error::Driver`].
pub(crate) fn driver<C: Into<Code>>(call: &'static str) -> impl FnOnce(C) -> Error {
    move |code| {
        let code = code.into();
        Error::Driver { call, code: code.0, message: code.to_string() }
    }
}

/// [`driver`] for a call of multicast memory, which needs the service that configures the NVSwitches: the message says
/// what to do if that is the cause.
pub(super) fn refused_by_fabric(call: &'static str) -> impl FnOnce(Code) -> Error {
    move |code| {
        let mut error = driver(call)(code);
        if let (Error::Driver { message, .. }, Code::ILLEGAL_STATE | Code::SYSTEM_NOT_READY) =
            (&mut error, code)
        {
            message.push_str(
                "; the NVSwitches or NVIDIA Fabric Manager are not in order: `systemctl status nvidia-fabricmanager` \
                 must say that it runs, in the driver's version, and `nvidia-smi -q` must show the fabric's state as \
                 Completed and its status as Success for each GPU; restart the service or the machine, or do without \
                 in-switch reduction",
            );
        }
        error
    }
}

/// Checks that the driver library is installed. Without it, cudarc panics.
pub(super) fn require() -> Result<()> {
    if api::is_present() {
        return Ok(());
    }
    Err(Error::Unavailable {
        what: "the CUDA device".into(),
        reason: "no CUDA driver (libcuda.so.1) is installed on this machine".into(),
    })
}

/// Makes a context current. Unlike cudarc's `bind_to_thread`, it does not return and clear an error that cudarc
/// recorded earlier, which this caller has nothing to do with.
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

/// [`bind`] before memory or a handle is released. It is tried twice, because a release is never retried.
pub(super) fn bind_to_free(context: &CudaContext) -> Result<()> {
    bind(context).or_else(|_| bind(context))
}

/// Returns the ID of the current context. It is unique for the life of the program, unlike the handle, which can be
/// reused.
pub(super) fn context_id() -> Result<u64> {
    let mut id = 0;
    // SAFETY: writes one number; null stands for the current context.
    unsafe { api::cuCtxGetId(std::ptr::null_mut(), &mut id) }.map_err(driver("cuCtxGetId"))?;
    Ok(id)
}

/// Makes a stream's context current and waits for the work on the stream.
pub(crate) fn synchronize(stream: &CudaStream) -> Result<()> {
    bind(stream.context())?;
    // SAFETY: the stream is live, and its context current.
    unsafe { wait_for(stream.cu_stream()) }
}

/// Waits for the work on a stream. Returns [`Error::Aborted`] if the program interrupts the wait.
///
/// # Safety
///
/// The stream is live and belongs to the current context.
pub(crate) unsafe fn wait_for(stream: sys::CUstream) -> Result<()> {
    /// Interval between two queries: it doubles up to the longest.
    const SHORTEST: Duration = Duration::from_micros(20);
    const LONGEST: Duration = Duration::from_millis(1);
    let mut interval = SHORTEST;
    // The driver's own wait cannot be interrupted, so poll instead.
    while interruption::has_callback() {
        let status = {
            let _relaxed = Relaxed::enter();
            // SAFETY: by the caller's contract, the stream is live.
            unsafe { api::cuStreamQuery(stream) }
        };
        match status {
            Err(Code::NOT_READY) if interruption::goes_on() => thread::pause(interval),
            Err(Code::NOT_READY) => return Err(Error::Aborted),
            status => return status.map_err(driver("cuStreamQuery")),
        }
        interval = LONGEST.min(2 * interval);
    }
    // SAFETY: by the caller's contract, the stream is live.
    unsafe { api::cuStreamSynchronize(stream) }.map_err(driver("cuStreamSynchronize"))
}

/// Returns the result of `take`, or the error that cudarc recorded during it: cudarc records errors where its
/// functions cannot return them. An error recorded earlier stays recorded.
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

/// Guard that sets this thread's capture mode to relaxed. Until it is dropped, the thread may make calls that
/// captures forbid by default although they are no part of the capture, such as freeing memory that no capture uses.
pub(super) struct Relaxed(u32);

impl Relaxed {
    /// Returns `None` if the driver did not change the mode.
    pub fn enter() -> Option<Self> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32;
        // SAFETY: sets this thread's mode and writes the previous one.
        unsafe { api::cuThreadExchangeStreamCaptureMode(&mut mode) }.ok()?;
        Some(Self(mode))
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: restores this thread's mode. On an error it stays relaxed, which only allows more.
        let _ = unsafe { api::cuThreadExchangeStreamCaptureMode(&mut self.0) };
    }
}

/// Enables access from one context to the memory of another one in this process.
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
