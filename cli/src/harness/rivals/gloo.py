"""A rank of gloo's allreduce through torch.distributed, for `compare`.

Reads commands from standard input, a line each, and answers each with a line. Elements are in the file of the first
argument, which the process that started this has open as well.
"""

import contextlib
import ctypes
import datetime
import mmap
import os
import signal
import socket
import sys
import time


def answer(line):
    print(line, flush=True)


PR_SET_PDEATHSIG = 1
path, rank, nranks, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
cpus, is_apart = sys.argv[5], int(sys.argv[6]) > 1
# It ends with the rank, however that ends.
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(path.split("/")[2]):
    sys.exit()
try:
    # The rank may be bound to fewer.
    os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
except OSError as error:
    answer(f"error binding to the CPUs {cpus}: {error}")
    sys.exit()
try:
    import torch
    import torch.distributed as dist

    gloo = dist.is_available() and dist.is_gloo_available()
except Exception as error:
    answer(f"error python3 cannot import torch: {error}".replace("\n", " "))
    sys.exit()
if not gloo:
    answer("error torch of python3 is built without gloo")
    sys.exit()
torch.set_num_threads(1)
limit = datetime.timedelta(seconds=limit)

try:
    listens = "0.0.0.0" if is_apart else "127.0.0.1"
    store = dist.TCPStore(listens, 0, nranks, True, limit, wait_for_workers=False) if rank == 0 else None
    answer(f"{store.port if store else 0} {os.environ.get('MASTER_ADDR') or socket.gethostname()} {torch.__version__}")
    host, port = sys.stdin.readline().split()
    store = store or dist.TCPStore(host, int(port), nranks, False, limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=nranks, timeout=limit)
    answer("met")
    for line in sys.stdin:
        dtype, op, count, calls = line.split()
        with open(path, "r+b") as file, contextlib.ExitStack() as open_files:
            dtype = getattr(torch, dtype)
            # An empty file cannot be mapped.
            memory = open_files.enter_context(mmap.mmap(file.fileno(), 0)) if int(count) else None
            tensor = torch.frombuffer(memory, dtype=dtype) if memory else torch.empty(0, dtype=dtype)
            op = getattr(dist.ReduceOp, op)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(int(calls)):
                dist.all_reduce(tensor, op)
            answer(f"{time.perf_counter() - start}")
            del tensor
except Exception as error:
    answer(f"error {error}".replace("\n", " "))
