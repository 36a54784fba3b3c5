"""How the ranks of a process group meet by torch's store, which may hold what an earlier life of the group left in it.

Rank 0 draws a name for this life and puts it there. Each other rank answers to the name that it finds, and again where a later name
has replaced it. When all have answered to its own, rank 0 puts the id of a rendezvous there, with the name. So what was there before
counts for nothing, except an id that ranks can still meet by, which is how one that starts anew alone comes to the others.
"""

import os
import time

from .. import Communicator, UniqueId, errors, get_unique_id
from ..process_group import check_nodes, node

# Between two looks at the store, in seconds: soon at first, as ranks mostly come together.
_LOOKS = (0.001, 0.1)

# Errors that an earlier life may be the reason of: it was elsewhere, or its rendezvous answers so, or ends.
_ELSEWHERE = (errors.InvalidArgument, errors.Rendezvous, errors.Refused, errors.PeerLost, errors.PeerFailed)


class _Meeting:
    def __init__(self, store, rank, size, limit, global_ranks):
        self._store, self._rank, self._size, self._limit = store, rank, size, limit
        self._global_ranks = global_ranks
        self._until = time.monotonic() + limit

    def _get(self, key):
        """What the store has, or None: its own `get` would wait for it."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _nodes(self, name):
        """What the ranks that have answered to that name say about where they are."""
        answers = {rank: self._get(f"rank_{rank}") or "" for rank in range(self._size)}
        return {rank: answer.partition("|")[2] for rank, answer in answers.items() if answer.partition("|")[0] == name}

    def _answer(self, name):
        self._store.set(f"rank_{self._rank}", f"{name}|{node()}")

    def _check(self, nodes):
        if len(nodes) == self._size:
            check_nodes(self._rank, [nodes[rank] for rank in range(self._size)])

    def _looks(self):
        """Comes back again and again until the time is up."""
        pause, longest = _LOOKS
        while True:
            # Asked before the look, so that the last look comes after the limit.
            left = self._until - time.monotonic()
            yield
            if left <= 0:
                return
            time.sleep(min(pause, left))
            pause = min(2 * pause, longest)

    def _join(self, unique_id):
        return Communicator.init(self._size, self._rank, UniqueId(unique_id), timeout=self._limit)

    def _late(self, missing):
        """The error that names ranks which have not come."""
        told = [self._global_ranks[rank] for rank in missing]
        others = f" (global ranks {told})" if told != missing else ""
        return errors.Timeout(
            f"ranks {missing} have not come within {self._limit} s{others}", operation="init_process_group", missing=missing,
            waited=self._limit, last_seen="", epoch=0, global_ranks=told,
        )  # fmt: skip

    def lead(self):
        name = os.urandom(16).hex()
        self._store.set("life", name)
        self._answer(name)
        for _ in self._looks():
            if self._get("life") != name:
                raise errors.Rendezvous(
                    "another process has come to the store as rank 0 of this group", reason="another rank 0"
                )
            nodes = self._nodes(name)
            if len(nodes) == self._size:
                try:
                    self._check(nodes)
                except errors.InvalidArgument:
                    # The others are to see for themselves.
                    self._store.set("meeting", f"{name}|")
                    raise
                unique_id = str(get_unique_id())
                self._store.set("meeting", f"{name}|{unique_id}")
                return self._join(unique_id)
        raise self._late([rank for rank in range(self._size) if rank not in nodes])

    def _meeting(self, name):
        """The id that ranks of that life meet by, if rank 0 has put it there."""
        told, _, unique_id = (self._get("meeting") or "").partition("|")
        return unique_id if told == name else None

    def follow(self):
        answered = past = failure = None
        for _ in self._looks():
            name = self._get("life")
            if name is None or name == past:
                continue
            if name != answered:
                # An id that is there before the answer may be of an earlier life.
                was_there = self._meeting(name) is not None
                self._answer(name)
                answered = name
            unique_id = self._meeting(name)
            if unique_id is None:
                continue
            try:
                self._check(self._nodes(name))
                return self._join(unique_id)
            except _ELSEWHERE as error:
                if not was_there and self._get("life") == name:
                    raise
                past, failure = name, error
        if failure is not None:
            raise failure
        there = range(1, self._size) if answered is None else self._nodes(answered)
        raise self._late([rank for rank in range(self._size) if rank not in there] or [0])


def meet(store, rank, size, limit, global_ranks):
    """The communicator of a group's ranks, within so many seconds to meet and as many to make it. Collective."""
    meeting = _Meeting(store, rank, size, limit, global_ranks)
    return meeting.lead() if rank == 0 else meeting.follow()
