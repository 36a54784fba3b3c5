"""FlashInfer's `allreduce_fusion` over this library, on CPUs and GPUs.

Names, arguments and meanings are those of `flashinfer.comm` (0.7.2)::

    import fast_allreduce.flashinfer as comm                 # instead of flashinfer.comm

    workspace = comm.create_allreduce_fusion_workspace(
        world_size=world_size, rank=rank, max_token_num=2048, hidden_dim=4096, dtype=torch.bfloat16, group=group
    )
    comm.allreduce_fusion(
        hidden, workspace, comm.AllReduceFusionPattern.kARResidualRMSNorm, residual_in=residual, residual_out=residual,
        norm_out=normed, rms_gamma=weight, rms_eps=1e-5,
    )
    workspace.destroy()

docs/fused.md has the patterns and the differences.
"""

import torch
import torch.distributed as dist

from . import errors
from .process_group import communicator_among
from .servers import limit

# The version whose interface this is.
VERSION = "0.7.2"

_TYPES = (torch.float16, torch.bfloat16, torch.float32)


class AllReduceFusionPattern:
    """What a call computes, and into which tensors."""

    kAllReduce = 0
    kARResidualRMSNorm = 1
    kARResidualRMSNormFP8Quant = 2
    kARResidualRMSNormFP4Quant = 3
    kARResidualRMSNormOutFP8Quant = 4
    kARResidualRMSNormOutFP4Quant = 5
    kMoEReductionARResidualRMSNorm = 6
    kMoEFinalizeARResidualRMSNorm = 7
    kARResidualRMSNormPerTokenGroupFP8PackedQuant = 8
    kARResidualRMSNormOutPerTokenGroupFP8PackedQuant = 9
    kARResidualRMSNormDynamicFP8Quant = 10
    kARResidualRMSNormOutDynamicFP8Quant = 11
    kMoEFinalizeARResidualRMSNormFP8Quant = 12


class QuantizationSFLayout:
    """How the scales of NVFP4 are stored."""

    SWIZZLED_128x4 = 0
    SWIZZLED_8x4 = 1
    LINEAR = 2


_NAMES = {value: name for name, value in vars(AllReduceFusionPattern).items() if name.startswith("k")}

# For each pattern with a norm: the format of its quantised rows, and whether it also writes plain rows.
_PATTERNS = {
    AllReduceFusionPattern.kARResidualRMSNorm: (None, True),
    AllReduceFusionPattern.kARResidualRMSNormFP8Quant: ("given", False),
    AllReduceFusionPattern.kARResidualRMSNormFP4Quant: ("nvfp4", False),
    AllReduceFusionPattern.kARResidualRMSNormOutFP8Quant: ("given", True),
    AllReduceFusionPattern.kARResidualRMSNormOutFP4Quant: ("nvfp4", True),
    AllReduceFusionPattern.kARResidualRMSNormPerTokenGroupFP8PackedQuant: ("per_group_ue8m0", False),
    AllReduceFusionPattern.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant: ("per_group_ue8m0", True),
    AllReduceFusionPattern.kARResidualRMSNormDynamicFP8Quant: ("per_row", False),
    AllReduceFusionPattern.kARResidualRMSNormOutDynamicFP8Quant: ("per_row", True),
    AllReduceFusionPattern.kMoEFinalizeARResidualRMSNorm: (None, True),
    AllReduceFusionPattern.kMoEFinalizeARResidualRMSNormFP8Quant: ("given", False),
}

# The patterns whose input is experts' rows.
_FINALIZES = (
    AllReduceFusionPattern.kMoEFinalizeARResidualRMSNorm,
    AllReduceFusionPattern.kMoEFinalizeARResidualRMSNormFP8Quant,
)

# For each layout of NVFP4: the format, and the multiples of rows and of blocks that have scales.
_LAYOUTS = {
    None: ("nvfp4_tiled", 128, 4),
    QuantizationSFLayout.SWIZZLED_128x4: ("nvfp4_tiled", 128, 4),
    QuantizationSFLayout.SWIZZLED_8x4: ("nvfp4_8x4", 8, 4),
    QuantizationSFLayout.LINEAR: ("nvfp4", 1, 1),
}


