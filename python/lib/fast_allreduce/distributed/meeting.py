"""Rendezvous of a process group's ranks through torch's store, which may hold entries of an earlier incarnation of the
group.

Rank 0 draws a random name for this incarnation and stores it. Each other rank answers with the name that it finds, and
answers again if a later name replaces it. When all ranks have answered with rank 0's name, rank 0 stores the id of a
rendezvous with that name. So earlier entries do not count, except for an id by which ranks can still meet: a rank that
restarts alone joins the others this way.

If the ranks are on several machines, rank 0 stores the word `machines` in place of an id, and the first rank of each
machine stores an id for the ranks of its own.
"""

import os
import time

from .. import Communicator, UniqueId, errors, get_unique_id
from ..process_group import check_machines, check_nodes, check_size, machines, node
from .machines import Machines

# Shortest and longest pause in seconds between polls of the store. Ranks mostly arrive together, so pauses start short.
_PAUSES = (0.001, 0.1)

# Errors that entries of an earlier incarnation can cause: its nodes differ, or its rendezvous has ended or refuses.
_ELSEWHERE = (errors.InvalidArgument, errors.Rendezvous, errors.Refused, errors.PeerLost, errors.PeerFailed)


# In place of an id: the ranks are on several machines.
_MACHINES = "machines"


class _Meeting:
    """One rank's part of the rendezvous."""

    def __init__(self, store, rank, size, limit, global_ranks):
        self._store, self._rank, self._size, self._limit = store, rank, size, limit
        self._global_ranks = global_ranks
        self._until = time.monotonic() + limit

    def _get(self, key):
        """Returns an entry, or None. The store's own `get` waits for one."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _nodes(self, name):
        """Returns the locations of the ranks that have answered with a name."""
        answers = {rank: self._get(f"rank_{rank}") or "" for rank in range(self._size)}
        return {rank: answer.partition("|")[2] for rank, answer in answers.items() if answer.partition("|")[0] == name}

    def _answer(self, name):
        self._store.set(f"rank_{self._rank}", f"{name}|{node()}")

    def _check(self, nodes):
        """Raises `InvalidArgument` if the ranks cannot meet. Returns whether they are on several machines."""
        if len(nodes) < self._size:
            return False
        of_ranks = machines([nodes[rank] for rank in range(self._size)])
        if max(of_ranks) > 0:
            check_machines(of_ranks)
        own = [rank for rank in range(self._size) if of_ranks[rank] == of_ranks[self._rank]]
        check_nodes(own.index(self._rank), [nodes[rank] for rank in own])
        check_size(len(own))
        return max(of_ranks) > 0

    def _polls(self):
        """Yields before each poll, until the limit has passed."""
        pause, longest = _PAUSES
        while True:
            # Read before the poll, so that the last poll comes after the limit.
            left = self._until - time.monotonic()
            yield
            if left <= 0:
                return
            time.sleep(min(pause, left))
            pause = min(2 * pause, longest)

    def _join(self, unique_id, name, nodes):
        if unique_id == _MACHINES:
            return self._join_machines(name, machines([nodes[rank] for rank in range(self._size)]))
        return Communicator.init(self._size, self._rank, UniqueId(unique_id), timeout=self._limit)

    def _join_machines(self, name, of_ranks):
        """Returns this rank of a world on several machines, each of which has equally many consecutive ranks."""
        ranks = of_ranks.count(0)
        node, local_rank = divmod(self._rank, ranks)
        key = f"{name}_machine_{node}"
        if local_rank == 0:
            self._store.set(key, str(get_unique_id()))
        for _ in self._polls():
            unique_id = self._get(key)
            if unique_id is not None:
                local = Communicator.init(ranks, local_rank, UniqueId(unique_id), timeout=self._limit)
                try:
                    return Machines(local, node, max(of_ranks) + 1, self._store, name, self._limit)
                except RuntimeError as error:
                    # The other ranks of the machine do not wait for this one.
                    local.destroy()
                    reason = str(error).partition("\n")[0]
                    raise errors.Rendezvous(f"gloo cannot join the machines: {reason}", reason=reason) from None
        raise self._late([node * ranks])

    def _late(self, missing):
        """Returns the error that names missing ranks."""
        told = [self._global_ranks[rank] for rank in missing]
        others = f" (global ranks {told})" if told != missing else ""
        return errors.Timeout(
            f"ranks {missing} have not come within {self._limit} s{others}", operation="init_process_group",
            missing=missing, waited=self._limit, last_seen="", epoch=0, global_ranks=told,
        )  # fmt: skip

    def lead(self):
        """Runs rank 0's part."""
        name = os.urandom(16).hex()
        self._store.set("incarnation", name)
        self._answer(name)
        for _ in self._polls():
            if self._get("incarnation") != name:
                raise errors.Rendezvous(
                    "another process has joined through the store as rank 0 of this group", reason="another rank 0"
                )
            nodes = self._nodes(name)
            if len(nodes) == self._size:
                try:
                    are_apart = self._check(nodes)
                except errors.InvalidArgument:
                    # Without an id the other ranks make the same check.
                    self._store.set("meeting", f"{name}|")
                    # The store may end with this process, so they get time to read it.
                    time.sleep(10 * _PAUSES[1])
                    raise
                unique_id = _MACHINES if are_apart else str(get_unique_id())
                self._store.set("meeting", f"{name}|{unique_id}")
                return self._join(unique_id, name, nodes)
        raise self._late([rank for rank in range(self._size) if rank not in nodes])

    def _meeting(self, name):
        """Returns the id of an incarnation's rendezvous, or None if rank 0 has not stored it."""
        told, _, unique_id = (self._get("meeting") or "").partition("|")
        return unique_id if told == name else None

    def follow(self):
        """Runs the part of the other ranks."""
        answered = past = failure = None
        for _ in self._polls():
            name = self._get("incarnation")
            if name is None or name == past:
                continue
            if name != answered:
                # An id stored before the answer may belong to an earlier incarnation.
                was_there = self._meeting(name) is not None
                self._answer(name)
                answered = name
            unique_id = self._meeting(name)
            if unique_id is None:
                continue
            nodes = self._nodes(name)
            if unique_id == _MACHINES and (was_there or len(nodes) < self._size):
                # gloo would read what an earlier incarnation has left in the store, or a rank has left this one.
                past = name
                continue
            try:
                self._check(nodes)
                return self._join(unique_id, name, nodes)
            except _ELSEWHERE as error:
                if not was_there and self._get("incarnation") == name:
                    raise
                past, failure = name, error
        if failure is not None:
            raise failure
        there = range(1, self._size) if answered is None else self._nodes(answered)
        raise self._late([rank for rank in range(self._size) if rank not in there] or [0])


def meet(store, rank, size, limit, global_ranks):
    """Returns the communicator of a group's ranks. Collective.

    Meeting is limited to `limit` seconds, and so is making the communicator. Raises `Timeout`, which names the missing
    ranks.
    """
    meeting = _Meeting(store, rank, size, limit, global_ranks)
    return meeting.lead() if rank == 0 else meeting.follow()
