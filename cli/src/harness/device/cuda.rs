//! A GPU: calls are timed by events around replays of a graph of calls, or around plain calls.

use std::cell::OnceCell;
use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaGraph, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice,
    SyncOnDrop,
};
use fast_allreduce::bootstrap::Threads;
use fast_allreduce::device::cuda::Sharing;
use fast_allreduce::plan::Table;
use fast_allreduce::{
    Algorithm, Buffer, Builder, Communicator, Cuda, DType, Error, Host, RawFused, Settings,
};

use fast_allreduce_oracle::number::Number;

use super::{Batch, Call, MeasuredRank, RowBuffers};
use crate::failure::{driver, Failure};
use crate::harness::memory::Lines;
use crate::harness::norm::{Float, NORM};
use crate::harness::row::{DeviceFacts, EAGER};
use crate::harness::session::Session;
use crate::harness::work::Work;

/// Calls in a graph: enough to make the launch a small part of the replay.
pub const GRAPH_CALLS: u64 = 20;
pub const MEGABYTE: usize = 1 << 20;
/// Calls between two marks of a [`Clock`].
const CALLS_AHEAD: u64 = 200;

/// Creates an event that records the time.
pub fn event(stream: &CudaStream) -> Result<CudaEvent, Failure> {
    stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(driver("cuEventCreate"))
}

/// Captures what `run` puts on the stream as a graph.
pub fn capture(
    stream: &Arc<CudaStream>,
    run: impl FnOnce() -> Result<(), Failure>,
) -> Result<CudaGraph, Failure> {
    // The mode is the thread's: other ranks may be threads of this process.
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream.begin_capture(mode).map_err(driver("cuStreamBeginCapture"))?;
    let captured = run();
    let graph = stream.end_capture(CUgraphInstantiate_flags(0));
    captured?;
    let graph = graph.map_err(driver("cuStreamEndCapture"))?;
    graph.ok_or_else(|| Failure::Driver("cuStreamEndCapture", "it made no graph".into()))
}

/// Refuses a machine without a CUDA driver.
pub fn require() -> Result<(), Failure> {
    // SAFETY: loads the driver's library, whose initialisers are the driver's own.
    if unsafe { cudarc::driver::sys::is_culib_present() } {
        return Ok(());
    }
    Err(Failure::Library(Error::Unavailable {
        what: "the CUDA device".into(),
        reason: "no CUDA driver (libcuda.so.1) is installed on this machine".into(),
    }))
}

/// Returns the number of GPUs that this process sees; at least one.
pub fn gpus() -> Result<usize, Failure> {
    require()?;
    let count = CudaContext::device_count().map_err(driver("cuDeviceGetCount"))?;
    match usize::try_from(count) {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(Failure::Library(Error::Unavailable {
            what: "the CUDA device".into(),
            reason: "the driver shows no GPU to this process".into(),
        })),
    }
}

/// Returns the UUID of the GPU that a rank uses.
#[cfg(feature = "mpi")]
pub fn gpu_of(rank: usize) -> Result<[u8; 16], Failure> {
    use cudarc::driver::sys::CUuuid;
    use fast_allreduce::device::cuda::api;
    let ordinal = rank % gpus()?;
    let (mut gpu, mut uuid) = (0, CUuuid { bytes: [0; 16] });
    // SAFETY: the driver writes one device, and the 16 bytes of its UUID.
    unsafe {
        api::cuDeviceGet(&mut gpu, ordinal as i32).map_err(driver("cuDeviceGet"))?;
        api::cuDeviceGetUuid_v2(&mut uuid, gpu).map_err(driver("cuDeviceGetUuid"))?;
    }
    Ok(uuid.bytes.map(|byte| byte as u8))
}

/// How a rank uses its GPU.
#[derive(Debug, Clone)]
pub struct GpuOptions {
    /// The first rank's GPU; the other ranks have the following ones, modulo `gpus`.
    pub first_gpu: usize,
    /// Number of GPUs to use.
    pub gpus: usize,
    /// Time plain calls instead of graphs.
    pub eager: bool,
    /// The settings of its communicators.
    pub settings: Settings,
}

