#!/usr/bin/env python3
"""Runs calls that `ptx-clock --export` wrote on a GPU, all ranks on the same one, and compares their times.

    replay.py FOLDER [--joined] [--json FILE] [--calls N] [--repeats N] [--limit S] [--budget S] [NAME...]

FOLDER has the calls, NAME.json, and the module of each, MODULE.cubin or MODULE.ptx. Each rank has a stream, and a graph
with a chain of its launches. With --joined, each launch is of all ranks, as one GPU begins kernels of many streams one
after the other; join_ranks.py has made the modules, MODULE.joined.cubin or MODULE.joined.ptx.

A call's time is the difference between graphs of two lengths, divided by the difference of the lengths: the median of N
repeats. Then the results are compared. A call that takes longer than --limit is ended with its process, and tried once
more as one graph with a branch for each rank. Calls whose blocks the GPU has no room for, all at once, are not run. The
table has measured and predicted microseconds: a column for each part of a NAME before its first dot, a row for each
rest. Needs Python 3.8 and the driver, nothing else."""

import argparse
import bisect
import ctypes
import json
import os
import pathlib
import select
import statistics
import subprocess
import sys
import time
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p

SHORT = 20  # launches of a rank in the shorter graph
WARM_UP = 0.02  # seconds, for the clock rate
CLUSTER_DIMENSION, PROGRAMMATIC_SERIALIZATION = 4, 6  # CUlaunchAttributeID
STRIDE = 64  # what the size of each rank's parameters is a multiple of in launches of all: see join_ranks.py
ALIGNMENT = 512  # of allocations, as of cuMemAlloc


class Attribute(ctypes.Structure):
    _fields_ = [("id", c_uint), ("pad", c_uint), ("value", c_uint * 16)]


