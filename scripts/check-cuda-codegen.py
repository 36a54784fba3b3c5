#!/usr/bin/env python3
"""Checks the code that the CUDA compiler generates for csrc/cuda, for properties that no run on one GPU can show.

    scripts/check-cuda-codegen.py TOOLKIT CSRC [ARCH ...] [--fatbins PATH ...]
    scripts/check-cuda-codegen.py --self-test

Compiles family by family with the flags of build/nvcc.flags, as the build does, reads PTX, SASS and ptxas' report,
and prints one line per check. Faults follow their line, indented. Exit status 1 if any failed.

TOOLKIT is what scripts/cuda-toolchain.sh prints: it needs bin/{nvcc,cuobjdump,nvdisasm}.
Needs Python 3.9 and nothing else.
"""

import argparse
import re
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Dict, List, Tuple

HERE = Path(__file__).resolve().parent
FLAGS_FILE = HERE.parent / "build" / "nvcc.flags"
# Lists the virtual architectures.
ARCHITECTURES_FILE = HERE.parent / "build" / "architectures.rs"
DEFAULT_ARCHS = ["sm_80", "sm_90", "sm_100"]
HOT = r"_sum_w\d+$"
FLAGS = r"pull|reduce|gather|broadcast|barrier|transfer|nvls"
# Kernels with multimem instructions, and the first architecture that has them.
NVLS, NVLS_SINCE = "_nvls_", 90
# The first architecture with programmatic dependent launch; the SASS of `griddepcontrol.wait`; and memory accesses,
# which may not come before it.
WAITS_SINCE = 90
WAIT = re.compile(r"\bACQBULK\b")
ACCESS = re.compile(r"\b(?:LD|LDG|LDGSTS|LDL|ST|STG|STL|ATOM|ATOMG|RED|REDG|LDGMC|MEMBAR)\b")
# The least number of releases and acquires in a kernel. A hot kernel with flags has one release, and two acquires: of a
# poll, and of the list of ranks that are gone. A kernel that also compares calls has one more of each. A transfer does
# not compare calls: it signals a chunk by three pairs of words, and a credit, which may revoke after a fence.sc.
RELEASES, ACQUIRES = 2, 3
HOT_RELEASES, HOT_ACQUIRES = 1, 2
TRANSFER_RELEASES, TRANSFER_ACQUIRES = 2, 6
PACKETS = r"push|ring|halving_doubling"
# Kernels launch with up to 512 threads, and a block has 65536 registers.
MAX_REGISTERS = 65536 // 512
# The largest hot kernel is the two-shot push of 16-bit floats between 8 ranks: 10,624 bytes.
MAX_HOT_BYTES = 21 << 9
# A hot kernel with the out-of-line functions that it calls, which contain rarely executed code.
MAX_WHOLE_BYTES = 50 << 8
# All fatbins together, for two architectures and PTX.
MAX_FATBIN = 5 << 19
# The PTX of all families: as text, and compressed as stored in the fatbins.
MAX_PTX_TEXT = 4_500_000
MAX_PTX = 4 << 20


@dataclass(frozen=True)
class Settings:
    """The kernels that the checks apply to."""

    hot: "re.Pattern[str]" = re.compile(HOT)
    # All kernels that must exist.
    names: Tuple[str, ...] = ()
    flags: "re.Pattern[str]" = re.compile(FLAGS)
    packets: "re.Pattern[str]" = re.compile(PACKETS)
    # Whether kernels wait for the previous launch.
    waits: bool = True


# ---- Reading what the compiler emitted -------------------------------------------------------------


@dataclass(frozen=True)
class Function:
    """One function of a PTX file."""

    is_kernel: bool
    body: str


@dataclass(frozen=True)
class Usage:
    """What ptxas reports about one kernel."""

    stack: int
    spill_stores: int
    spill_loads: int
    registers: int


@dataclass(frozen=True)
class Emitted:
    """One architecture's code, parsed."""

    ptx: Dict[str, Function]
    sass: Dict[str, str]
    usage: Dict[str, Usage]
    ptx_bytes: int

    def kernels(self) -> List[str]:
        return [name for name, function in self.ptx.items() if function.is_kernel]

    def hot(self, settings: Settings) -> List[str]:
        return [name for name in self.kernels() if settings.hot.search(name)]

    def reached(self, kernel: str) -> str:
        """Returns the text of the kernel and of every function that it calls."""
        seen, todo = {kernel}, [kernel]
        while todo:
            for call in CALL.findall(self.ptx[todo.pop()].body):
                callees = {word for word in re.findall(r"[\w$]+", call) if word in self.ptx} - seen
                seen |= callees
                todo += callees
        return "\n".join(self.ptx[name].body for name in seen)


