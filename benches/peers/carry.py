#!/usr/bin/env python3
"""Fills a folder with the compared engines, for a machine without compilers, MPIs and network.

    benches/peers/carry.py FOLDER            # there: benches/peers/run.py --carried FOLDER

The folder has this crate's rank program, Open MPI and MPICH with their libraries, and DeepSpeed's kernel for CPUs with
AVX-512. That machine needs x86-64, a C library and a C++ library that are not older than here, Python, and torch for
DeepSpeed and Gloo. DeepSpeed's kernel needs the version of torch that it was compiled with: PEERS_TORCH names its
folder, here and there. Open MPI lacks the components for networks, batch systems and files.
"""

import re
import shutil
import sys
from pathlib import Path

import engines
from engines import Unavailable, output

BASE = re.compile(r"/(libc|libm|libdl|libpthread|librt|libresolv|libutil|libgcc_s|libstdc\+\+|ld-linux-x86-64)\.so")
LEFT_OUT = re.compile(
    "ofi|openib|psm|ucx|slurm|romio|flux|jsm|schizo_tm|memheap|spml|scoll|sshmem|monitoring|gridengine|_fs_|fcoll|fbtl"
    "|sharedfp|ompio|crs|compress|verbs"
)


def libraries(programs: list[Path]) -> set[Path]:
    """Returns the libraries that programs load, except those of every Linux system."""
    found = re.findall(r"=> (/\S+)", output(["ldd", *programs]))
    return {Path(path) for path in found if not BASE.search(path)}


def copy(source: Path, folder: Path, strip: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    copied = folder / source.name
    shutil.copy(source, copied)  # follows links
    if strip:
        output(["strip", "--strip-unneeded", copied])
    return copied


def mpis(folder: Path, ranks: list[Path]) -> None:
    tools = [Path(shutil.which(name)).resolve() for name in ("orterun", "mpiexec.hydra", "hydra_pmi_proxy")]
    place = output(["ompi_info", "--path", "pkglibdir", "--parsable"]).strip().rpartition(":")[2]
    components = [path for path in Path(place).glob("mca_*.so") if not LEFT_OUT.search(path.name)]
    for path in libraries([*tools, *components, *ranks]):
        copy(path, folder / "lib")
    for path in tools:
        copy(path, folder / "bin")
    for path in components:
        copy(path, folder / "openmpi3")
    for path in Path("/usr/share/openmpi").glob("*.txt"):
        copy(path, folder / "share", strip=False)
    copy(Path("/etc/openmpi/openmpi-mca-params.conf"), folder / "etc", strip=False)
    (folder / "ucx").mkdir(exist_ok=True)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    try:
        copy(Path(engines.fast_allreduce().command[0]), folder)
        ranks = [Path(engines.mpi(flavour, 2).command[-1]) for flavour in ("openmpi", "mpich")]
        for path in ranks:
            copy(path, folder)
        mpis(folder / "mpi", ranks)
        kernel = engines.deepspeed(2, "x86-64-v4")
        copy(Path(kernel.command[0]), folder)
        (folder / "deepspeed-version").write_text(kernel.environment["PEERS_VERSION"])
    except Unavailable as why:
        sys.exit(f"cannot go on: {why}")


if __name__ == "__main__":
    main()
