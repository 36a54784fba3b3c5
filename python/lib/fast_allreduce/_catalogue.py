# Generated from catalogue/ by `cargo run -p fast-allreduce-catalogue --example generate`: do not edit.

from enum import Enum


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
