"""The stream that a call on a GPU is enqueued on, and the streams it waits for, on the stand-in driver."""

import sys
import threading
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from stand_in import Driver  # noqa: E402
from test_misuse import Capsule  # noqa: E402

import fast_allreduce as fa  # noqa: E402

COUNT = 5000
ZEROS = np.zeros(COUNT, np.float32)
SEVENS = np.full(COUNT, 7, np.float32)


@pytest.fixture(scope="module")
def driver():
    return Driver(0)


@pytest.fixture
def alone(driver):
    """Returns a communicator of one rank, whose reductions are copies."""
    with fa.Communicator.init(1, 0, fa.get_unique_id(), "cuda:0", timeout=30) as communicator:
        yield communicator


class Exported(Capsule):
    """Memory of a GPU with DLPack only. Its owner uses it on a stream, and orders that stream as requested."""

    def __init__(self, array, own):
        super().__init__(array.of, shape=array.of.shape, data=array.address, device_type=2)
        self.array, self.own, self.asked = array, own, []

    def __dlpack__(self, *, stream):
        self.asked.append(stream)
        self.array.driver.order(self.own.cuda_stream, stream)
        return super().__dlpack__()


def test_an_interface_that_names_its_stream(driver, alone):
    own = driver.stream()
    x, y = (driver.array(ZEROS, version=3, stream=own.cuda_stream) for _ in range(2))
    released = own.hold()
    x.set(SEVENS, own)
    alone.allreduce(x, y)
    assert not own.is_done()
    released.set()
    own.synchronize()
    assert (y.numpy() == 7).all()


def test_interfaces_that_name_different_streams(driver, alone):
    first, second, given = driver.stream(), driver.stream(), driver.stream()
    x = driver.array(ZEROS, version=3, stream=first.cuda_stream)
    y = driver.array(ZEROS, version=3, stream=second.cuda_stream)
    for on in (None, given):
        x.set(ZEROS, first)
        y.set(ZEROS, second)
        released = first.hold()
        x.set(SEVENS, first)
        alone.allreduce(x, y, stream=on)
        if on is None:
            # The caller names no stream: later work on either stream comes after the call.
            x.set(ZEROS, first)
        released.set()
        for stream in (first, second, given):
            stream.synchronize()
        assert (y.numpy() == 7).all()


@pytest.mark.parametrize("handle", [1, 2])
def test_an_interface_that_names_a_default_stream(driver, alone, handle):
    x = driver.array(SEVENS, version=3, stream=handle)
    y = driver.array(ZEROS, version=3, stream=handle)
    alone.allreduce(x, y)
    driver.synchronize()
    assert (y.numpy() == 7).all()


def test_an_interface_that_names_an_invalid_stream(driver, alone):
    for stream, said in ((0, "names the stream 0"), (-1, "names the stream -1"), ("own", "names the stream 'own'")):
        with pytest.raises(ValueError, match=said):
            alone.allreduce(driver.array(ZEROS, version=3, stream=stream))
    elsewhere = Driver(1).stream()
    driver.call("cuCtxSetCurrent", driver.context)
    for arguments in ({}, {"stream": driver.stream()}):
        with pytest.raises(fa.errors.InvalidStream):
            alone.allreduce(driver.array(ZEROS, version=3, stream=elsewhere.cuda_stream), **arguments)
    alone.barrier()


def test_dlpack_is_passed_the_stream(driver, alone):
    own, given = driver.stream(), driver.stream()
    x, y = Exported(driver.array(ZEROS), own), Exported(driver.array(ZEROS), own)
    released = own.hold()
    x.array.set(SEVENS, own)
    alone.allreduce(x, y, stream=given)
    assert x.asked == y.asked == [given.cuda_stream] and not given.is_done()
    released.set()
    given.synchronize()
    assert (y.array.numpy() == 7).all()
    # DLPack's number of the legacy default stream is not its handle.
    alone.allreduce(x, y, stream=0)
    assert x.asked[1:] == [1]
    # A stream that another buffer names works as well.
    alone.allreduce(x, driver.array(ZEROS, version=3, stream=given.cuda_stream))
    assert x.asked[2:] == [given.cuda_stream]
    driver.synchronize()