CALL = re.compile(r"\bcall\b[^;]*;")
BRACE = re.compile(r"[{}]")
HEADER = re.compile(r"\.(entry|func)\b\s*(?:\([^)]*\)\s*)?([\w$]+)[^;{]*([;{])")


def parse_ptx(text: str) -> Dict[str, Function]:
    # Comments and file names may mention instructions.
    text = re.sub(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"', " ", text, flags=re.S)
    functions = {}
    for header in HEADER.finditer(text):
        kind, name, opening = header.groups()
        if opening == ";":
            continue  # a declaration
        depth, end = 1, header.end()
        while depth > 0:
            brace = BRACE.search(text, end)
            if brace is None:
                raise ValueError(f"the PTX ends within {name}")
            depth += 1 if brace.group() == "{" else -1
            end = brace.end()
        functions[name] = Function(kind == "entry", text[header.end() : end])
    return functions


def parse_sass(text: str) -> Dict[str, str]:
    parts = re.split(r"^\s*Function : (\S+)\s*$", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


def parse_usage(log: str) -> Dict[str, Usage]:
    """Parses the output of `ptxas -v`. It lists the frames of called functions under their own names."""
    usage: Dict[str, Usage] = {}
    frames: Dict[str, Tuple[int, int, int]] = {}
    kernel = function = ""
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '([^']+)'", line):
            kernel = found[1]
        elif found := re.search(r"Function properties for (\S+)", line):
            function = found[1]
        elif found := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            frames[function] = (int(found[1]), int(found[2]), int(found[3]))
        elif found := re.search(r"Used (\d+) registers", line):
            if kernel in frames:
                usage[kernel] = Usage(*frames[kernel], int(found[1]))
    return usage


# ---- The checks: each returns its faults -----------------------------------------------------------


def lists(catalogue: Path) -> Dict[str, List[List[str]]]:
    """Returns the lists of catalogue.h with their entries, including those of nested lists."""
    text = catalogue.read_text()
    found: Dict[str, List[List[str]]] = {}
    for name, body in re.findall(r"#define (FA_\w+)\(X, \.\.\.\)((?:.*\\\n)+.*)", text):
        found[name] = []
        for part, entry in re.findall(r"^\s*(X|FA_\w+)\(([^()]*)\)", body, re.M):
            words = [word.strip() for word in entry.split(",")][:-1]
            found[name] += [words] if part == "X" else found[part]
    return found


def names_of(catalogue: Path) -> Tuple[str, ...]:
    """Returns the names of the kernels that csrc/cuda must have: those of the catalogue, and the probe."""
    table = lists(catalogue)
    types = sorted({dtype[6] for dtype in table["FA_TYPES"]})
    names = [f"{reducing[2]}_{dtype}" for reducing in table["FA_REDUCING"] for dtype in types]
    names += [
        f"{hot[2]}_{dtype[0]}_sum_w{world[0]}"
        for hot in table["FA_HOT"]
        for dtype in table["FA_HOT_TYPES"]
        for world in table["FA_HOT_WORLDS"]
    ]
    names += [f"{norming[2]}_{dtype[0]}" for norming in table["FA_NORMING"] for dtype in table["FA_HOT_TYPES"]]
    names += [
        f"{kernel[2]}_{dtype[0]}"
        for name in ("FA_NVLS", "FA_SHARDED")
        for kernel in table[name]
        for dtype in table["FA_HOT_TYPES"]
    ]
    names += [entry[2] for name in ("FA_MOVING", "FA_OTHER") for entry in table[name]]
    return (*names, "share_probe")


def check_names(code: Emitted, settings: Settings) -> List[str]:
    there, wanted = set(code.kernels()), set(settings.names)
    faults = [f"{name}: not in catalogue.h" for name in sorted(there - wanted)]
    return faults + [f"{name}: not compiled" for name in sorted(wanted - there)]


def check_wide(code: Emitted, settings: Settings) -> List[str]:
    faults = []
    for kernel in code.hot(settings):
        sass = code.sass.get(kernel)
        if sass is None:
            faults.append(f"{kernel}: not in the SASS")
            continue
        for opcode, what in (("LDG", "load"), ("STG", "store")):
            # The width is the last size modifier; LTC128B is a prefetch hint.
            if not re.search(rf"\b{opcode}\.E\.(?:[A-Z0-9_]+\.)*128\b", sass):
                found = sorted(set(re.findall(rf"\b{opcode}\.[A-Z0-9_.]+", sass)))
                faults.append(f"{kernel}: no 128-bit global {what} (has: {', '.join(found) or 'none'})")
    return faults


