"""Streams, arrays and captures for tests, by functions of the CUDA driver."""

import contextlib
import ctypes
import threading

import numpy as np


class Driver:
    """The driver's functions that tests need, on one device."""

    def __init__(self, ordinal):
        self.ordinal = ordinal
        self.library = ctypes.CDLL("libcuda.so.1")
        device, self.context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.call("cuCtxSetCurrent", self.context)

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    @contextlib.contextmanager
    def here(self):
        """Makes the device's context current, and restores the previous one."""
        before = self.current()
        self.call("cuCtxSetCurrent", self.context)
        yield
        self.call("cuCtxSetCurrent", ctypes.c_void_p(before))

    def stream(self):
        made = ctypes.c_void_p()
        with self.here():
            self.call("cuStreamCreate", ctypes.byref(made), 1)
        return Stream(self, made.value)

    def array(self, of, **interface):
        with self.here():
            return Array(self, np.ascontiguousarray(of), interface)

    def synchronize(self):
        self.call("cuCtxSynchronize")

    def current(self):
        """Returns the handle of the current context, or None."""
        context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value

    def order(self, earlier, later):
        """Makes one stream wait for another, as exporters of memory do."""
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), 2)
        self.call("cuEventRecord", event, ctypes.c_void_p(earlier))
        self.call("cuStreamWaitEvent", ctypes.c_void_p(later), event, 0)
        self.call("cuEventDestroy_v2", event)


class Stream:
    """A stream with the interfaces of torch's and of other libraries' protocol."""

    def __init__(self, driver, handle):
        self.driver, self.cuda_stream = driver, handle
        # A torch.device, set by tests that use torch.
        self.device = None
        self.waits = 0

    def __cuda_stream__(self):
        return (0, self.cuda_stream)

    def synchronize(self):
        self.driver.call("cuStreamSynchronize", ctypes.c_void_p(self.cuda_stream))

    def is_done(self):
        code = self.driver.library.cuStreamQuery(ctypes.c_void_p(self.cuda_stream))
        assert code in (0, 600), code
        return code == 0

    def hold(self):
        """Blocks the stream. Returns the event that releases it."""
        released = threading.Event()
        self.held = HOST_FUNCTION(lambda _: released.wait(60) and None)
        self.driver.call("cuLaunchHostFunc", ctypes.c_void_p(self.cuda_stream), self.held, None)
        return released

    def begin_capture(self):
        self.driver.call("cuStreamBeginCapture_v2", ctypes.c_void_p(self.cuda_stream), 0)

    def end_capture(self):
        """Returns a function that launches the captured graph."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self.driver.call("cuStreamEndCapture", ctypes.c_void_p(self.cuda_stream), ctypes.byref(graph))
        self.driver.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        return lambda: self.driver.call("cuGraphLaunch", executable, ctypes.c_void_p(self.cuda_stream))

    def record_event(self):
        return self

    def wait_event(self, _):
        self.waits += 1

    def query(self):
        return True


HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Array:
    """Memory of a GPU with an array interface, of version 2 unless another is given."""

    def __init__(self, driver, of, interface):
        self.driver, self.of, self.interface = driver, of, {"version": 2, **interface}
        address = ctypes.c_uint64()
        driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(of.nbytes, 1)))
        self.address = address.value
        driver.call("cuMemcpyHtoD_v2", address, of.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(of.nbytes))
        # The copy may return before it is complete, and other streams do not wait for it.
        driver.synchronize()

    @property
    def __cuda_array_interface__(self):
        described = {
            "shape": self.of.shape,
            "typestr": self.of.dtype.str,
            "data": (self.address, False),
            "strides": None,
        }
        return {**described, **self.interface}

    def set(self, of, stream):
        """Copies other values to the memory, on a stream."""
        self.of = np.ascontiguousarray(of)
        source, count = self.of.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(self.of.nbytes)
        address = ctypes.c_uint64(self.address)
        self.driver.call("cuMemcpyHtoDAsync_v2", address, source, count, ctypes.c_void_p(stream.cuda_stream))

    def numpy(self):
        found = np.empty_like(self.of)
        address = ctypes.c_uint64(self.address)
        self.driver.call(
            "cuMemcpyDtoH_v2", found.ctypes.data_as(ctypes.c_void_p), address, ctypes.c_size_t(found.nbytes)
        )
        return found