class AllReduceFusionWorkspace:
    """A communicator of the ranks, as FlashInfer's functions expect it.

    `create_allreduce_fusion_workspace` makes one. `AllReduceFusionWorkspace(communicator)` uses an existing
    communicator.
    """

    backend = "fast_allreduce"

    def __init__(self, communicator):
        self.communicator = communicator
        self.world_size, self.rank = communicator.nranks, communicator.rank

    def is_buffer_size_sufficient(self, tp_size, num_tokens, hidden_dim, dtype, use_oneshot=None):
        """Returns whether calls of this size are possible.

        The number of ranks and the type decide: calls divide tensors of any size into pieces of whole rows.
        """
        return tp_size == self.world_size and dtype in _TYPES

    def destroy(self):
        """Destroys the communicator. A second call does nothing."""
        self.communicator.destroy()


def create_allreduce_fusion_workspace(
    backend="auto",
    world_size=None,
    rank=None,
    max_token_num=None,
    hidden_dim=None,
    dtype=None,
    gpus_per_node=None,
    comm_backend=None,
    force_oneshot_support=False,
    group=None,
    *,
    top_k=None,
    rms_eps=None,
    weight_bias=None,
    routed_scaling_factor=None,
    include_shared_expert=None,
    add_residual=None,
    write_residual_output=None,
    apply_rms_norm=None,
    output_dtype=None,
    dynamic_fp8=None,
    write_norm_output=None,
    config=None,
    device=None,
    **settings,
):
    """Makes a workspace. Collective, for ranks of one machine.

    `world_size` and `rank` are those of the ranks' group: of `comm_backend`, which has FlashInfer's method
    `allgather`, else of `group`, by default torch's world. `device` is by default the current GPU, or the CPU without
    one. `settings` are those of `Communicator.init`. `backend` is "auto", "trtllm", "mnnvl" or "fast_allreduce", with
    the same result. `max_token_num`, `hidden_dim`, `dtype`, `gpus_per_node` and `force_oneshot_support` have no effect.
    The others belong to FlashInfer's backend "mnnvl-cutedsl".

    Raises `ValueError` for a wrong argument or that backend, on this rank alone, and on all ranks as `communicator_of`
    does if one cannot join.
    """
    compiled = {
        "top_k": top_k, "rms_eps": rms_eps, "weight_bias": weight_bias, "routed_scaling_factor": routed_scaling_factor,
        "include_shared_expert": include_shared_expert, "add_residual": add_residual,
        "write_residual_output": write_residual_output, "apply_rms_norm": apply_rms_norm, "output_dtype": output_dtype,
        "dynamic_fp8": dynamic_fp8, "write_norm_output": write_norm_output, "config": config,
    }  # fmt: skip
    given = [name for name, value in compiled.items() if value is not None]
    if backend not in ("auto", "trtllm", "mnnvl", AllReduceFusionWorkspace.backend):
        raise errors.InvalidArgument(f"backend {backend!r} is not available: use 'auto'")
    if given:
        raise errors.InvalidArgument(f"only FlashInfer's backend 'mnnvl-cutedsl' has {', '.join(given)}")
    size, mine, exchange = _ranks(comm_backend, group)
    if (world_size, rank) != (size, mine):
        raise errors.InvalidArgument(
            f"world_size is {world_size} and rank {rank}, but the group has {size} ranks and this is rank {mine}"
        )
    if dtype is not None and dtype not in _TYPES:
        raise errors.InvalidArgument(f"dtype is {dtype}: {_expected_types()}")
    if device is None:
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    return AllReduceFusionWorkspace(communicator_among(mine, size, exchange, str(device), **(limit() | settings)))


def _ranks(comm_backend, group):
    """Returns the number of ranks, this rank, and a function that exchanges texts between them."""
    if comm_backend is not None:
        return comm_backend.Get_size(), comm_backend.Get_rank(), comm_backend.allgather

    def exchange(text):
        texts = [None] * dist.get_world_size(group)
        dist.all_gather_object(texts, text, group=group)
        return texts

    if not dist.is_initialized():
        raise errors.InvalidArgument("torch.distributed is not initialized: pass comm_backend, or initialize it")
    return dist.get_world_size(group), dist.get_rank(group), exchange


