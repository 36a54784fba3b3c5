//! The scenario of the injection sweep: the steps of a rank while a driver call fails on it or on its peer. The steps
//! cover every part of the crate that calls the driver.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUstream, CUstreamCaptureMode};
use cudarc::driver::{result, CudaContext, CudaSlice, CudaStream, DevicePtr, DriverError};
use fast_allreduce::bootstrap::Bootstrap;
use fast_allreduce::device::cuda::Sharing;
use fast_allreduce::{Algorithm, Collective, Communicator, Cuda, DType, ReduceOp};

use crate::fixtures::injection::aside;

/// Timeout of the communicators. Waits for a rank that has failed must end long before.
pub const LIMIT: Duration = Duration::from_secs(3);

const COUNT: usize = 600;

/// The outcome of a step on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Right,
    Failed,
    /// The step returned no error, but the data is wrong.
    Wrong,
}

/// A step: its name, whether its outcome must be the same on all ranks, its outcome and error, and its duration.
#[derive(Debug, Clone)]
pub struct Step {
    pub name: String,
    pub agreed: bool,
    pub outcome: Outcome,
    pub problem: String,
    pub took: Duration,
}

/// The steps of a rank, in order.
pub struct Scenario {
    pub steps: Vec<Step>,
    /// Whether the rank continues after an error, like a caller that ignores results. Otherwise it leaves.
    goes_on: bool,
}

impl Scenario {
    /// Runs a step, unless the rank has failed and is to leave.
    fn step<T>(&mut self, name: &str, agreed: bool, body: impl FnOnce() -> Result<T, Problem>) -> Option<T> {
        if !self.goes_on && self.has_failed() {
            return None;
        }
        let started = Instant::now();
        let (result, outcome, problem) = match body() {
            Ok(value) => (Some(value), Outcome::Right, String::new()),
            Err(Problem::Error(error)) => (None, Outcome::Failed, error),
            Err(Problem::Wrong(what)) => (None, Outcome::Wrong, what),
        };
        let took = started.elapsed();
        self.steps.push(Step { name: name.into(), agreed, outcome, problem, took });
        result
    }

    fn has_failed(&self) -> bool {
        self.steps.iter().any(|step| step.outcome == Outcome::Failed)
    }
}

enum Problem {
    Error(String),
    Wrong(String),
}

/// Converts errors of the test's own driver calls. They fail if the context is lost, which the crate has then noticed
/// too.
impl From<DriverError> for Problem {
    fn from(error: DriverError) -> Self {
        Self::Error(format!("the test's own call: {error:?}"))
    }
}

impl From<fast_allreduce::Error> for Problem {
    fn from(error: fast_allreduce::Error) -> Self {
        Self::Error(error.to_string())
    }
}

/// The test's own memory and streams. Its driver calls bypass cudarc's safe layer, which would consume errors that the
/// crate has to detect.
pub struct Bench {
    context: Arc<CudaContext>,
    streams: [Arc<CudaStream>; 2],
    /// Two inputs and an output, allocated by `cuMemAlloc`.
    memory: [u64; 3],
    /// The slice to be registered.
    slice: RefCell<Option<CudaSlice<f32>>>,
}

impl Bench {
    pub fn new(ordinal: usize) -> Self {
        let context = CudaContext::new(ordinal).unwrap();
        let streams = [(); 2].map(|()| context.new_stream().unwrap());
        // SAFETY: a context is current.
        let memory = [(); 3].map(|()| unsafe { result::malloc_sync(4 * COUNT) }.unwrap());
        // SAFETY: a context is current; the slice owns the allocation, and any bits are a valid f32.
        let slice = unsafe { streams[0].upgrade_device_ptr(result::malloc_sync(4 * COUNT).unwrap(), COUNT) };
        Self { context, streams, memory, slice: RefCell::new(Some(slice)) }
    }

    fn bind(&self) {
        // SAFETY: the context is retained.
        unsafe { result::ctx::set_current(self.context.cu_ctx()) }.unwrap();
    }

    fn upload(&self, stream: CUstream, address: u64, values: &[f32]) -> Result<(), Problem> {
        self.bind();
        // SAFETY: the callers' memory is large enough; pageable memory is copied before the call returns.
        Ok(unsafe { result::memcpy_htod_async(address, values, stream) }?)
    }

