//! Launches the kernels of csrc/probes/costs.cu, and reads what they have measured.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use fast_allreduce::device::cuda::api;
use fast_allreduce::device::cuda::probes::Probes;

use crate::arguments::GpuCheck;
use crate::failure::{driver, Failure};

/// Most blocks of a launch.
const MOST_BLOCKS: usize = 1024;
/// Words behind the results.
const SINK: usize = 64;

/// What a kernel works on.
#[derive(Debug, Clone, Copy, Default)]
pub struct Work {
    /// Address of memory on the GPU or of pinned memory.
    pub memory: u64,
    /// What it is, the kernel says.
    pub count: u64,
    pub turns: u32,
}

/// What a block has measured.
#[derive(Debug, Clone, Copy)]
pub struct Block {
    pub cycles: f64,
    /// By the clock that all blocks share.
    pub start_ns: f64,
    pub end_ns: f64,
}

/// A GPU with the module of microbenchmarks.
pub struct Bench {
    pub context: Arc<CudaContext>,
    pub stream: Arc<CudaStream>,
    probes: Probes,
    results: CudaSlice<u64>,
    pub multiprocessors: u32,
    pub small: bool,
}

impl Bench {
    pub fn new(options: &GpuCheck) -> Result<Self, Failure> {
        let context = CudaContext::new(options.gpu).map_err(driver("cuDevicePrimaryCtxRetain"))?;
        // SAFETY: all work on memory of this context is on one stream, or waited for.
        unsafe { context.disable_event_tracking() };
        let probes = Probes::costs(&context)?;
        let stream = context.new_stream().map_err(driver("cuStreamCreate"))?;
        let results = stream.alloc_zeros(3 * MOST_BLOCKS + SINK).map_err(driver("cuMemAlloc"))?;
        let count = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors = context.attribute(count).map_err(driver("cuDeviceGetAttribute"))?;
        let multiprocessors = multiprocessors.clamp(1, MOST_BLOCKS as i32) as u32;
        Ok(Self { context, stream, probes, results, multiprocessors, small: options.small })
    }

    /// A kernel of the module.
    pub fn function(&self, name: &str) -> Result<CUfunction, Failure> {
        Ok(self.probes.function(name)?)
    }

    /// Fewer turns where only the steps themselves are tried.
    pub fn turns(&self, turns: u32) -> u32 {
        if self.small {
            turns.div_ceil(100)
        } else {
            turns
        }
    }

    /// Puts a kernel on a stream. Kernels that spin need `blocks` to be resident: a cooperative launch says so if they are not.
    pub fn launch_on(
        &self,
        stream: &CudaStream,
        function: CUfunction,
        (blocks, threads): (u32, u32),
        work: Work,
        cooperative: bool,
    ) -> Result<(), Failure> {
        self.context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))?;
        let mut results = self.results.device_ptr(&self.stream).0;
        let mut sink = results + (3 * MOST_BLOCKS * size_of::<u64>()) as u64;
        let Work { mut memory, mut count, mut turns } = work;
        let mut parameters: [*mut c_void; 5] = [
            (&raw mut results).cast(),
            (&raw mut memory).cast(),
            (&raw mut count).cast(),
            (&raw mut turns).cast(),
            (&raw mut sink).cast(),
        ];
        let (stream, parameters, none) = (stream.cu_stream(), parameters.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: the kernels of the module take these five, which the driver copies. Results and sink live as long as self, which
        // waits for the stream; the memory is the caller's, who knows what the kernel does with it.
        unsafe {
            match cooperative {
                true => api::cuLaunchCooperativeKernel(
                    function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters,
                ),
                false => {
                    api::cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, none)
                }
            }
        }
        .map_err(driver("cuLaunchKernel"))
    }

    /// Runs a kernel to its end: what its blocks have measured.
    pub fn run(
        &self,
        name: &str,
        (blocks, threads): (u32, u32),
        work: Work,
        cooperative: bool,
    ) -> Result<Vec<Block>, Failure> {
        let blocks = blocks.min(MOST_BLOCKS as u32);
        self.launch_on(&self.stream, self.function(name)?, (blocks, threads), work, cooperative)?;
        let words = self.words(3 * blocks as usize)?;
        let block = |words: &[u64]| Block {
            cycles: words[0] as f64,
            start_ns: words[1] as f64,
            end_ns: words[2] as f64,
        };
        Ok(words.chunks_exact(3).map(block).collect())
    }

    /// The first words of the results, when all on the stream has ended.
    pub fn words(&self, count: usize) -> Result<Vec<u64>, Failure> {
        let mut words = vec![0; count];
        let view = self.results.slice(0..count);
        self.stream.memcpy_dtoh(&view, &mut words).map_err(driver("cuMemcpyDtoHAsync"))?;
        self.stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
        Ok(words)
    }

    /// What the last kernel left in the sink.
    pub fn sink(&self, count: usize) -> Result<Vec<u64>, Failure> {
        Ok(self.words(3 * MOST_BLOCKS + count.min(SINK))?.split_off(3 * MOST_BLOCKS))
    }

    /// The address that kernels write their results to.
    pub fn results(&self) -> u64 {
        self.results.device_ptr(&self.stream).0
    }

    /// Zeroed memory of the GPU.
    pub fn device_memory(&self, bytes: usize) -> Result<(CudaSlice<u8>, u64), Failure> {
        let slice = self.stream.alloc_zeros::<u8>(bytes).map_err(driver("cuMemAlloc"))?;
        self.stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
        let address = slice.device_ptr(&self.stream).0;
        Ok((slice, address))
    }
}

/// Pinned host memory, zeroed.
pub struct Pinned {
    context: Arc<CudaContext>,
    host: *mut c_void,
    pub address: u64,
}

impl Pinned {
    pub fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, Failure> {
        context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))?;
        let mut pinned = Self { context: Arc::clone(context), host: std::ptr::null_mut(), address: 0 };
        // SAFETY: a context is current; the driver writes two addresses of memory of that size.
        unsafe {
            api::cuMemHostAlloc(&mut pinned.host, bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP)
                .map_err(driver("cuMemHostAlloc"))?;
            pinned.host.cast::<u8>().write_bytes(0, bytes);
            api::cuMemHostGetDevicePointer_v2(&mut pinned.address, pinned.host, 0)
                .map_err(driver("cuMemHostGetDevicePointer"))?;
        }
        Ok(pinned)
    }

    /// Writes while no kernel uses the memory.
    pub fn write(&mut self, words: &[u64]) {
        // SAFETY: callers write at most what they have asked for.
        unsafe { self.host.cast::<u64>().copy_from_nonoverlapping(words.as_ptr(), words.len()) };
    }

    /// Sets the first word, which kernels may be looking at.
    pub fn raise(&self) {
        use std::sync::atomic::{AtomicU32, Ordering};
        // SAFETY: the memory has at least a word, and lives as long as self.
        unsafe { AtomicU32::from_ptr(self.host.cast()) }.store(1, Ordering::Release);
    }

    /// Takes that back.
    pub fn lower(&mut self) {
        self.write(&[0]);
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        // SAFETY: allocated by `new`, if at all; whoever launched kernels on it has waited for them.
        let _ = unsafe { api::cuMemFreeHost(self.host) };
    }
}

/// What lies in the middle.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
