"""Starts and ends the ranks of one engine, and talks to them over a Unix socket. rank.hpp describes the protocol."""

import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from engines import Engine, Unavailable

START_SECONDS = 90
BLOCK_SECONDS = 120


class World:
    """The ranks of an engine. They are blocked except while they measure."""

    def __init__(self, engine: Engine, ranks: int, cores: list[int]):
        """Starts the ranks, each on its core; with fewer cores than ranks, ranks share them in turn."""
        self.engine = engine
        self.ranks = ranks
        self.folder = tempfile.TemporaryDirectory(prefix="peers-")
        self.processes: list[subprocess.Popen] = []
        self.streams: list = []
        try:
            self.version = self._start(cores)
        except BaseException:
            self.close()
            raise

    def _start(self, cores: list[int]) -> str:
        folder = Path(self.folder.name)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / "socket"))
        listener.listen()
        listener.settimeout(1)
        self.log = open(folder / "log", "w+b")
        shared = {
            **os.environ, **self.engine.environment,
            "PEERS_SOCKET": str(folder / "socket"), "PEERS_STORE": str(folder / "store"),
            "PEERS_CORES": ",".join(map(str, cores)), "PEERS_WORLD": folder.name, "PEERS_RANKS": str(self.ranks),
        }  # fmt: skip
        for rank in range(1 if self.engine.launcher else self.ranks):
            own = {} if self.engine.launcher else {"PEERS_RANK": str(rank), "CCL_LOCAL_RANK": str(rank)}
            self.processes.append(
                subprocess.Popen(
                    self.engine.command, env=shared | own, stdin=subprocess.DEVNULL, stdout=self.log,
                    stderr=self.log, start_new_session=True,
                )  # fmt: skip
            )
        deadline = time.monotonic() + START_SECONDS
        streams, self.pids = {}, []
        with listener:
            while len(streams) < self.ranks:
                connection = self._accept(listener, deadline)
                connection.settimeout(START_SECONDS)
                peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                self.pids.append(int.from_bytes(peer[:4], "little"))
                stream = connection.makefile("rw")
                stream.connection = connection
                self.streams.append(stream)
                streams[int(self._heard(stream, "rank"))] = stream
        self.streams = [streams[rank] for rank in sorted(streams)]
        return self._gather()

    def _accept(self, listener: socket.socket, deadline: float) -> socket.socket:
        while True:
            try:
                return listener.accept()[0]
            except TimeoutError:
                ended = any(process.poll() is not None for process in self.processes)
                if ended or time.monotonic() > deadline:
                    raise Unavailable(self._reason("a rank did not start")) from None

    def _gather(self) -> str:
        word, text = self._line(self.streams[0])
        if word == "share":
            for stream in self.streams[1:]:
                print(text, file=stream, flush=True)
            word, text = self._line(self.streams[0])
        for stream in self.streams[1:]:
            self._heard(stream, "ready")
        if word != "ready":
            raise Unavailable(self._reason(f"rank 0 said {word} {text}"))
        return text

    def _line(self, stream) -> tuple[str, str]:
        try:
            word, _, rest = stream.readline().rstrip("\n").partition(" ")
        except TimeoutError:
            raise Unavailable(self._reason(f"{self.engine.name}: a rank does not answer")) from None
        except OSError as error:
            raise Unavailable(self._reason(str(error))) from None
        if not word:
            raise Unavailable(self._reason(f"{self.engine.name}: a rank ended"))
        return word, rest

    def _heard(self, stream, expected: str) -> str:
        word, rest = self._line(stream)
        if word != expected:
            raise Unavailable(self._reason(f"{self.engine.name}: a rank said {word} {rest}"))
        return rest

    def _reason(self, what: str) -> str:
        self.log.seek(0)
        said = self.log.read().decode(errors="replace").split("\n")
        last = [line.strip() for line in said if line.strip()][-3:]
        return f"{what}: {' / '.join(last)}" if last else what

    def measure(self, size: int, calls: int, place: str) -> tuple[float, float, int]:
        """Returns the slowest rank's median and mean microseconds per call, and the number of wrong elements of all."""
        for stream in self.streams:
            stream.connection.settimeout(BLOCK_SECONDS)
            try:
                print(f"measure {size} {calls} {place}", file=stream, flush=True)
            except OSError:
                raise Unavailable(self._reason(f"{self.engine.name}: a rank ended")) from None
        took = [self._heard(stream, "took").split() for stream in self.streams]
        median, mean = (max(float(words[i]) for words in took) / 1000 for i in (0, 1))
        return median, mean, sum(int(words[2]) for words in took)

    def processor_seconds(self) -> float:
        """Returns the processor time that all threads of its ranks have used."""
        ticks = 0
        for pid in self.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        for stream in self.streams:
            stream.connection.close()
            try:
                stream.close()
            except OSError:
                pass
        deadline = time.monotonic() + 5
        for process in self.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                # The process leads a session: this also ends the ranks that a launcher started.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if hasattr(self, "log"):
            self.log.close()
        # Shared memory named after this world that the engine did not remove, for instance because it failed to start.
        for left in Path("/dev/shm").glob(f"*{Path(self.folder.name).name}*"):
            left.unlink(missing_ok=True)
        self.folder.cleanup()
