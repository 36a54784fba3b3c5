"""The order of a process group's calls: what is carried out at once, what is queued, and by whom that is carried out."""

import atexit
import os
import sys
import threading
import time
import weakref
from collections import deque
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .. import errors, group
from .devices import current_stream, seconds
from .settling import lane_here, settlers

# As many messages as go into one launch.
_MESSAGES = 64

# Seconds that the caller of an asynchronous call has to wait for it itself.
_HEAD_START = 0.001

# Seconds that calls which nobody has waited for have when the interpreter ends, and that threads have after them.
_AT_EXIT = 5.0
_THREADS_AT_EXIT = 1.0


def within_another():
    """The error of a call that cannot keep its order."""
    return errors.Unavailable(
        "a call of a process group from within another one: code of the program, such as a __del__, has run in the middle of it",
        what="a call within another", reason="calls of a group keep their order",
    )  # fmt: skip


class Work(dist._Work):
    """A call that has been made: carried out already, or queued. One on a GPU has been put on a stream."""

    def __init__(self, queue, call=None, tensors=(), stream=None, limit=None):
        super().__init__()
        self._queue = queue
        self._call = call
        self._tensors = tensors
        self._error = None
        # Seconds.
        self._limit = limit
        self._done = call is None
        self._stream = stream
        self._event = stream.record_event() if stream is not None and self._done else None

    def _finish(self, error):
        self._error = error
        self._call = None
        if self._stream is not None and error is None:
            self._event = self._stream.record_event()
        # Before it looks for a future: `get_future` puts one there before it looks whether this is done.
        self._done = True

    def settle(self):
        """Settles the future, and so runs what the program attached to it. Once: a second time is nothing."""
        unsettled, begin = self._future[1:3]
        try:
            unsettled.pop()
        except IndexError:
            return
        try:
            if self._stream is None:
                begin.set_result(None)
            elif self._error is not None:
                begin.set_exception(self._error)
            else:
                # Who waits for the future waits for what is on this stream by now.
                with torch.cuda.stream(self._stream):
                    begin.set_result(list(self._tensors))
        except RuntimeError:
            # The program has settled it itself.
            pass

    def _outcome(self, _):
        if self._error is not None:
            raise self._error
        return list(self._tensors)

    def wait(self, timeout=None):
        if not self._done:
            self._queue.carry_out(self, seconds(timeout) if timeout is not None else 0)
            if not self._done:
                raise within_another()
        if "_future" in self.__dict__:
            self._await_settling()
        if self._error is not None:
            raise self._error
        if self._event is not None:
            current_stream(self._stream.device).wait_event(self._event)
        return True

    def _await_settling(self):
        """Returns when the future is done, which it is before its callbacks begin."""
        try:
            self._future[0].wait()
        except Exception:
            # It is this work's error.
            pass

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
        if "_future" not in self.__dict__:
            if self._stream is None:
                begin = torch.futures.Future()
                # An exception that is set by `set_exception` is a result like any other once c10d has handed the future on.
                future = begin.then(self._outcome)
            else:
                begin = future = torch.futures.Future(devices=[self._stream.device])
            # One call puts it there, whichever threads come, without a lock that a call might be carried out under.
            self.__dict__.setdefault("_future", (future, [True], begin, lane_here()))
            if self._done:
                self.settle()
        return self._future[0]


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
    # Another thread of the parent may have held the lock, and its threads are not here. Calls say that this is a fork.
    settlers.begin()
    for queue in _queues:
        queue._begin()


os.register_at_fork(after_in_child=_forked)


@atexit.register
def _end():
    """Ends the threads before the interpreter does: one that is in torch's C++ then would abort the process.

    Threads that the program waits for have ended. Handlers that were registered earlier may still make calls.
    """
    global _ending_thread
    until = time.monotonic() + _AT_EXIT
    for queue in list(_queues):
        queue.end(until)
    settlers.stop(time.monotonic() + _THREADS_AT_EXIT)
    if _queues:
        _ending_thread = threading.get_ident()
        until = time.monotonic() + _AT_EXIT
        while _is_called_elsewhere() and time.monotonic() < until:
            time.sleep(0.001)


# The thread in which the interpreter ends, once only daemon threads are left beside it, and those that `_halt` keeps.
_ending_thread = None
_halted = set()


def _halt():
    """Keeps a daemon thread while the interpreter ends. It has come through torch's C++, which it must not go back to."""
    if _ending_thread not in (None, threading.get_ident()):
        _halted.add(threading.get_ident())
        # Not for ever: a handler of the program may wait for the thread.
        threading.Event().wait(_AT_EXIT)


def _is_called_elsewhere():
    """Whether another thread is in a function of torch.distributed and has not come to `_halt`."""
    for thread, frame in sys._current_frames().items():
        if thread in _halted or thread == _ending_thread:
            continue
        while frame is not None:
            if frame.f_code.co_filename == distributed_c10d.__file__:
                return True
            frame = frame.f_back
    return False