def allreduce_fusion(
    input,
    workspace,
    pattern,
    launch_with_pdl=False,
    trigger_completion_at_end=True,
    output=None,
    residual_out=None,
    norm_out=None,
    quant_out=None,
    scale_out=None,
    residual_in=None,
    rms_gamma=None,
    rms_eps=1e-6,
    scale_factor=None,
    layout_code=None,
    use_oneshot=None,
    fp32_acc=False,
    moe_reduction_device_num_experts=None,
    moe_reduction_scale_input=None,
    moe_reduction_active_experts_token_input=None,
    moe_reduction_token_input=None,
    expanded_idx_to_permuted_idx=None,
    expert_scale_factor=None,
    shared_expert_output=None,
    block_quant_group_size=None,
    weight_bias=0.0,
    *,
    moe_finalize_backend="trtllm",
):
    """Sums `input` over the ranks; patterns with a norm then add the residual, normalise the rows, and quantise them.

    All tensors are contiguous and on one device. `input`, `residual_in`, `residual_out`, `norm_out` and `output` are
    `[token_num, hidden_dim]`, f16, bf16 or f32. `rms_gamma` has `hidden_dim` elements, to which `weight_bias`, 0 or 1,
    is added. The residual must be equal on all ranks.

    * `kAllReduce` writes the sum to `output`.
    * `kARResidualRMSNorm` writes input + residual to `residual_out`, and normalised rows to `norm_out`.
    * Patterns named `FP8Quant` also write float8_e4m3fn to `quant_out`, normalised rows divided by `scale_factor` (a
      number, or a tensor of one; 1 without it). `DynamicFP8Quant` writes the divisors, a f32 for each row, to
      `scale_out`, `[token_num, 1]`.
    * Patterns named `FP4Quant` write NVFP4 to `quant_out`, `[token_num, hidden_dim / 2]` bytes, with the global scale
      `scale_factor`, and the scales of blocks of 16 to `scale_out`, in the order `layout_code`.
    * Patterns named `PerTokenGroupFP8PackedQuant` write float8_e4m3fn to `quant_out`, and for each group of
      `block_quant_group_size` elements, 128 or 32, an E8M0 to `scale_out`: an int32 for four groups,
      `[token_num, ceil(groups / 4)]`, with the strides 1 and token_num rounded up to a multiple of 4.
    * Of the patterns that quantise, those named `Out` also write `norm_out`.
    * Patterns named `MoEFinalize` compute what they sum from experts' rows. `input` is these rows, any number of them.
      `expanded_idx_to_permuted_idx`, an int32 `[token_num, top_k]`, has the experts' rows of each token, or negative
      numbers; `expert_scale_factor` has their factors, f32 or of the type of `input`. The rows of
      `shared_expert_output`, `[token_num, hidden_dim]`, are added. The last two may be omitted.

    `residual_out` may be `residual_in`, or `input`, which is then copied first; `norm_out` and `output` may be `input`.
    None of them may be experts' rows.
    A tensor that is written and not passed is allocated, except `scale_out`, and `norm_out` of a pattern named `Out`.

    Returns `output`, `norm_out` or `quant_out`: the last of them that the pattern has. The result does not depend on
    `launch_with_pdl`, `trigger_completion_at_end`, `use_oneshot`, `fp32_acc` and `moe_finalize_backend`: sums are
    always in f32. The arguments of other patterns are ignored.

    Raises `ValueError`, on this rank alone and before it communicates, for an unavailable pattern, and for a missing
    tensor or one of another shape, type or device. Errors of the call are those of `Communicator.allreduce_fused`.
    """
    if not isinstance(workspace, AllReduceFusionWorkspace):
        raise errors.InvalidArgument(f"workspace is a {type(workspace).__name__}, not one of fast_allreduce.flashinfer")
    _check_pattern(pattern)
    if not isinstance(input, torch.Tensor) or input.dim() != 2:
        raise errors.InvalidArgument("input is not a tensor of two dimensions, [token_num, hidden_dim]")
    if input.dtype not in _TYPES:
        raise errors.InvalidArgument(f"input has the type {input.dtype}: {_expected_types()}")
    _check("input", input, input)
    communicator = workspace.communicator
    if pattern == AllReduceFusionPattern.kAllReduce:
        if output is None:
            output = torch.empty_like(input)
        _check("output", output, input)
        communicator.allreduce(input, None if _same(output, input) else output)
        return output
    scaling, keeps_rows = _PATTERNS[pattern]
    if weight_bias not in (0, 1):
        raise errors.InvalidArgument(f"weight_bias is {weight_bias}: it must be 0, or 1 as in Gemma")
    for name, tensor in (("residual_in", residual_in), ("rms_gamma", rms_gamma)):
        if tensor is None:
            raise errors.InvalidArgument(f"{_NAMES[pattern]} needs {name}")
    if scaling is not None and keeps_rows and norm_out is None:
        raise errors.InvalidArgument(f"{_NAMES[pattern]} needs norm_out")
    experts = {}
    # The tensor with the shape of the rows that are normalised.
    like = input
    if pattern in _FINALIZES:
        if expanded_idx_to_permuted_idx is None:
            raise errors.InvalidArgument(f"{_NAMES[pattern]} needs expanded_idx_to_permuted_idx")
        experts = _experts(input, residual_in, expanded_idx_to_permuted_idx, expert_scale_factor, shared_expert_output)
        like = residual_in
    _check("residual_in", residual_in, like)
    residual_out = torch.empty_like(like) if residual_out is None else residual_out
    if not keeps_rows:
        norm_out = None
    elif norm_out is None:
        norm_out = torch.empty_like(like)
    _check("residual_out", residual_out, like)
    _check("rms_gamma", rms_gamma, like, (like.shape[1],))
    if keeps_rows:
        _check("norm_out", norm_out, like)
    quantized = {}
    if scaling is not None:
        if scaling != "given" and scale_out is None:
            raise errors.InvalidArgument(f"{_NAMES[pattern]} needs scale_out")
        if scaling == "per_group_ue8m0":
            quant_out, quantized = _packed(input, quant_out, scale_out, block_quant_group_size)
        else:
            quant_out, quantized = _quantized(scaling, like, quant_out, scale_out, scale_factor, layout_code)
    if not experts and _same(residual_out, input):
        # Rows may replace the input, the residual may not.
        if keeps_rows and not _same(norm_out, input):
            input = norm_out.copy_(input)
        else:
            input = input.clone()
    communicator.allreduce_fused(
        input,
        norm_out,
        residual=residual_in,
        residual_out=None if _same(residual_out, residual_in) else residual_out,
        norm="rms",
        weight=rms_gamma,
        epsilon=rms_eps,
        unit_offset=weight_bias == 1,
        **quantized,
        **experts,
    )
    return norm_out if scaling is None else quant_out


