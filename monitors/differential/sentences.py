"""The sentences of a differential finding, without full stops."""

from collections.abc import Sequence

from ..moment import utc
from .comparison import Comparison
from .facts import TensorDifference
from .finding import BlockDivergence, Location
from .narrowing import Narrowing
from .reference import ReferenceKind

_NAMED = 3
"""So many places are written out in the reason; all of them are in the finding."""


def block_reason(comparison: Comparison, gate: float) -> str:
    """What came of one block, with the numbers."""
    told = distance(comparison)
    return told if gate == 1 else f"{told}; served at alpha {gate:g}, judged at 1"


def distance(comparison: Comparison) -> str:
    """How far, and how far is allowed."""
    if comparison.divergence is None:
        return f"it cannot be told: {comparison.why}"
    if not comparison.divergence.finite:
        return "its values are not finite, or infinitely far away, where the reference's are finite"
    far = f"relative distance {number(comparison.l2)} (1 - cosine {number(comparison.cosine)})"
    if comparison.allowed is None:
        return f"it cannot be told: {far}, but {comparison.why}"
    return f"{far}, allowed {number(comparison.allowed)}"


def narrowed(found: Narrowing) -> str:
    """Where a block begins to depart."""
    hidden = f" ({listed(found.skipped)} in front of it could not be compared)" if found.skipped else ""
    if found.sublayer is None:
        unseen = f" ({listed(found.skipped)} could not be compared)" if found.skipped else ""
        return f"no part of it departs by itself{unseen}"
    if found.module in (None, found.sublayer):
        return f"it begins at {found.sublayer}{hidden}"
    return f"it begins at {found.sublayer}, in {found.module}{hidden}"


def differing(found: TensorDifference, rank: int | None) -> str:
    """A tensor that is not the checkpoint's; `rank` where there are several."""
    parts = f", in rows of {listed(found.parts)}" if found.parts else ""
    where = "" if rank is None else f" on rank {rank}"
    return f"against the checkpoint{where}, {found.diagnosis.sentence()}{parts}"


def equal_tensors(comparable: int, whole: bool) -> str:
    """Of a block that departs though its tensors do not; `whole`: all of them could be compared."""
    if not whole:
        return f"the {count(comparable, 'tensor')} that can be compared {'is' if comparable == 1 else 'are'} equal"
    return "it computes something else with equal tensors (a compute fault?)"


def without_value(sentences: Sequence[str]) -> str:
    """Tensors that the checkpoint has no value for."""
    has = "has" if len(sentences) == 1 else "have"
    return f"{count(len(sentences), 'tensor')} {has} no value in the checkpoint, first: {sentences[0].rstrip('.')}"


def foreign(changed: int, comparable: int) -> str:
    """The files are those of another model."""
    return (
        f"{changed} of {count(comparable, 'tensor')} are not the checkpoint's: these files are not what the model was "
        "loaded from, and nothing is judged by them"
    )


def counted(locations: Sequence[Location]) -> str:
    """What was found in one block: the first in full."""
    more = f" (and {len(locations) - 1} more)" if len(locations) > 1 else ""
    return f"{locations[0].sentence}{more}"


def healthy(blocks: Sequence[BlockDivergence], reference: str) -> str:
    """All blocks compute what they should: the one that lies furthest away stands for all."""
    most = max(blocks, key=lambda block: block.l2 or 0.0)
    noun = f"all {len(blocks)} blocks compute" if len(blocks) > 1 else "the block computes"
    far = f"largest relative distance {number(most.l2)} (block {most.block}), allowed {number(most.allowed)}"
    return f"{noun} what {reference}: {far}"


def failing(places: Sequence[str], blocks: int, reference: str) -> str:
    """How many blocks depart, and the first of them."""
    more = f" (and {len(places) - _NAMED} more)" if len(places) > _NAMED else ""
    do = "does" if len(places) == 1 else "do"
    return f"{len(places)} of {blocks} blocks {do} not compute what {reference}: {'; '.join(places[:_NAMED])}{more}"


def doubted(blocks: Sequence[BlockDivergence]) -> str:
    """Blocks of which nothing can be told."""
    first = blocks[0]
    return f"{count(len(blocks), 'block')} cannot be told, first block {first.block}: {first.reason}"


def source(kind: ReferenceKind, recorded_at: float | None) -> str:
    """What the reference is: `all blocks compute what ...`."""
    if recorded_at is None:
        return "the checkpoint's tensors give"
    at = utc(recorded_at)
    return f"{'the peer computed' if kind is ReferenceKind.PEER else 'was recorded'} at {at}"


def gated(gates: Sequence[float]) -> str:
    """Blocks that are served at another alpha than 1."""
    named = [f"block {block} at alpha {gate:g}" for block, gate in enumerate(gates) if gate != 1]
    return ", ".join(named)


def losses(nats: float | None, reference_nats: float | None) -> str:
    """The mean losses, now and then."""
    return f"the loss is {_nats(nats)}, and was {_nats(reference_nats)}"


def listed(names: Sequence[str]) -> str:
    """`a, b`, and how many more behind the third."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def count(number_of: int, noun: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{number_of} {noun}{'' if number_of == 1 else 's'}"


def number(value: float | None) -> str:
    """Three digits."""
    return "unknown" if value is None else f"{value:.3g}"


def _nats(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f} nats"