def test_dlpack_takes_precedence_over_an_old_interface(driver, alone):
    own, given = driver.stream(), driver.stream()

    class Both(Exported):
        __cuda_array_interface__ = property(lambda self: self.array.__cuda_array_interface__)

    x, y = Both(driver.array(SEVENS), own), Both(driver.array(ZEROS, version=3, stream=None), own)
    alone.allreduce(x, y, stream=given)
    assert (x.asked, y.asked) == ([given.cuda_stream], [])
    given.synchronize()
    assert (y.array.numpy() == 7).all()


class Cupy(bytearray):
    """An array with the protocols of CuPy's arrays, whose type has the buffer protocol as well."""

    def __init__(self, array, own, version):
        super().__init__(array.of.nbytes)
        self.exported, self.interface = Exported(array, own), {**array.__cuda_array_interface__, "version": version}
        if version == 3:
            self.interface["stream"] = own.cuda_stream

    @property
    def __cuda_array_interface__(self):
        return self.interface

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self.exported.__dlpack__(stream=stream)

    def __dlpack_device__(self):
        return (2, 0)


class DlpackAlone(Cupy):
    @property
    def __cuda_array_interface__(self):
        raise AttributeError


@pytest.mark.parametrize(("kind", "version"), [(Cupy, 3), (Cupy, 2), (DlpackAlone, 2)])
def test_arrays_on_a_gpu_whose_type_has_the_buffer_protocol(driver, alone, kind, version):
    own = driver.stream()
    given = None if version == 3 else driver.stream()
    x, y = (kind(driver.array(values), own, version) for values in (SEVENS, ZEROS))
    released = own.hold()
    x.exported.array.set(SEVENS + 1, own)
    alone.allreduce(x, y, stream=given)
    assert x.exported.asked == ([given.cuda_stream] if given else []) and not (given or own).is_done()
    released.set()
    alone.synchronize(stream=given or own)
    assert (y.exported.array.numpy() == 8).all()


def calls(communicator, make):
    """Returns each call that reads or writes buffers by name, as a function of a stream."""
    a, b, c = (make() for _ in range(3))
    counts = [COUNT]
    return {
        "allreduce": lambda stream: communicator.allreduce(a, b, stream=stream),
        "allreduce in place": lambda stream: communicator.allreduce(a, stream=stream),
        "allreduce_quantized": lambda stream: communicator.allreduce_quantized(a, b, tolerance=1, stream=stream),
        "allreduce_fused": lambda stream: communicator.allreduce_fused(
            a, residual=b, residual_out=c, norm="rms", hidden=COUNT, stream=stream
        ),
        "allgather": lambda stream: communicator.allgather(a, b, stream=stream),
        "allgather_v": lambda stream: communicator.allgather_v(a, b, counts, stream=stream),
        "reduce_scatter": lambda stream: communicator.reduce_scatter(a, b, stream=stream),
        "reduce_scatter_v": lambda stream: communicator.reduce_scatter_v(a, b, counts, stream=stream),
        "broadcast": lambda stream: communicator.broadcast(a, b, stream=stream),
        "reduce": lambda stream: communicator.reduce(a, b, stream=stream),
        "gather": lambda stream: communicator.gather(a, b, stream=stream),
        "scatter": lambda stream: communicator.scatter(a, b, stream=stream),
        "alltoall": lambda stream: communicator.alltoall(a, b, stream=stream),
        "alltoall_v": lambda stream: communicator.alltoall_v(a, counts, b, counts, stream=stream),
        "messages": lambda stream: messages(communicator, a, b, stream),
    }


def messages(communicator, a, b, stream):
    with fa.group():
        communicator.send(a, 0, stream=stream)
        communicator.recv(b, 0, stream=stream)


