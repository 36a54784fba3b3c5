//! Calls of the driver that the library or its callers make while a peer's kernel may be waiting. The step
//! `beside-a-kernel` makes each while a kernel spins.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUlimit, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaGraph, CudaSlice, CudaStream};
use fast_allreduce::device::cuda::api;
use fast_allreduce::device::cuda::probes::Probes;

use super::exporter::Exporter;
use crate::failure::{driver, Failure};
use crate::gpu_check::probe::{new_stream, synchronize, Pinned, ProbeRunner, Workload};
use crate::harness::device::cuda::capture;

/// What the calls are made with.
pub struct Caller {
    /// Has other results than the kernel that spins.
    probes: ProbeRunner,
    /// Memory of another process on the same GPU, or why there is none.
    exporter: Result<Exporter, Failure>,
}

/// What a timed call made; released after the kernel has ended.
type Made = Box<dyn Any>;
type Timed<'a> = Box<dyn FnOnce() -> Result<Made, Failure> + 'a>;

/// A call: its name, and the function that prepares it before the kernel is launched.
pub struct Operation {
    pub name: &'static str,
    pub prepare: fn(&Caller) -> Result<Timed<'_>, Failure>,
}

impl Caller {
    pub fn new(probes: ProbeRunner) -> Self {
        let exporter = Exporter::start(probes.gpu);
        Self { probes, exporter }
    }

    fn context(&self) -> &Arc<CudaContext> {
        &self.probes.context
    }

    fn stream(&self) -> Result<Arc<CudaStream>, Failure> {
        new_stream(self.context())
    }

    /// Launches a kernel of one block on a stream.
    fn launch(&self, stream: &CudaStream, name: &str, cooperative: bool) -> Result<(), Failure> {
        let workload = Workload { iterations: 1, ..Workload::default() };
        self.probes.launch_on(stream, self.probes.function(name)?, (1, 32), workload, cooperative)
    }

    fn launch_and_wait(&self, cooperative: bool) -> Result<Timed<'_>, Failure> {
        let stream = self.stream()?;
        self.launch(&stream, "empty", cooperative)?;
        synchronize(&stream)?;
        Ok(Box::new(move || {
            self.launch(&stream, "empty", cooperative)?;
            synchronize(&stream)?;
            made(stream)
        }))
    }
}

fn made(value: impl Any) -> Result<Made, Failure> {
    Ok(Box::new(value))
}

/// Returns a call that releases a value.
fn release<'a>(value: impl Any) -> Timed<'a> {
    Box::new(move || {
        drop(value);
        made(())
    })
}

