//! A GPU: calls are timed by events around replays of a graph that holds a number of them, or around plain calls.

use std::cell::OnceCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaGraph, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice,
    SyncOnDrop,
};
use fast_allreduce::bootstrap::Threads;
use fast_allreduce::device::cuda::Sharing;
use fast_allreduce::plan::Table;
use fast_allreduce::{Algorithm, Buffer, Builder, Communicator, Cuda, DType, Error, Fused};

use super::{Batch, Call, MeasuredRank, RowBuffers};
use crate::failure::{driver, Failure};
use crate::harness::memory::Lines;
use crate::harness::norm::{Float, NORM};
use crate::harness::row::{DeviceFacts, EAGER};
use crate::harness::session::Session;
use crate::harness::work::Work;

/// Calls in a graph: enough that starting one replay is a small part of its time.
pub const GRAPH_CALLS: u64 = 20;
/// Between two marks of a [`Clock`].
const CALLS_AHEAD: u64 = 200;

/// Says why no rank can have a GPU, where that is known without starting one.
pub fn require() -> Result<(), Failure> {
    // SAFETY: tries to load the driver's library, whose initialisers are the driver's own.
    if unsafe { cudarc::driver::sys::is_culib_present() } {
        return Ok(());
    }
    Err(Failure::Library(Error::Unavailable {
        what: "the CUDA device".into(),
        reason: "no CUDA driver (libcuda.so.1) is installed on this machine".into(),
    }))
}

/// GPUs that this process sees; at least one.
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

/// Names the GPU that a rank of `bench` uses, the same in every process that sees it.
#[cfg(feature = "mpi")]
pub fn gpu_of(rank: usize) -> Result<[u8; 16], Failure> {
    use cudarc::driver::sys::CUuuid;
    use fast_allreduce::device::cuda::api;
    let ordinal = rank % gpus()?;
    let (mut gpu, mut uuid) = (0, CUuuid { bytes: [0; 16] });
    // SAFETY: the driver writes one device, and of its number 16 bytes.
    unsafe {
        api::cuDeviceGet(&mut gpu, ordinal as i32).map_err(driver("cuDeviceGet"))?;
        api::cuDeviceGetUuid_v2(&mut uuid, gpu).map_err(driver("cuDeviceGetUuid"))?;
    }
    Ok(uuid.bytes.map(|byte| byte as u8))
}

/// How a rank uses its GPU.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The first rank's GPU; the others follow, and begin again after the last.
    pub first_gpu: usize,
    /// GPUs to go around.
    pub gpus: usize,
    /// Time plain calls, not graphs.
    pub eager: bool,
    /// Of its communicators.
    pub given: fast_allreduce::Settings,
}

/// A rank on a GPU.
pub struct Gpu {
    communicator: Communicator<Cuda>,
    /// Of this rank alone, for what it does after an allreduce.
    alone: OnceCell<Communicator<Cuda>>,
    stream: Arc<CudaStream>,
    settings: Settings,
}

impl Gpu {
    /// Collective.
    pub fn new(
        session: &Session,
        settings: &Settings,
        algorithm: Option<Algorithm>,
    ) -> Result<Self, Failure> {
        Self::with(session, settings, settings.given.builder()?.algorithm(algorithm))
    }

    /// With a plan to measure. Collective.
    pub fn planned(session: &Session, settings: &Settings, plan: Table) -> Result<Self, Failure> {
        Self::with(session, settings, settings.given.builder()?.table(plan))
    }

    fn with(session: &Session, settings: &Settings, builder: Builder) -> Result<Self, Failure> {
        // What is compared is called in turn.
        let ordinal = settings.first_gpu + session.rank() % settings.gpus;
        let device = settings.given.cuda(ordinal)?.one_at_a_time();
        // SAFETY: all work on memory of this context is on the one stream below, in whose order it is also freed.
        unsafe { device.context().disable_event_tracking() };
        let stream = device.context().new_stream().map_err(driver("cuStreamCreate"))?;
        let (communicator, alone) = (session.build(device, builder)?, OnceCell::new());
        Ok(Self { communicator, alone, stream, settings: settings.clone() })
    }

    /// What all work on this rank's memory is on.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Of the GPU that has most of them.
    pub fn ranks_per_gpu(&self) -> usize {
        let world_size = self.communicator.world_size();
        world_size.div_ceil(self.settings.gpus.min(world_size))
    }

