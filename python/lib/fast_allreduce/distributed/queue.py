"""The queue of a process group's calls: which run at once, which are queued, and in which thread those run."""

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

from .. import errors
from .devices import current_stream, seconds
from .settling import current_lane, settlers

# The number of messages that one launch takes.
_MESSAGES = 64

# Seconds before the group's thread takes an asynchronous call: a caller that waits sooner runs it itself.
_HEAD_START = 0.001

# Limits in seconds when the interpreter ends: for calls that nobody has waited for, and for threads after them.
_AT_EXIT = 5.0
_THREADS_AT_EXIT = 1.0


def within_another():
    """Returns the error of a call from within another one, which cannot keep its order."""
    return errors.Unavailable(
        "a call of a process group from within another one: code of the program, such as a __del__, has run during it",
        what="a call within another", reason="calls of a group keep their order",
    )  # fmt: skip


class Work(dist._Work):
    """A call: completed, queued, or on a GPU enqueued on a stream. Methods are those of torch's `Work`."""

    def __init__(self, queue, call=None, tensors=(), stream=None, limit=None):
        super().__init__()
        self._queue = queue
        self._call = call
        self._tensors = tensors
        self._error = None
        # The call's own limit in seconds, or None.
        self._limit = limit
        self._done = call is None
        self._stream = stream
        self._event = stream.record_event() if stream is not None and self._done else None

    def _finish(self, error):
        self._error = error
        self._call = None
        if self._stream is not None and error is None:
            self._event = self._stream.record_event()
        # Set before the caller checks for a future. `get_future` stores one before it reads this. So one of them sees
        # the other.
        self._done = True

    def settle(self):
        """Settles the future, which runs its callbacks. A second call does nothing."""
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
                # A wait for the future waits for the work that is on this stream now.
                with torch.cuda.stream(self._stream):
                    begin.set_result(list(self._tensors))
        except RuntimeError:
            # The program has settled it.
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
        """Waits until the future is done, which is before its callbacks run."""
        try:
            self._future[0].wait()
        except Exception:
            # The error is this work's, which the caller raises.
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
                # c10d turns an exception set by `set_exception` into a plain result when it passes the future on.
                future = begin.then(self._outcome)
            else:
                begin = future = torch.futures.Future(devices=[self._stream.device])
            # `setdefault` stores one future even if several threads come here, without a lock.
            self.__dict__.setdefault("_future", (future, [True], begin, current_lane()))
            if self._done:
                self.settle()
        return self._future[0]


class Message(Work):
    """A message, which runs concurrently with adjacent messages of the queue."""

    def __init__(self, queue, devices, tensor, peer, tag, sends, tensors):
        super().__init__(queue, self.put, tensors, current_stream(tensor.device))
        self._devices = devices
        self._tensor, self._peer, self._tag, self._sends = tensor, peer, tag, sends

    def is_completed(self):
        # A program that polls has already queued the messages that belong together.
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


# All queues of this process.
_queues = weakref.WeakSet()


def _forked():
    # Another thread of the parent may have held the lock, and its threads do not exist here. Calls raise `Forked`.
    settlers.begin()
    for queue in _queues:
        queue._begin()


os.register_at_fork(after_in_child=_forked)


@atexit.register
def _end():
    """Ends the threads before the interpreter ends: a thread that is in torch's C++ then would abort the process.

    Non-daemon threads have ended. Exit handlers that were registered earlier may still make calls.
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


# The thread in which the interpreter ends, once only daemon threads are left, and the daemon threads that `_halt` has
# stopped.
_ending_thread = None
_halted = set()


def _halt():
    """Stops a daemon thread while the interpreter ends. Its caller is torch's C++ code, to which it must not return."""
    if _ending_thread not in (None, threading.get_ident()):
        _halted.add(threading.get_ident())
        # Not forever: an exit handler of the program may wait for the thread.
        threading.Event().wait(_AT_EXIT)


def _is_called_elsewhere():
    """Returns whether another thread is in a function of torch.distributed, outside of `_halt`."""
    for thread, frame in sys._current_frames().items():
        if thread in _halted or thread == _ending_thread:
            continue
        while frame is not None:
            if frame.f_code.co_filename == distributed_c10d.__file__:
                return True
            frame = frame.f_back
    return False


