"""Which of vLLM's workers this process is, and whether its engine is one by itself."""

from typing import Any

from ..monitors.fingerprint.facts import Rank
from .stack import UnsupportedModel


def this_rank(vllm_config: Any) -> Rank:
    """Its place among the workers of all engines, and in each kind of parallelism.

    The engines of a dense model know nothing of each other: each counts its workers from 0, its data-parallel group is
    itself alone, and only the index tells it from the others.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group, get_world_group

    parallel = vllm_config.parallel_config
    return Rank(
        rank=parallel.data_parallel_index * parallel.world_size + get_world_group().rank,
        data=parallel.data_parallel_index,
        pipeline=get_pp_group().rank_in_group,
        tensor=get_tp_group().rank_in_group,
    )


def check_independent(vllm_config: Any) -> None:
    """Engines that compute together are left alone: a probe in one of them would wait for the others, or pair wrongly.

    Raises:
        UnsupportedModel: the experts of this model are spread over the engines; one sentence.
    """
    engines = vllm_config.parallel_config.data_parallel_size
    # To an engine of a dense model vLLM says that it is the only one.
    if engines > 1:
        raise UnsupportedModel(
            f"Data parallel size {engines} of a mixture-of-experts model is not supported: its engines compute as one."
        )