def test_every_call_needs_a_stream(driver, alone):
    given, own = driver.stream(), driver.stream()
    registered = alone.alloc(COUNT * 4)
    nameless = {
        "an interface of version 2": lambda: driver.array(ZEROS),
        "one of version 3 whose owner has no work": lambda: driver.array(ZEROS, version=3, stream=None),
        "DLPack": lambda: Exported(driver.array(ZEROS), own),
        "an address": lambda: fa.RawBuffer(driver.array(ZEROS).address, COUNT, "f32", device="cuda:0"),
    }
    for kind, make in nameless.items():
        kept = []
        for name, call in calls(alone, lambda: kept.append(make()) or kept[-1]).items():  # noqa: B023
            with pytest.raises(ValueError, match="needs stream="):
                call(None)
                pytest.fail(f"{name} of {kind}")
            call(given)
    with pytest.raises(ValueError, match="needs stream="):
        alone.allreduce(registered)
    with pytest.raises(ValueError, match="needs stream="):
        alone.synchronize()
    alone.allreduce(registered, stream=given)
    alone.barrier(stream=given)
    # This barrier is between the ranks' threads, on no stream.
    alone.barrier()
    alone.synchronize(stream=given)
    alone.check()


def test_every_call_is_enqueued_on_the_named_stream(driver, alone):
    own = driver.stream()
    for name, call in calls(alone, lambda: driver.array(ZEROS, version=3, stream=own.cuda_stream)).items():
        released = own.hold()
        call(None)
        assert not own.is_done(), name
        released.set()
        alone.synchronize(stream=own)
        # After a wait all work is complete: none is on another stream.
        begun = driver.stream()
        released = begun.hold()
        call(begun)
        assert not begun.is_done(), name
        released.set()
        alone.synchronize(stream=begun)


def test_captures(driver, alone):
    stream = driver.stream()
    makes = {
        "named": ((lambda of: driver.array(of, version=3, stream=stream.cuda_stream)), None),
        "given": ((lambda of: driver.array(of)), stream),
    }
    for make, given in makes.values():
        x, y = make(ZEROS), make(ZEROS)
        alone.allreduce(x, y, stream=given)
        alone.synchronize(stream=stream)
        stream.begin_capture()
        alone.allreduce(x, y, stream=given)
        replay = stream.end_capture()
        x.set(SEVENS, stream)
        replay()
        alone.synchronize(stream=stream)
        assert (y.numpy() == 7).all()


def test_a_capture_with_a_buffer_in_use_on_another_stream(driver, alone):
    stream, other = driver.stream(), driver.stream()
    x, y = driver.array(SEVENS, version=3, stream=other.cuda_stream), driver.array(ZEROS)
    nameless = driver.array(SEVENS)
    alone.allreduce(x, y, stream=stream)
    alone.synchronize(stream=stream)
    stream.begin_capture()
    # The capture stays valid.
    with pytest.raises(fa.errors.Unavailable, match="another stream than its buffer's"):
        alone.allreduce(x, y, stream=stream)
    with pytest.raises(fa.errors.Unavailable, match="being captured"):
        alone.synchronize(stream=stream)
    with pytest.raises(ValueError, match="needs stream="):
        alone.allreduce(y)
    alone.allreduce(nameless, y, stream=stream)
    replay = stream.end_capture()
    y.set(ZEROS, stream)
    replay()
    alone.synchronize(stream=stream)
    assert (y.numpy() == 7).all()


def test_a_registration_needs_no_stream(driver, alone):
    own = driver.stream()
    for buffer in (driver.array(ZEROS), fa.RawBuffer(driver.array(ZEROS).address, COUNT, "f32", device="cuda:0")):
        assert alone.register_buffer(buffer).nbytes == COUNT * 4

    class Unordered(Exported):
        def __dlpack__(self, *, stream):
            self.asked.append(stream)
            return Capsule.__dlpack__(self)

    exported = Unordered(driver.array(ZEROS), own)
    assert alone.register_buffer(exported).nbytes == COUNT * 4 and exported.asked == [-1]


