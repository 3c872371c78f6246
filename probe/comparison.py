"""Memory against the checkpoint, as a measurement: a fault that is older than the baseline shows here."""

from collections.abc import Generator

from ..monitors.fingerprint.facts import CheckpointReading, NotCovered, RankComparison
from .armed import Armed
from .fresh import differing


def compare(armed: Armed) -> Generator[None, None, CheckpointReading]:
    """This rank's tensors against the checkpoint, bit for bit; yields after each block and after what lies outside.

    For blocks of other pipeline stages too, so that all ranks take the same number of steps.

    Raises:
        UnsupportedModel: the bytes of this model have no baseline.
        CheckpointUnusable: the checkpoint cannot be read, or not be matched with the model.
    """
    rank = armed.bytes().rank
    equal = 0
    different: list[str] = []
    not_comparable: list[NotCovered] = []
    comparisons = differing(armed.model, armed.vllm_config, armed.stack)
    for block in [*range(armed.stack.num_blocks), None]:
        if block is not None and block not in armed.stack.layers:
            yield
            continue
        found = next(comparisons)
        equal += len(found.equal)
        different += [f"{count} values of {name} differ." for name, count in found.different.items()]
        unfilled = {
            name: f"No tensor of the checkpoint fills {count} values." for name, count in found.unfilled.items()
        }
        not_comparable += [
            NotCovered(tensor=name, bytes=None, reason=reason)
            for name, reason in (found.not_comparable | unfilled).items()
        ]
        yield
    return CheckpointReading(
        ranks=[RankComparison(rank=rank, equal=equal, different=different, not_comparable=not_comparable)]
    )