class Queue:
    """Calls that have been made and have not run. Adjacent messages run together."""

    def __init__(self, devices):
        self._devices = devices
        self.closed = False
        self._begin()
        _queues.add(self)

    def _begin(self):
        # Held while a call runs, so that calls keep their order. Callbacks of the program never run under it.
        self.lock = threading.RLock()
        self._works = deque()
        self._worker = None
        # Guarded by the lock. Code of the program can still run during a call, such as the `__del__` of a dropped
        # object.
        self._is_in_call = False
        # Holds one token, which the caller that starts the group's thread pops.
        self._unstarted = [True]
        # A SimpleQueue, because its `put` can run during another `put`, for the same reason.
        self._wakeups = SimpleQueue()
        self._wakes = False
        self._coalescing = None
        # Whether calls are no longer left to the group's thread.
        self._stopped = self.closed

    # --- making calls ---

    def make(self, later, call, tensors=(), stream=None, limit=None):
        """Runs a call, or queues it if it may run `later`.

        Calls on a stream are enqueued at once. Returns its `Work`, or None if it is done: torch's layers then make
        no work and do not wait for it.
        """
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
        if stream is None:
            return None
        work = Work(self, None, tensors, stream)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def message(self, *message):
        """Queues a message. Returns its `Work`."""
        _halt()
        work = Message(self, self._devices, *message)
        self._works.append(work)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def start_coalescing(self):
        """Begins a batch of calls."""
        self._coalescing = []

    def end_coalescing(self):
        """Ends a batch. Returns a `Work` for all of its calls."""
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

        # Queued after the whole batch.
        tensors = () if isinstance(last, Message) else last._tensors
        last = Work(self, call, tensors, last._stream)
        self._works.append(last)
        self._wake()
        return last

    # --- running calls ---

    def _perform(self, call, limit):
        """Runs a call, with a limit in seconds for its waits. The caller holds the lock."""
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
        """Runs queued calls: until `last` is done, or all. Waits end at the time `until`. The caller holds the lock."""
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
                    settlers.submit(work, work._future[3])
            if error is not None and not isinstance(error, Exception):
                # KeyboardInterrupt belongs to this thread, whichever call it interrupted.
                raise error

    def _carry_out(self, works):
        if not isinstance(works[0], Message):
            works[0]._call()
            return
        with self._devices.messages():
            for message in works:
                message.put()

    def carry_out(self, work, timeout=0):
        """Returns when a work is done. After `timeout` seconds (0: no limit) it aborts the group instead."""
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
        # Another thread is in a call of the group. The abort ends that call.
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
        """Makes the group's thread run the queue soon."""
        if self._wakes and not self._stopped:
            return
        self._wakes = True
        if self._stopped or not self._is_started():
            # There is no thread to run it.
            with self.lock:
                self.drain()
            return
        self._wakeups.put(None)

    def _is_started(self):
        """Starts the group's thread unless it runs. Returns False if it cannot be started."""
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

    def _first_call(self):
        """Returns the first queued call that is not a message, or None."""
        # A copy, because other threads queue calls meanwhile.
        return next((work for work in self._works.copy() if not isinstance(work, Message)), None)

    def _work(self):
        while not self._stopped:
            self._wakeups.get()
            if not self._stopped:
                # A caller that waits at once runs the call itself. And the thread wakes once for several calls.
                time.sleep(_HEAD_START)
            self._wakes = False
            with self.lock:
                # Messages at the end stay queued, because later ones may have to run with them.
                while (call := self._first_call()) is not None:
                    self.drain(call)
        with self.lock:
            # No more calls are queued.
            self.drain()

    def stop(self):
        """Ends the group's thread after the calls that are queued. Later calls run in their callers."""
        self._stopped = True
        self._wakeups.put(None)

    def end(self, until):
        """Runs the remaining calls, with waits that end at the time `until`, and joins the group's thread."""
        self.stop()
        if self.lock.acquire(timeout=max(0.0, until - time.monotonic())):
            try:
                self.drain(until=until)
            finally:
                self.lock.release()
        else:
            # Another thread is still in a call.
            self._devices.abort()
        if self._worker is not None and self._worker is not threading.current_thread():
            self._worker.join(_THREADS_AT_EXIT)

    def close(self, end):
        """Ends the group by `end()`. Remaining calls fail with its error."""
        self.closed = True
        end()
        self.stop()
        if self._works:
            self._wake()
