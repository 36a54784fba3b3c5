"""Methods that tests call in vLLM's workers (the setting `worker_extension_cls`)."""

import os
from collections import Counter


class Asked:
    """What a worker tells a test."""

    def process_id(self):
        """Returns the process that this worker is."""
        return os.getpid()

    def calls_made(self):
        """Returns the calls of the plugin's communicator in this worker's group, or None if vLLM runs its own."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        group = get_tp_group() if get_tp_group().world_size > 1 else get_pp_group()
        ranks = getattr(getattr(group.device_communicator, "dist_module", None), "_ranks", None)
        return ranks and ranks.counters().calls

    def count_calls(self):
        """Counts the calls of the plugin's communicator from now on, by method."""
        import torch
        from fast_allreduce.operators import definitions
        from vllm.distributed.parallel_state import get_tp_group

        calls = get_tp_group().device_communicator.dist_module
        ranks, counts = calls._ranks, Counter()

        class Counted:
            def __getattr__(self, name):
                value = getattr(ranks, name)
                counts[name] += callable(value)
                return value

        self.counts, calls._ranks = counts, Counted()
        definitions.named = lambda name: calls._ranks
        # Compiled code calls these. They look up no method unless they leave a call to Python, which counts twice then.
        direct = torch.ops.fast_allreduce.direct
        for operator, name in (("allreduce", "allreduce"), ("allreduce_rms_norm", "allreduce_fused")):

            def counted(*arguments, call=getattr(direct, operator), name=name):
                counts[name] += 1
                return call(*arguments)

            setattr(direct, operator, counted)

    def counted(self):
        """Returns the counts since `count_calls`."""
        return dict(self.counts)