/// A rank on a GPU.
pub struct Gpu {
    communicator: Communicator<Cuda>,
    /// A communicator of this rank alone, for the norm after an allreduce.
    alone: OnceCell<Communicator<Cuda>>,
    stream: Arc<CudaStream>,
    options: GpuOptions,
}

impl Gpu {
    /// Makes the communicator. Collective.
    pub fn new(
        session: &Session,
        options: &GpuOptions,
        algorithm: Option<Algorithm>,
    ) -> Result<Self, Failure> {
        Self::with(session, options, options.settings.builder()?.algorithm(algorithm))
    }

    /// Makes a communicator with a plan to measure. Collective.
    pub fn planned(session: &Session, options: &GpuOptions, plan: Table) -> Result<Self, Failure> {
        Self::with(session, options, options.settings.builder()?.table(plan))
    }

    fn with(session: &Session, options: &GpuOptions, builder: Builder) -> Result<Self, Failure> {
        // Contenders are called in turns.
        let ordinal = options.first_gpu + session.rank() % options.gpus;
        let device = options.settings.cuda(ordinal)?.one_at_a_time();
        // SAFETY: all work on memory of this context is on the one stream below, in whose order it is also freed.
        unsafe { device.context().disable_event_tracking() };
        let stream = device.context().new_stream().map_err(driver("cuStreamCreate"))?;
        let (communicator, alone) = (session.build(device, builder)?, OnceCell::new());
        Ok(Self { communicator, alone, stream, options: options.clone() })
    }

    /// Returns the stream of all work on this rank's memory.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Returns the largest number of ranks that share a GPU.
    pub fn ranks_per_gpu(&self) -> usize {
        let world_size = self.communicator.world_size();
        world_size.div_ceil(self.options.gpus.min(world_size))
    }

    /// # Safety
    ///
    /// As for [`Communicator::collective_raw`], with this rank's lengths, on this rank's stream.
    unsafe fn start_raw(&self, work: &Work, input: CUdeviceptr, output: CUdeviceptr) -> Result<(), Failure> {
        let stream = self.stream.cu_stream();
        // SAFETY: guaranteed by the caller.
        unsafe {
            match work.collective() {
                Some(collective) => {
                    let count = work.shares[0];
                    self.communicator.collective_raw(stream, collective, input, output, count, work.dtype)?;
                }
                None => self.communicator.transfer_raw(stream, &work.transfers(input, output))?,
            }
        }
        Ok(())
    }

    fn fused<T: Float>(
        &self,
        communicator: &Communicator<Cuda>,
        [input, weight]: [&Memory; 2],
        [residual, output]: [&mut Memory; 2],
    ) -> Result<(), Failure> {
        let (count, hidden) = (input.len() / size_of::<T>(), weight.len() / size_of::<T>());
        assert!(residual.len() == input.len() && output.len() == input.len());
        let stream = &self.stream;
        let ((input, _input_guard), (weight, _weight_guard)) =
            (input.device_ptr(stream), weight.device_ptr(stream));
        let ((residual, _residual_guard), (rows, _output_guard)) =
            (residual.device_ptr_mut(stream), output.device_ptr_mut(stream));
        let fused = RawFused {
            residual,
            residual_out: residual,
            norm: NORM,
            hidden,
            weight,
            rows,
            ..RawFused::default()
        };
        let dtype = <T as Number>::DTYPE;
        // SAFETY: a residual and rows as long as the input, and weights as long as a row, all freed in the order of the
        // stream.
        Ok(unsafe { communicator.all_reduce_fused_raw(stream.cu_stream(), input, count, dtype, &fused) }?)
    }
}

impl MeasuredRank for Gpu {
    type Device = Cuda;
    type Memory = Memory;

    fn communicator(&self) -> &Communicator<Cuda> {
        &self.communicator
    }

    fn on_host(&self) -> Option<&Communicator<Host>> {
        None
    }

    fn finish(&self) -> Result<(), Failure> {
        Ok(self.communicator.synchronize(&self.stream)?)
    }