    /// # Safety
    ///
    /// That of [`Communicator::collective_raw`], for this rank's lengths, on this rank's stream.
    unsafe fn start_raw(&self, work: &Work, input: CUdeviceptr, output: CUdeviceptr) -> Result<(), Failure> {
        let stream = self.stream.cu_stream();
        // SAFETY: the caller's.
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

    fn finish(&self) -> Result<(), Failure> {
        Ok(self.communicator.synchronize(&self.stream)?)
    }
}

impl MeasuredRank for Gpu {
    type Device = Cuda;
    type Memory = Memory;

    fn communicator(&self) -> &Communicator<Cuda> {
        &self.communicator
    }

    fn facts(&self) -> DeviceFacts {
        let device = self.communicator.device();
        let gpus = self.settings.gpus.min(self.communicator.world_size());
        DeviceFacts::Cuda {
            gpu: device.context().name().unwrap_or_else(|_| "unknown".into()),
            gpus,
            ranks_per_gpu: self.ranks_per_gpu(),
            sharing: device.chosen_sharing().map_or("none", Sharing::name),
            timed: if self.settings.eager { EAGER } else { "replays of a graph of 20 calls" },
        }
    }

    fn allocate(&self, dtype: DType, count: usize, registered: bool) -> Result<Memory, Failure> {
        let bytes = count * dtype.size();
        if registered {
            return Ok(Memory::Registered(self.communicator.alloc(bytes)?));
        }
        // SAFETY: whatever the memory holds is bytes.
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
        // What a failed kernel has left is of no interest.
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
        // SAFETY: input and output are within the elements of a buffer that is freed in the order of the stream, and where they
        // overlap they do so as this collective permits.
        unsafe { self.start_raw(work, address(from), address(to)) }
    }

    fn copy(&self, from: &Memory, to: &mut Memory) -> Result<(), Failure> {
        if from.is_empty() {
            return Ok(());
        }
        self.stream.memcpy_dtod(from, to).map_err(driver("cuMemcpyDtoDAsync"))
    }

    fn ready_norm(&self) -> Result<String, Failure> {
        let by = "in one kernel, that of a world of one rank";
        if self.alone.get().is_none() {
            let device = Cuda::new(Arc::clone(self.communicator.device().context()))?.one_at_a_time();
            let [bootstrap] = <[Threads; 1]>::try_from(Threads::world(1)?).expect("a world of one");
            let alone = self.settings.given.builder()?.build(device, bootstrap)?;
            let _ = self.alone.set(alone);
        }
        Ok(by.into())
    }

    fn start_fused<T: Float>(&self, buffers: &mut RowBuffers<Memory>) -> Result<(), Failure> {
        let RowBuffers { input, residual, output, weight, .. } = buffers;
        let (input, weight) = (As::<_, T>::new(&*input), As::new(&*weight));
        let (mut residual, mut output) = (As::new(residual), As::new(output));
        let hidden = DeviceSlice::<T>::len(&weight);
        let fused = Fused::on_cuda(&mut residual).norm(NORM, hidden).weight(&weight).rows(&mut output);
        Ok(self.communicator.all_reduce_fused(&self.stream, &input, fused)?)
    }

    fn start_norm<T: Float>(&self, buffers: &mut RowBuffers<Memory>) -> Result<(), Failure> {
        let RowBuffers { sum, residual, output, weight, .. } = buffers;
        let (sum, weight) = (As::<_, T>::new(&*sum), As::new(&*weight));
        let (mut residual, mut output) = (As::new(residual), As::new(output));
        let hidden = DeviceSlice::<T>::len(&weight);
        let fused = Fused::on_cuda(&mut residual).norm(NORM, hidden).weight(&weight).rows(&mut output);
        let alone = self.alone.get().ok_or_else(|| Failure::Usage("no norm was made ready".into()))?;
        Ok(alone.all_reduce_fused(&self.stream, &sum, fused)?)
    }

