"""Methods that tests call in vLLM's workers (the setting `worker_extension_cls`)."""

import os


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
