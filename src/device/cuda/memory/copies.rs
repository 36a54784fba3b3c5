//! This crate's own streams, and copies on them.

use std::sync::Arc;

use cudarc::driver::{sys, CudaContext, CudaStream};

use crate::device::cuda::driver::{
    api::{self, Code},
    bind, bind_to_free, driver, Relaxed,
};
use crate::error::Result;

/// Non-blocking stream: it does not synchronise with the legacy default stream.
#[derive(Debug)]
pub(crate) struct RawStream {
    context: Arc<CudaContext>,
    stream: sys::CUstream,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for RawStream {}
// SAFETY: as for Send.
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

    /// Returns the stream as cudarc's type. It is not counted among cudarc's streams, since those turn its event
    /// tracking on. The caller drops the result before self.
    pub fn borrowed(&self) -> Arc<CudaStream> {
        // SAFETY: the stream belongs to that context; the caller drops the result before self.
        unsafe { self.context.wrap_borrowed_stream(self.stream) }
    }
}

impl Drop for RawStream {
    fn drop(&mut self) {
        let _relaxed = Relaxed::enter();
        // An error means that the context has been destroyed, and the stream with it.
        let _ = bind_to_free(&self.context);
        // SAFETY: created by `new`; the driver destroys it after its work has ended.
        let _ = unsafe { api::cuStreamDestroy_v2(self.stream) };
    }
}

/// Synchronous copies between host and device memory, on a separate stream. The legacy default stream would wait for
/// kernels of other ranks in this context, which may wait for this rank.
#[derive(Debug)]
pub(crate) struct Copies(RawStream);

impl Copies {
    pub fn new(context: &Arc<CudaContext>) -> Result<Self> {
        RawStream::new(context).map(Self)
    }

    /// Makes the context current and sets relaxed capture mode until the guard is dropped. Copies are no part of a
    /// capture, but capture modes may forbid even to wait for them.
    fn begin(&self) -> Result<Option<Relaxed>> {
        bind(&self.0.context)?;
        Ok(Relaxed::enter())
    }

    /// Returns whether the context is lost: it has a sticky error, and no work runs on it any more. Queried twice,
    /// because what callers do about it cannot be undone.
    pub fn is_broken(&self) -> bool {
        let is_broken = || {
            let Ok(_relaxed) = self.begin() else { return true };
            // SAFETY: the stream is live, as self owns it. Its own work has been waited for.
            !matches!(unsafe { api::cuStreamQuery(self.0.stream) }, Ok(()) | Err(Code::NOT_READY))
        };
        is_broken() && is_broken()
    }

    /// Waits for the work on the stream.
    fn finish(&self) -> Result<()> {
        // SAFETY: the stream is live, as self owns it.
        let wait = || unsafe { api::cuStreamSynchronize(self.0.stream) };
        wait().map_err(|error| {
            // After an error the caller may free memory that the copy still uses, so wait again.
            let _ = wait();
            driver("cuStreamSynchronize")(error)
        })
    }

    /// Runs a kernel that takes four words, with one block, for each set of words; then waits.
    ///
    /// # Safety
    ///
    /// `function` is such a kernel, and the addresses in `words` are valid for its accesses.
    pub unsafe fn run(
        &self,
        function: sys::CUfunction,
        words: impl IntoIterator<Item = [u64; 4]>,
    ) -> Result<()> {
        const WARP: u32 = 32;
        let _relaxed = self.begin()?;
        let launch = |mut words: [u64; 4]| {
            let mut parameters = words.each_mut().map(|word| std::ptr::from_mut(word).cast());
            let (parameters, none) = (parameters.as_mut_ptr(), std::ptr::null_mut());
            // SAFETY: the driver copies the four parameters; their addresses are valid by the caller's contract.
            unsafe { api::cuLaunchKernel(function, 1, 1, 1, WARP, 1, 1, 0, self.0.stream, parameters, none) }
                .map_err(driver("cuLaunchKernel"))
        };
        let launched = words.into_iter().try_for_each(launch);
        // In any case: the caller may free memory that the launches before a failed one use.
        self.finish().and(launched)
    }

    /// Zeroes device memory.
    ///
    /// # Safety
    ///
    /// `bytes` bytes at `address` are device memory that no kernel uses now.
    pub unsafe fn zero(&self, address: u64, bytes: usize) -> Result<()> {
        let _relaxed = self.begin()?;
        // SAFETY: by the caller's contract, the range is valid and unused.
        unsafe { api::cuMemsetD8Async(address, 0, bytes, self.0.stream) }
            .map_err(driver("cuMemsetD8Async"))?;
        self.finish()
    }

    /// Copies `values` to device memory.
    ///
    /// # Safety
    ///
    /// `values` fit at `address`, which is device memory that no kernel uses now.
    pub unsafe fn write<T: Copy>(&self, address: u64, values: &[T]) -> Result<()> {
        let _relaxed = self.begin()?;
        let bytes = size_of_val(values);
        // SAFETY: by the caller's contract, `values` fit; they are borrowed until the copy has ended.
        unsafe { api::cuMemcpyHtoDAsync_v2(address, values.as_ptr().cast(), bytes, self.0.stream) }
            .map_err(driver("cuMemcpyHtoDAsync"))?;
        self.finish()
    }

    /// Copies device memory to `values`.
    ///
    /// # Safety
    ///
    /// `size_of_val(values)` bytes at `address` are device memory that no kernel writes now, and every bit pattern is
    /// a valid T.
    pub unsafe fn read<T: Copy>(&self, address: u64, values: &mut [T]) -> Result<()> {
        let _relaxed = self.begin()?;
        let bytes = size_of_val(values);
        // SAFETY: by the caller's contract, the range is valid; `values` is borrowed until the copy has ended.
        unsafe { api::cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), address, bytes, self.0.stream) }
            .map_err(driver("cuMemcpyDtoHAsync"))?;
        self.finish()
    }
}
