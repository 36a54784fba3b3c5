"""Kinds of buffers, and the errors of invalid ones."""

import array
import ctypes

import numpy as np
import pytest
from ranks import on_ranks

import fast_allreduce as fa


@pytest.fixture
def alone():
    """Returns a communicator of one rank, whose reductions are copies."""
    with fa.Communicator.init(1, 0, fa.get_unique_id()) as communicator:
        yield communicator


class Interface:
    def __init__(self, of, **changes):
        self.of = of
        self.__array_interface__ = {**of.__array_interface__, **changes}


class Dlpack:
    def __init__(self, of):
        self.of = of

    def __dlpack__(self):
        return self.of.__dlpack__()


def test_kinds(alone):
    source = np.arange(10, dtype=np.float32)
    kinds = {
        "numpy": source,
        "memoryview": memoryview(source),
        "array": array.array("f", source),
        "ctypes": (ctypes.c_float * 10)(*source),
        "array interface": Interface(source),
        "DLPack": Dlpack(source),
        "raw": fa.RawBuffer(source.ctypes.data, 10, "float32"),
    }
    for name, kind in kinds.items():
        output = np.zeros(10, np.float32)
        alone.allreduce(kind, output)
        assert (output == source).all(), name
        target = np.zeros(10, np.float32)
        alone.allreduce(
            source, {"numpy": target, "array interface": Interface(target), "DLPack": Dlpack(target)}.get(name, target)
        )
        assert (target == source).all(), name
    alone.allreduce(bytearray(b"abc"))
    alone.allreduce(b"abc", bytearray(3))


class OnGpu(np.ndarray):
    """An array on a GPU whose type has the buffer protocol, which refuses it. CuPy's arrays are such."""

    @property
    def __cuda_array_interface__(self):
        return {"shape": (3,), "typestr": "<f8", "data": (64, False), "version": 3, "stream": 1}


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        (np.zeros((4, 4))[:, 1], "contiguous"),
        (np.zeros((4, 4)).T, "contiguous"),
        (Interface(np.zeros((4, 4)), strides=(8, 32)), "not contiguous"),
        (Dlpack(np.zeros((4, 4)).T), "not contiguous"),
        (b"not to be written", "writable"),
        (np.broadcast_to(np.float32(1), 3), "writable"),
        (Interface(np.zeros(3), data=(64, True)), "read-only"),
        (fa.RawBuffer(64, 1, "i32", readonly=True), "read-only"),
        (fa.RawBuffer(64, 1, "i32", readonly=np.True_), "read-only"),
        (np.zeros(3, np.complex64), "not supported"),
        (np.zeros(3, bool), "not supported"),
        (np.zeros(3, np.int16), "not supported"),
        (np.zeros(3, ">f4"), "not supported"),
        (np.zeros(3, "U1"), "not supported"),
        (Interface(np.zeros(3), typestr="<f16"), "not supported"),
        (fa.RawBuffer(64, 1, "f32", device="cuda:1"), "on cuda:1, the communicator's buffers are on cpu"),
        (np.zeros(3, "M8[s]").view(OnGpu), "on cuda:0, the communicator's buffers are on cpu"),
        (fa.RawBuffer(3, 1, "f32"), "not aligned"),
        (fa.RawBuffer(0, 1, "f32"), "null"),
        ([1.0, 2.0], "a list"),
        (3.0, "a float"),
        (None, "a NoneType"),
    ],
)
def test_refused(alone, buffer, said):
    with pytest.raises(ValueError) as caught:
        alone.allreduce(buffer)
    assert said in str(caught.value) or {"contiguous", said} == {"contiguous"}, caught.value
    assert isinstance(caught.value, fa.errors.InvalidArgument)
    alone.barrier()


def test_arguments(alone):
    data = np.zeros(3, np.float32)
    for call, said in {
        (lambda: alone.allreduce(data, np.zeros(3))): "recvbuf of type f64",
        (lambda: alone.allreduce(data, np.zeros(2, np.float32))): "recvbuf has 2 elements",
        (lambda: alone.allreduce(data, op="mean")): "mean",
        (lambda: alone.broadcast(data, root=1)): "rank 1 is out of range",
        (lambda: alone.send(data, 1)): "rank 1 is out of range",
        (lambda: alone.shrink([99])): "rank 99 is out of range",
        (lambda: alone.shrink([0])): "survivors",
        (lambda: alone.allreduce(data, stream=5)): "a stream is given",
        (lambda: alone.send(data, 0, stream=0)): "a stream is given",
        (lambda: alone.barrier(stream=5)): "a stream is given",
        (lambda: alone.synchronize(stream=5)): "a stream is given",
        (lambda: alone.allreduce_fused(data, residual=data.copy(), norm="layer-ish", hidden=3)): "layer-ish",
        (lambda: alone.allgather_v(data, data, [1, 2])): "2 numbers for 1 ranks",
        (lambda: alone.allreduce(data[:2], data[1:])): "overlap",
        (lambda: alone.plan(1, "f8")): "f8",
        (lambda: fa.UniqueId(b"short")): "128 bytes",
        (lambda: fa.Communicator.init(17, 0, fa.get_unique_id())): "17",
        (lambda: fa.Communicator.init(1, 1, fa.get_unique_id())): "rank 1",
        (lambda: fa.Communicator.init(1, 0, fa.get_unique_id(), "tpu")): "tpu",
        (lambda: fa.Communicator.init(1, 0, fa.get_unique_id(), timeout=-1)): "timeout",
        (lambda: fa.Communicator.init(1, 0, fa.get_unique_id(), algorithm="tree")): "tree",
        (lambda: fa.Communicator.init(1, 0, fa.get_unique_id(), wait="nap")): "nap",
        (lambda: fa.RawBuffer(0, 0, "f32", device="gpu")): "gpu",
    }.items():
        with pytest.raises(ValueError, match=said):
            call()
    with pytest.raises(TypeError):
        alone.allreduce(data, op=3)
    with pytest.raises(fa.errors.Unavailable, match="allocate it by `alloc`"):
        alone.register_buffer(data)
    with pytest.raises(fa.Error):
        fa.Communicator.init(1, 0, fa.get_unique_id(), "cuda")
    assert alone.plan(1, np.dtype("float32"))[0] == "one-shot-pull"
    alone.destroy()
    with pytest.raises(ValueError, match="destroyed"):
        alone.allreduce(data)


