"""Threads that settle futures. A program's callbacks run in them, and may wait for anything.

Futures are settled one after the other, in the order of their calls, so that calls made by callbacks have one order on
all ranks. A callback may wait for the future of a call that it has made: futures of each nesting level have a separate
lane. If a callback waits for a future of its own lane, another thread continues the lane after a moment. So no wait
depends on a thread that waits.

Nothing here takes a lock: dropping an object may run code of the program at any point, and that code may enter this
module again.
"""

import threading
import time
from queue import Empty, SimpleQueue

# Number of nesting levels of callbacks with separate lanes. Deeper levels share the last lane.
_LANES = 4

# Seconds after which a lane continues without a callback that has not returned.
_CALLBACK_TIME = 0.1

_here = threading.local()


def current_lane():
    """Returns the lane of futures that this thread creates: the one after that of the callback it runs."""
    return min(getattr(_here, "lane", 0), _LANES - 1)


class _Lane:
    """Futures that are settled one after the other."""

    def __init__(self, number, watch):
        self._number = number
        self._watch = watch
        self._works = SimpleQueue()
        # The thread that runs the lane. None before the first.
        self._runner = None
        self._is_in_callback = False
        # Number of futures begun, and that number at the last check.
        self._begun = self._seen = 0

    def submit(self, work):
        """Queues a work's future. Returns False if no thread can be started."""
        if self._runner is None and not self._start():
            return False
        # The thread sets `_is_in_callback` before it looks for more works, and this puts the work before it reads the
        # flag. So at least one of them sees the other.
        self._works.put(work)
        if self._is_in_callback:
            self._watch()
        return True

    def _start(self):
        before = self._runner
        self._runner = threading.Thread(target=self._run, name="fast-allreduce-futures", daemon=True)
        try:
            self._runner.start()
        except RuntimeError:
            self._runner = before
            return False
        return True

    def _run(self):
        _here.lane = self._number + 1
        while self._runner is threading.current_thread():
            self._is_in_callback = False
            work = self._works.get()
            if work is None:
                return
            self._begun += 1
            self._is_in_callback = True
            if not self._works.empty():
                self._watch()
            work.settle()

    def check_progress(self):
        """Continues the lane in another thread if the current one has not returned since the last check.

        Returns whether to check again.
        """
        begun, seen = self._begun, self._seen
        self._seen = begun
        if self._works.empty():
            return False
        if begun == seen:
            self._start()
        return True

    def stop(self):
        """Ends the thread after the queued futures. Returns the thread."""
        self._works.put(None)
        return self._runner

    def settle_here(self):
        """Settles the futures that a thread which has not returned has left."""
        while True:
            try:
                work = self._works.get_nowait()
            except Empty:
                return
            if work is not None:
                work.settle()


class Settlers:
    """The lanes of this process, and a thread that checks their progress."""

    def __init__(self):
        self.begin()

    def begin(self):
        """Resets to the initial state, also in a fork, which has no threads."""
        self._lanes = [_Lane(number, self._watch) for number in range(_LANES)]
        self._stopped = False
        self._watcher = None
        self._wakeups = SimpleQueue()
        self._is_watching = False

    def submit(self, work, lane):
        """Settles the future of a work in another thread, or in this one if none can be started."""
        if self._stopped or not self._lanes[lane].submit(work):
            work.settle()

    def _watch(self):
        """Schedules a check of the lanes' progress."""
        if self._is_watching:
            return
        self._is_watching = True
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch_lanes, name="fast-allreduce-watch", daemon=True)
            try:
                self._watcher.start()
            except RuntimeError:
                # The next call tries again.
                self._watcher, self._is_watching = None, False
                return
        self._wakeups.put(None)

    def _watch_lanes(self):
        while not self._stopped:
            self._wakeups.get()
            self._is_watching = False
            again = True
            while again and not self._stopped:
                time.sleep(_CALLBACK_TIME)
                again = any([lane.check_progress() for lane in self._lanes])

    def stop(self, until):
        """Ends the threads, and waits for running callbacks until a time.

        Later futures are settled by the threads that complete them.
        """
        self._stopped = True
        for runner in [lane.stop() for lane in self._lanes]:
            if runner is not None and runner is not threading.current_thread():
                runner.join(max(0.0, until - time.monotonic()))
        for lane in self._lanes:
            lane.settle_here()


settlers = Settlers()