# bar.red and barrier.red are not memory accesses, so the opcode must come first.
MEMORY_OPERATION = re.compile(r"(?<![\w.%$])((?:ld|st|red|atom|fence|membar|multimem)(?:\.[\w:]+)+)")
ORDERED = re.compile(
    r"^(ld|st|multimem)\..*\b(relaxed|acquire|release|volatile|mmio)\b|^(red|atom|fence|membar)\."
)


def check_scope(code: Emitted, _: Settings) -> List[str]:
    faults = {}
    for name, function in code.ptx.items():
        for operation in MEMORY_OPERATION.findall(function.body):
            # Shared memory is private to the block: no other device sees it. fence.proxy.alias orders aliases of an
            # address and has no scope.
            if operation == "fence.proxy.alias":
                continue
            if ORDERED.search(operation) and ".shared" not in operation:
                if "sys" not in operation.split("."):
                    faults[f"{name}: {operation} has no .sys scope"] = None
    return list(faults)


def check_flags(code: Emitted, settings: Settings) -> List[str]:
    faults = []
    for kernel in filter(settings.flags.search, code.kernels()):
        operations = MEMORY_OPERATION.findall(code.reached(kernel))

        def count(prefix: str) -> int:
            return sum(operation.startswith(prefix) for operation in operations)

        fences = count("fence.acq_rel.sys") + (count("fence.sc.sys") if kernel == "transfer" else 0)
        releases = count("st.release.sys") + min(fences, count("st.relaxed.sys"))
        hot = settings.hot.search(kernel) is not None
        wanted = HOT_RELEASES if hot else TRANSFER_RELEASES if kernel == "transfer" else RELEASES
        if releases < wanted:
            faults.append(f"{kernel}: {releases} st.release.sys, or fence.acq_rel.sys with st.relaxed.sys")
        acquires = HOT_ACQUIRES if hot else TRANSFER_ACQUIRES if kernel == "transfer" else ACQUIRES
        if count("ld.acquire.sys") < acquires:
            faults.append(f"{kernel}: {count('ld.acquire.sys')} ld.acquire.sys")
    return faults


def check_packets(code: Emitted, settings: Settings) -> List[str]:
    """Requires vector accesses with system scope: check_scope accepts packet accesses without any scope."""
    faults = []
    for kernel in filter(settings.packets.search, code.kernels()):
        operations = MEMORY_OPERATION.findall(code.reached(kernel))
        for pattern in (r"st\.relaxed\.sys\S*\.v[24]\.", r"ld\.relaxed\.sys\S*\.v[24]\."):
            if not any(re.match(pattern, operation) for operation in operations):
                faults.append(f"{kernel}: nothing matches {pattern}")
    return faults


def check_no_read_only_loads(code: Emitted, _: Settings) -> List[str]:
    """Forbids loads through the read-only cache: it is not coherent, and peers write what these kernels read."""
    return [
        f"{name}: {operation}"
        for name, function in code.ptx.items()
        for operation in dict.fromkeys(MEMORY_OPERATION.findall(function.body))
        if operation.startswith("ld.") and "nc" in operation.split(".")
    ]


def check_frames(code: Emitted, settings: Settings) -> List[str]:
    faults = []
    for kernel in code.kernels():
        usage = code.usage.get(kernel)
        if usage is None:
            faults.append(f"{kernel}: ptxas reports nothing about it")
        elif (usage.stack, usage.spill_stores, usage.spill_loads) != (0, 0, 0):
            faults.append(
                f"{kernel}: {usage.stack} bytes stack frame, {usage.spill_stores} bytes spill stores,"
                f" {usage.spill_loads} bytes spill loads"
            )
    return faults


def check_registers(code: Emitted, _: Settings) -> List[str]:
    faults = []
    for kernel in code.kernels():
        usage = code.usage.get(kernel)
        if usage is None:
            faults.append(f"{kernel}: ptxas reports nothing about it")
        elif usage.registers > MAX_REGISTERS:
            faults.append(f"{kernel}: {usage.registers} registers")
    return faults


INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,5})\*/", re.M)
# In SASS a kernel's functions follow it.
SASS_CALL = re.compile(r"\bCALL\.REL\.NOINC 0x([0-9a-f]+)")