class Config(ctypes.Structure):
    _fields_ = [("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p)]
    _fields_ += [("attributes", ctypes.POINTER(Attribute)), ("count", c_uint)]


class Driver:
    """The driver's functions: driver.MemAlloc_v2(...) calls cuMemAlloc_v2, and raises its error."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        device, context = c_int(), c_void_p()
        self.Init(0)
        self.DeviceGet(byref(device), 0)
        self.DevicePrimaryCtxRetain(byref(context), device)
        self.CtxSetCurrent(context)
        count = c_int()
        self.DeviceGetAttribute(byref(count), 16, device)
        self.multiprocessors = count.value

    def __getattr__(self, name):
        function = getattr(self.library, "cu" + name)

        def call(*arguments):
            code = function(*arguments)
            if code:
                text = c_char_p()
                self.library.cuGetErrorName(code, byref(text))
                raise RuntimeError(f"cu{name}: {(text.value or b'?').decode()}")

        return call

    def made(self, name, *arguments, kind=c_void_p):
        """Returns what a function writes to its first argument."""
        value = kind()
        getattr(self, name)(byref(value), *arguments)
        return value


class Call:
    """A call's memory and launches on the GPU."""

    def __init__(self, driver, folder, path, modules, joined):
        self.driver, self.all = driver, json.loads(path.read_text())
        files = [folder / (self.all["module"] + ".joined" * joined + end) for end in (".cubin", ".ptx")]
        file = next((file for file in files if file.exists()), files[0])
        if file not in modules:
            modules[file] = driver.made("ModuleLoadData", file.read_bytes() + b"\0")
        kernel = self.all["kernel"] + "_joined" * joined
        self.function = driver.made("ModuleGetFunction", modules[file], kernel.encode())
        self.place()
        blobs = [self.moved(bytes.fromhex(text)) for text in self.all["launches"]]
        if joined:
            self.all["grid"][1], self.all["parameters"] = len(blobs), [[0, 0]]
            blobs = [b"".join(blob + bytes(-len(blob) % STRIDE) for blob in blobs).ljust(32 << 10, b"\0")]
        self.blobs = [ctypes.create_string_buffer(blob, len(blob)) for blob in blobs]
        self.ranks = len(blobs)
        self.check_room()
        self.streams = [driver.made("StreamCreate", 1) for _ in range(self.ranks)]
        self.events = [driver.made("EventCreate", 0) for _ in range(self.ranks + 2)]

    def check_room(self):
        blocks, threads = 1, 1
        for i in range(3):
            blocks, threads = blocks * self.all["grid"][i], threads * self.all["block"][i]
        if self.all["shared"] > 48 << 10:
            self.driver.FuncSetAttribute(self.function, 8, self.all["shared"])
        name = "OccupancyMaxActiveBlocksPerMultiprocessor"
        fit = self.driver.made(name, self.function, threads, c_size_t(self.all["shared"]), kind=c_int).value
        if blocks * self.ranks > fit * self.driver.multiprocessors:
            raise RuntimeError(f"{self.ranks} x {blocks} blocks: no room, {fit} on each multiprocessor")

    def place(self):
        """Allocates the memory and fills it. Addresses in it change with it."""
        total, self.moves = 0, []
        for address, size, _ in sorted(self.all["memory"]):
            self.moves.append((address, size, total))
            total += (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        self.base = self.driver.made("MemAlloc_v2", c_size_t(total), kind=c_uint64).value
        self.driver.MemsetD8_v2(c_uint64(self.base), 0, c_size_t(total))
        for address, _, runs in self.all["memory"]:
            for at, word, count in runs:
                words = self.moved(word.to_bytes(8, "little")) * count
                self.driver.MemcpyHtoD_v2(c_uint64(self.address(address + 8 * at)), words, c_size_t(len(words)))
        self.driver.CtxSynchronize()  # the streams do not wait for the default one

    def address(self, old):
        """Returns where an address has moved to; other numbers stay."""
        i = bisect.bisect_right(self.moves, (old, float("inf"))) - 1
        start, size, offset = self.moves[i] if i >= 0 else (0, 0, 0)
        return self.base + offset + old - start if old - start < size else old

    def moved(self, data):
        """Returns bytes with all addresses in them moved."""
        data = bytearray(data)
        for at in range(0, len(data) - 7, 8):
            word = int.from_bytes(data[at : at + 8], "little")
            data[at : at + 8] = self.address(word).to_bytes(8, "little")
        return bytes(data)

    def launch(self, rank, programmatic):
        attributes = (Attribute * 2)()
        count = 0
        for on, number, values in [
            (self.all["cluster"] != [1, 1, 1], CLUSTER_DIMENSION, self.all["cluster"]),
            (programmatic, PROGRAMMATIC_SERIALIZATION, [1]),
        ]:
            if on:
                attributes[count].id = number
                attributes[count].value[: len(values)] = values
                count += 1
        config = Config((c_uint * 3)(*self.all["grid"]), (c_uint * 3)(*self.all["block"]), self.all["shared"])
        config.stream, config.attributes, config.count = self.streams[rank], attributes, count
        start = ctypes.addressof(self.blobs[rank])
        parameters = (c_void_p * len(self.all["parameters"]))(*[start + at for at, _ in self.all["parameters"]])
        self.driver.LaunchKernelEx(byref(config), self.function, parameters, None)

    def fork(self):
        self.driver.EventRecord(self.events[0], self.streams[0])
        for rank in range(1, self.ranks):
            self.driver.StreamWaitEvent(self.streams[rank], self.events[0], 0)

    def join(self):
        for rank in range(1, self.ranks):
            self.driver.EventRecord(self.events[rank], self.streams[rank])
            self.driver.StreamWaitEvent(self.streams[0], self.events[rank], 0)

    def graphs(self, calls, branches):
        """Returns graphs of this number of launches of each rank: one for each rank, or one with branches."""
        graphs = []
        for ranks in [range(self.ranks)] if branches else [[rank] for rank in range(self.ranks)]:
            stream = self.streams[ranks[0]]
            self.driver.StreamBeginCapture_v2(stream, 2)
            if branches:
                self.fork()
            for i in range(calls):
                for rank in ranks:
                    self.launch(rank, self.all["programmatic"] and i > 0)
            if branches:
                self.join()
            graph = c_void_p()
            self.driver.StreamEndCapture(stream, byref(graph))
            graphs.append(self.driver.made("GraphInstantiateWithFlags", graph, c_uint64(0)))
            self.driver.GraphDestroy(graph)
            # So that no launch of it waits for memory while other ranks spin.
            self.driver.GraphUpload(graphs[-1], stream)
            self.driver.StreamSynchronize(stream)
        return graphs

    def run(self, graphs):
        """Runs graphs once, and returns the time in us."""
        self.driver.EventRecord(self.events[0], self.streams[0])
        for rank in range(1, self.ranks if len(graphs) > 1 else 1):
            self.driver.StreamWaitEvent(self.streams[rank], self.events[0], 0)
        for rank, graph in enumerate(graphs):
            self.driver.GraphLaunch(graph, self.streams[rank])
        if len(graphs) > 1:
            self.join()
        start, end = self.events[0], self.events[-1]
        self.driver.EventRecord(end, self.streams[0])
        self.driver.EventSynchronize(end)
        return self.driver.made("EventElapsedTime", start, end, kind=c_float).value * 1e3

    def time(self, calls, repeats, branches):
        short, long = self.graphs(SHORT, branches), self.graphs(SHORT + calls, branches)
        begin = time.monotonic()
        while time.monotonic() < begin + WARM_UP:
            self.run(short), self.run(long)
        times = sorted((self.run(long) - self.run(short)) / calls for _ in range(repeats))
        for graph in short + long:
            self.driver.GraphExecDestroy(graph)
        return {"us": statistics.median(times), "low": times[len(times) // 10], "high": times[-1 - len(times) // 10]}

    def check(self):
        for address, size, text in self.all["expected"]:
            one, found = bytes.fromhex(text), ctypes.create_string_buffer(size)
            self.driver.MemcpyDtoH_v2(found, c_uint64(self.address(address)), c_size_t(size))
            if found.raw != one * (size // len(one)):
                raise RuntimeError("the result is wrong")

    def free(self):
        for stream in self.streams:
            self.driver.StreamDestroy_v2(stream)
        for event in self.events:
            self.driver.EventDestroy_v2(event)
        self.driver.MemFree_v2(c_uint64(self.base))


def child(options):
    """Runs calls, and prints a line of JSON for each."""
    driver, modules = Driver(), {}
    for name in options.names:
        path = options.folder / f"{name}.json"
        try:
            call = Call(driver, options.folder, path, modules, options.joined)
            result = call.time(options.calls, options.repeats, options.branches)
            call.check()
            call.free()
        except (RuntimeError, OSError, AttributeError) as error:
            result = {"error": str(error)}
        print(json.dumps({"name": name, **result}), flush=True)
        if "error" in result and "no room" not in result["error"]:
            return  # errors of kernels stay with the context


def run_some(options, names, branches, end):
    """Runs calls in a process until one fails or takes too long; returns the results, the failed one last."""
    line = [sys.executable, __file__, "--child", f"--calls={options.calls}", f"--repeats={options.repeats}"]
    line += ["--branches"] * branches + ["--joined"] * options.joined + [str(options.folder), *names]
    # A hardware queue for each stream, as none may wait behind another.
    more = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
    process = subprocess.Popen(line, stdout=subprocess.PIPE, env={**os.environ, **more})
    results, text = [], b""
    while len(results) < len(names):
        limit = options.limit * (1 if results else 2)  # the first call loads the driver
        left = max(0.0, min(limit, end - time.monotonic()))
        ready, _, _ = select.select([process.stdout], [], [], left)
        read = os.read(process.stdout.fileno(), 65536) if ready else b""
        if not read:
            why = f"ended, {process.wait()}" if ready else f"no end after {left:.0f} s"
            results.append({"name": names[len(results)], "error": why})
            break
        *lines, text = (text + read).split(b"\n")
        results += [json.loads(one) for one in lines]
        if any("error" in one and "no room" not in one["error"] for one in results):
            break
    process.kill()
    process.wait()
    return results


def table(results):
    columns = sorted({name.partition(".")[0] for name in results})
    rows = sorted({name.partition(".")[2] for name in results})
    cells = [["us: measured/predicted", *columns]]
    for row in rows:
        cells.append([row])
        for column in columns:
            one = results.get(f"{column}.{row}" if row else column, {})
            cells[-1].append(f"{one['us']:.2f}/{one['predicted']:.2f}" if "us" in one else "-" if not one else "!")
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=pathlib.Path)
    for name, kind, value in [("calls", int, 200), ("repeats", int, 15), ("limit", float, 5), ("budget", float, 300)]:
        parser.add_argument(f"--{name}", type=kind, default=value)
    for name in ("child", "branches", "joined"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    if options.child:
        return child(options)
    found = (path.name[:-5] for path in options.folder.glob("*.json"))
    left = options.names or sorted(found, key=lambda name: name.partition(".")[::-1])
    results, end, branches, tried = {}, time.monotonic() + options.budget, options.branches, set()
    while left and time.monotonic() < end:
        for one in run_some(options, left, branches, end):
            results[one["name"]] = {**one, "branches": branches}
        last = one["name"]
        left = left[left.index(last) + 1 :]
        if "no end" in one.get("error", "") and last not in tried:
            tried.add(last)
            left, branches = [last, *left], not branches
    for name, one in results.items():
        one["predicted"] = json.loads((options.folder / f"{name}.json").read_text())["predicted_us"]
        if "error" in one:
            print(f"{name}: {one['error']}")
    if options.json:
        options.json.write_text(json.dumps(list(results.values()), indent=1) + "\n")
    if left:
        print(f"not run, no time left: {' '.join(left)}")
    print(table(results))
    return 1 if left or any("error" in one for one in results.values()) else 0


sys.exit(main())
