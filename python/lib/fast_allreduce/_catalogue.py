# Generated from catalogue/ by `cargo run -p fast-allreduce-catalogue --example generate`: do not edit.

from __future__ import annotations

from enum import Enum
from os import PathLike
from typing import Literal, TypedDict


class ReduceOp(str, Enum):
    """How elements are combined, always in the order of the ranks. Its name, such as "sum", does as well.

    The bitwise ones are of integers. `premul_sum(scale)` makes another one, of floats.
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

# Operations that floating-point types do not have.
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
    """Settings of a communicator. None is the default."""

    # Longest wait for another rank without progress, in a call or in a step of making the communicator.
    # Default: 30; 1800 in the plugins for vLLM and SGLang.
    timeout: float | None
    # Limit of calls up to the first that has waited for a rank, which may load weights before it.
    # Default: `timeout` where that is set, else 600.
    first_call_timeout: float | None
    # Longest wait for all ranks to come. The variable does not count for ranks that are given an id.
    # Default: 120; for ranks that are given an id, what the program sets `timeout` to, else 30.
    join_timeout: float | None
    # Bytes that one launch takes through shared memory. Larger messages go in pieces.
    # Default: 1M on CPUs, 8M on GPUs.
    max_bytes: int | str | None
    # One algorithm for all allreduces.
    # Default: the plan's choice.
    algorithm: Literal["one-shot-pull", "two-shot-pull", "one-shot-push", "two-shot-push", "ring", "halving-doubling", "one-shot-nvls", "two-shot-nvls"] | None
    # Order of additions. `any` lets the plan take algorithms that give other bits, in-switch reductions among them.
    # Default: fixed.
    order: Literal["fixed", "any"] | None
    # Whether ranks compare their calls by a barrier of its own before each.
    # Default: 0; 1 in debug builds.
    check: bool | None
    # Whether the host may measure its cores to choose between its built-in plans. No effect on GPUs.
    # Default: 1.
    calibrate: bool | None
    # Whether a receiver in another process reads large messages where they are. No effect on GPUs.
    # Default: whichever has been faster so far.
    direct_reads: bool | None
    # The plan. The variable counts if its file is of the communicator's device.
    # Default: the file installed for this machine, else `built-in`.
    tuning: str | PathLike[str] | None
    # Threads of each rank for large messages, the caller's included.
    # Default: 1.
    workers: int | None
    # What a waiting rank does with its core. `auto` spins where every rank can have one.
    # Default: auto.
    wait: Literal["auto", "spin", "yield"] | None
    # What each rank's threads are bound to: cores.
    # Default: none.
    bind: Literal["none", "core", "numa"] | None
    # Most blocks of a launch: several communicators.
    # Default: half of the multiprocessors that the process's communicators have left.
    max_blocks: int | None
    # Promises that no call runs on the GPU at the same time as one of another communicator of the process, on any rank.
    # Default: 0.
    one_at_a_time: bool | None
    # Launches with the attribute of programmatic dependent launch, which is also a promise.
    # Default: 0.
    programmatic_launch: bool | None
    # How ranks share memory.
    # Default: the first that is found to work.
    sharing: Literal["pointers", "descriptor", "ipc"] | None