/// The calls that are made while a kernel spins on another stream of the same GPU.
pub const ON_ONE_GPU: [Operation; 26] = [
    Operation { name: "cuStreamCreate", prepare: |at| Ok(Box::new(|| made(at.stream()?))) },
    Operation {
        name: "cuMemAlloc of 64 MiB",
        prepare: |at| Ok(Box::new(|| made(Allocation::new(at.context(), 64 << 20)?))),
    },
    Operation { name: "cuMemFree", prepare: free },
    Operation {
        name: "cuMemHostAlloc",
        prepare: |at| Ok(Box::new(|| made(Pinned::new(at.context(), 1 << 20)?))),
    },
    Operation {
        name: "cuMemFreeHost",
        prepare: |at| {
            let pinned = Pinned::new(at.context(), 1 << 20)?;
            Ok(release(pinned))
        },
    },
    Operation { name: "cuModuleLoadData", prepare: |at| Ok(Box::new(|| made(Probes::costs(at.context())?))) },
    Operation {
        name: "cuModuleUnload",
        prepare: |at| {
            let module = Probes::costs(at.context())?;
            module.function("empty")?;
            Ok(release(module))
        },
    },
    Operation {
        name: "the first use of a kernel (lazy loading)",
        prepare: |at| {
            let stream = at.stream()?;
            Ok(Box::new(move || {
                at.launch(&stream, "evict_code", false)?;
                made(stream)
            }))
        },
    },
    Operation {
        name: "cuCtxSetLimit of the stack's size, and a launch",
        prepare: |at| {
            const STACK: CUlimit = CUlimit::CU_LIMIT_STACK_SIZE;
            let stream = at.stream()?;
            Ok(Box::new(move || {
                // SAFETY: sets a limit of the current context.
                unsafe { api::cuCtxSetLimit(STACK as u32, 16 << 10) }.map_err(driver("cuCtxSetLimit"))?;
                at.launch(&stream, "empty", false)?;
                made(stream)
            }))
        },
    },
    Operation {
        name: "a launch on another stream, and waiting for it",
        prepare: |at| at.launch_and_wait(false),
    },
    Operation {
        name: "a cooperative launch on another stream, and waiting for it",
        prepare: |at| at.launch_and_wait(true),
    },
    Operation {
        name: "cuStreamEndCapture and cuGraphInstantiate",
        prepare: |at| {
            let stream = at.stream()?;
            at.launch(&stream, "empty", false)?;
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            stream.begin_capture(mode).map_err(driver("cuStreamBeginCapture"))?;
            at.launch(&stream, "empty", false)?;
            Ok(Box::new(move || {
                made(stream.end_capture(CUgraphInstantiate_flags(0)).map_err(driver("cuStreamEndCapture"))?)
            }))
        },
    },
    Operation {
        name: "cuGraphUpload, and waiting for it",
        prepare: |at| {
            let stream = at.stream()?;
            let graph = capture(&stream, || at.launch(&stream, "empty", false))?;
            Ok(Box::new(move || {
                graph.upload().map_err(driver("cuGraphUpload"))?;
                synchronize(&stream)?;
                made(graph)
            }))
        },
    },
    Operation {
        name: "the first launch of a graph, and waiting for it",
        prepare: |at| {
            let stream = at.stream()?;
            let graph = capture(&stream, || at.launch(&stream, "empty", false))?;
            graph.upload().map_err(driver("cuGraphUpload"))?;
            synchronize(&stream)?;
            first_launch(stream, graph, ())
        },
    },
    Operation {
        name: "the first launch of a graph that was not uploaded, and waiting for it",
        prepare: |at| {
            let stream = at.stream()?;
            let graph = capture(&stream, || at.launch(&stream, "empty", false))?;
            first_launch(stream, graph, ())
        },
    },
    Operation {
        name: "the first launch of a graph with a copy that was not uploaded, and waiting for it",
        prepare: |at| {
            let (stream, graph, memory) = graph_with_copy(at)?;
            first_launch(stream, graph, memory)
        },
    },
    Operation {
        name: "cuStreamEndCapture and cuGraphInstantiate of a graph with a copy, and its upload",
        prepare: |at| {
            // The first graph of that kind may make what all need.
            drop(graph_with_copy(at)?);
            let (stream, mut memory) = to_copy(at)?;
            Ok(Box::new(move || {
                let graph = captured_copy(&stream, &mut memory)?;
                graph.upload().map_err(driver("cuGraphUpload"))?;
                synchronize(&stream)?;
                made((graph, memory))
            }))
        },
    },
    Operation {
        name: "cuGraphExecDestroy and cuGraphDestroy",
        prepare: |at| {
            let stream = at.stream()?;
            let graph = capture(&stream, || at.launch(&stream, "empty", false))?;
            graph.launch().map_err(driver("cuGraphLaunch"))?;
            synchronize(&stream)?;
            Ok(Box::new(move || {
                drop(graph);
                made(stream)
            }))
        },
    },
    Operation {
        name: "cuMemAllocAsync of 64 MiB and cuMemsetD8Async, and waiting for them",
        prepare: |at| {
            let stream = at.stream()?;
            Ok(Box::new(move || {
                let memory = stream.alloc_zeros::<u8>(64 << 20).map_err(driver("cuMemAllocAsync"))?;
                synchronize(&stream)?;
                made(memory)
            }))
        },
    },
    Operation {
        name: "cuMemFreeAsync, and waiting for it",
        prepare: |at| {
            let stream = at.stream()?;
            let memory = stream.alloc_zeros::<u8>(64 << 20).map_err(driver("cuMemAllocAsync"))?;
            synchronize(&stream)?;
            Ok(Box::new(move || {
                drop(memory);
                synchronize(&stream)?;
                made(stream)
            }))
        },
    },
    Operation {
        name: "cuStreamDestroy",
        prepare: |at| {
            let stream = at.stream()?;
            at.launch(&stream, "empty", false)?;
            synchronize(&stream)?;
            Ok(release(stream))
        },
    },
    Operation {
        name: "cuIpcOpenMemHandle",
        prepare: |at| match &at.exporter {
            Ok(exporter) => Ok(Box::new(|| made(exporter.open(at.context())?))),
            Err(failure) => Err(Failure::Ranks(format!("no memory of another process: {failure}"))),
        },
    },
    Operation {
        name: "cuMemMap and cuMemSetAccess",
        prepare: |at| {
            let memory = Reserved::new(at.context())?;
            Ok(Box::new(move || made(memory.map()?)))
        },
    },
    Operation {
        name: "cuMemcpyHtoDAsync and cuMemcpyDtoHAsync of pageable memory",
        prepare: pageable_copies,
    },
    Operation {
        name: "cuMemsetD8Async on another stream, and waiting for it",
        prepare: |at| {
            let (stream, memory) = (at.stream()?, Allocation::new(at.context(), 1 << 20)?);
            Ok(Box::new(move || {
                // SAFETY: the memory is of that size, and freed after the stream has been waited for.
                unsafe { api::cuMemsetD8Async(memory.address, 0, 1 << 20, stream.cu_stream()) }
                    .map_err(driver("cuMemsetD8Async"))?;
                synchronize(&stream)?;
                made(memory)
            }))
        },
    },
    Operation { name: "cuCtxSynchronize", prepare: synchronize_context },
];

