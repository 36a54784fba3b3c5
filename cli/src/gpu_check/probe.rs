//! Launches the kernels of csrc/probes/costs.cu, and reads what they measured.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUfunction};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use fast_allreduce::device::cuda::api;
use fast_allreduce::device::cuda::probes::Probes;

use crate::arguments::GpuCheck;
use crate::failure::{driver, Failure};
use crate::harness::device::cuda::event;

/// Most blocks of a launch.
const MOST_BLOCKS: usize = 1024;
/// Words of the sink, which follows the results.
const SINK: usize = 64;

/// Largest relative change of the clock during a step.
const CLOCK_TOLERANCE: f64 = 0.02;

/// Returns the longest time that kernels may wait on a GPU, at most `limit`. A GPU with a display has a watchdog that
/// ends kernels after some seconds, and then its context is lost.
pub fn wait_limit(gpu: usize, limit: Duration) -> Result<Duration, Failure> {
    const BESIDE_A_WATCHDOG: Duration = Duration::from_secs(1);
    const WATCHDOG: sys::CUdevice_attribute =
        sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT;
    let (mut device, mut has_watchdog) = (0, 0);
    // SAFETY: the driver validates the ordinal and the device, and writes one int each.
    unsafe {
        api::cuInit(0).map_err(driver("cuInit"))?;
        api::cuDeviceGet(&mut device, gpu as i32).map_err(driver("cuDeviceGet"))?;
        api::cuDeviceGetAttribute(&mut has_watchdog, WATCHDOG as u32, device)
            .map_err(driver("cuDeviceGetAttribute"))?;
    }
    Ok(if has_watchdog == 0 { limit } else { limit.min(BESIDE_A_WATCHDOG) })
}

/// Retains the primary context of a GPU.
pub fn context(gpu: usize) -> Result<Arc<CudaContext>, Failure> {
    CudaContext::new(gpu).map_err(driver("cuDevicePrimaryCtxRetain"))
}

pub fn new_stream(context: &Arc<CudaContext>) -> Result<Arc<CudaStream>, Failure> {
    context.new_stream().map_err(driver("cuStreamCreate"))
}

pub fn synchronize(stream: &CudaStream) -> Result<(), Failure> {
    stream.synchronize().map_err(driver("cuStreamSynchronize"))
}

/// The parameters of a kernel.
#[derive(Debug, Clone, Copy, Default)]
pub struct Workload {
    /// Address of memory of the GPU or of pinned memory.
    pub memory: u64,
    /// A parameter of the kernel; its meaning is documented there.
    pub count: u64,
    pub iterations: u32,
}

/// The measurement of a block.
#[derive(Debug, Clone, Copy)]
pub struct Block {
    pub cycles: f64,
    /// By the clock that all blocks share, since the first block began.
    pub start_ns: f64,
    pub end_ns: f64,
}

impl Block {
    /// Returns the nanoseconds that the block took. Unlike its cycles, they do not depend on the clock's frequency.
    pub fn ns(&self) -> f64 {
        self.end_ns - self.start_ns
    }
}

/// A GPU with the module of microbenchmarks.
pub struct ProbeRunner {
    pub context: Arc<CudaContext>,
    pub stream: Arc<CudaStream>,
    probes: Probes,
    results: CudaSlice<u64>,
    pub multiprocessors: u32,
    pub gpu: usize,
    pub small: bool,
}

impl ProbeRunner {
    pub fn new(options: &GpuCheck) -> Result<Self, Failure> {
        Self::on(options.gpu, options.small)
    }

    /// Prepares a GPU of this ordinal.
    pub fn on(gpu: usize, small: bool) -> Result<Self, Failure> {
        let context = context(gpu)?;
        // SAFETY: all work on memory of this context is on one stream, or waited for.
        unsafe { context.disable_event_tracking() };
        let probes = Probes::costs(&context)?;
        let stream = new_stream(&context)?;
        let results = stream.alloc_zeros(3 * MOST_BLOCKS + SINK).map_err(driver("cuMemAlloc"))?;
        let count = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors = context.attribute(count).map_err(driver("cuDeviceGetAttribute"))?;
        let multiprocessors = multiprocessors.clamp(1, MOST_BLOCKS as i32) as u32;
        Ok(Self { context, stream, probes, results, multiprocessors, gpu, small })
    }

    pub fn function(&self, name: &str) -> Result<CUfunction, Failure> {
        Ok(self.probes.function(name)?)
    }