    fn batch<'a>(&'a self, call: Call<'a>) -> Result<Box<dyn Batch + 'a>, Failure> {
        let clock = Clock::new(self)?;
        if self.settings.eager {
            return Ok(Box::new(Eager { clock, call }));
        }
        // The thread's own, because other ranks may be threads of this process.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode).map_err(driver("cuStreamBeginCapture"))?;
        let captured = (0..GRAPH_CALLS).try_for_each(|_| call());
        let graph = self.stream.end_capture(CUgraphInstantiate_flags(0));
        captured?;
        let graph = graph.map_err(driver("cuStreamEndCapture"))?;
        let graph = graph.ok_or_else(|| Failure::Driver("cuStreamEndCapture", "it made no graph".into()))?;
        // Now, and not when a peer's kernel waits for the first replay.
        graph.upload().map_err(driver("cuGraphUpload"))?;
        self.stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
        Ok(Box::new(Replay { clock, graph }))
    }
}

/// Two events, and those that bound how far calls are queued ahead.
struct Clock<'a> {
    endpoint: &'a Gpu,
    start: CudaEvent,
    end: CudaEvent,
    marks: [CudaEvent; 2],
}

impl<'a> Clock<'a> {
    fn new(endpoint: &'a Gpu) -> Result<Self, Failure> {
        let event = || {
            let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
            endpoint.stream.context().new_event(flags).map_err(driver("cuEventCreate"))
        };
        Ok(Self { endpoint, start: event()?, end: event()?, marks: [event()?, event()?] })
    }

    /// Queues batches of so many calls. At most twice [`CALLS_AHEAD`] are queued and have not ended: a rank that fills the
    /// driver's queue waits under a lock of its context, and a thread of the same process could not launch what it waits for.
    fn seconds(
        &self,
        batches: u64,
        calls: u64,
        mut run: impl FnMut() -> Result<(), Failure>,
    ) -> Result<f64, Failure> {
        let stream = &self.endpoint.stream;
        let between = CALLS_AHEAD.div_ceil(calls);
        self.start.record(stream).map_err(driver("cuEventRecord"))?;
        for batch in 0..batches {
            // Not before the first: a single call has nothing beside it.
            if batch > 0 && batch % between == 0 {
                let mark = &self.marks[(batch / between % 2) as usize];
                // One that was never recorded is not waited for.
                mark.synchronize().map_err(driver("cuEventSynchronize"))?;
                mark.record(stream).map_err(driver("cuEventRecord"))?;
            }
            run()?;
        }
        self.end.record(stream).map_err(driver("cuEventRecord"))?;
        self.endpoint.finish()?;
        let milliseconds = self.start.elapsed_ms(&self.end).map_err(driver("cuEventElapsedTime"))?;
        Ok(f64::from(milliseconds) * 1e-3)
    }
}

/// One call, started as it is made.
struct Eager<'a> {
    clock: Clock<'a>,
    call: Call<'a>,
}

impl Batch for Eager<'_> {
    fn calls(&self) -> u64 {
        1
    }

    fn seconds(&mut self, batches: u64) -> Result<f64, Failure> {
        self.clock.seconds(batches, 1, &mut *self.call)
    }
}

/// A graph of [`GRAPH_CALLS`] calls.
struct Replay<'a> {
    clock: Clock<'a>,
    graph: CudaGraph,
}

impl Batch for Replay<'_> {
    fn calls(&self) -> u64 {
        GRAPH_CALLS
    }

    fn seconds(&mut self, batches: u64) -> Result<f64, Failure> {
        let graph = &self.graph;
        self.clock.seconds(batches, GRAPH_CALLS, || graph.launch().map_err(driver("cuGraphLaunch")))
    }
}

/// Private or registered.
pub enum Memory {
    /// `slice` holds a byte even where `bytes` is 0.
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

/// Memory as elements of a type.
struct As<M, T>(M, PhantomData<fn(T)>);

impl<M, T> As<M, T> {
    fn new(memory: M) -> Self {
        Self(memory, PhantomData)
    }
}

impl<M: Deref<Target = Memory>, T> DeviceSlice<T> for As<M, T> {
    fn len(&self) -> usize {
        self.0.len() / size_of::<T>()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.0.stream()
    }
}

impl<M: Deref<Target = Memory>, T> DevicePtr<T> for As<M, T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.0.device_ptr(stream)
    }
}

impl<M: DerefMut<Target = Memory>, T> DevicePtrMut<T> for As<M, T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.0.device_ptr_mut(stream)
    }
}