EXTENSIONS = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("name", EXTENSIONS)
def test_types_of_ml_dtypes(alone, name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = getattr(ml_dtypes, name)
    values = np.array([0, -1.5, 2, 3.5, 0.25, -0.5], np.float32)
    data, output = values.astype(dtype), np.zeros(6, dtype)
    alone.allreduce(data, output)
    assert (output.astype(np.float32) == values).all()
    alone.allreduce(output.reshape(2, 3), op="max")
    alone.allreduce(np.zeros((3, 0), dtype))
    with fa.group():
        alone.send(data, 0)
        alone.recv(output[:], 0)
    # The library's memory as numbers of the type.
    shared = np.asarray(alone.alloc(6 * data.itemsize)).view(dtype)
    shared[:] = data
    alone.allreduce(shared, output)
    assert (output.astype(np.float32) == values).all()
    alone.allreduce(fa.RawBuffer(data.ctypes.data, 6, data.dtype))
    assert alone.plan(6, data.dtype)
    frozen = data.copy()
    frozen.flags.writeable = False
    for buffer, said in (
        (data.reshape(2, 3).T, "not contiguous"),
        (data[::2], "not contiguous"),
        (frozen, "read-only"),
        (np.zeros(3, ml_dtypes.int4), "not supported"),
        (np.zeros(3, ml_dtypes.float8_e4m3), "not supported"),
        (np.zeros(3, "V2"), "not supported"),
        (np.zeros(3, [("field", dtype)]), "not supported"),
    ):
        with pytest.raises(ValueError, match=said):
            alone.allreduce(buffer)
    with pytest.raises(ValueError, match="recvbuf of type f32"):
        alone.allreduce(data, np.zeros(6, np.float32))


@on_ranks(3)
def test_sums_of_types_of_ml_dtypes(rank, nranks, unique_id):
    ml_dtypes = pytest.importorskip("ml_dtypes")

    with fa.Communicator.init(nranks, rank, unique_id, timeout=30) as communicator:
        for name in EXTENSIONS:
            inputs = [(np.arange(24) % 5 - 2 + r).astype(getattr(ml_dtypes, name)) for r in range(nranks)]
            output = np.zeros_like(inputs[0])
            communicator.allreduce(inputs[rank], output)
            exact = np.sum([one.astype(np.float32) for one in inputs], axis=0)
            assert (output.astype(np.float32) == exact.astype(output.dtype).astype(np.float32)).all()
            gathered = np.zeros((nranks, 24), output.dtype)
            communicator.allgather(inputs[rank], gathered)
            assert (gathered == np.stack(inputs)).all()


class Raising:
    """An object whose attribute raises."""

    def __init__(self, name, error):
        self.name, self.error = name, error

    def __getattr__(self, name):
        if name == self.name:
            raise self.error
        raise AttributeError(name)


@pytest.mark.parametrize("name", ["__array_interface__", "__cuda_array_interface__", "__dlpack__"])
def test_an_exception_of_a_buffer_is_passed_on(alone, name):
    for error in (ValueError("mine"), RuntimeError("mine"), KeyError("mine")):
        with pytest.raises(type(error)) as caught:
            alone.allreduce(Raising(name, error))
        assert caught.value is error
    # AttributeError means that there is no such attribute.
    with pytest.raises(ValueError, match="which has none of"):
        alone.allreduce(Raising(name, AttributeError(name)))


def test_an_exception_of_an_export_is_the_cause(alone):
    class Exported:
        def __dlpack__(self):
            raise error

    for error in (RuntimeError("mine"), BufferError("mine")):
        with pytest.raises(fa.errors.InvalidArgument, match="mine") as caught:
            alone.allreduce(Exported())
        assert caught.value.__cause__ is error


@on_ranks(2)
def test_tensors(rank, nranks, unique_id):
    torch = pytest.importorskip("torch")
    communicator = fa.Communicator.init(nranks, rank, unique_id, timeout=60)
    for name in ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"):
        data = torch.full((3, 5), rank + 1, dtype=getattr(torch, name))
        output = torch.zeros_like(data)
        communicator.allreduce(data, output)
        communicator.allreduce(data)
        expected = torch.full((3, 5), nranks * (nranks + 1) // 2, dtype=data.dtype)
        assert torch.equal(data, expected) and torch.equal(output, expected)
    for tensor, said in (
        (torch.zeros(4, 4).t(), "not contiguous"),
        (torch.zeros(3, dtype=torch.complex64), "complex64"),
        (torch.zeros(3, device="meta"), "on meta, the communicator's buffers are on cpu"),
    ):
        with pytest.raises(ValueError, match=said):
            communicator.allreduce(tensor)
    communicator.barrier()