    /// Returns fewer iterations with `--small`, which only tests that the steps work.
    pub fn iterations(&self, iterations: u32) -> u32 {
        if self.small {
            iterations.div_ceil(100)
        } else {
            iterations
        }
    }

    /// Measures the clock of the multiprocessors after they have been busy, since those of an idle GPU are slower:
    /// until several measurements agree. Returns the clock in GHz, and the cycles of one instruction.
    pub fn warm_clock(&self) -> Result<(f64, f64), Failure> {
        const NEAR: f64 = 0.002;
        const AGREEING: u32 = 4;
        const LIMIT: Duration = Duration::from_secs(1);
        let busy = if self.small { Duration::ZERO } else { Duration::from_millis(200) };
        let start = Instant::now();
        let (mut last, mut agreeing) = (self.clock()?, 0);
        while start.elapsed() < LIMIT && (agreeing < AGREEING || start.elapsed() < busy) {
            let now = self.clock()?;
            agreeing = if (now.0 - last.0).abs() <= NEAR * last.0 { agreeing + 1 } else { 0 };
            last = now;
        }
        Ok(last)
    }

    /// Fails if the clock is no longer as it was at the beginning of a step: then times in cycles and in ns do not
    /// belong together. With `small` it is measured for microseconds, and the constants are not valid anyway.
    pub fn check_clock(&self, before: f64) -> Result<(), Failure> {
        if self.small {
            return Ok(());
        }
        let after = median((0..3).map(|_| Ok(self.clock()?.0)).collect::<Result<_, Failure>>()?);
        if (after - before).abs() <= CLOCK_TOLERANCE * before {
            return Ok(());
        }
        Err(Failure::Ranks(format!(
            "the clock of the multiprocessors was {before:.3} GHz at the beginning of the step and is {after:.3} GHz \
             at its end, so its constants are not valid: wait until the GPU is cool and no other program uses it, or \
             fix its clock (nvidia-smi --lock-gpu-clocks), and run the step again"
        )))
    }

    /// Measures the clock of the multiprocessors, in GHz, by a chain of `iterations` x 64 dependent instructions.
    /// Returns the clock and the cycles of one instruction.
    fn clock(&self) -> Result<(f64, f64), Failure> {
        let iterations = self.iterations(20_000);
        let workload = Workload { iterations, count: 1, ..Workload::default() };
        let Block { cycles, start_ns, end_ns } = self.run("cost_arithmetic", (1, 32), workload, false)?[0];
        let (ghz, instruction) = (cycles / (end_ns - start_ns), cycles / f64::from(iterations) / 64.0);
        // No multiprocessor issues dependent instructions in less than a cycle each: then the compiler has moved them
        // out of what is timed.
        match ghz.is_finite() && ghz > 0.0 && instruction >= 1.0 {
            true => Ok((ghz, instruction)),
            false => Err(Failure::Ranks(format!(
                "no clock: {cycles} cycles for {} instructions, from {start_ns} to {end_ns} ns",
                64 * iterations
            ))),
        }
    }

