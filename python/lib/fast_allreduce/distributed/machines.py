"""The ranks of a process group on several machines, with the methods of a communicator.

Collectives that every step of a training loop needs are hierarchical. The others, and messages, go through a gloo group
of all ranks.
"""

import contextlib
import datetime

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ..hierarchical import Hierarchical


class Machines(Hierarchical):
    """This rank of a world on several machines. `name` distinguishes it from other worlds in the store."""

    def __init__(self, local, node, nodes, store, name, limit):
        limit_of_gloo = datetime.timedelta(seconds=limit)
        self._messages = None

        def gloo(what, rank, size):
            return c10d.ProcessGroupGloo(dist.PrefixStore(f"{name}_{what}", store), rank, size, limit_of_gloo)

        rank, size = node * local.nranks + local.rank, nodes * local.nranks
        self._world = gloo("world", rank, size)
        between = gloo(f"between_{local.rank}", node, nodes)
        super().__init__(local, between, timeout=limit, store=dist.PrefixStore(f"{name}_failures", store))

    @property
    def behind(self):
        """The ranks of this machine that have begun fewer calls than this one; those of others are not known."""
        return [self.node * self.local.nranks + rank for rank in self.local.behind]

    @property
    def device(self):
        return self.local.device

    def flight_record(self):
        """Returns what the ranks of this machine did last; the record numbers them within the machine."""
        return self.local.flight_record()

    def _close(self):
        super()._close()
        # None after `destroy`.
        if self._world is not None:
            with contextlib.suppress(RuntimeError):
                self._world.abort()

    def destroy(self):
        super().destroy()
        self._world = None

    # --- calls of all ranks through gloo ---

    def reduce(self, sendbuf, recvbuf, op, root, *, stream=None):
        # As an allreduce, since torch lets the other ranks' tensors have any values.
        self._rank(root)
        self.allreduce(sendbuf, recvbuf, op)

    def allgather_v(self, sendbuf, recvbuf, counts, *, stream=None):
        outputs = list(_bytes(recvbuf).split([count * recvbuf.element_size() for count in counts]))
        # gloo's gathers need equal sizes.
        longest = max(output.numel() for output in outputs)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: _bytes(sendbuf).numel()] = _bytes(sendbuf)
        if longest:
            received = [torch.empty_like(padded) for _ in outputs]
            self._gather(received, padded)
            for output, one in zip(outputs, received):
                output.copy_(one[: output.numel()])

    def _gather(self, received, mine):
        self._step(lambda: self._world.allgather([received], [mine], c10d.AllgatherOptions()))

    def gather(self, sendbuf, recvbuf, root, *, stream=None):
        options = c10d.GatherOptions()
        options.rootRank = self._rank(root)
        outputs = [list(_bytes(recvbuf).chunk(self.nranks))] if self.rank == root else []
        self._step(lambda: self._world.gather(outputs, [_bytes(sendbuf)], options))

    def scatter(self, sendbuf, recvbuf, root, *, stream=None):
        options = c10d.ScatterOptions()
        options.rootRank = self._rank(root)
        inputs = [list(_bytes(sendbuf).chunk(self.nranks))] if self.rank == root else []
        self._step(lambda: self._world.scatter([_bytes(recvbuf)], inputs, options))

    def reduce_scatter_v(self, sendbuf, recvbuf, counts, op="sum", *, stream=None):
        whole = sendbuf.clone()
        self.allreduce(whole, None, op)
        start = sum(counts[: self.rank])
        recvbuf.view(-1).copy_(whole[start : start + counts[self.rank]])

    def alltoall(self, sendbuf, recvbuf, *, stream=None):
        each = sendbuf.numel() // self.nranks
        self.alltoall_v(sendbuf, [each] * self.nranks, recvbuf, [each] * self.nranks)

    def alltoall_v(self, sendbuf, sendcounts, recvbuf, recvcounts, *, stream=None):
        size = sendbuf.element_size()
        send, receive = [count * size for count in sendcounts], [count * size for count in recvcounts]
        options = c10d.AllToAllOptions()
        self._step(lambda: self._world.alltoall_base(_bytes(recvbuf), _bytes(sendbuf), receive, send, options))

    # --- messages ---

    @contextlib.contextmanager
    def messages(self):
        """A context in which messages start, and at whose end they are waited for."""
        self._messages = []
        try:
            yield
            works, self._messages = self._messages, None
            for work in works:
                self._among_nodes(lambda work=work: work)
        finally:
            self._messages = None

    def send(self, sendbuf, peer, *, tag=0, stream=None):
        self._message(lambda: self._world.send([_bytes(sendbuf)], self._rank(peer), tag))

    def recv(self, recvbuf, peer, *, tag=0, stream=None):
        self._message(lambda: self._world.recv([_bytes(recvbuf)], self._rank(peer), tag))

    def _message(self, start):
        self._healthy()
        self._messages.append(start())

    def _step(self, step):
        self._healthy()
        self._among_nodes(step)


def _bytes(tensor):
    """Returns the bytes of a contiguous tensor as a vector that shares its memory."""
    return tensor.view(-1).view(torch.uint8)