    fn facts(&self) -> DeviceFacts {
        let device = self.communicator.device();
        let gpus = self.options.gpus.min(self.communicator.world_size());
        DeviceFacts::Cuda {
            gpu: device.context().name().unwrap_or_else(|_| "unknown".into()),
            gpus,
            ranks_per_gpu: self.ranks_per_gpu(),
            sharing: device.chosen_sharing().map_or("none", Sharing::name),
            timed: if self.options.eager { EAGER } else { "replays of a graph of 20 calls" },
        }
    }

    fn allocate(&self, dtype: DType, count: usize, registered: bool) -> Result<Memory, Failure> {
        let bytes = count * dtype.size();
        if registered {
            return Ok(Memory::Registered(self.communicator.alloc(bytes)?));
        }
        // SAFETY: the memory may hold any bytes.
        let slice = unsafe { self.stream.alloc(bytes.max(1)) }.map_err(driver("cuMemAlloc"))?;
        // No rank allocates while another's kernel waits.
        self.stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
        Ok(Memory::Private { slice, bytes })
    }

    fn write(&self, memory: &mut Memory, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), Failure> {
        let mut bytes = Lines::new(memory.len())?;
        fill(&mut bytes);
        if !bytes.is_empty() {
            self.stream.memcpy_htod(&bytes[..], memory).map_err(driver("cuMemcpyHtoDAsync"))?;
        }
        self.finish()
    }

    fn read(&self, memory: &Memory, look: &mut dyn FnMut(&[u8])) -> Result<(), Failure> {
        // First, to report a failed kernel.
        self.finish()?;
        let mut bytes = Lines::new(memory.len())?;
        if !bytes.is_empty() {
            self.stream.memcpy_dtoh(memory, &mut bytes[..]).map_err(driver("cuMemcpyDtoHAsync"))?;
        }
        self.finish()?;
        look(&bytes);
        Ok(())
    }

    fn start(&self, work: &Work, input: &Memory, output: &mut Memory) -> Result<(), Failure> {
        assert!(work.bytes(work.input_len()) <= input.len() && work.bytes(work.output_len()) <= output.len());
        let (input, _input_guard) = input.device_ptr(&self.stream);
        let (output, _output_guard) = output.device_ptr_mut(&self.stream);
        // SAFETY: two buffers, as long as the collective reads and writes, which are freed in the order of the stream.
        unsafe { self.start_raw(work, input, output) }
    }

    fn start_in_place(&self, work: &Work, data: &mut Memory) -> Result<(), Failure> {
        let Some((from, to)) = work.in_place() else {
            return Ok(());
        };
        assert!(work.bytes(from + work.input_len()) <= data.len());
        assert!(work.bytes(to + work.output_len()) <= data.len());
        let (data, _guard) = data.device_ptr_mut(&self.stream);
        let address = |elements: usize| data + work.bytes(elements) as CUdeviceptr;
        // SAFETY: input and output are within the elements of a buffer that is freed in the order of the stream,
        // and where they overlap they do so as this collective permits.
        unsafe { self.start_raw(work, address(from), address(to)) }
    }

    fn copy(&self, from: &Memory, to: &mut Memory) -> Result<(), Failure> {
        if from.is_empty() {
            return Ok(());
        }
        self.stream.memcpy_dtod(from, to).map_err(driver("cuMemcpyDtoDAsync"))
    }

    fn ready_norm(&self) -> Result<String, Failure> {
        if self.alone.get().is_none() {
            let device = Cuda::new(Arc::clone(self.communicator.device().context()))?.one_at_a_time();
            let [bootstrap] = <[Threads; 1]>::try_from(Threads::world(1)?).expect("a world of one");
            let alone = self.options.settings.builder()?.build(device, bootstrap)?;
            let _ = self.alone.set(alone);
        }
        Ok("in one kernel, that of a world of one rank".into())
    }

    fn start_fused<T: Float>(&self, buffers: &mut RowBuffers<Memory>) -> Result<(), Failure> {
        let RowBuffers { input, residual, output, weight, .. } = buffers;
        self.fused::<T>(&self.communicator, [input, weight], [residual, output])
    }