def sizes(sass: str) -> Tuple[int, int]:
    """Returns the bytes of a kernel without the functions that it calls, which follow it, and with them."""
    functions = min((int(target, 16) for target in SASS_CALL.findall(sass)), default=1 << 32)
    instructions = INSTRUCTION.findall(sass)
    return 16 * sum(int(at, 16) < functions for at in instructions), 16 * len(instructions)


def check_sizes(code: Emitted, settings: Settings) -> List[str]:
    """Limits code size: a server runs other kernels between calls, so a call starts with a cold instruction cache."""
    faults = []
    for kernel in code.hot(settings):
        own, whole = sizes(code.sass.get(kernel, ""))
        if not 0 < own <= MAX_HOT_BYTES:
            faults.append(f"{kernel}: {own} bytes")
        elif whole > MAX_WHOLE_BYTES:
            faults.append(f"{kernel}: {whole} bytes including the functions that it calls")
    return faults


def check_waits(code: Emitted, settings: Settings) -> List[str]:
    """Forbids memory accesses before the wait for the previous launch (see csrc/core/dependent_launch.cuh)."""
    faults = []
    for kernel in code.kernels() if settings.waits else ():
        sass = code.sass.get(kernel, "")
        wait, access = WAIT.search(sass), ACCESS.search(sass)
        if wait is None:
            faults.append(f"{kernel}: does not wait for the previous launch")
        elif access is not None and access.start() < wait.start():
            faults.append(f"{kernel}: {access.group()} before the wait for the previous launch")
    return faults


def check_text(code: Emitted, settings: Settings) -> List[str]:
    return [f"PTX of {code.ptx_bytes} bytes"] if code.ptx_bytes > MAX_PTX_TEXT else []


def check_symbols(code: Emitted, _: Settings) -> List[str]:
    """nvcc puts a hash of the source's path into the names of an anonymous namespace."""
    return [f"{name} depends on the folder of the sources" for name in code.ptx if "_INTERNAL_" in name]


CHECKS = [
    ("the kernels are those of catalogue.h", check_names),
    ("128-bit global loads and stores in the hot set", check_wide),
    ("every flag and packet access has system scope", check_scope),
    ("kernels with flags release and acquire them", check_flags),
    ("kernels with packets store and load them with system scope", check_packets),
    ("no loads through the read-only cache", check_no_read_only_loads),
    ("no stack frame and no spills in any kernel", check_frames),
    (f"at most {MAX_HOT_BYTES} bytes of SASS, {MAX_WHOLE_BYTES} with functions, in hot kernels", check_sizes),
    (f"at most {MAX_REGISTERS} registers in every kernel", check_registers),
    ("from sm_90 on, no memory access before the wait for the previous launch", check_waits),
    (f"at most {MAX_PTX_TEXT} bytes of PTX as text", check_text),
    ("the same bytes in every folder: no anonymous namespace", check_symbols),
]


def check_fatbins(paths: List[Path]) -> List[str]:
    missing = [f"{path}: no such file" for path in paths if not path.is_file()]
    if missing:
        return missing
    sizes = [path.stat().st_size for path in paths]
    faults = [f"{path}: empty, as in a build without CUDA" for path, size in zip(paths, sizes) if size == 0]
    return faults + ([f"{sum(sizes)} bytes"] if sum(sizes) > MAX_FATBIN else [])


FATBIN_USAGE = re.compile(r"^arch = (\S+)|^ *Function (\S+):\s+REG:(\d+) STACK:(\d+) ", re.M)


def check_fatbin_usage(text: str) -> List[str]:
    """Checks the output of `cuobjdump --dump-resource-usage`: the frames, which spills need, and the registers."""
    faults, arch, kernels = [], "", 0
    for found in FATBIN_USAGE.finditer(text):
        if found[1]:
            arch = found[1]
            continue
        kernels += 1
        if int(found[4]) != 0:
            faults.append(f"{found[2]}, {arch}: {found[4]} bytes stack frame")
        if int(found[3]) > MAX_REGISTERS:
            faults.append(f"{found[2]}, {arch}: {found[3]} registers")
    return faults or ([] if kernels else ["no kernels"])


def fatbin_usage(toolkit: Path, paths: List[Path]) -> List[str]:
    try:
        texts = [run([toolkit / "bin" / "cuobjdump", "--dump-resource-usage", path]) for path in paths]
    except (OSError, RuntimeError) as error:
        return str(error).splitlines()
    return [fault for text in texts for fault in check_fatbin_usage(text)]


