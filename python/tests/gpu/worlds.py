"""Ranks that share one GPU: as threads with a stream each."""

import ctypes
import functools
import os
from concurrent.futures import ThreadPoolExecutor

# Read when the driver is initialised: ranks on one GPU need as many hardware queues as they have streams.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch  # noqa: E402

import fast_allreduce as fa  # noqa: E402

DEVICE = os.environ.get("FAST_ALLREDUCE_TEST_DEVICE", "cuda:0")
LIMIT = 60


class Silent:
    """A communicator whose calls do nothing."""

    def __init__(self, rank, nranks):
        self.rank, self.nranks = rank, nranks

    def __getattr__(self, _):
        return lambda *arguments, **named: None


class World:
    """Ranks that are threads, each with a stream, and a second one."""

    def __init__(self, nranks, device=DEVICE, timeout=10, **settings):
        self.nranks = nranks
        self.pool = ThreadPoolExecutor(nranks)
        self.streams, self.sides = ([torch.cuda.Stream(DEVICE) for _ in range(nranks)] for _ in range(2))
        unique_id = fa.get_unique_id()
        self.communicators = self.each(
            lambda rank: fa.Communicator.init(nranks, rank, unique_id, device, timeout=timeout, **settings)
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        torch.cuda.synchronize()
        self.each(lambda rank: self.communicators[rank].destroy())
        self.pool.shutdown()

    def each(self, function):
        """Returns the results of `function(rank)`, called by each rank's thread with its stream as the current one."""

        def of_rank(rank):
            with torch.cuda.stream(self.streams[rank]), torch.no_grad():
                return function(rank)

        running = [self.pool.submit(of_rank, rank) for rank in range(self.nranks)]
        return [each.result(LIMIT) for each in running]

    def run(self, prepare, body):
        """Returns the results of `body(communicator, *prepare(rank))` of each rank, once the GPU has computed them.

        The kernel of a rank waits for the others, whose threads must not wait for it in the driver. So all ranks are
        prepared first, and `body` runs with silent communicators before: that loads torch's kernels.
        """
        silent = [Silent(rank, self.nranks) for rank in range(self.nranks)]
        for communicators in (silent, self.communicators):
            prepared = self.each(lambda rank: (pooled(), prepare(rank))[1])
            torch.cuda.synchronize()
            results = self.each(lambda rank: body(communicators[rank], *prepared[rank]))  # noqa: B023
            torch.cuda.synchronize()
        for communicator in self.communicators:
            communicator.check()
        return results


def pooled():
    """Fills the pools of torch's allocator for the current stream, so that it allocates nothing beside calls."""
    return [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in [1 << 19] * 16 + [16 << 20] * 4] and None


def captured(stream, function):
    """Returns a function that launches a graph of what `function` enqueues.

    The graph is uploaded: its first launch does not wait for kernels that run.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        function()
    code = ctypes.CDLL("libcuda.so.1").cuGraphUpload(
        ctypes.c_void_p(graph.raw_cuda_graph_exec()), ctypes.c_void_p(stream.cuda_stream)
    )
    assert code == 0, code
    torch.cuda.synchronize()
    return graph.replay


@functools.cache
def values(rank, count, dtype):
    """Returns the numbers of a rank, in memory of the CPU: small integers or eighths, or of a normal distribution."""
    generator = torch.Generator().manual_seed(1000 * count + rank)
    if dtype.is_floating_point and dtype.itemsize > 1:
        made = torch.randn(count, generator=generator, dtype=torch.float64)
        made[0] = -0.0
        return made.to(dtype)
    made = torch.randint(0, 16, (count,), generator=generator)
    return (made / 8).to(dtype) if dtype.is_floating_point else made.to(dtype)


def total(inputs):
    """Returns the sum in rank order: in f32, which is rounded once, or f64, or integers. A zero is never negative."""
    dtype = inputs[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32 if dtype.is_floating_point else torch.int64
    added = inputs[0].to(wide)
    for one in inputs[1:]:
        added = added + one.to(wide)
    return (added + 0).to(dtype)


def placed(tensor, offset=0):
    """Returns a copy of a tensor on the GPU that begins `offset` elements behind an aligned address."""
    room = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=DEVICE)
    return room[offset:].copy_(tensor.flatten()).view(tensor.shape)


def bits(tensor):
    """Returns the bytes of a tensor, in memory of the CPU."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def same(one, other):
    """Returns whether two tensors have the same type and bits."""
    return one.dtype == other.dtype and torch.equal(bits(one), bits(other))
