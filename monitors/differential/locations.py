"""Where in a block a fault lies: the tensors that are not the checkpoint's, or the module that departs first."""

from collections.abc import Sequence
from dataclasses import dataclass

from .facts import CleanBlock, DifferentialReading, TensorDifference
from .finding import Location
from .narrowing import narrow
from .pair import Pair
from .sentences import differing, equal_tensors, narrowed


@dataclass(frozen=True)
class Located:
    """What was found in one block."""

    locations: tuple[Location, ...]
    sublayers: int
    """Comparisons of outputs of modules inside it that were made."""


def clean_blocks(now: DifferentialReading) -> list[CleanBlock]:
    """Those of all ranks."""
    return [clean for rank in now.ranks for clean in rank.clean]


def locate(now: DifferentialReading, pairs: Sequence[Pair], block: int, departs: bool) -> Located:
    """Follow a block down: a location for each tensor that differs; else, where it departs, its first module."""
    blocks = len(now.gates)
    cleans = [(rank.rank.rank, clean) for rank in now.ranks for clean in rank.clean if clean.block == block]
    sublayers = sum(clean.comparisons.sublayers for _, clean in cleans)
    found = [
        _of_tensor(clean, difference, rank if len(now.ranks) > 1 else None, blocks)
        for rank, clean in cleans
        for difference in clean.tensors
    ]
    if found or not departs:
        return Located(tuple(found), sublayers)
    where = narrow(pairs, block)
    sentence = narrowed(where)
    if cleans:
        whole = not any(clean.not_comparable for _, clean in cleans)
        sentence = f"{equal_tensors(sum(clean.comparable for _, clean in cleans), whole)}, and {sentence}"
    location = Location(
        block=block,
        sublayer=where.sublayer,
        module=where.module,
        tensor=None,
        parts=(),
        diagnosis=None,
        comparisons=blocks + where.comparisons,
        sentence=sentence,
    )
    return Located((location,), sublayers + where.comparisons)


def _of_tensor(clean: CleanBlock, difference: TensorDifference, rank: int | None, blocks: int) -> Location:
    return Location(
        block=clean.block,
        sublayer=difference.module.partition(".")[0] or None,
        module=difference.module or None,
        tensor=difference.tensor,
        parts=tuple(difference.parts),
        diagnosis=difference.diagnosis,
        comparisons=blocks + clean.comparisons.sublayers + 1,
        sentence=differing(difference, rank),
    )