def check_ptx(paths: List[Path]) -> List[str]:
    faults, total = [], 0
    for path in paths:
        try:
            ptx = ptx_sizes(path.read_bytes())
            total += sum(ptx)
            faults += [] if ptx else [f"{path}: no PTX"]
        except (OSError, ValueError, struct.error) as error:
            faults.append(f"{path}: {error}")
    return faults + ([f"PTX of {total} bytes"] if total > MAX_PTX else [])


def ptx_sizes(image: bytes) -> List[int]:
    """Returns the sizes of a fatbin's PTX entries. Entry header: kind (1: PTX), version, header size, contents size."""
    ptx, at = [], 0
    while at < len(image):
        magic, _, header, size = struct.unpack_from("<IHHQ", image, at)
        if magic != 0xBA55ED50:
            raise ValueError(f"no fatbin at {at}")
        at += header
        end = at + size
        while at < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", image, at)
            ptx += [size] if kind == 1 else []
            at += header + size
    return ptx


# ---- Running ---------------------------------------------------------------------------------------


class Report:
    """Prints and counts the results of checks."""

    SHOWN = 8

    def __init__(self) -> None:
        self.passed = self.failed = 0

    def add(self, where: str, what: str, faults: List[str]) -> None:
        print(f"{'FAILED' if faults else 'ok':<7} {where:<7} {what}")
        for fault in faults[: self.SHOWN]:
            print(f"          {fault}")
        if len(faults) > self.SHOWN:
            print(f"          and {len(faults) - self.SHOWN} more")
        self.passed += not faults
        self.failed += bool(faults)

    def finish(self) -> int:
        print(f"{self.passed} passed, {self.failed} failed")
        return 1 if self.failed else 0


def flags() -> List[str]:
    lines = FLAGS_FILE.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def ptx_of(arch: str) -> str:
    """Returns the virtual architecture from whose PTX the build compiles code for `arch`."""
    (shared,) = re.findall(r"^const VIRTUAL: .* = \[(.*)\];$", ARCHITECTURES_FILE.read_text(), re.M)
    return f"compute_{max(int(word) for word in shared.split(',') if int(word) <= number(arch))}"


def number(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))


def emit(toolkit: Path, csrc: Path, archs: List[str]) -> List[Emitted]:
    """Compiles each family of kernels for architectures that share their PTX."""

    def family(source: Path) -> Tuple[str, List[Tuple[str, str]]]:
        nvcc, ptx = toolkit / "bin" / "nvcc", Path(folder) / f"{source.stem}.ptx"
        run([nvcc, "-ptx", f"-arch={ptx_of(archs[0])}", *flags(), "-I", csrc, "-o", ptx, source])
        codes = []
        for arch in archs:
            cubin = Path(folder) / f"{source.stem}.{arch}.cubin"
            log = run([nvcc, "-cubin", f"-arch={arch}", *flags(), "-Xptxas=-v", "-o", cubin, ptx])
            codes.append((run([toolkit / "bin" / "cuobjdump", "-sass", cubin]), log))
        return ptx.read_text(), codes

    sources = sorted(source for source in (csrc / "cuda").glob("*.cu") if source.stem != "kernels")
    with tempfile.TemporaryDirectory(prefix="check-cuda-codegen-") as folder, ThreadPoolExecutor(2) as pool:
        families = list(pool.map(family, sources))
    ptx = {name: function for text, _ in families for name, function in parse_ptx(text).items()}
    ptx_bytes = sum(len(text) for text, _ in families)
    found = []
    for of_arch in zip(*(codes for _, codes in families)):
        emitted = Emitted(ptx, {}, {}, ptx_bytes)
        for sass, log in of_arch:
            emitted.sass.update(parse_sass(sass))
            emitted.usage.update(parse_usage(log))
        found.append(emitted)
    return found


def run(command: list) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{Path(command[0]).name} failed ({done.returncode}):\n{done.stdout}")
    return done.stdout


def of_arch(settings: Settings, arch: str) -> Settings:
    """Returns the settings without kernels and checks whose instructions the architecture lacks."""
    names = tuple(name for name in settings.names if number(arch) >= NVLS_SINCE or NVLS not in name)
    return replace(settings, names=names, waits=number(arch) >= WAITS_SINCE)


