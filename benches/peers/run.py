#!/usr/bin/env python3
"""Compares this crate's allreduce between CPU processes with that of other libraries, in one run.

    benches/peers/run.py [--peers openmpi,mpich,deepspeed,vllm,oneccl,gloo,floor,other] [--sizes 1K,...,64M]
                         [--rounds 15] [--json FILE] [--ranks 2] [--cores 0,1] [--block-ms 20] [--seconds 60]
                         [--carried FOLDER]

There are 2, 4, 8 or 16 ranks, each pinned to its own core unless --cores names fewer. They sum f32 values from private
inputs, out of place if the library can. The ranks of all engines stay alive and take turns block by block: ours, a
peer, ours, the next peer. A ratio is the median of the peer's blocks divided by the median of our blocks that ran just
before them. A block's time is the slowest rank's median over its calls. Every result is checked. A library that only
reduces in place is compared with ours in place. Libraries are downloaded from PyPI into target/peers/ (several GB,
because PyPI has no smaller torch for x86-64); the MPI implementations must be installed.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import time
from pathlib import Path

import engines
from driver import World
from engines import Unavailable

UNITS = {"K": 1 << 10, "M": 1 << 20}
SIZES = "1K,4K,16K,64K,256K,1M,4M,16M,64M"


def size(text: str) -> int:
    number, unit = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1)
    if not number.isdigit() or int(number) * unit < 4 or int(number) * unit % 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not a multiple of 4 bytes, such as 64K or 1M")
    return int(number) * unit


def label(count: int) -> str:
    for unit, scale in (("Mi", 1 << 20), ("Ki", 1 << 10)):
        if count % scale == 0:
            return f"{count // scale} {unit}"
    return str(count)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=",".join(name for name in engines.PEERS if name != "other"),
                        help="names, separated by commas (default: all except other, this library with the variables "
                        "that PEERS_OTHER names)")  # fmt: skip
    parser.add_argument("--sizes", default=SIZES, help=f"bytes, separated by commas (default: {SIZES})")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each engine and size (default: 15)")
    parser.add_argument("--ranks", type=int, default=2, help="2, 4, 8 or 16 (default: 2)")
    parser.add_argument("--cores", help="cores, such as 0,1; ranks share them if they are fewer (default: the first "
                        "that are allowed, one for each rank)")  # fmt: skip
    parser.add_argument("--block-ms", type=float, help="longest time of a block's calls, of which there are at least 3")
    parser.add_argument("--seconds", type=float, help="begin no other size this long after the start of the first")
    parser.add_argument("--carried", type=Path, metavar="FOLDER", help="take the engines from a folder of carry.py")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for all measurements")
    chosen = parser.parse_args()
    chosen.peers = [name for name in chosen.peers.split(",") if name]
    for name in chosen.peers:
        if name not in engines.PEERS:
            parser.error(f"no peer {name!r}: there are {', '.join(engines.PEERS)}")
    try:
        chosen.sizes = [size(text) for text in chosen.sizes.split(",")]
        allowed = sorted(os.sched_getaffinity(0))
        cores = [int(core) for core in chosen.cores.split(",")] if chosen.cores else allowed
    except (argparse.ArgumentTypeError, ValueError) as error:
        parser.error(str(error))
    if chosen.ranks not in (2, 4, 8, 16):
        parser.error("there are 2, 4, 8 or 16 ranks: the checks need a power of two")
    if len(set(cores)) != len(cores) or not set(cores) <= set(allowed):
        parser.error(f"different cores are needed, of those allowed: {allowed}")
    if not chosen.cores and len(cores) < chosen.ranks:
        parser.error(f"there are {len(cores)} cores: name them by --cores if {chosen.ranks} ranks are to share them")
    chosen.cores = cores[: chosen.ranks]
    engines.CARRIED = chosen.carried and chosen.carried.resolve()
    if chosen.rounds < 1:
        parser.error("at least one round")
    return chosen


def facts(ranks: int, cores: list[int]) -> dict:
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": model,
        "machine": platform.machine(),
        "kernel": platform.release(),
        "ranks": ranks,
        "cores": cores,
        "load_average": round(os.getloadavg()[0], 2),
        "huge_pages": pages.read_text().strip() if pages.exists() else "none",
        "command": " ".join(sys.argv),
    }


def calls(size: int) -> int:
    """Returns the number of calls in a block: fewer for large sizes."""
    return min(max((32 << 20) // size, 3), 1000)


def place(world: World) -> str:
    """Returns where an engine reduces to."""
    return "out" if world.engine.out_of_place else "in"


def calls_within(world: World, size: int, block_ms: float | None, where: str) -> int:
    """Returns the number of calls in a block that takes about `block_ms`, if there is such a limit."""
    if block_ms is None:
        return calls(size)
    mean_us = world.measure(size, 3, where)[1]
    return min(calls(size), max(3, int(1000 * block_ms / mean_us)))


def measure(ours: World, peers: list[World], size: int, rounds: int, block_ms: float | None) -> dict[str, dict]:
    """Measures blocks of our engine and of each peer alternately."""
    blocks = {world.engine.name: {"ours": [], "peer": []} for world in peers}
    many = {(ours, where): calls_within(ours, size, block_ms, where) for where in {place(world) for world in peers}}
    many |= {(world, place(world)): calls_within(world, size, block_ms, place(world)) for world in peers}
    for _ in range(rounds):
        for world in peers:
            where, mine = place(world), blocks[world.engine.name]
            for key, engine in (("ours", ours), ("peer", world)):
                block = engine.measure(size, many[engine, where], where)
                if block[2]:
                    sys.exit(f"{engine.engine.name} got {block[2]} elements of {size} bytes wrong")
                mine[key].append(block)
    return blocks


def summary(blocks: list[tuple]) -> dict:
    medians = [median for median, _, _ in blocks]
    return {
        "us": statistics.median(medians),
        "mean_us": statistics.median(mean for _, mean, _ in blocks),
        "blocks_us": medians,
    }


def start(chosen: argparse.Namespace, worlds: list[World]) -> dict[str, str]:
    """Starts our ranks, then those of all peers that run here, into `worlds`. Returns why other peers do not run."""
    worlds.append(World(engines.fast_allreduce(), chosen.ranks, chosen.cores))
    missing = {}
    for name in chosen.peers:
        count = len(worlds)
        try:
            worlds.append(World(engines.PEERS[name](chosen.ranks), chosen.ranks, chosen.cores))
            # A first call finds engines that start but do not work.
            worlds[-1].measure(1024, 2, place(worlds[-1]))
        except Unavailable as why:
            missing[name] = str(why)
            if len(worlds) > count:
                worlds.pop().close()
    return missing


def idle(worlds: list[World]) -> dict[str, float]:
    """Returns the number of cores that each engine keeps busy while nothing is measured."""
    before = [world.processor_seconds() for world in worlds]
    time.sleep(2)
    return {world.engine.name: (world.processor_seconds() - was) / 2 for world, was in zip(worlds, before)}


def main() -> None:
    chosen = arguments()
    # SIGTERM must end the ranks too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    worlds = []
    try:
        missing = start(chosen, worlds)
        ours, *peers = worlds
        machine = facts(chosen.ranks, chosen.cores)
        for key, value in machine.items():
            print(f"# {key}: {value}")
        print(f"# versions: {'; '.join(world.version for world in worlds)}")
        for name, why in missing.items():
            print(f"# not measured: {name}: {why}")
        used = idle(worlds)
        for name, share in used.items():
            if share > 0.02:
                print(f"# disturbs the others: {name} uses {share:.2f} cores while it waits for its turn")
        if not peers:
            sys.exit("there is nothing to compare with")
        print("\n| bytes |" + "".join(f" ours (µs) | {w.engine.name} (µs) | ratio |" for w in peers))
        print("|---|" + "---|---|---|" * len(peers), flush=True)
        rows, end = {}, time.monotonic() + (chosen.seconds or float("inf"))
        for size in chosen.sizes:
            if time.monotonic() > end:
                print(f"# not measured: {label(size)} and the sizes after it: the time is up")
                break
            row = f"| {label(size)} |"
            rows[size] = {}
            for name, blocks in measure(ours, peers, size, chosen.rounds, chosen.block_ms).items():
                mine, theirs = summary(blocks["ours"]), summary(blocks["peer"])
                ratio = theirs["us"] / mine["us"]
                rows[size][name] = {"ours": mine, "peer": theirs, "ratio": ratio}
                row += f" {mine['us']:.4g} | {theirs['us']:.4g} | {ratio:.2f} |"
            print(row, flush=True)
        print("\nIn place, both: " + (", ".join(w.engine.name for w in peers if not w.engine.out_of_place) or "none"))
        if chosen.json:
            record = {
                "machine": machine, "missing": missing, "idle_cores": used, "rounds": chosen.rounds,
                "versions": {world.engine.name: world.version for world in worlds},
                "in_place": [w.engine.name for w in peers if not w.engine.out_of_place], "rows": rows,
            }  # fmt: skip
            chosen.json.write_text(json.dumps(record, indent=1) + "\n")
    except Unavailable as why:
        sys.exit(f"cannot go on: {why}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for world in worlds:
            world.close()


if __name__ == "__main__":
    main()
