"""Generates with `vllm.LLM`: the model's folder, a file for the results, and the settings as JSON."""

import json
import os
import sys
from pathlib import Path

from vllm_model import PROMPTS, STEPS


def main(model, output, settings):
    from vllm import LLM, SamplingParams

    llm = LLM(model, worker_extension_cls="vllm_worker.Asked", max_model_len=512, **json.loads(settings))
    fuses = os.environ["FAST_ALLREDUCE_VLLM"] and os.environ.get("FAST_ALLREDUCE_VLLM_FUSION") == "1"
    if fuses:
        llm.collective_rpc("count_calls")
    results = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True))
    texts = [result.outputs[0].text.split() for result in results]
    counted = llm.collective_rpc("counted") if fuses else None
    Path(output).write_text(json.dumps([texts, llm.collective_rpc("calls_made"), counted]))


if __name__ == "__main__":
    main(*sys.argv[1:])