    /// Synchronises the stream. The crate has noticed any error that this returns.
    fn drain(&self, stream: CUstream) {
        self.bind();
        // SAFETY: the stream is live.
        let _ = unsafe { result::stream::synchronize(stream) };
    }

    fn compare(&self, stream: CUstream, address: u64, expected: &[f32]) -> Result<(), Problem> {
        self.bind();
        let mut values = vec![0.0; expected.len()];
        // SAFETY: the callers' memory holds at least this many elements, and the copy is synchronised.
        unsafe {
            result::memcpy_dtoh_async(&mut values, address, stream)?;
            result::stream::synchronize(stream)?;
        }
        match values.iter().zip(expected).position(|(is, should_be)| is != should_be) {
            None => Ok(()),
            Some(at) => Err(Problem::Wrong(format!("[{at}] is {} and not {}", values[at], expected[at]))),
        }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.bind();
        for address in self.memory {
            // SAFETY: `new` allocated the memory, and the calls that use it have been synchronised. Freeing fails only
            // if the context is lost.
            let _ = unsafe { result::free_sync(address) };
        }
    }
}

/// Returns the input of a rank, different for each call, and the sum over all ranks.
fn input(call: usize, rank: usize) -> Vec<f32> {
    (0..COUNT).map(|i| ((rank + 1) * (call * 13 + i % 31)) as f32).collect()
}

fn sum(call: usize, world: usize) -> Vec<f32> {
    input(call, 0).iter().map(|value| value * (world * (world + 1) / 2) as f32).collect()
}

fn poison(call: usize) -> Vec<f32> {
    vec![-(call as f32) - 0.5; COUNT]
}

/// Objects that outlive a scenario, until all ranks have closed their mappings of them.
pub struct Kept {
    _foreign: Option<CudaSlice<f32>>,
    _bench: Bench,
}

/// Runs a rank's scenario. Returns its steps, and the objects to drop within `aside` after all ranks have finished.
pub fn run(
    bootstrap: impl Bootstrap + 'static,
    bench: Bench,
    sharing: Sharing,
    goes_on: bool,
) -> (Vec<Step>, Kept) {
    let mut scenario = Scenario { steps: Vec::new(), goes_on };
    let device = scenario.step("device", false, || {
        let device = Cuda::new(Arc::clone(&bench.context))?;
        Ok(device.sharing(sharing).graph_registration(true))
    });
    let communicator = device.and_then(|device| {
        let builder =
            Communicator::builder().max_bytes(8 << 10).timeout(LIMIT).algorithm(Algorithm::OneShotPull);
        scenario.step("build", true, || Ok(builder.build(device, bootstrap)?))
    });
    let foreign = communicator
        .and_then(|communicator| Rank { communicator, bench: &bench, call: 0 }.run(&mut scenario, sharing));
    (scenario.steps, Kept { _foreign: foreign, _bench: bench })
}

struct Rank<'a> {
    communicator: Communicator<Cuda>,
    bench: &'a Bench,
    /// The number of calls so far: each call has its own data.
    call: usize,
}