    /// Launches a kernel on a stream. Kernels that spin need `blocks` to be resident: a cooperative launch fails if
    /// they are not.
    pub fn launch_on(
        &self,
        stream: &CudaStream,
        function: CUfunction,
        (blocks, threads): (u32, u32),
        workload: Workload,
        cooperative: bool,
    ) -> Result<(), Failure> {
        self.context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))?;
        let mut results = self.results();
        let mut sink = results + (3 * MOST_BLOCKS * size_of::<u64>()) as u64;
        let Workload { mut memory, mut count, mut iterations } = workload;
        let mut parameters: [*mut c_void; 5] = [
            (&raw mut results).cast(),
            (&raw mut memory).cast(),
            (&raw mut count).cast(),
            (&raw mut iterations).cast(),
            (&raw mut sink).cast(),
        ];
        let (stream, parameters, none) = (stream.cu_stream(), parameters.as_mut_ptr(), std::ptr::null_mut());
        let launch = |blocks, threads| match cooperative {
            // SAFETY: the kernels of the module take these five parameters, which the driver copies. Results and
            // sink live as long as self, which waits for the stream; the memory is the caller's, who knows what the
            // kernel does.
            true => unsafe {
                api::cuLaunchCooperativeKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters)
            },
            // SAFETY: as above.
            false => unsafe {
                api::cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, none)
            },
        };
        launch(blocks, threads).map_err(driver("cuLaunchKernel"))
    }

    /// Runs a kernel to its end, and returns what its blocks measured.
    pub fn run(
        &self,
        name: &str,
        (blocks, threads): (u32, u32),
        workload: Workload,
        cooperative: bool,
    ) -> Result<Vec<Block>, Failure> {
        let blocks = blocks.min(MOST_BLOCKS as u32);
        self.launch_on(&self.stream, self.function(name)?, (blocks, threads), workload, cooperative)?;
        let words = self.words(3 * blocks as usize)?;
        // The clock may count from 1970, and near such numbers values of f64 are 256 ns apart.
        let first = words.chunks_exact(3).map(|block| block[1]).min().unwrap_or(0);
        let block = |words: &[u64]| Block {
            cycles: words[0] as f64,
            start_ns: words[1].saturating_sub(first) as f64,
            end_ns: words[2].saturating_sub(first) as f64,
        };
        Ok(words.chunks_exact(3).map(block).collect())
    }

    /// Waits for the stream, and returns the first words of the results.
    pub fn words(&self, count: usize) -> Result<Vec<u64>, Failure> {
        let mut words = vec![0; count];
        let view = self.results.slice(0..count);
        self.stream.memcpy_dtoh(&view, &mut words).map_err(driver("cuMemcpyDtoHAsync"))?;
        synchronize(&self.stream)?;
        Ok(words)
    }

    /// Returns what the last kernel left in the sink.
    pub fn sink(&self, count: usize) -> Result<Vec<u64>, Failure> {
        Ok(self.words(3 * MOST_BLOCKS + count.min(SINK))?.split_off(3 * MOST_BLOCKS))
    }

    /// Returns the address that kernels write their results to.
    pub fn results(&self) -> u64 {
        self.results.device_ptr(&self.stream).0
    }

    /// Allocates zeroed memory of the GPU.
    pub fn device_memory(&self, bytes: usize) -> Result<(CudaSlice<u8>, u64), Failure> {
        let slice = self.stream.alloc_zeros::<u8>(bytes).map_err(driver("cuMemAlloc"))?;
        synchronize(&self.stream)?;
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
        // SAFETY: callers write at most as many bytes as they allocated.
        unsafe { self.host.cast::<u64>().copy_from_nonoverlapping(words.as_ptr(), words.len()) };
    }

    /// Sets the first word, which kernels may be polling.
    pub fn raise(&self) {
        self.word(0).store(1, Ordering::Release);
    }

    /// Returns whether a kernel has set the third word.
    pub fn is_answered(&self) -> bool {
        self.word(2).load(Ordering::Acquire) != 0
    }

    /// Returns one of the first 32-bit words, which kernels may be accessing.
    fn word(&self, index: usize) -> &AtomicU32 {
        // SAFETY: callers allocate at least 128 bytes, which live as long as self.
        unsafe { AtomicU32::from_ptr(self.host.cast::<u32>().add(index)) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        // SAFETY: allocated by `new`, or null; the caller has waited for the kernels that use it.
        let _ = unsafe { api::cuMemFreeHost(self.host) };
    }
}

/// Returns the median time of `run` in nanoseconds, by events on the stream. The first of the runs is a warm-up.
pub fn median_ns(
    stream: &Arc<CudaStream>,
    runs: usize,
    mut run: impl FnMut() -> Result<(), Failure>,
) -> Result<f64, Failure> {
    let (start, end) = (event(stream)?, event(stream)?);
    let time = |_| {
        start.record(stream).map_err(driver("cuEventRecord"))?;
        run()?;
        end.record(stream).map_err(driver("cuEventRecord"))?;
        Ok(f64::from(start.elapsed_ms(&end).map_err(driver("cuEventElapsedTime"))?) * 1e6)
    };
    let times = (0..=runs).map(time).collect::<Result<Vec<_>, Failure>>()?;
    Ok(median(times[1..].to_vec()))
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Returns a linked ring through `lines` slots that are `stride` bytes apart, in which no step goes to the next slot.
pub fn ring(lines: usize, stride: usize) -> Vec<u64> {
    // Odd, and so coprime with a power of two.
    let step = (lines / 2 + lines / 8) | 1;
    let mut words = vec![0; lines * stride / 8];
    for line in 0..lines {
        words[line * stride / 8] = ((line + step) % lines * stride) as u64;
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_visits_all_slots_before_it_closes() {
        for (lines, stride) in [(32, 128), (2048, 512)] {
            let ring = ring(lines, stride);
            let mut at = 0;
            for step in 1..=lines {
                at = ring[at as usize / 8];
                assert_eq!(at == 0, step == lines);
            }
        }
    }
}