def _check_pattern(pattern):
    if pattern in _PATTERNS or pattern == AllReduceFusionPattern.kAllReduce:
        return
    if pattern not in _NAMES:
        raise errors.InvalidArgument(f"pattern {pattern} is not one of FlashInfer {VERSION}")
    reason = "its scales are expert by expert; kMoEFinalizeARResidualRMSNorm takes rows in any order, with a table"
    raise errors.InvalidArgument(f"{_NAMES[pattern]} is not available: {reason}")


def _expected_types():
    return "it must be float16, bfloat16 or float32"


def _check(name, tensor, like, shape=None, dtype=None, is_contiguous=True):
    """Raises `InvalidArgument` unless a tensor has the device, the type and the shape of another, or the given ones."""
    if not isinstance(tensor, torch.Tensor):
        raise errors.InvalidArgument(f"{name} is a {type(tensor).__name__}, not a tensor")
    if is_contiguous and not tensor.is_contiguous():
        raise errors.InvalidArgument(f"{name} is not contiguous")
    for what, has, expected in (
        ("device", tensor.device, like.device),
        ("type", tensor.dtype, dtype or like.dtype),
        ("shape", tuple(tensor.shape), tuple(like.shape) if shape is None else shape),
    ):
        if has != expected:
            raise errors.InvalidArgument(f"{name} has the {what} {has}, and the call needs {expected}")


def _same(one, other):
    return one.data_ptr() == other.data_ptr()


def _experts(input, residual, table, weights, shared):
    """Checks the residual, which has the shape of the message, and returns the arguments of
    `Communicator.allreduce_fused` for experts' rows."""
    tokens = getattr(residual, "shape", ())[:1]
    _check("residual_in", residual, input, (*tokens, input.shape[1]))
    entries = (*tokens, *getattr(table, "shape", ())[-1:])
    _check("expanded_idx_to_permuted_idx", table, input, entries, torch.int32)
    if weights is not None:
        is_float = getattr(weights, "dtype", None) == torch.float32
        _check("expert_scale_factor", weights, input, entries, torch.float32 if is_float else input.dtype)
    if shared is not None:
        _check("shared_expert_output", shared, residual)
    return {"expert_table": table, "expert_weights": weights, "shared_expert": shared}


