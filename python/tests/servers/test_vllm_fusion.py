"""The pass over graphs, with the graphs that vLLM's own fusion for GPUs looks for."""

import importlib
import re
from unittest import mock

import torch

import fast_allreduce.operators  # noqa: F401
from fast_allreduce.vllm.fusion import Fusion


def test_graphs_of_vllms_own_fusion():
    """Applies the pass to the graphs that vLLM's own fusion for GPUs looks for."""
    from torch._inductor import pattern_matcher
    from torch._subclasses.fake_tensor import FakeTensorMode
    from vllm.config import VllmConfig, set_current_vllm_config

    # The wheel for CPUs has not all operators that these modules name.
    library, allreduce_rms_fusion = torch.library.Library("_C", "FRAGMENT"), None
    while allreduce_rms_fusion is None:
        try:
            allreduce_rms_fusion = importlib.import_module("vllm.compilation.passes.fusion.allreduce_rms_fusion")
        except AttributeError as error:
            missing = re.search("'_C' object has no attribute '([a-z0-9_]+)'", str(error))
            library.define(f"{missing[1]}() -> ()")
    graphs = []

    def traced(pattern, _replacement, inputs, *_, **__):
        graphs.append(pattern_matcher.fwd_only(pattern, inputs).graph)

    replaced = {
        "get_tp_group": lambda: None,
        "get_tensor_model_parallel_world_size": lambda: 2,
        "tensor_model_parallel_all_reduce": lambda data: torch.ops.vllm.all_reduce(data, group_name="tp:0"),
    }
    known = ("AllReduceFusedAddRMSNorm", "AllReduceFusedAddGemmaRMSNorm", "AllReduceFusedAddRMSNormStaticQuantFP8")
    with (
        mock.patch.multiple(allreduce_rms_fusion, **replaced),
        mock.patch.object(pattern_matcher, "register_replacement", traced),
        set_current_vllm_config(VllmConfig()), FakeTensorMode(), torch.no_grad(),
    ):  # fmt: skip
        for name in known:
            kind = getattr(allreduce_rms_fusion, f"{name}Pattern")
            kind(1e-5, torch.bfloat16, "cpu", None).register(None)
            for graph in graphs:
                fuse = Fusion({"tp:0": "ours"}.get)
                fuse(graph)
                graph.lint()
                assert fuse.count == 1, graph
                (call,) = graph.find_nodes(
                    op="call_function", target=torch.ops.fast_allreduce.allreduce_rms_norm.default
                )
                assert call.args[3:] == ("ours", 1e-5, "Gemma" in name), call.args
            assert graphs, name
            graphs.clear()
