#!/usr/bin/env python3
"""Measures the host device on a machine with many cores, in about three minutes.

    benches/host_machine.py --program target/release/fast-allreduce --out FOLDER [--carried FOLDER] [--seconds 200]

The parts: the machine's topology, random checked calls, bandwidth of copies, every algorithm against the planned one,
other libraries (peers/run.py), several threads in each rank, pairs of cores at different distances, more ranks than
cores, and `tune`. Each has its share of the time, and a part that fails does not end the others. FOLDER gets log.txt
with all output, results.json with all numbers, system.tar.gz with the files of sysfs that describe CPUs, caches and
nodes, and summary.txt, which is also printed. peers/carry.py makes the folder of `--carried`.
"""

import argparse
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SYSTEM = Path("/sys/devices/system")
SIZES = ["1K", "8K", "64K", "512K", "1M", "4M", "16M"]
# Algorithms of `--order fixed`, among which a plan chooses.
DIRECT = ["one-shot-pull", "two-shot-pull", "one-shot-push", "two-shot-push"]
# How much slower than another algorithm the planned one may be before the summary lists it.
TOLERANCE = 1.1


def cores_of(text: str) -> list[int]:
    """Returns the cores of a list such as 0-3,8."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return [core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)]


def quota() -> float:
    """Returns the number of cores that the container's CPU quota allows."""
    for limit, period in (("cpu.max", None), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = (Path("/sys/fs/cgroup") / limit).read_text().split()
            if period:
                words += (Path("/sys/fs/cgroup") / period).read_text().split()
            # Without a limit the quota is "max" or negative.
            return int(words[0]) / int(words[1]) if int(words[0]) > 0 else float("inf")
        except (OSError, ValueError):
            continue
    return float("inf")


def shared_by(core: int, file: str) -> list[int]:
    path = SYSTEM / f"cpu/cpu{core}" / file
    return cores_of(path.read_text()) if path.exists() else [core]


def number(text: str):
    """Returns a cell of a table as a number, if it is one."""
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        return text


def microseconds(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


class Machine:
    """Runs the parts, and keeps what they print and find."""

    def __init__(self, chosen: argparse.Namespace):
        self.program = str(chosen.program.resolve())
        self.carried, self.out = chosen.carried, chosen.out
        # When this part must end, set before each.
        self.end = float("inf")
        self.out.mkdir(parents=True, exist_ok=True)
        self.log = open(self.out / "log.txt", "w")
        self.summary = open(self.out / "summary.txt", "w")
        self.results = {}
        self.cores = sorted(os.sched_getaffinity(0))
        # One hardware thread of each physical core, then the others.
        first = [core for core in self.cores if shared_by(core, "topology/thread_siblings_list")[0] == core]
        self.ordered = first + [core for core in self.cores if core not in first]
        # Number of threads that can run at once.
        self.most = int(min(len(self.cores), max(quota(), 1)))
        self.worlds = [ranks for ranks in (2, 4, 8, 16) if ranks <= self.most]

    def say(self, line: str = "") -> None:
        for file in (self.summary, self.log, sys.stdout):
            print(line, file=file, flush=True)

    def left(self) -> float:
        """Returns the seconds that this part has left."""
        return self.end - time.monotonic()

    def run(self, command: list, limit: float, cores: list[int] | None = None, partial: bool = False) -> str | None:
        """Runs a command in its own session, on these cores, and returns its output.

        Returns `None` if it fails or is late, except that `partial` output of a late one is returned.
        """
        limit = min(limit, self.left())
        words = [str(word) for word in command]
        print(f"\n$ {' '.join(words)}  # {f'cores {cores}, ' if cores else ''}at most {limit:.0f} s", file=self.log)
        if limit < 1:
            print("not run: the time is up", file=self.log, flush=True)
            return None
        bind = (lambda: os.sched_setaffinity(0, cores)) if cores else None
        began = time.monotonic()
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                start_new_session=True, preexec_fn=bind,
            )  # fmt: skip
        except OSError as error:
            print(error, file=self.log, flush=True)
            return None
        try:
            text, late = process.communicate(timeout=limit)[0], False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                text = process.communicate(timeout=5)[0]
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                text = process.communicate()[0]
            late = True
        took = time.monotonic() - began
        end = "stopped" if late else f"exit status {process.returncode}"
        print(f"{text}\n# {end} after {took:.1f} s", file=self.log, flush=True)
        is_good = partial if late else process.returncode == 0
        return text if is_good else None

    def bench(self, ranks: int, limit: float, *options, cores: list[int] | None = None) -> list[dict]:
        """Returns the rows of a bench: until it failed or was late."""
        words = [self.program, "bench", "--ranks", ranks, "--format", "csv", *options]
        lines = (self.run(words, limit, cores, partial=True) or "").splitlines()
        start = next((at for at, line in enumerate(lines) if line.startswith("collective,")), len(lines))
        rows = [row for row in csv.DictReader(lines[start:]) if row["memcpy_us"]]
        return [{key: number(value) for key, value in row.items()} for row in rows]

    def keep(self, name: str, value) -> None:
        self.results[name] = value
        (self.out / "results.json").write_text(json.dumps(self.results, indent=1) + "\n")


def system(machine: Machine) -> None:
    """The files of sysfs, lscpu, and what the program makes of them."""
    with tarfile.open(machine.out / "system.tar.gz", "w:gz") as archive:
        for pattern in ("cpu/*", "cpu/cpu[0-9]*/topology/*", "cpu/cpu[0-9]*/cache/*/*", "node/*", "node/node[0-9]*/*"):
            for path in SYSTEM.glob(pattern):
                try:
                    text = path.read_bytes() if path.is_file() else None
                except OSError:
                    continue
                if text is not None:
                    copied = machine.out / "copied"
                    copied.write_bytes(text)
                    archive.add(copied, path.relative_to("/"))
                    copied.unlink()
    lscpu = machine.run(["lscpu"], 5) or ""
    for line in lscpu.splitlines():
        if re.match(r"(Model name|CPU\(s\)|Thread|Core|Socket|L[123]|NUMA)", line):
            machine.say(f"# {re.sub(' +', ' ', line)}")
    for command in (["topology"], ["plan"]):
        machine.run([machine.program, *command], 5)
    for file in ("/proc/cpuinfo", "/sys/fs/cgroup/cpu.max", "/sys/kernel/mm/transparent_hugepage/enabled"):
        machine.run(["head", "-40", file], 5)
    load = os.getloadavg()[0]
    machine.say(f"# kernel {os.uname().release}, load {load:.2f}, quota {quota():g}, cores {machine.ordered}")


def soak(machine: Machine) -> None:
    for ranks in (3, 5, 8, 16):
        if ranks <= max(2 * machine.most, 5):
            faults = "all" if ranks == 8 else "none"
            words = ["soak", "--minutes", 0.05, "--ranks", ranks, "--faults", faults, "--maxbytes", "1M"]
            text = machine.run([machine.program, *words], 15)
            ended = "ok" if text is not None else "FAILED or late (log.txt)"
            machine.say(f"soak of {ranks} ranks, faults {faults}: {ended}")


def copies(machine: Machine) -> None:
    found = {}
    for ranks in (1, *machine.worlds):
        rows = machine.bench(ranks, 8, "-b", "64M", "-e", "64M", "-n", 3, "-w", 1, "-c", 0)
        if rows:
            found[ranks] = ranks * rows[0]["size"] / rows[0]["memcpy_us"] / 1000
    machine.keep("copies_gbs", found)
    cells = [f"{threads}: {speed:.1f}" for threads, speed in found.items()]
    machine.say(f"copies of 64 MiB, all threads together (GB/s): {', '.join(cells)}")


def planned(machine: Machine) -> None:
    """Every algorithm at every size, and where another one than the planned is faster."""
    slower, times, kept = [], {}, {}
    # Small messages of all worlds come first, and each bench has an equal share of what is left.
    spans = [("1K", "64K", 8), ("512K", "4M", 8), ("1M", "16M", 16)]
    types = {ranks: ("f32", "bf16") if ranks in (2, 8, 16) else ("f32",) for ranks in machine.worlds}
    benches = [(*span, ranks, dtype) for span in spans for ranks in machine.worlds for dtype in types[ranks]]
    for done, (first, last, factor, ranks, dtype) in enumerate(benches):
        span = ("-b", first, "-e", last, "-f", factor, "-d", dtype)
        plans = {row["size"]: row["algo"] for row in machine.bench(ranks, 5, *span, "-n", 1, "-w", 0, "-c", 0)}
        rows = machine.bench(ranks, machine.left() / (len(benches) - done), *span, "--algo", "all")
        kept[f"{ranks} {dtype} {first}"] = {"planned": plans, "rows": rows}
        for size, plan in plans.items():
            for place in ("out_of_place", "in_place"):
                cells = [row for row in rows if row["size"] == size]
                p50 = {row["algo"]: row[f"{place}_p50_us"] for row in cells}
                if plan not in p50:
                    continue
                mine = p50[plan]
                p99 = next(row[f"{place}_p99_us"] for row in cells if row["algo"] == plan)
                times[ranks, dtype, place, size] = (mine, p99)
                best = min((p50[name], name) for name in DIRECT if name in p50)
                if mine > TOLERANCE * best[0]:
                    slower.append((ranks, dtype, place, size, plan, mine, best[1], best[0]))
                if any(row[f"{place}_wrong"] for row in cells):
                    machine.say(f"WRONG elements: {ranks} ranks {dtype} {place} {size} bytes")
    machine.keep("algorithms", kept)
    sizes = sorted({key[3] for key in times})
    machine.say("\nplanned algorithm, p50 and p99 (µs), out of place | in place")
    machine.say("| ranks | " + " | ".join(str(size) for size in sizes) + " |")
    for ranks, dtype in sorted({key[:2] for key in times}):
        cells = []
        for size in sizes:
            pair = [times.get((ranks, dtype, place, size)) for place in ("out_of_place", "in_place")]
            cells.append(", ".join("-" if each is None else "/".join(map(microseconds, each)) for each in pair))
        machine.say(f"| {ranks} {dtype} | " + " | ".join(cells) + " |")
    machine.say(f"planned more than {TOLERANCE} times as slow as another algorithm: {len(slower) or 'nowhere'}")
    for ranks, dtype, place, size, plan, mine, best, theirs in slower:
        cell = f"  {ranks} ranks {dtype} {place} {size}"
        machine.say(f"{cell}: {plan} {microseconds(mine)}, {best} {microseconds(theirs)} ({mine / theirs:.2f})")


def against_peers(machine: Machine, ranks: int, peers: str, sizes: list[str], limit: float, cores: list[int]) -> None:
    record = machine.out / "peers.json"
    record.unlink(missing_ok=True)
    carried = ["--carried", machine.carried] if machine.carried else []
    words = [sys.executable, HERE / "peers/run.py", *carried, "--peers", peers, "--ranks", ranks]
    words += ["--sizes", ",".join(sizes), "--rounds", 5, "--block-ms", 8, "--seconds", limit, "--json", record]
    machine.run([*words, "--cores", ",".join(map(str, cores))], limit + 30)
    if not record.exists():
        return machine.say(f"{ranks} ranks on {len(cores)} cores against others: failed or late (log.txt)")
    found = json.loads(record.read_text())
    record.unlink()
    machine.keep(f"peers {ranks} on {len(cores)}", found)
    for name, why in found["missing"].items():
        machine.say(f"  not measured: {name}: {why[:150]}")
    if not found["rows"]:
        machine.say(f"{ranks} ranks on {len(cores)} cores: nothing measured in time")
    for size, row in found["rows"].items():
        cells = [f"{name} {each['ratio']:.2f}" for name, each in row.items()]
        ours = sorted({microseconds(each["ours"]["us"]) for each in row.values()})
        machine.say(f"| {ranks} on {len(cores)} | {size} | {' / '.join(ours)} µs | {' | '.join(cells)} |")


def peers(machine: Machine) -> None:
    machine.say("\ntimes of others, over ours")
    for ranks in machine.worlds:
        cores = machine.ordered[:ranks]
        against_peers(machine, ranks, "openmpi,mpich,deepspeed,gloo", SIZES, 12, cores)


def shared_cores(machine: Machine) -> None:
    machine.say("\nmore ranks than cores: times of others, over ours")
    cores = machine.ordered[: max(machine.most // 2, 2)]
    ranks = min(1 << (2 * len(cores)).bit_length() - 1, 16)
    cores = cores[: ranks // 2]
    against_peers(machine, ranks, "mpich,gloo", ["1K", "64K", "1M"], 8, cores)


def workers(machine: Machine) -> None:
    machine.say("\nthreads of each rank (µs, p50 out of place)")
    for ranks in (2, 4):
        columns, sizes = {}, {}
        for threads in (1, 2, 4, 8):
            if ranks * threads <= machine.most:
                options = ("-b", "256K", "-e", "64M", "-f", 4, "--set", f"workers={threads}", "-c", 0)
                rows = machine.bench(ranks, 6, *options)
                columns[threads] = {row["size"]: row["out_of_place_p50_us"] for row in rows}
                sizes |= dict.fromkeys(columns[threads])
        machine.keep(f"workers of {ranks} ranks", columns)
        for size in sizes:
            cells = [f"{n} threads {microseconds(column[size])}" for n, column in columns.items() if size in column]
            machine.say(f"| {ranks} ranks | {size} | {' | '.join(cells)} |")


def pairs(machine: Machine) -> None:
    """Two ranks on cores at different distances."""
    first, found = machine.cores[0], {}
    siblings = shared_by(first, "topology/thread_siblings_list")
    caches = shared_by(first, "cache/index3/shared_cpu_list")
    package = shared_by(first, "topology/package_cpus_list")
    chosen = {
        "one physical core": [core for core in siblings if core != first],
        "one third-level cache": [core for core in caches if core not in siblings],
        "two third-level caches": [core for core in package if core not in caches],
        "two packages": [core for core in machine.cores if core not in package],
    }
    machine.say("\n2 ranks by distance (µs, p50 out of place)")
    for name, others in chosen.items():
        others = [core for core in others if core in machine.cores]
        if others:
            pair = [first, others[-1]]
            rows = machine.bench(2, 5, "-b", "1K", "-e", "1M", "-f", 8, "-c", 0, cores=pair)
            found[name] = {row["size"]: row["out_of_place_p50_us"] for row in rows}
            cells = [f"{size}: {microseconds(time)}" for size, time in found[name].items()]
            machine.say(f"| {name} {pair} | {' | '.join(cells)} |")
    machine.keep("pairs", found)


def tune(machine: Machine) -> None:
    for ranks in machine.worlds[-2:]:
        file = machine.out / "tuned.toml"
        words = ["tune", "--ranks", ranks, "--budget", 10, "--calls", "all_reduce", "--output", file]
        text = machine.run([machine.program, *words], 25)
        file.unlink(missing_ok=True)
        machine.say(f"\ntune of {ranks} ranks" + ("" if text else ": failed or late (log.txt)"))
        for line in (text or "").splitlines():
            if re.match(r" *\d|# ratio|# +size", line):
                machine.say(line)


# The parts, and how the time is divided among them. A part that ends early leaves its time to the later ones.
PARTS = {
    system: 3, soak: 12, copies: 6, planned: 60, peers: 55, workers: 14, pairs: 12, shared_cores: 12, tune: 26,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=Path(shutil.which("fast-allreduce") or "fast-allreduce"))
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder for the results")
    parser.add_argument("--carried", type=Path, metavar="FOLDER", help="take the other libraries from there")
    parser.add_argument("--seconds", type=float, default=200, help="end all parts after this time (default: 200)")
    parts = {part.__name__: part for part in PARTS}
    parser.add_argument("--parts", default=",".join(parts), help=f"default: {','.join(parts)}")
    chosen = parser.parse_args()
    names = chosen.parts.split(",")
    if unknown := set(names) - set(parts):
        parser.error(f"no parts {', '.join(unknown)}: there are {', '.join(parts)}")
    os.environ["FAST_ALLREDUCE_TUNING"] = "built-in"
    machine = Machine(chosen)
    end = time.monotonic() + chosen.seconds
    for at, name in enumerate(names):
        began = time.monotonic()
        share = PARTS[parts[name]] / sum(PARTS[parts[later]] for later in names[at:])
        machine.end = began + (end - began) * share
        try:
            parts[name](machine)
        except Exception as error:  # whatever it is, the other parts go on
            machine.say(f"{name} FAILED: {type(error).__name__}: {error}")
        print(f"# {name} took {time.monotonic() - began:.1f} s", file=machine.log, flush=True)
        machine.keep(f"seconds of {name}", round(time.monotonic() - began, 1))
    took = {name: machine.results[f"seconds of {name}"] for name in names}
    machine.say("seconds: " + ", ".join(f"{name} {seconds}" for name, seconds in took.items()))


if __name__ == "__main__":
    main()