def _packed(input, quant_out, scale_out, group):
    """Returns the tensor of 8-bit floats, and the arguments of `Communicator.allreduce_fused` for packed scales."""
    tokens, hidden = input.shape
    scaling = {128: "per_group_ue8m0", 32: "per_32_ue8m0"}.get(group)
    if scaling is None:
        raise errors.InvalidArgument(f"block_quant_group_size is {group}: only 128 and 32 are available")
    if hidden % group != 0:
        raise errors.InvalidArgument(f"hidden_dim is {hidden}, not a multiple of {group}")
    if quant_out is None:
        quant_out = torch.empty_like(input, dtype=torch.float8_e4m3fn)
    _check("quant_out", quant_out, input, dtype=torch.float8_e4m3fn)
    words, aligned = -(-hidden // group // 4), -(-tokens // 4) * 4
    _check("scale_out", scale_out, input, (tokens, words), torch.int32, is_contiguous=False)
    for size, stride, expected in zip(scale_out.shape, scale_out.stride(), (1, aligned)):
        if size > 1 and stride != expected:
            raise errors.InvalidArgument(f"scale_out has the strides {scale_out.stride()}, not {(1, aligned)}")
    scales = torch.as_strided(scale_out, ((words - 1) * aligned + tokens if tokens else 0,), (1,))
    if tokens % 4 != 0:
        # FlashInfer's kernels fill columns with zeros.
        scales.zero_()
    return quant_out, {"scaling": scaling, "numbers": quant_out, "scales": scales}


def _quantized(scaling, input, quant_out, scale_out, scale_factor, layout_code):
    """Returns the tensor of quantised rows, and the arguments of `Communicator.allreduce_fused` for them."""
    tokens, hidden = input.shape
    if scaling == "per_row":
        _check("scale_out", scale_out, input, (tokens, 1), torch.float32)
    elif scale_factor is None:
        scale_factor = torch.ones(1, device=input.device)
    elif isinstance(scale_factor, torch.Tensor):
        if scale_factor.numel() != 1 or scale_factor.is_complex():
            raise errors.InvalidArgument(
                f"scale_factor has {scale_factor.numel()} elements of {scale_factor.dtype}: the call needs 1, real"
            )
        scale_factor = scale_factor.reshape(1).to(input.device, torch.float32)
    else:
        scale_factor = torch.full((1,), float(scale_factor), device=input.device)
    if scaling != "nvfp4":
        if quant_out is None:
            quant_out = torch.empty_like(input, dtype=torch.float8_e4m3fn)
        _check("quant_out", quant_out, input, dtype=torch.float8_e4m3fn)
        scales = scale_out if scaling == "per_row" else scale_factor
        return quant_out, {"scaling": scaling, "numbers": quant_out, "scales": scales}
    if layout_code not in _LAYOUTS:
        raise errors.InvalidArgument(f"layout_code is {layout_code}, not one of QuantizationSFLayout")
    if hidden % 16 != 0:
        raise errors.InvalidArgument(f"hidden_dim is {hidden}: NVFP4 needs a multiple of 16")
    if quant_out is None:
        quant_out = torch.empty((tokens, hidden // 2), dtype=torch.uint8, device=input.device)
    if isinstance(quant_out, torch.Tensor) and quant_out.dtype == getattr(torch, "float4_e2m1fn_x2", None):
        quant_out = quant_out.view(torch.uint8)
    _check("quant_out", quant_out, input, (tokens, hidden // 2), torch.uint8)
    scaling, rows, blocks = _LAYOUTS[layout_code]
    size = -(-tokens // rows) * rows * -(-hidden // 16 // blocks) * blocks
    if not isinstance(scale_out, torch.Tensor) or not scale_out.is_contiguous() or scale_out.device != input.device:
        raise errors.InvalidArgument(f"scale_out is not a contiguous tensor on {input.device}")
    scales = scale_out.reshape(-1).view(torch.uint8)
    if scales.numel() < size:
        raise errors.InvalidArgument(f"scale_out has {scales.numel()} bytes, and the call needs {size}")
    return quant_out, {
        "scaling": scaling,
        "numbers": quant_out,
        "scales": scales[:size],
        "global_scale": scale_factor,
    }


__all__ = [
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "QuantizationSFLayout",
    "allreduce_fusion",
    "create_allreduce_fusion_workspace",
]
