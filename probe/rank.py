"""Which of vLLM's workers this process is."""

from ..monitors.fingerprint.facts import Rank


def this_rank() -> Rank:
    """Its place among all workers, and in each kind of parallelism."""
    from vllm.distributed.parallel_state import get_dp_group, get_pp_group, get_tp_group, get_world_group

    return Rank(
        rank=get_world_group().rank,
        data=get_dp_group().rank_in_group,
        pipeline=get_pp_group().rank_in_group,
        tensor=get_tp_group().rank_in_group,
    )