/// The calls that are made while a kernel spins on another GPU that has access to this one's memory.
pub const ON_TWO_GPUS: [Operation; 3] = [
    Operation { name: "cuMemFree", prepare: free },
    Operation {
        name: "cuMemUnmap and cuMemRelease",
        prepare: |at| {
            let memory = Reserved::new(at.context())?.map()?;
            Ok(release(memory))
        },
    },
    Operation { name: "cuCtxSynchronize", prepare: synchronize_context },
];

/// Launches a graph; what its nodes access is kept.
fn first_launch<'a>(stream: Arc<CudaStream>, graph: CudaGraph, kept: impl Any) -> Result<Timed<'a>, Failure> {
    Ok(Box::new(move || {
        graph.launch().map_err(driver("cuGraphLaunch"))?;
        synchronize(&stream)?;
        made((graph, kept))
    }))
}

/// Captures a copy within memory of the GPU.
fn graph_with_copy(at: &Caller) -> Result<(Arc<CudaStream>, CudaGraph, impl Any), Failure> {
    let (stream, mut memory) = to_copy(at)?;
    let graph = captured_copy(&stream, &mut memory)?;
    Ok((stream, graph, memory))
}

/// Source and destination of a copy.
type Pair = [CudaSlice<u8>; 2];

fn to_copy(at: &Caller) -> Result<(Arc<CudaStream>, Pair), Failure> {
    const BYTES: usize = 1 << 20;
    let stream = at.stream()?;
    let memory = || stream.alloc_zeros::<u8>(BYTES).map_err(driver("cuMemAllocAsync"));
    let pair = [memory()?, memory()?];
    synchronize(&stream)?;
    Ok((stream, pair))
}

fn captured_copy(stream: &Arc<CudaStream>, [from, to]: &mut Pair) -> Result<CudaGraph, Failure> {
    capture(stream, || stream.memcpy_dtod(from, to).map_err(driver("cuMemcpyDtoDAsync")))
}

fn free(at: &Caller) -> Result<Timed<'_>, Failure> {
    let memory = Allocation::new(at.context(), 2 << 20)?;
    Ok(release(memory))
}

fn synchronize_context(at: &Caller) -> Result<Timed<'_>, Failure> {
    Ok(Box::new(|| made(at.context().synchronize().map_err(driver("cuCtxSynchronize"))?)))
}