def check(toolkit: Path, csrc: Path, archs: List[str], settings: Settings, report: Report) -> None:
    for ptx in sorted({ptx_of(arch) for arch in archs}):
        of_ptx = [arch for arch in archs if ptx_of(arch) == ptx]
        start = time.monotonic()
        try:
            codes, faults = emit(toolkit, csrc, of_ptx), []
        except (OSError, RuntimeError, ValueError) as error:
            codes, faults = [], str(error).splitlines()
        report.add(" ".join(of_ptx), f"compiles ({time.monotonic() - start:.1f} s)", faults)
        for arch, code in zip(of_ptx, codes):
            for title, function in CHECKS:
                report.add(arch, title, function(code, of_arch(settings, arch)))


# ---- Self-test: a check that cannot fail asserts nothing ------------------------------------------

# From nvcc 13.0.88 for sm_90, shortened to the parts that the checks read.
PTX = """
.func  (.param .b32 func_retval0) wait_failed(
	.param .b64 wait_failed_param_0
)
{
	ld.relaxed.sys.global.u32 %r2, [%rd2];
	st.relaxed.sys.global.u32 [%rd3], %r2;
	ret;
}
	// .globl	one_shot_pull_f32_sum_w2: comments may say ld.acquire.gpu and {
.visible .entry one_shot_pull_f32_sum_w2(
	.param .align 8 .b8 one_shot_pull_f32_sum_w2_param_0[440]
)
.maxntid 512, 1, 1
{
	// begin inline asm
	st.release.sys.global.u32 [%rd22], %r2;
	// end inline asm
	ld.acquire.sys.global.u32 %r15, [%rd23];
	ld.acquire.sys.global.u32 %r17, [%rd26];
	{ // callseq 28, 0
	call.uni (retval0), 
	wait_failed, 
	(
	param0
	);
	} // callseq 28
	bar.red.and.pred 	%p2, 0, %p1; 
	atom.shared.add.u32 %r9, [%r8], 1;
	ld.global.v4.u32 {%r31,%r32,%r33,%r34}, [%rd40];
	st.global.v4.f32 	[%rd43], {%f16, %f15, %f14, %f13};
}
.visible .entry one_shot_push_f32_sum_w2(
	.param .align 8 .b8 one_shot_push_f32_sum_w2_param_0[440]
)
{
	st.relaxed.sys.global.v4.u32 [%rd12], {%r27,%r1,%r28,%r1};
	ld.relaxed.sys.global.v4.u32 {%r48,%r49,%r50,%r51}, [%rd22];
}
"""
SASS = """
		Function : one_shot_pull_f32_sum_w2
        /*0030*/                   ACQBULK ;
        /*0200*/                   STG.E.STRONG.SYS desc[UR4][R4.64], R16 ;
        /*0550*/                   LDG.E.128 R8, desc[UR4][R10.64] ;
        /*0620*/                   STG.E.128 desc[UR4][R8.64], R4 ;
		Function : one_shot_push_f32_sum_w2
        /*0040*/                   ACQBULK ;
        /*02d0*/                   STG.E.128.STRONG.SYS desc[UR4][R28.64], R8 ;
        /*03a0*/                   LDG.E.128.STRONG.SYS R4, desc[UR4][R10.64] ;
"""
LOG = """
ptxas info    : Compiling entry function 'one_shot_push_f32_sum_w2' for 'sm_90'
ptxas info    : Function properties for one_shot_push_f32_sum_w2
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 0 barriers
ptxas info    : Compiling entry function 'one_shot_pull_f32_sum_w2' for 'sm_90'
ptxas info    : Function properties for wait_failed
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for one_shot_pull_f32_sum_w2
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 26 registers, used 1 barriers
"""
# What cuobjdump reports about a fatbin for two architectures.
RESOURCES = """
arch = sm_75
 Function push_norm_bf16:
  REG:126 STACK:0 SHARED:19584 LOCAL:0 CONSTANT[0]:1528 TEXTURE:0 SURFACE:0 SAMPLER:0
Fatbin elf code:
arch = sm_120
 Function push_norm_bf16:
  REG:128 STACK:0 SHARED:19584 LOCAL:0 CONSTANT[2]:36 CONSTANT[0]:1784 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
A_CALL, AN_INSTRUCTION = "/*0540*/                   CALL.REL.NOINC 0x560 ;", "\n        /*0560*/"
# Planted faults: a name, a replacement in one of the three texts, and exactly those checks that must report it.
PLANTED = [
    ("nothing", ".visible", ".visible", []),
    ("a kernel of another name", "one_shot_pull_f32_sum_w2", "one_shot_pull_f32_sum_w9", [check_names]),
    ("a kernel without SASS", "Function : one_shot_push", "Function : other", [check_wide, check_sizes, check_waits]),
    (
        "a function of permitted size",
        "/*0550*/",
        f"{A_CALL}{AN_INSTRUCTION * ((MAX_WHOLE_BYTES - MAX_HOT_BYTES) // 16)}",
        [],
    ),
    ("a function that is too large", "/*0550*/", f"{A_CALL}{AN_INSTRUCTION * (MAX_WHOLE_BYTES // 16)}", [check_sizes]),
    ("a function of an anonymous namespace", "wait_failed", "_INTERNAL_8d1ec617_4_k_cu_wait_failed", [check_symbols]),
    ("text that is too long", ".func  (", " " * MAX_PTX_TEXT + ".func  (", [check_text]),
    ("a kernel that is too large", "/*0550*/", "/*0550*/" + AN_INSTRUCTION * (MAX_HOT_BYTES // 16), [check_sizes]),
    ("a kernel that does not wait", "/*0040*/                   ACQBULK ;", "", [check_waits]),
    ("a wait after a store", "ACQBULK ;", "STG.E [R2.64], R3 ;\n ACQBULK ;", [check_waits]),
    ("a wait after an atomic", "ACQBULK ;", "ATOMG.E.ADD [R2.64], R3 ;\n ACQBULK ;", [check_waits]),
    ("64-bit loads only", "LDG.E.128 ", "LDG.E.64 ", [check_wide]),
    ("64-bit loads with a prefetch hint", "LDG.E.128 ", "LDG.E.LTC128B.64 ", [check_wide]),
    ("generic stores only", "STG.E.128 ", "ST.E.128 ", [check_wide]),
    ("no 128-bit packet load", "LDG.E.128.STRONG.SYS", "LDG.E.STRONG.SYS", [check_wide]),
    ("an acquire of .gpu scope", "ld.acquire.sys", "ld.acquire.gpu", [check_scope, check_flags]),
    ("a release of .gpu scope", "st.release.sys", "st.release.gpu", [check_scope, check_flags]),
    ("a packet store of .gpu scope", "st.relaxed.sys.global.v4", "st.relaxed.gpu", [check_scope, check_packets]),
    ("a weak packet load", "ld.relaxed.sys.global.v4", "ld.global.v4", [check_packets]),
    ("a .cta scope in a called function", "ld.relaxed.sys.global.u32", "ld.relaxed.cta.u32", [check_scope]),
    ("a volatile store", "st.relaxed.sys.global.u32", "st.volatile.global.u32", [check_scope]),
    ("an atomic of the default scope", "atom.shared.add", "atom.global.add", [check_scope]),
    ("a reduction of .gpu scope", "atom.shared.add.u32", "red.relaxed.gpu.global.add.u32", [check_scope]),
    ("a fence of .gpu scope", "bar.red.and.pred", "fence.acq_rel.gpu;", [check_scope]),
    ("a fence of one device", "bar.red.and.pred", "membar.gl;", [check_scope]),
    ("one release too few", "st.release.sys.global.u32 [%rd22]", "st.global.u32 [%rd22]", [check_flags]),
    ("one acquire too few", "ld.acquire.sys.global.u32 %r17", "ld.global.u32 %r17", [check_flags]),
    ("a plain store for a release", "st.release.sys.global", "st.global", [check_flags]),
    ("a relaxed load for an acquire", "ld.acquire.sys", "ld.relaxed.sys", [check_flags]),
    ("a release as a fence and a store", "st.release.sys", "fence.acq_rel.sys; st.relaxed.sys", []),
    ("a read-only load", "ld.global.v4", "ld.global.nc.v4", [check_no_read_only_loads]),
    ("spilled stores", "0 bytes spill stores", "8 bytes spill stores", [check_frames]),
    ("spilled loads", "0 bytes spill loads", "8 bytes spill loads", [check_frames]),
    ("a stack frame", "_w2\n    0 bytes stack", "_w2\n    64 bytes stack", [check_frames]),
    ("too many registers", "Used 128 registers", "Used 129 registers", [check_registers]),
    ("a kernel unknown to ptxas", "function 'one_shot_pull", "function 'other", [check_frames, check_registers]),
]


def self_test(report: Report) -> None:
    settings = replace(Settings(), names=("one_shot_pull_f32_sum_w2", "one_shot_push_f32_sum_w2"))
    for planted, old, new, expected in PLANTED:
        texts = [text.replace(old, new) for text in (PTX, SASS, LOG)]
        code = Emitted(parse_ptx(texts[0]), parse_sass(texts[1]), parse_usage(texts[2]), len(texts[0]))
        failed = [function for _, function in CHECKS if function(code, settings)]
        faults = [] if failed == expected else [f"failed: {[function.__name__ for function in failed]}"]
        if not any(old in text for text in (PTX, SASS, LOG)):
            faults.append(f"{old!r} is not in the snippets")
        report.add("planted", planted, faults)
    for planted, old, new, expected in (
        ("nothing", "REG", "REG", []),
        ("a stack frame", "REG:128 STACK:0", "REG:128 STACK:32", ["sm_120: 32 bytes stack frame"]),
        ("too many registers", "REG:126", "REG:129", ["sm_75: 129 registers"]),
        ("no kernels", "Function", "Other", ["no kernels"]),
    ):
        found = [fault.split(", ")[-1] for fault in check_fatbin_usage(RESOURCES.replace(old, new))]
        report.add("planted", f"{planted} in a fatbin", [] if found == expected else [f"reported: {found}"])
    with tempfile.TemporaryDirectory(prefix="check-cuda-codegen-") as folder:
        for size, is_fault in ((0, True), (1, False), (MAX_FATBIN, False), (MAX_FATBIN + 1, True)):
            fatbin = Path(folder) / "cuda.fatbin"
            with fatbin.open("wb") as file:
                file.truncate(size)
            found = bool(check_fatbins([fatbin]))
            report.add("planted", f"a fatbin of {size} bytes", [f"reported: {found}"] * (found != is_fault))
        for sizes, is_fault in (((), True), ((MAX_PTX,), False), ((MAX_PTX, 8), True), ((-1,), True)):
            entries = [struct.pack("<HHIQ", 1, 1, 16, abs(size)) + bytes(size) for size in sizes if size >= 0]
            entries.append(struct.pack("<HHIQ", 2, 1, 16, 8) + bytes(8))
            magic = 0 if -1 in sizes else 0xBA55ED50
            header = struct.pack("<IHHQ", magic, 1, 16, sum(map(len, entries)))
            fatbin.write_bytes(header + b"".join(entries))
            found = bool(check_ptx([fatbin]))
            report.add("planted", f"PTX of {list(sizes)} bytes", [f"reported: {found}"] * (found != is_fault))
        fatbin.write_bytes(header + b"".join(entries))
        for paths in ([Path(folder) / "none"], [fatbin, Path(folder) / "none"]):
            found = check_fatbins(paths) and check_ptx(paths)
            report.add("planted", f"fatbin {len(paths)} is missing", [] if found else ["not reported"])
        with fatbin.open("wb") as file:
            file.truncate(MAX_FATBIN // 2 + 1)
        found = check_fatbins([fatbin, fatbin])
        report.add("planted", "two fatbins that are too large together", [] if found else ["not reported"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("toolkit", type=Path, nargs="?", metavar="TOOLKIT")
    parser.add_argument("csrc", type=Path, nargs="?", metavar="CSRC")
    parser.add_argument("archs", nargs="*", metavar="ARCH", help=f"default: {' '.join(DEFAULT_ARCHS)}")
    parser.add_argument("--fatbins", type=Path, nargs="+", metavar="PATH", help="fatbins of the build, checked as well")
    parser.add_argument("--hot", default=HOT, metavar="REGEX", help="kernels that must be fast")
    parser.add_argument("--flags", default=FLAGS, metavar="REGEX", help="kernels with flags")
    parser.add_argument("--packets", default=PACKETS, metavar="REGEX", help="kernels with packets")
    parser.add_argument("--self-test", action="store_true", help="plant faults; each must be found")
    options = parser.parse_intermixed_args()
    report = Report()
    if options.self_test:
        self_test(report)
        return report.finish()
    if options.toolkit is None or options.csrc is None:
        parser.error("TOOLKIT and CSRC are needed")
    settings = Settings(
        re.compile(options.hot),
        names_of(options.csrc / "catalogue.h"),
        re.compile(options.flags),
        re.compile(options.packets),
    )
    check(options.toolkit, options.csrc, options.archs or DEFAULT_ARCHS, settings, report)
    if options.fatbins is not None:
        report.add("fatbins", f"at most {MAX_FATBIN} bytes", check_fatbins(options.fatbins))
        report.add("fatbins", f"at most {MAX_PTX} bytes of PTX", check_ptx(options.fatbins))
        usage = fatbin_usage(options.toolkit, options.fatbins)
        report.add("fatbins", f"no stack frame, and at most {MAX_REGISTERS} registers", usage)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