    fn start_norm<T: Float>(&self, buffers: &mut RowBuffers<Memory>) -> Result<(), Failure> {
        let RowBuffers { sum, residual, output, weight, .. } = buffers;
        let alone = self.alone.get().ok_or_else(|| Failure::Usage("no norm was made ready".into()))?;
        self.fused::<T>(alone, [sum, weight], [residual, output])
    }

    fn batch<'a>(&'a self, call: Call<'a>) -> Result<Batch<'a>, Failure> {
        let clock = Clock::new(self)?;
        if self.options.eager {
            return Ok(Batch::new(1, move |batches| clock.seconds(batches, 1, &mut *call)));
        }
        let graph = capture(&self.stream, || (0..GRAPH_CALLS).try_for_each(|_| call()))?;
        // Not at the first replay, which a peer's kernel may wait for.
        graph.upload().map_err(driver("cuGraphUpload"))?;
        self.stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
        Ok(Batch::new(GRAPH_CALLS, move |batches| {
            clock.seconds(batches, GRAPH_CALLS, || graph.launch().map_err(driver("cuGraphLaunch")))
        }))
    }
}

/// Two events around the timed calls, and events that limit how many calls are queued.
struct Clock<'a> {
    gpu: &'a Gpu,
    start: CudaEvent,
    end: CudaEvent,
    marks: [CudaEvent; 2],
}

impl<'a> Clock<'a> {
    fn new(gpu: &'a Gpu) -> Result<Self, Failure> {
        let event = || event(&gpu.stream);
        Ok(Self { gpu, start: event()?, end: event()?, marks: [event()?, event()?] })
    }

    /// Times batches of `calls` calls. At most twice [`CALLS_AHEAD`] calls are queued and have not ended: a rank
    /// that fills the driver's queue waits under a lock of the context, and another thread could not launch the
    /// kernel that it waits for.
    fn seconds(
        &self,
        batches: u64,
        calls: u64,
        mut run: impl FnMut() -> Result<(), Failure>,
    ) -> Result<f64, Failure> {
        let stream = &self.gpu.stream;
        let between = CALLS_AHEAD.div_ceil(calls);
        self.start.record(stream).map_err(driver("cuEventRecord"))?;
        for batch in 0..batches {
            // Not before the first batch, so that a single call is timed alone.
            if batch > 0 && batch % between == 0 {
                let mark = &self.marks[(batch / between % 2) as usize];
                // Returns at once for an event that was never recorded.
                mark.synchronize().map_err(driver("cuEventSynchronize"))?;
                mark.record(stream).map_err(driver("cuEventRecord"))?;
            }
            run()?;
        }
        self.end.record(stream).map_err(driver("cuEventRecord"))?;
        self.gpu.finish()?;
        let milliseconds = self.start.elapsed_ms(&self.end).map_err(driver("cuEventElapsedTime"))?;
        Ok(f64::from(milliseconds) * 1e-3)
    }
}

/// Private or registered memory of the GPU.
pub enum Memory {
    /// `slice` holds a byte even if `bytes` is 0.
    Private {
        slice: CudaSlice<u8>,
        bytes: usize,
    },
    Registered(Buffer<u8, Cuda>),
}

impl DeviceSlice<u8> for Memory {
    fn len(&self) -> usize {
        match self {
            Self::Private { bytes, .. } => *bytes,
            Self::Registered(buffer) => DeviceSlice::len(buffer),
        }
    }

    fn stream(&self) -> &Arc<CudaStream> {
        match self {
            Self::Private { slice, .. } => slice.stream(),
            Self::Registered(buffer) => buffer.stream(),
        }
    }
}

impl DevicePtr<u8> for Memory {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        match self {
            Self::Private { slice, .. } => slice.device_ptr(stream),
            Self::Registered(buffer) => buffer.device_ptr(stream),
        }
    }
}

impl DevicePtrMut<u8> for Memory {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        match self {
            Self::Private { slice, .. } => slice.device_ptr_mut(stream),
            Self::Registered(buffer) => buffer.device_ptr_mut(stream),
        }
    }
}