fn pageable_copies(at: &Caller) -> Result<Timed<'_>, Failure> {
    const BYTES: usize = 1 << 20;
    let (stream, memory) = (at.stream()?, Allocation::new(at.context(), BYTES)?);
    let mut host = vec![1_u8; BYTES];
    Ok(Box::new(move || {
        let (there, back) = (host.as_ptr().cast::<c_void>(), host.as_mut_ptr().cast::<c_void>());
        // SAFETY: both memories have that many bytes, and live until the stream has been waited for.
        unsafe {
            api::cuMemcpyHtoDAsync_v2(memory.address, there, BYTES, stream.cu_stream())
                .map_err(driver("cuMemcpyHtoDAsync"))?;
            api::cuMemcpyDtoHAsync_v2(back, memory.address, BYTES, stream.cu_stream())
                .map_err(driver("cuMemcpyDtoHAsync"))?;
        }
        synchronize(&stream)?;
        made(memory)
    }))
}

/// Memory from `cuMemAlloc`.
struct Allocation {
    context: Arc<CudaContext>,
    address: u64,
}

impl Allocation {
    fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, Failure> {
        context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))?;
        let mut address = 0;
        // SAFETY: a context is current; the driver writes one address.
        unsafe { api::cuMemAlloc_v2(&mut address, bytes) }.map_err(driver("cuMemAlloc"))?;
        Ok(Self { context: Arc::clone(context), address })
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        // SAFETY: allocated by `new`; the work on it has been waited for.
        let _ = unsafe { api::cuMemFree_v2(self.address) };
    }
}

/// A range of addresses, and physical memory for it, which may be mapped there.
struct Reserved {
    context: Arc<CudaContext>,
    address: u64,
    handle: u64,
    is_mapped: bool,
}

impl Reserved {
    /// A multiple of every GPU's granularity.
    const BYTES: usize = 2 << 20;

    fn new(context: &Arc<CudaContext>) -> Result<Self, Failure> {
        context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))?;
        let mut reserved = Self { context: Arc::clone(context), address: 0, handle: 0, is_mapped: false };
        // SAFETY: all zeros is a valid value of the struct: no flags. The driver reads it and writes one handle.
        unsafe {
            let mut properties: sys::CUmemAllocationProp = std::mem::zeroed();
            properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
            set_location(&raw mut properties.location, context);
            api::cuMemCreate(&mut reserved.handle, Self::BYTES, &properties, 0)
                .map_err(driver("cuMemCreate"))?;
            api::cuMemAddressReserve(&mut reserved.address, Self::BYTES, 0, 0, 0)
                .map_err(driver("cuMemAddressReserve"))?;
        }
        Ok(reserved)
    }

    fn map(mut self) -> Result<Self, Failure> {
        // SAFETY: range and handle are of that size; the driver reads one zeroed descriptor whose fields are set.
        unsafe {
            let mut access: sys::CUmemAccessDesc = std::mem::zeroed();
            access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            set_location(&raw mut access.location, &self.context);
            api::cuMemMap(self.address, Self::BYTES, 0, self.handle, 0).map_err(driver("cuMemMap"))?;
            self.is_mapped = true;
            api::cuMemSetAccess(self.address, Self::BYTES, &access, 1).map_err(driver("cuMemSetAccess"))?;
        }
        Ok(self)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        // SAFETY: the range was reserved, and the handle created, by `new`, unless they are 0. No kernel uses them.
        unsafe {
            if self.is_mapped {
                let _ = api::cuMemUnmap(self.address, Self::BYTES);
            }
            let _ = api::cuMemRelease(self.handle);
            if self.address != 0 {
                let _ = api::cuMemAddressFree(self.address, Self::BYTES);
            }
        }
    }
}

/// Sets a location to this context's device.
fn set_location(location: *mut sys::CUmemLocation, context: &CudaContext) {
    let kind = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as i32;
    // SAFETY: in every version of the API the struct begins with the type and the device's ordinal, 4 bytes each.
    unsafe { location.cast::<[i32; 2]>().write([kind, context.ordinal() as i32]) };
}