impl Rank<'_> {
    /// Runs every operation of a communicator, and drops it. Returns the slice that the caller had registered.
    fn run(mut self, scenario: &mut Scenario, sharing: Sharing) -> Option<CudaSlice<f32>> {
        let [first, second] = self.bench.streams.clone();
        // SAFETY: the handle denotes the calling thread's default stream, which always exists.
        let per_thread = aside(|| unsafe { self.bench.context.wrap_borrowed_stream(2 as CUstream) });
        let memory = self.bench.memory;
        scenario.step("calls", false, || self.calls(memory[0], &[&first, &first, &second, &first]));
        scenario.step("calls on the thread's default stream", false, || {
            self.calls(memory[0], &[&per_thread, &first, &per_thread])
        });

        let buffer = scenario.step("alloc", true, || Ok(self.communicator.alloc::<f32>(COUNT)?));
        if let Some(buffer) = &buffer {
            let address = aside(|| buffer.device_ptr(&first).0);
            scenario.step("calls from a buffer", false, || self.calls(address, &[&first]));
        }
        // Memory that is shared in another way cannot be given back.
        if sharing != Sharing::Ipc {
            scenario.step("suspend", true, || Ok(self.communicator.suspend()?));
            scenario.step("resume", true, || Ok(self.communicator.resume(LIMIT)?));
            scenario.step("calls after a resume", false, || self.calls(memory[0], &[&first, &second]));
        }
        let slice = self.bench.slice.take().expect("taken once");
        let address = aside(|| slice.device_ptr(&first).0);
        let registered = scenario.step("register", true, || Ok(self.communicator.register(slice)?));
        if registered.is_some() {
            scenario.step("calls from a registered slice", false, || self.calls(address, &[&first]));
        }
        scenario.step("slices", false, || self.slices(&first));
        scenario.step("messages", false, || self.messages(&second));

        let graph = scenario.step("capture", false, || self.capture(&second));
        let graph_inputs = scenario
            .step("register graph buffers", true, || Ok(self.communicator.register_graph_buffers()?));
        if let (Some(graph), Some(())) = (&graph, graph_inputs) {
            scenario.step("replay", false, || self.replay(graph, &second));
        }
        aside(|| drop(graph));

        let symmetric = scenario
            .step("symmetric memory", true, || Ok(self.communicator.symmetric_memory::<f32>(COUNT)?));
        if let Some(memory) = symmetric {
            let buffer = scenario.step("register symmetric memory", true, || Ok(memory.register()?));
            let memory =
                buffer.and_then(|buffer| scenario.step("deregister", true, || Ok(buffer.deregister()?)));
            memory.and_then(|memory| scenario.step("free symmetric memory", true, || Ok(memory.free()?)));
        }
        let rank = self.communicator.rank();
        let part = scenario.step("split", true, || Ok(self.communicator.split(Some(0), rank as i64)?));
        scenario.step("last calls", false, || self.calls(memory[1], &[&second, &first]));
        // No rank may succeed here if a rank has failed.
        scenario.step("farewell", true, || Ok(self.communicator.barrier()?));

        drop(part);
        drop(buffer);
        let foreign = registered.map(|registered| registered.into_inner());
        drop(self.communicator);
        foreign
    }

    /// Writes the input of the next call, and poison to its output.
    fn prepare(&mut self, stream: &CudaStream, from: u64, to: u64) -> Result<(), Problem> {
        self.call += 1;
        let (stream, rank) = (stream.cu_stream(), self.communicator.rank());
        aside(|| {
            self.bench.upload(stream, from, &input(self.call, rank))?;
            self.bench.upload(stream, to, &poison(self.call))?;
            self.bench.drain(stream);
            Ok(())
        })
    }

    /// Synchronises the communicator, and compares the output with that of the last call.
    fn finish(
        &self,
        started: Result<(), Problem>,
        stream: &CudaStream,
        to: u64,
        expected: &[f32],
    ) -> Result<(), Problem> {
        let ended = started.and_then(|()| Ok(self.communicator.synchronize(stream)?));
        aside(|| match ended {
            Ok(()) => self.bench.compare(stream.cu_stream(), to, expected),
            Err(error) => {
                self.bench.drain(stream.cu_stream());
                Err(error)
            }
        })
    }

    /// Makes several sums in sequence, and does not stop at one that fails.
    fn calls(&mut self, from: u64, streams: &[&Arc<CudaStream>]) -> Result<(), Problem> {
        let output = self.bench.memory[2];
        let mut all = Ok(());
        for stream in streams {
            let prepared = self.prepare(stream, from, output);
            // SAFETY: the memory is the bench's, or registered, and outlives the call.
            let started = unsafe {
                self.communicator.collective_raw(
                    stream.cu_stream(),
                    Collective::AllReduce(ReduceOp::Sum),
                    from,
                    output,
                    COUNT,
                    DType::F32,
                )
            };
            let started = prepared.and_then(|()| Ok(started?));
            let expected = sum(self.call, self.communicator.world_size());
            match self.finish(started, stream, output, &expected) {
                Err(Problem::Wrong(what)) => return Err(Problem::Wrong(what)),
                ended => all = all.and(ended),
            }
        }
        all
    }

    /// Makes a sum from cudarc's slices, and drops the input as soon as the call returns.
    fn slices(&mut self, stream: &Arc<CudaStream>) -> Result<(), Problem> {
        let [input, mut output] = two_slices(stream)?;
        let [from, to] = aside(|| [&input, &output].map(|slice| slice.device_ptr(stream).0));
        let prepared = self.prepare(stream, from, to);
        let started = self.communicator.all_reduce(stream, &input, &mut output, ReduceOp::Sum);
        aside(|| drop(input));
        let expected = sum(self.call, self.communicator.world_size());
        let ended = self.finish(prepared.and_then(|()| Ok(started?)), stream, to, &expected);
        aside(|| drop(output));
        ended
    }

    /// Sends to the next rank, and receives from the previous one.
    fn messages(&mut self, stream: &Arc<CudaStream>) -> Result<(), Problem> {
        let mut slices = two_slices(stream)?;
        let [from, to] = aside(|| [0, 1].map(|which: usize| slices[which].device_ptr(stream).0));
        let prepared = self.prepare(stream, from, to);
        let (rank, world) = (self.communicator.rank(), self.communicator.world_size());
        let (next, before) = ((rank + 1) % world, (rank + world - 1) % world);
        let [outgoing, incoming] = &mut slices;
        let started = self.communicator.send_recv(stream, outgoing, next, incoming, before, 3);
        let started = prepared.and_then(|()| Ok(started?));
        let ended = self.finish(started, stream, to, &input(self.call, before));
        aside(|| drop(slices));
        ended
    }

    /// Captures a graph of two sums.
    fn capture(&mut self, stream: &Arc<CudaStream>) -> Result<Graph, Problem> {
        let [from, other, output] = self.bench.memory;
        let handle = stream.cu_stream();
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is live.
        aside(|| unsafe { result::stream::begin_capture(handle, mode) })?;
        let mut all = Ok(());
        for input in [other, from] {
            // SAFETY: the memory is the bench's and outlives the graph.
            all = all.and(unsafe {
                self.communicator.collective_raw(
                    handle,
                    Collective::AllReduce(ReduceOp::Sum),
                    input,
                    output,
                    COUNT,
                    DType::F32,
                )
            });
        }
        aside(|| {
            // SAFETY: the stream is live, and this thread captures it.
            let graph = unsafe { result::stream::end_capture(handle) }.map_err(|error| match error.0 {
                sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS => Problem::from(error),
                _ => Problem::Wrong(format!("the capture was invalidated: {error:?}")),
            })?;
            let graph = Graph::new(graph)?;
            all?;
            Ok(graph)
        })
    }

    fn replay(&mut self, graph: &Graph, stream: &Arc<CudaStream>) -> Result<(), Problem> {
        let [from, _, output] = self.bench.memory;
        let mut all = Ok(());
        for _ in 0..2 {
            let prepared = self.prepare(stream, from, output);
            let started = prepared.and_then(|()| Ok(aside(|| graph.launch(stream.cu_stream()))?));
            let expected = sum(self.call, self.communicator.world_size());
            match self.finish(started, stream, output, &expected) {
                Err(Problem::Wrong(what)) => return Err(Problem::Wrong(what)),
                ended => all = all.and(ended),
            }
        }
        all
    }
}

fn two_slices(stream: &Arc<CudaStream>) -> Result<[CudaSlice<f32>; 2], Problem> {
    let slice = || aside(|| stream.alloc_zeros::<f32>(COUNT));
    Ok([slice()?, slice()?])
}

/// An instantiated graph that bypasses cudarc's safe layer.
struct Graph(sys::CUgraph, sys::CUgraphExec);

impl Graph {
    fn new(graph: sys::CUgraph) -> Result<Self, DriverError> {
        let flags = sys::CUgraphInstantiate_flags(0);
        // SAFETY: the graph was just captured.
        let executable = unsafe { result::graph::instantiate(graph, flags) };
        executable.map(|executable| Self(graph, executable)).inspect_err(|_| {
            // SAFETY: the graph was just captured, and its handle is not used again.
            let _ = unsafe { result::graph::destroy(graph) };
        })
    }

    fn launch(&self, stream: CUstream) -> Result<(), DriverError> {
        // SAFETY: both handles are live.
        unsafe { result::graph::launch(self.1, stream) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: `new` created both, and all launches have been synchronised.
        let _ = unsafe { (result::graph::exec_destroy(self.1), result::graph::destroy(self.0)) };
    }
}
