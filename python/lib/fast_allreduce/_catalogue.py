# Generated from catalogue/ by `cargo run -p fast-allreduce-catalogue --example generate`: do not edit.

from __future__ import annotations

from enum import Enum
from os import PathLike
from typing import Literal, TypedDict


class ReduceOp(str, Enum):
    """Reduction operation. Elements are combined in rank order. Functions also accept the name, such as "sum".

    Bitwise operations support integers only. `premul_sum(scale)` returns another operation, which supports floats only.
    """

    SUM = "sum"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    AVG = "avg"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


# Types that can be reduced, by torch's names.
TORCH_TYPES = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float8_e4m3fn",
    "float8_e5m2",
)

# Operations by the attribute of torch.distributed.ReduceOp.
TORCH_OPS = {
    "SUM": ReduceOp.SUM,
    "PRODUCT": ReduceOp.PROD,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
    "AVG": ReduceOp.AVG,
    "BAND": ReduceOp.BAND,
    "BOR": ReduceOp.BOR,
    "BXOR": ReduceOp.BXOR,
}

# Operations that support integers only.
INTEGER_OPS = (
    ReduceOp.BAND,
    ReduceOp.BOR,
    ReduceOp.BXOR,
)

# Formats of quantised rows whose scale is given.
GIVEN_SCALINGS = (
    "given",
    "per_tensor",
)


class Settings(TypedDict, total=False):
    """Settings of a communicator. None means the default."""

    # Longest wait for a rank without progress, also while a communicator is made.
    # Default: 30; 1800 in the plugins of vLLM and SGLang.
    timeout: float | None
    # Limit of calls until one has waited for another rank, which may load weights first.
    # Default: `timeout` if it is set, else 600.
    first_call_timeout: float | None
    # Time for all ranks to join. Ranks with an id ignore the variable.
    # Default: 120; with an id the program's `timeout` or 30.
    join_timeout: float | None
    # Bytes that one launch moves through shared memory. Larger messages are divided into pieces.
    # Default: 1M on CPUs, 8M on GPUs.
    max_bytes: int | str | None
    # Algorithm of all allreduces.
    # Default: the plan's choice.
    algorithm: Literal["one-shot-pull", "two-shot-pull", "one-shot-push", "two-shot-push", "ring", "halving-doubling",
        "one-shot-nvls", "two-shot-nvls"] | None
    # Order of additions. `any` permits more algorithms, which give other bits.
    # Default: fixed.
    order: Literal["fixed", "any"] | None
    # Whether ranks compare their calls, by a separate barrier before each call.
    # Default: 0; 1 in debug builds.
    check: bool | None
    # Whether the host may measure its cores to choose a built-in plan. GPUs ignore it.
    # Default: 1.
    calibrate: bool | None
    # Whether receivers read large messages directly from the sender's process. GPUs ignore it.
    # Default: whichever has been faster so far.
    direct_reads: bool | None
    # Calls whose times the flight record has. It always has the latest calls.
    # Default: sampled.
    flight: Literal["sampled", "all", "off"] | None
    # Plan. The variable is ignored on other devices than its file's.
    # Default: the installed file, else `built-in`.
    tuning: str | PathLike[str] | None
    # Number of threads of each rank for large messages, including the caller.
    # Default: 1.
    workers: int | None
    # What a waiting rank does with its core. `auto` spins if the rank shares no core with other ranks.
    # Default: auto.
    wait: Literal["auto", "spin", "yield"] | None
    # Smallest allreduce whose results bypass the caches.
    # Default: by the make of CPU.
    stream_from: int | str | None
    # Binding of each rank's threads: cores.
    # Default: none.
    bind: Literal["none", "core", "numa"] | None
    # Largest grid: several communicators.
    # Default: half of the multiprocessors that the process has free.
    max_blocks: int | None
    # Promises that calls of different communicators of the process never run at the same time on a rank's GPU.
    # Default: 0.
    one_at_a_time: bool | None
    # Uses programmatic dependent launch. Setting it is also a promise.
    # Default: 0.
    programmatic_launch: bool | None
    # How ranks share GPU memory.
    # Default: the first that works.
    sharing: Literal["pointers", "descriptor", "fabric", "host", "ipc"] | None
