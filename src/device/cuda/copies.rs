//! Streams of this crate's own, and copies on them.

use std::sync::Arc;

use cudarc::driver::{sys, CudaContext, CudaStream};

use super::api::{self, Code};
use super::driver::{bind, bind_to_free, driver, Relaxed};
use crate::error::Result;

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
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle.
        unsafe { api::cuStreamCreate(&mut stream, flags) }.map_err(driver("cuStreamCreate"))?;
        Ok(Self { context: Arc::clone(context), stream })
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
        let _ = unsafe { api::cuStreamDestroy_v2(self.stream) };
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

    /// Whether the context has an error that it does not survive, so that nothing runs there any more. Asked twice, as what
    /// depends on it is not undone.
    pub fn is_broken(&self) -> bool {
        let is_broken = || {
            let Ok(_relaxed) = self.begin() else { return true };
            // SAFETY: the stream is ours, and live. Its own work has been waited for.
            !matches!(unsafe { api::cuStreamQuery(self.0.stream) }, Ok(()) | Err(Code::NOT_READY))
        };
        is_broken() && is_broken()
    }

    /// Waits for what is on the stream.
    fn finish(&self) -> Result<()> {
        // SAFETY: the stream is ours, and live.
        let wait = || unsafe { api::cuStreamSynchronize(self.0.stream) };
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
        unsafe { api::cuMemsetD8Async(address, 0, bytes, self.0.stream) }
            .map_err(driver("cuMemsetD8Async"))?;
        self.finish()
    }

    /// # Safety
    ///
    /// `values` fit at `address`, which is device memory that no kernel uses now.
    pub unsafe fn write<T: Copy>(&self, address: u64, values: &[T]) -> Result<()> {
        let _relaxed = self.begin()?;
        let bytes = size_of_val(values);
        // SAFETY: the caller's; `values` is borrowed until the copy is done.
        unsafe { api::cuMemcpyHtoDAsync_v2(address, values.as_ptr().cast(), bytes, self.0.stream) }
            .map_err(driver("cuMemcpyHtoDAsync"))?;
        self.finish()
    }

    /// # Safety
    ///
    /// As many bytes at `address` are device memory that no kernel writes now, and any bits are a value of T.
    pub unsafe fn read<T: Copy>(&self, address: u64, values: &mut [T]) -> Result<()> {
        let _relaxed = self.begin()?;
        let bytes = size_of_val(values);
        // SAFETY: the caller's; `values` is borrowed until the copy is done.
        unsafe { api::cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), address, bytes, self.0.stream) }
            .map_err(driver("cuMemcpyDtoHAsync"))?;
        self.finish()
    }
}
