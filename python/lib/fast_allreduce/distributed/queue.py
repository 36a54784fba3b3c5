"""The order of a process group's calls: what is carried out at once, what is queued, and by whom that is carried out."""

import os
import threading
import time
import weakref
from collections import deque

import torch
import torch.distributed as dist

from .. import errors, group
from .devices import current_stream, seconds

# As many messages as go into one launch.
_MESSAGES = 64

# Seconds that the caller of an asynchronous call has to wait for it itself.
_HEAD_START = 0.001


class Work(dist._Work):
    """A call that has been made: carried out already, or queued. One on a GPU has been put on a stream."""

    def __init__(self, queue, call=None, tensors=(), stream=None):
        super().__init__()
        self._queue = queue
        self._call = call
        self._tensors = tensors
        self._error = None
        self._future = None
        # Done too before this one is.
        self._after = None
        self._done = call is None
        self._stream = stream
        self._event = stream.record_event() if stream is not None and self._done else None

    def _run(self):
        """Carries the call out. The queue's lock is held."""
        error = None
        try:
            self._call()
            if self._after is not None:
                self._after()
        except BaseException as raised:
            error = raised
        self._finish(error)

    def _finish(self, error):
        self._error = error
        self._call = None
        if self._stream is not None and error is None:
            self._event = self._stream.record_event()
        self._done = True
        if self._future is not None:
            self._settle(self._future)

    def _settle(self, future):
        if self._error is not None:
            future.set_exception(self._error)
        elif self._stream is None:
            future.set_result(list(self._tensors))
        else:
            # Who waits for the future waits for what is on this stream by now.
            with torch.cuda.stream(self._stream):
                future.set_result(list(self._tensors))

    def wait(self, timeout=None):
        if not self._done:
            self._queue.carry_out(self, timeout)
        if self._error is not None:
            raise self._error
        if self._event is not None:
            current_stream(self._stream.device).wait_event(self._event)
        return True

    def synchronize(self):
        self.wait()

    def is_completed(self):
        return self._done and (self._event is None or self._event.query())

    def is_success(self):
        return self.is_completed() and self._error is None

    def exception(self):
        return self._error

    def result(self):
        return list(self._tensors)

    def get_future(self):
        if self._future is None:
            future = torch.futures.Future(devices=[self._stream.device] if self._stream is not None else None)
            # Carried out meanwhile, it would settle this one or not: under the lock it has or it has not been.
            with self._queue.lock:
                if self._done:
                    self._settle(future)
                self._future = future
        return self._future


class Message(Work):
    """A message, which goes with those beside it."""

    def __init__(self, queue, devices, tensor, peer, tag, sends, tensors):
        super().__init__(queue, self.put, tensors, current_stream(tensor.device))
        self._devices = devices
        self._tensor, self._peer, self._tag, self._sends = tensor, peer, tag, sends

    def is_completed(self):
        # Whoever asks again and again has put together what goes together.
        if not self._done:
            self._queue.carry_out(self)
        return super().is_completed()

    def put(self):
        communicator = self._devices.of(self._tensor)
        call = communicator.send if self._sends else communicator.recv
        call(self._tensor, self._peer, tag=self._tag, stream=self._stream)

    def _source_rank(self):
        return self._peer

    source_rank = _source_rank


# Of this process.
_queues = weakref.WeakSet()


def _forked():
    # Another thread of the parent may have held the lock, and its worker is not here. Calls say that this is a fork.
    for queue in _queues:
        queue._begin()


os.register_at_fork(after_in_child=_forked)


class Queue:
    """What has been called and not carried out; messages at its end go together."""

    def __init__(self, devices):
        self._devices = devices
        self._begin()
        self.closed = False
        _queues.add(self)

    def _begin(self):
        # Held while a call is carried out, so that calls keep their order.
        self.lock = threading.RLock()
        self._works = deque()
        self._worker = None
        self._woken = threading.Event()
        self._wakes = False
        self._coalescing = None

    def make(self, later, call, tensors=(), stream=None):
        """Carries a call out, or queues it if that may be `later`. Calls on a stream are put there at once: nobody waits."""
        if stream is None and (self._coalescing is not None or later):
            work = Work(self, call, tensors)
            self._works.append(work)
            if self._coalescing is not None:
                self._coalescing.append(work)
            elif not self._wakes:
                self._wake()
            return work
        with self.lock:
            if self._works:
                self.drain()
            call()
        work = Work(self, None, tensors, stream)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def message(self, *message):
        work = Message(self, self._devices, *message)
        self._works.append(work)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def drain(self, until=None):
        """Carries out what is queued, as far as `until`. The lock is held."""
        while self._works and not (until is not None and until._done):
            work = self._works.popleft()
            if isinstance(work, Message):
                messages = [work]
                while self._works and isinstance(self._works[0], Message):
                    messages.append(self._works.popleft())
                self._exchange(messages)
            else:
                work._run()

    @staticmethod
    def _exchange(messages):
        for start in range(0, len(messages), _MESSAGES):
            part = messages[start : start + _MESSAGES]
            error = None
            try:
                with group():
                    for message in part:
                        message.put()
            except BaseException as raised:
                error = raised
            for message in part:
                message._finish(error)

    def carry_out(self, work, timeout=None):
        if timeout is None or seconds(timeout) <= 0:
            with self.lock:
                self.drain(work)
            return
        # The library's own limit may be longer: then this rank gives up for the group.
        timer = threading.Timer(seconds(timeout), self._devices.abort)
        timer.daemon = True
        timer.start()
        try:
            with self.lock:
                self.drain(work)
        finally:
            timer.cancel()
        if isinstance(work._error, errors.Aborted):
            work._error = errors.Timeout(
                f"a call of the process group was not done within {seconds(timeout)} s; the group is aborted",
                operation="wait", missing=[], waited=seconds(timeout), last_seen="", epoch=0,
            )  # fmt: skip

    def _wake(self):
        """Has the group's thread look at the queue, in a moment."""
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="fast-allreduce-group", daemon=True)
            self._worker.start()
        self._wakes = True
        self._woken.set()

    def _work(self):
        while not self.closed:
            self._woken.wait()
            self._woken.clear()
            # Who waits at once does it itself; and a thread is woken once in a while, not for each call.
            time.sleep(_HEAD_START)
            self._wakes = False
            with self.lock:
                # Messages at the end wait for those that may come: the peer's may depend on them.
                while self._works and any(not isinstance(work, Message) for work in self._works):
                    self.drain(next(work for work in self._works if not isinstance(work, Message)))

    def start_coalescing(self):
        self._coalescing = []

    def end_coalescing(self):
        works, self._coalescing = self._coalescing or [], None
        if not works:
            return Work(self)
        last = works[-1]

        def call():
            for work in works:
                if work._error is not None:
                    raise work._error

        if isinstance(last, Message):
            # Nothing of the batch is still to come: it may be begun.
            last = Work(self, call, stream=last._stream)
            self._works.append(last)
        else:
            with self.lock:
                last._after = call
                if last._done and last._error is None:
                    # It was carried out before it was known to be the last.
                    last._done = False
                    last._call = last._after
                    last._after = None
                    self._works.append(last)
        self._wake()
        return last

    def close(self, end):
        self.closed = True
        self._woken.set()
        end()