class Queue:
    """What has been called and not carried out; messages at its end go together."""

    def __init__(self, devices):
        self._devices = devices
        self.closed = False
        self._begin()
        _queues.add(self)

    def _begin(self):
        # Held while a call is carried out, so that calls keep their order. What a program attached to a call never runs under it.
        self.lock = threading.RLock()
        self._works = deque()
        self._worker = None
        # Under the lock. Code of the program may still run in the middle of a call, such as the `__del__` of an object that goes.
        self._is_in_call = False
        # Taken by the one who starts the group's thread.
        self._unstarted = [True]
        # Its `put` may come in the middle of another one, for the same reason.
        self._wakeups = SimpleQueue()
        self._wakes = False
        self._coalescing = None
        # Nothing is left for later.
        self._stopped = self.closed

    # --- making calls ---

    def make(self, later, call, tensors=(), stream=None, limit=None):
        """Carries a call out, or queues it if that may be `later`. Calls on a stream are put there at once: nobody waits."""
        _halt()
        limit = limit or self._devices.timeout
        if stream is None and (self._coalescing is not None or later):
            work = Work(self, call, tensors, limit=limit)
            self._works.append(work)
            if self._coalescing is not None:
                self._coalescing.append(work)
            else:
                self._wake()
            return work
        with self.lock:
            self.drain()
            self._perform(call, limit)
        work = Work(self, None, tensors, stream)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def message(self, *message):
        _halt()
        work = Message(self, self._devices, *message)
        self._works.append(work)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def start_coalescing(self):
        self._coalescing = []

    def end_coalescing(self):
        works, self._coalescing = self._coalescing or [], None
        if not works:
            return Work(self)
        last = works[-1]
        if last._stream is not None and last._done:
            return last

        def call():
            for work in works:
                if work._error is not None:
                    raise work._error

        # After all of the batch.
        tensors = () if isinstance(last, Message) else last._tensors
        last = Work(self, call, tensors, last._stream)
        self._works.append(last)
        self._wake()
        return last

    # --- carrying them out ---

    def _perform(self, call, limit):
        """Carries a call out, waiting so many seconds for other ranks at most. The lock is held."""
        if self._is_in_call:
            raise within_another()
        self._is_in_call = True
        try:
            self._devices.limit(limit)
            call()
        except errors.Error as error:
            self._devices.name_globally(error)
            raise
        finally:
            self._is_in_call = False

    def drain(self, last=None, until=None):
        """Carries out what is queued, as far as a work, and until then as the clock has it. The lock is held."""
        while self._works and not (last is not None and last._done) and not self._is_in_call:
            works = [self._works.popleft()]
            if isinstance(works[0], Message):
                while self._works and len(works) < _MESSAGES and isinstance(self._works[0], Message):
                    works.append(self._works.popleft())
            limit = works[0]._limit or self._devices.timeout
            if until is not None:
                limit = min(limit, max(round(until - time.monotonic(), 3), 0.001))
            error = None
            try:
                self._perform(lambda works=works: self._carry_out(works), limit)
            except BaseException as raised:
                error = raised
            for work in works:
                work._finish(error)
            for work in works:
                if "_future" in work.__dict__:
                    settlers.hand(work, work._future[3])
            if error is not None and not isinstance(error, Exception):
                # Ctrl-C is for the thread that is here, whosever call it was in.
                raise error

    @staticmethod
    def _carry_out(works):
        if not isinstance(works[0], Message):
            works[0]._call()
            return
        with group():
            for message in works:
                message.put()

    def carry_out(self, work, timeout=0):
        """Returns when a work is done. If that takes longer than so many seconds, this rank gives up for the group."""
        _halt()
        if timeout <= 0:
            with self.lock:
                self.drain(work)
            return
        until = time.monotonic() + timeout
        if self.lock.acquire(timeout=timeout):
            try:
                self.drain(work, until)
            finally:
                self.lock.release()
            return
        # Another thread is in a call of the group. It ends with the group.
        behind = self._devices.behind()
        self._devices.abort()
        with self.lock:
            self.drain(work)
        if isinstance(work._error, errors.Aborted):
            ranks = ", ".join(f"rank {rank}" for rank in behind)
            work._error = errors.Timeout(
                f"a call of the process group was not done within {timeout} s"
                f"{', waiting for ' + ranks if ranks else ''}; the group is aborted",
                operation="wait", missing=behind, waited=timeout, last_seen="", epoch=0,
            )  # fmt: skip
            self._devices.name_globally(work._error)

    # --- the group's thread ---

    def _wake(self):
        """Has the group's thread look at the queue, in a moment."""
        if self._wakes and not self._stopped:
            return
        self._wakes = True
        if self._stopped or not self._is_started():
            # Nobody will look.
            with self.lock:
                self.drain()
            return
        self._wakeups.put(None)

    def _is_started(self):
        """Starts the group's thread if it has not been; False if no thread is to be had."""
        try:
            self._unstarted.pop()
        except IndexError:
            return True
        self._worker = threading.Thread(target=self._work, name="fast-allreduce-group", daemon=True)
        try:
            self._worker.start()
        except RuntimeError:
            self._worker = None
            self._wakes = False
            self._unstarted.append(True)
            return False
        return True

    def _work(self):
        while not self._stopped:
            self._wakeups.get()
            if not self._stopped:
                # Who waits at once does it itself; and a thread is woken once in a while, not for each call.
                time.sleep(_HEAD_START)
            self._wakes = False
            with self.lock:
                # Messages at the end wait for those that may come: the peer's may depend on them.
                while self._works and any(not isinstance(work, Message) for work in self._works):
                    self.drain(next(work for work in self._works if not isinstance(work, Message)))
        with self.lock:
            # No more come.
            self.drain()

    def stop(self):
        """Has nothing left for later: the group's thread ends when it has carried out what is there."""
        self._stopped = True
        self._wakeups.put(None)

    def end(self, until):
        """Carries out what is left, until then, and returns when the group's thread has ended."""
        self.stop()
        if self.lock.acquire(timeout=max(0.0, until - time.monotonic())):
            try:
                self.drain(until=until)
            finally:
                self.lock.release()
        else:
            # A call still waits.
            self._devices.abort()
        if self._worker is not None and self._worker is not threading.current_thread():
            self._worker.join(_THREADS_AT_EXIT)

    def close(self, end):
        self.closed = True
        end()
        # What is left ends with the error that the group has now.
        self.stop()
        if self._works:
            self._wake()