def test_streams_of_other_kinds(driver, alone):
    torch = pytest.importorskip("torch")
    x = driver.array(ZEROS)

    class Failing:
        @property
        def cuda_stream(self):
            raise RuntimeError("no such stream")

    with pytest.raises(RuntimeError, match="no such stream"):
        alone.allreduce(x, stream=Failing())
    # torch's default streams have the same handle on all GPUs.
    default = driver.stream()
    default.cuda_stream, default.device = 0, torch.device("cuda", 1)
    with pytest.raises(ValueError, match="the stream is on cuda:1"):
        alone.allreduce(x, stream=default)
    default.device = torch.device("cuda", 0)
    alone.allreduce(x, stream=default)
    driver.synchronize()


def test_tensors_use_torchs_current_stream(driver, alone, monkeypatch):
    torch = pytest.importorskip("torch")
    current = driver.stream()
    asked = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: asked.append(device) or current)

    class OnGpu(torch.Tensor):
        """The parts of torch's tensors on a GPU that calls read."""

        is_cpu = False
        device = property(lambda self: torch.device("cuda", 0))

        def data_ptr(self):
            return self.array.address

    def tensor(values):
        made = torch.Tensor._make_subclass(OnGpu, torch.from_numpy(values.copy()))
        made.array = driver.array(values)
        return made

    x, y = tensor(ZEROS), tensor(ZEROS)
    released = current.hold()
    x.array.set(SEVENS, current)
    alone.allreduce(x, y)
    assert not current.is_done() and set(asked) == {torch.device("cuda", 0)}
    released.set()
    alone.synchronize(stream=current)
    assert (y.array.numpy() == 7).all()
    # As torch.cuda.graph does.
    current.begin_capture()
    alone.allreduce(x, y)
    replay = current.end_capture()
    x.array.set(np.full(COUNT, 9, np.float32), current)
    replay()
    alone.synchronize(stream=current)
    assert (y.array.numpy() == 9).all()
    # With another library's array: the call waits for its stream, which then waits for the call.
    other = driver.stream()
    array = driver.array(ZEROS, version=3, stream=other.cuda_stream)
    released = other.hold()
    array.set(SEVENS, other)
    alone.allreduce(array, y)
    array.set(ZEROS, other)
    released.set()
    alone.synchronize(stream=current)
    assert (y.array.numpy() == 7).all()
    other.synchronize()
    # A stream that the caller passes takes precedence.
    given = driver.stream()
    released = given.hold()
    alone.allreduce(x, y, stream=given)
    current.synchronize()
    assert not given.is_done()
    released.set()
    alone.synchronize(stream=given)
    assert (y.array.numpy() == 9).all()


def test_a_wait_names_missing_ranks(driver):
    communicators = [None, None]
    drivers = [Driver(0), Driver(1)]
    unique_id, met = fa.get_unique_id(), threading.Barrier(2)

    def second():
        communicators[1] = fa.Communicator.init(2, 1, unique_id, "cuda:1", timeout=1)
        met.wait(60)

    thread = threading.Thread(target=second)
    thread.start()
    communicators[0] = fa.Communicator.init(2, 0, unique_id, "cuda:0", timeout=1)
    met.wait(60)
    thread.join()
    drivers[0].call("cuCtxSetCurrent", drivers[0].context)
    stream = drivers[0].stream()
    communicators[0].allreduce(drivers[0].array(ZEROS), stream=stream)
    with pytest.raises(fa.errors.Timeout) as late:
        communicators[0].synchronize(stream=stream)
    assert late.value.missing == [1]
    with pytest.raises(fa.errors.Timeout):
        communicators[0].check()
    # Rank 0 may have sent its part, so that the first call of rank 1 succeeds.
    drivers[1].call("cuCtxSetCurrent", drivers[1].context)
    data, stream = drivers[1].array(ZEROS), drivers[1].stream()
    with pytest.raises(fa.errors.PeerFailed) as failed:
        for _ in range(2):
            communicators[1].allreduce(data, stream=stream)
            communicators[1].synchronize(stream=stream)
    assert failed.value.rank == 0
    for communicator in communicators:
        communicator.destroy()
