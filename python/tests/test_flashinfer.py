"""FlashInfer's interface, on the CPU. scripts/check-flashinfer.py compares it with FlashInfer's own."""

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from groups import in_group  # noqa: E402
from ranks import on_ranks  # noqa: E402

import fast_allreduce as fa  # noqa: E402
import fast_allreduce.flashinfer as comm  # noqa: E402

Pattern, Layout = comm.AllReduceFusionPattern, comm.QuantizationSFLayout

EPSILON = 1e-3
SCALE = 0.37


def values(rank, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def arguments(rank, tokens, hidden, dtype):
    """Returns a rank's input, the residual and the weight."""
    return (
        values(rank, tokens, hidden, dtype=dtype),
        values(98, tokens, hidden, dtype=dtype),
        values(99, hidden, dtype=dtype),
    )


def expected(nranks, tokens, hidden, dtype, bias):
    """Returns the sum, the new residual, and the normalised rows in f64."""
    total = torch.zeros(tokens, hidden)
    for rank in range(nranks):
        total += arguments(rank, tokens, hidden, dtype)[0].float()
    _, residual, weight = arguments(0, tokens, hidden, dtype)
    total = total.to(dtype)
    added = (total.float() + residual.float()).to(dtype)
    rows = added.double()
    rows = rows / torch.sqrt((rows**2).mean(1, keepdim=True) + EPSILON) * (bias + weight.double())
    return total, added, rows


def empty(*shape, dtype):
    """Returns a tensor that no result equals."""
    return torch.full(shape, 0x55, dtype=torch.uint8).repeat_interleave(dtype.itemsize, -1).view(dtype)


def same_bits(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def fp8(rows, scale):
    return (rows.float() * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@on_ranks(1, 2, 3)
def test_patterns(rank, nranks, communicator, dtype):
    workspace = comm.AllReduceFusionWorkspace(communicator)
    for tokens, hidden in ((1, 16), (3, 48), (130, 144), (0, 32)):
        for bias in (0.0, 1.0):
            total, added, rows = expected(nranks, tokens, hidden, dtype, bias)
            mine, residual, weight = arguments(rank, tokens, hidden, dtype)
            kept = [tensor.clone() for tensor in (mine, residual, weight)]

            def call(pattern, mine=mine, residual=residual, weight=weight, bias=bias, **tensors):
                tensors = {"residual_in": residual, "rms_gamma": weight, "rms_eps": EPSILON} | tensors
                return comm.allreduce_fusion(mine, workspace, pattern, weight_bias=bias, **tensors)

            def results(tokens=tokens, hidden=hidden):
                shape = (tokens, hidden)
                return {name: empty(*shape, dtype=dtype) for name in ("residual_out", "norm_out")}

            assert same_bits(call(Pattern.kAllReduce), total)
            found = empty(tokens, hidden, dtype=dtype)
            assert call(Pattern.kAllReduce, output=found, launch_with_pdl=True) is found and same_bits(found, total)

            plain = results()
            assert call(Pattern.kARResidualRMSNorm, **plain, use_oneshot=False) is plain["norm_out"]
            assert same_bits(plain["residual_out"], added)
            # An error of one unit in the last place, of the three roundings in f32.
            torch.testing.assert_close(plain["norm_out"].double(), rows, rtol=1.01 * torch.finfo(dtype).eps, atol=1e-6)
            assert same_bits(call(Pattern.kARResidualRMSNorm), plain["norm_out"])
            normed = plain["norm_out"]

            for scale in (SCALE, torch.tensor(SCALE), torch.tensor([SCALE], dtype=torch.float64), None):
                found, numbers = results(), empty(tokens, hidden, dtype=torch.float8_e4m3fn)
                given = {"quant_out": numbers, "scale_factor": scale}
                assert call(Pattern.kARResidualRMSNormOutFP8Quant, **found, **given, fp32_acc=True) is numbers
                assert same_bits(numbers, fp8(normed, torch.tensor(1.0 if scale is None else SCALE)))
                assert all(same_bits(found[name], plain[name]) for name in plain)
                found = results()
                alone = call(Pattern.kARResidualRMSNormFP8Quant, **found, scale_factor=scale)
                assert same_bits(alone, numbers) and same_bits(found["residual_out"], added)
                assert same_bits(found["norm_out"], results()["norm_out"])

            found, numbers = results(), empty(tokens, hidden, dtype=torch.float8_e4m3fn)
            scales = empty(tokens, 1, dtype=torch.float32)
            given = {"quant_out": numbers, "scale_out": scales}
            assert call(Pattern.kARResidualRMSNormOutDynamicFP8Quant, **found, **given) is numbers
            if tokens:
                assert torch.equal(scales, normed.float().abs().amax(1, keepdim=True) / 448)
            assert same_bits(numbers, fp8(normed, scales)) and same_bits(found["norm_out"], normed)
            again = empty(tokens, 1, dtype=torch.float32)
            alone = call(Pattern.kARResidualRMSNormDynamicFP8Quant, scale_out=again)
            assert same_bits(alone, numbers) and same_bits(again, scales)

            check_nvfp4(call, results(), normed)
            assert all(same_bits(one, other) for one, other in zip(kept, (mine, residual, weight)))


def check_nvfp4(call, found, normed):
    tokens, hidden = normed.shape
    blocks, scale = hidden // 16, torch.tensor([100.0])
    linear = empty(tokens, blocks, dtype=torch.float8_e4m3fn)
    given = {"scale_factor": scale, "scale_out": linear, "layout_code": Layout.LINEAR}
    numbers = call(Pattern.kARResidualRMSNormOutFP4Quant, **found, **given)
    assert same_bits(found["norm_out"], normed)
    codes = torch.stack((numbers & 15, numbers >> 4), -1).reshape(tokens, blocks, 16).long()
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    decoded = torch.cat((magnitudes, -magnitudes))[codes] * linear.float()[..., None] / scale
    rows = normed.float().reshape(tokens, blocks, 16)
    if tokens:
        # Half of the largest step is a sixth of the greatest number; the scale is rounded to three bits.
        assert ((decoded - rows).abs() <= rows.abs().amax(-1, keepdim=True) * (1 / 6 + 1 / 16)).all()
    # vLLM passes the scales in words.
    tiled = torch.full((-(-tokens // 128) * 128, -(-blocks // 4)), -1, dtype=torch.int32)
    given = {"scale_factor": 100.0, "scale_out": tiled}
    assert same_bits(call(Pattern.kARResidualRMSNormFP4Quant, **given), numbers)
    bytes_ = tiled.view(torch.uint8).reshape(-(-tokens // 128), -(-blocks // 4), 32, 4, 4)
    untiled = bytes_.permute(0, 3, 2, 1, 4).reshape(tiled.shape[0], 4 * tiled.shape[1])
    assert torch.equal(untiled[:tokens, :blocks], linear.view(torch.uint8))
    assert (untiled[tokens:] == 255).all() and (untiled[:, blocks:] == 255).all()
    tiled = torch.full((-(-tokens // 8) * 8, -(-blocks // 4) * 4), 255, dtype=torch.uint8)
    given = {"scale_factor": scale, "scale_out": tiled, "layout_code": Layout.SWIZZLED_8x4}
    assert same_bits(call(Pattern.kARResidualRMSNormFP4Quant, **given), numbers)
    untiled = tiled.reshape(-(-tokens // 8), -(-blocks // 4), 8, 4).permute(0, 2, 1, 3).reshape(tiled.shape)
    assert torch.equal(untiled[:tokens, :blocks], linear.view(torch.uint8))
    assert (untiled[tokens:] == 255).all() and (untiled[:, blocks:] == 255).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@on_ranks(2)
def test_finalizes(rank, nranks, communicator, dtype):
    workspace = comm.AllReduceFusionWorkspace(communicator)
    # The last two have ranks without rows of experts, and no tokens.
    for tokens, hidden, top_k, rows in ((1, 16, 1, 3), (7, 48, 4, 40), (5, 32, 2, 9 * rank), (0, 32, 2, 4)):
        shared, residual, weight = arguments(rank, tokens, hidden, dtype)
        mine, generator = values(50 + rank, rows, hidden, dtype=dtype), torch.Generator().manual_seed(rank)
        table = torch.randint(-1, max(rows, 1), (tokens, top_k), dtype=torch.int32, generator=generator)
        table[table >= rows] = -1
        for factors_type, has_shared in ((torch.float32, True), (dtype, False), (None, True)):
            sums = torch.zeros(tokens, hidden)
            factors = None if factors_type is None else values(60 + rank, tokens, top_k, dtype=factors_type)
            for place in range(top_k):
                part = torch.zeros(tokens, hidden)
                has = table[:, place] >= 0
                part[has] = mine[table[has, place].long()].float()
                sums += part if factors is None else part * factors[:, place, None].float()
            if has_shared:
                sums += shared.float()
            norm = {"residual_in": residual, "rms_gamma": weight, "rms_eps": EPSILON, "weight_bias": 1.0}
            added = empty(tokens, hidden, dtype=dtype)
            normed = comm.allreduce_fusion(
                sums.to(dtype), workspace, Pattern.kARResidualRMSNorm, residual_out=added, **norm
            )
            moe = {
                "expanded_idx_to_permuted_idx": table, "expert_scale_factor": factors,
                "shared_expert_output": shared if has_shared else None,
            }  # fmt: skip
            found = {name: empty(tokens, hidden, dtype=dtype) for name in ("residual_out", "norm_out")}
            kept, pattern = mine.clone(), Pattern.kMoEFinalizeARResidualRMSNorm
            result = comm.allreduce_fusion(
                mine, workspace, pattern, **found, **norm, **moe, moe_finalize_backend="cake"
            )
            assert result is found["norm_out"] and same_bits(result, normed)
            assert same_bits(found["residual_out"], added) and same_bits(mine, kept)
            assert same_bits(comm.allreduce_fusion(mine, workspace, pattern, **norm, **moe), normed)
            inside = {"residual_in": residual.clone(), "scale_factor": SCALE}
            inside["residual_out"] = inside["residual_in"]
            pattern = Pattern.kMoEFinalizeARResidualRMSNormFP8Quant
            numbers = comm.allreduce_fusion(mine, workspace, pattern, **(norm | inside), **moe)
            assert same_bits(numbers, fp8(normed, torch.tensor(SCALE))) and same_bits(inside["residual_out"], added)


@on_ranks(2)
def test_packed_scales(rank, nranks, communicator):
    workspace = comm.AllReduceFusionWorkspace(communicator)
    shapes = (1, 128, 128), (3, 640, 128), (130, 512, 128), (0, 256, 128), (3, 96, 32), (6, 288, 32)
    for tokens, hidden, group_size in shapes:
        mine, residual, weight = arguments(rank, tokens, hidden, torch.bfloat16)
        groups, aligned = hidden // group_size, -(-tokens // 4) * 4
        words = -(-groups // 4)
        size = (words - 1) * aligned + tokens if tokens else 0
        storage = torch.full((size + 8,), -1, dtype=torch.int32)

        def call(pattern, mine=mine, residual=residual, weight=weight, shape=(tokens, words), **tensors):
            scales = torch.as_strided(storage, shape, (1, -(-shape[0] // 4) * 4))
            return comm.allreduce_fusion(
                mine, workspace, pattern, residual_in=residual, rms_gamma=weight, rms_eps=EPSILON,
                scale_out=scales, block_quant_group_size=group_size, **tensors
            )  # fmt: skip

        normed = torch.empty_like(mine)
        numbers = call(Pattern.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant, norm_out=normed)
        # The exponent of the least power of two that is not below the greatest magnitude / 448.
        rows = normed.float().reshape(tokens, groups, group_size)
        quotient = (rows.abs().amax(-1) / 448).clamp_min(2.0**-126)
        codes = (quotient.view(torch.int32) + 0x7FFFFF) >> 23
        assert same_bits(numbers, (rows * torch.exp2(127.0 - codes)[..., None]).to(numbers.dtype).reshape(mine.shape))
        columns = torch.zeros(words, aligned, 4, dtype=torch.uint8)
        for group in range(groups):
            columns[group // 4, :tokens, group % 4] = codes[:, group]
        assert torch.equal(storage[:size], columns.view(torch.int32).flatten()[:size])
        assert (storage[size:] == -1).all()
        again = call(Pattern.kARResidualRMSNormPerTokenGroupFP8PackedQuant)
        assert same_bits(again, numbers)
        # The types of scales that the library takes for this format.
        scaling = "per_32_ue8m0" if group_size == 32 else "per_group_ue8m0"
        for dtype in (torch.int32, torch.uint8, torch.float8_e8m0fnu):
            scales, found = torch.full((4 * size,), 9, dtype=torch.uint8), torch.empty_like(numbers)
            communicator.allreduce_fused(
                mine, None, residual=residual.clone(), norm="rms", weight=weight, epsilon=EPSILON,
                scaling=scaling, numbers=found, scales=scales.view(dtype),
            )  # fmt: skip
            assert same_bits(found, numbers)
            words = scales.view(torch.int32)
            padding = torch.arange(size) % max(aligned, 1) >= tokens
            assert torch.equal(words[~padding], storage[:size][~padding]) and (words[padding] == 0x09090909).all()


@on_ranks(2)
def test_tensors_that_are_one(rank, nranks, communicator):
    workspace = comm.AllReduceFusionWorkspace(communicator)
    shape, dtype = (5, 64), torch.bfloat16
    total, added, _ = expected(nranks, *shape, dtype, 0)
    mine, residual, weight = arguments(rank, *shape, dtype)
    norm = {"rms_gamma": weight, "rms_eps": EPSILON}
    normed = comm.allreduce_fusion(mine, workspace, Pattern.kARResidualRMSNorm, residual_in=residual, **norm)
    scale = {"scale_factor": SCALE}
    # As vLLM calls it for layers with and without a residual, and SGLang.
    for pattern, out, result in (
        (Pattern.kARResidualRMSNorm, "norm_out", normed),
        (Pattern.kARResidualRMSNormOutFP8Quant, "quant_out", fp8(normed, torch.tensor(SCALE))),
        (Pattern.kARResidualRMSNormFP8Quant, "quant_out", fp8(normed, torch.tensor(SCALE))),
    ):
        for residual_is, norm_is in (("residual_in", "input"), ("input", "norm_out"), ("residual_in", "norm_out")):
            tensors = {"input": mine.clone(), "residual_in": residual.clone(), "norm_out": torch.zeros_like(mine)}
            passed = tensors | {"residual_out": tensors[residual_is], "norm_out": tensors[norm_is]}
            assert same_bits(
                comm.allreduce_fusion(workspace=workspace, pattern=pattern, **passed, **norm, **scale), result
            )
            assert same_bits(tensors[residual_is], added)
            if pattern != Pattern.kARResidualRMSNormFP8Quant:
                assert same_bits(tensors[norm_is], normed)
            elif residual_is != "input":
                assert same_bits(tensors["input"], mine)
    data = mine.clone()
    assert comm.allreduce_fusion(data, workspace, Pattern.kAllReduce, output=data) is data and same_bits(data, total)


@on_ranks(2)
def test_wrong_calls(rank, nranks, communicator):
    workspace = comm.AllReduceFusionWorkspace(communicator)
    assert workspace.is_buffer_size_sufficient(nranks, 100_000, 4096, torch.bfloat16, use_oneshot=True)
    assert not workspace.is_buffer_size_sufficient(tp_size=4, num_tokens=1, hidden_dim=8, dtype=torch.float32)
    assert not workspace.is_buffer_size_sufficient(nranks, 1, 8, torch.float64)
    data, wide, half = torch.ones(4, 32), torch.ones(4, 64), torch.ones(4, 32, dtype=torch.float16)
    fp8_out, fp4_out = data.to(torch.float8_e4m3fn), torch.zeros(4, 16, dtype=torch.uint8)
    dynamic = {"pattern": Pattern.kARResidualRMSNormDynamicFP8Quant, "scale_out": torch.ones(4, 1)}
    nvfp4 = {"pattern": Pattern.kARResidualRMSNormFP4Quant, "quant_out": fp4_out, "scale_out": torch.ones(4, 128)}
    static = {"pattern": Pattern.kARResidualRMSNormFP8Quant}
    words = torch.zeros(4, 2, dtype=torch.int32)
    packed = {
        "pattern": Pattern.kARResidualRMSNormPerTokenGroupFP8PackedQuant,
        "scale_out": words[:, :1],
        "block_quant_group_size": 128,
    }
    experts, table = torch.ones(6, 32), torch.full((4, 2), -1, dtype=torch.int32)
    moe = {
        "pattern": Pattern.kMoEFinalizeARResidualRMSNorm,
        "input": experts,
        "expanded_idx_to_permuted_idx": table,
    }
    packs = dict.fromkeys(("input", "residual_in"), torch.ones(4, 640)) | {"rms_gamma": torch.ones(640)}
    for wrong, said in (
        ({"pattern": 13}, "pattern 13 is not one of FlashInfer"),
        ({"pattern": Pattern.kMoEReductionARResidualRMSNorm}, "kMoEReduction.* not available: its scales are"),
        ({"pattern": Pattern.kMoEFinalizeARResidualRMSNormFP8Quant}, "Quant needs expanded_idx_to_permuted_idx"),
        (moe | {"residual_in": None}, "kMoEFinalizeARResidualRMSNorm needs residual_in"),
        (moe | {"residual_in": [1]}, "residual_in is a list"),
        (moe | {"residual_in": wide}, r"residual_in has the shape \(4, 64\), and the call needs \(4, 32\)"),
        (moe | {"residual_in": data.flatten()}, r"residual_in has the shape \(128,\), and the call needs \(128, 32\)"),
        (moe | {"expanded_idx_to_permuted_idx": table.long()}, "torch.int64, and the call needs torch.int32"),
        (moe | {"expanded_idx_to_permuted_idx": table[:3]}, r"shape \(3, 2\), and the call needs \(4, 2\)"),
        (moe | {"expanded_idx_to_permuted_idx": table[:, 0].clone()}, r"shape \(4,\), and the call needs \(4, 4\)"),
        (moe | {"expanded_idx_to_permuted_idx": table + 7}, "entry 0 is 6, of 6 rows"),
        (moe | {"expert_scale_factor": torch.ones(4, 1)}, r"expert_scale_factor has the shape \(4, 1\)"),
        (moe | {"expert_scale_factor": torch.ones(4, 2).half()}, "expert_scale_factor has the type torch.float16"),
        (moe | {"shared_expert_output": data[:3]}, "shared_expert_output has the shape"),
        (moe | {"norm_out": experts}, r"norm_out has the shape \(6, 32\), and the call needs \(4, 32\)"),
        (moe | {"norm_out": experts[:4]}, "pointer .* has another use"),
        (moe | {"residual_out": experts[:4]}, "pointer .* has another use"),
        (packed | {"scale_out": None}, "PackedQuant needs scale_out"),
        (packed | {"block_quant_group_size": 64}, "block_quant_group_size is 64: only 128 and 32"),
        (packed, "hidden_dim is 32, not a multiple of 128"),
        (packed | packs, r"scale_out has the shape \(4, 1\), and the call needs \(4, 2\)"),
        (packed | packs | {"scale_out": words}, r"scale_out has the strides \(2, 1\), not \(1, 4\)"),
        ({"workspace": communicator}, "workspace is a Communicator"),
        ({"input": data.flatten()}, "two dimensions"),
        ({"input": data.double()}, "type torch.float64: it must be float16"),
        ({"input": torch.ones(32, 4).t()}, "input is not contiguous"),
        ({"residual_in": None}, "kARResidualRMSNorm needs residual_in"),
        ({"rms_gamma": None}, "kARResidualRMSNorm needs rms_gamma"),
        ({"residual_in": wide}, r"residual_in has the shape \(4, 64\), and the call needs \(4, 32\)"),
        ({"residual_in": half}, "residual_in has the type torch.float16"),
        ({"residual_out": wide[:, ::2]}, "residual_out is not contiguous"),
        ({"norm_out": half}, "norm_out has the type"),
        ({"norm_out": data.to("meta")}, "norm_out has the device meta"),
        ({"rms_gamma": torch.ones(31)}, "rms_gamma has the shape"),
        ({"weight_bias": 0.5}, "weight_bias is 0.5"),
        ({"pattern": Pattern.kAllReduce, "output": wide}, "output has the shape"),
        (static | {"quant_out": data}, "quant_out has the type torch.float32"),
        (static | {"scale_factor": torch.ones(2)}, "scale_factor has 2 elements"),
        (static | {"scale_factor": torch.ones(1, dtype=torch.complex64)}, "the call needs 1, real"),
        ({"pattern": Pattern.kARResidualRMSNormOutFP8Quant}, "kARResidualRMSNormOutFP8Quant needs norm_out"),
        (dynamic | {"scale_out": None}, "DynamicFP8Quant needs scale_out"),
        (dynamic | {"scale_out": torch.ones(4)}, r"scale_out has the shape \(4,\), and the call needs \(4, 1\)"),
        (nvfp4 | {"scale_out": None}, "FP4Quant needs scale_out"),
        (nvfp4 | {"quant_out": fp8_out}, "quant_out has the type torch.float8_e4m3fn, and the call needs torch.uint8"),
        (nvfp4 | {"quant_out": [1]}, "quant_out is a list"),
        (nvfp4 | {"quant_out": fp4_out[:3]}, r"quant_out has the shape \(3, 16\)"),
        (nvfp4 | {"scale_out": torch.ones(4, 2, dtype=torch.uint8)}, "scale_out has 8 bytes, and the call needs 512"),
        (nvfp4 | {"layout_code": 3}, "layout_code is 3, not one of"),
        (
            nvfp4 | dict.fromkeys(("input", "residual_in"), torch.ones(4, 8)) | {"rms_gamma": torch.ones(8)},
            "multiple of 16",
        ),
        ({"rms_eps": -1.0}, "epsilon"),
    ):
        call = {"input": data, "workspace": workspace, "pattern": Pattern.kARResidualRMSNorm}
        call |= {"residual_in": data.clone(), "rms_gamma": torch.ones(32)} | wrong
        with pytest.raises(ValueError, match=said):
            comm.allreduce_fusion(**call)
    # Nothing was sent: the ranks still agree on the next call.
    if rank == 0:
        with pytest.raises(ValueError, match="needs residual_in"):
            comm.allreduce_fusion(data, workspace, Pattern.kARResidualRMSNorm)
    assert torch.equal(comm.allreduce_fusion(data, workspace, Pattern.kAllReduce), 2 * data)


class Backend:
    """What FlashInfer's functions call of a `CommBackend`."""

    Get_rank, Get_size = staticmethod(dist.get_rank), staticmethod(dist.get_world_size)

    def allgather(self, data):
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, data)
        return tuple(gathered)


@in_group(2, backend="gloo")
def test_workspace(rank, nranks):
    size = {"max_token_num": 4, "hidden_dim": 8, "dtype": torch.float32}
    for where in (
        {},
        {"group": dist.new_group([0, 1])},
        {"comm_backend": Backend(), "backend": "trtllm", "timeout": 60},
    ):
        workspace = comm.create_allreduce_fusion_workspace(world_size=nranks, rank=rank, **size, **where)
        assert (workspace.world_size, workspace.rank, workspace.backend) == (nranks, rank, "fast_allreduce")
        assert workspace.communicator.device == "cpu"
        data = torch.full((3, 8), rank + 1.0)
        assert torch.equal(comm.allreduce_fusion(data, workspace, Pattern.kAllReduce), torch.full((3, 8), 3.0))
        workspace.destroy()
        workspace.destroy()
        with pytest.raises(fa.Error):
            comm.allreduce_fusion(data, workspace, Pattern.kAllReduce)
    for wrong, said in (
        ({"world_size": 3}, "world_size is 3 and rank ., but the group has 2 ranks"),
        ({"rank": None}, "rank None, but"),
        ({"backend": "mnnvl-cutedsl"}, "'mnnvl-cutedsl' is not available"),
        ({"top_k": 2, "dynamic_fp8": True}, "has top_k, dynamic_fp8"),
        ({"dtype": torch.float64}, "dtype is torch.float64"),
    ):
        with pytest.raises(ValueError, match=said):
            comm.create_allreduce_fusion_workspace(**({"world_size": nranks, "rank": rank} | size | wrong))
    with pytest.raises(fa.errors.InvalidSetting, match="depth"):
        comm.create_allreduce_fusion_workspace(world_size=nranks, rank=rank, depth=3)


def test_workspace_without_a_group():
    with pytest.raises(ValueError, match="pass comm_backend, or initialize it"):
        comm.create_allreduce_fusion_workspace(world_size=1, rank=0)
