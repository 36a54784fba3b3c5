"""Threads that settle futures: what a program attached to one runs there, and may wait for anything.

Futures are settled one after the other, in the order of their calls, so that calls which callbacks make come in one order on all
ranks. A callback may wait for the future of a call that it has made: such futures have a lane of their own, for each level. Where a
callback waits for one of its own lane, another thread goes on with the lane after a moment. So no wait depends on a thread that waits.

Nothing here takes a lock: an object that goes anywhere in between may run code of the program, which may come here again.
"""

import threading
import time
from queue import Empty, SimpleQueue

# Levels of callbacks whose calls have callbacks. Those beyond share the last lane.
_LANES = 4

# Seconds that a callback has before others of its lane go on without it.
_PATIENCE = 0.1

_here = threading.local()


def lane_here():
    """The lane of futures that this thread asks for: one more than that of the future whose callback it runs."""
    return min(getattr(_here, "lane", 0), _LANES - 1)


class _Lane:
    """Futures that are settled one after the other."""

    def __init__(self, number, watch):
        self._number = number
        self._watch = watch
        self._works = SimpleQueue()
        # Changes when another thread goes on with the lane. None: nobody has begun.
        self._runner = None
        self._is_in_callback = False
        # Futures that have been begun with, and how many these were at the last look.
        self._begun = self._seen = 0

    def hand(self, work):
        """Has a work's future settled; False if no thread is to be had for it."""
        if self._runner is None and not self._start():
            return False
        # The thread says that it is in a callback before it looks for more works, and this is there before it is asked that: one
        # of both finds the other.
        self._works.put(work)
        if self._is_in_callback:
            self._watch()
        return True

    def _start(self):
        before, self._runner = self._runner, threading.Thread(target=self._run, name="fast-allreduce-futures", daemon=True)
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

    def look(self):
        """Has another thread go on if the one that is here has not come back since the last look; whether to look again."""
        begun, seen = self._begun, self._seen
        self._seen = begun
        if self._works.empty():
            return False
        if begun == seen:
            self._start()
        return True

    def stop(self):
        """Has the thread end after what is there, and returns it."""
        self._works.put(None)
        return self._runner

    def settle_here(self):
        """Settles what a thread that has not come back has left."""
        while True:
            try:
                work = self._works.get_nowait()
            except Empty:
                return
            if work is not None:
                work.settle()


class Settlers:
    """The lanes of this process, and a thread that looks whether they go on."""

    def __init__(self):
        self.begin()

    def begin(self):
        """As at first: in a fork, which has no threads."""
        self._lanes = [_Lane(number, self._watch) for number in range(_LANES)]
        self._stopped = False
        self._watcher = None
        self._looks = SimpleQueue()
        self._is_looking = False

    def hand(self, work, lane):
        """Has the future of a work settled by another thread."""
        if self._stopped or not self._lanes[lane].hand(work):
            work.settle()

    def _watch(self):
        """Has somebody look, after a moment, whether the lanes go on."""
        if self._is_looking:
            return
        self._is_looking = True
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._look, name="fast-allreduce-watch", daemon=True)
            try:
                self._watcher.start()
            except RuntimeError:
                # The next one tries again.
                self._watcher, self._is_looking = None, False
                return
        self._looks.put(None)

    def _look(self):
        while not self._stopped:
            self._looks.get()
            self._is_looking = False
            looks = True
            while looks and not self._stopped:
                time.sleep(_PATIENCE)
                looks = any([lane.look() for lane in self._lanes])

    def stop(self, until):
        """Ends the threads, and waits for those that are in callbacks until then. Later futures are settled by whoever comes."""
        self._stopped = True
        for runner in [lane.stop() for lane in self._lanes]:
            if runner is not None and runner is not threading.current_thread():
                runner.join(max(0.0, until - time.monotonic()))
        for lane in self._lanes:
            lane.settle_here()


settlers = Settlers()
