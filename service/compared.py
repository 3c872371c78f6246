"""What a comparison of two models came to: the document that `flipwatch compare --json` prints."""

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ..monitors.alpha_scan import AlphaScanFinding
from ..monitors.differential.finding import BlockDivergence, DifferentialFinding
from ..monitors.differential.reference import Conditions
from .skippability import loss_without


class _Closed(BaseModel):
    """An unknown field is an error; a number that is not finite is None."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ComparedSide(_Closed):
    """One of the two models."""

    source: str
    """The checkpoint folder, or the URL of the server without user and password."""
    conditions: Conditions
    gates: tuple[float, ...]
    """Alpha per block as served: losses and walk are those of the model so gated; blocks run alone are taken at 1."""


class SkipCost(_Closed):
    """What one model is without one block."""

    loss_without_nats: float | None
    """Mean loss per scored token without the block; None: not finite, or not measured."""
    skip_gain_nats: float | None
    """Loss as served minus that; above 0 where the model is better without the block."""


class ComparedBlock(_Closed):
    """One block without which both models were measured."""

    block: int
    a: SkipCost
    b: SkipCost


class Comparison(_Closed):
    """B held against A, block by block, on the same tokens."""

    format: Literal[1] = 1
    flipwatch_version: str
    a: ComparedSide
    """The reference: what its blocks were fed is what the blocks of B were fed."""
    b: ComparedSide
    sequences: int
    tokens: int
    """Of all sequences together."""
    limit: float | None
    """Largest relative L2 distance that was allowed; None: what measured noise explains."""
    finding: DifferentialFinding
    """Distances of all blocks; `nats` is the mean loss of B, `reference_nats` that of A."""
    ranking: tuple[int, ...]
    """All blocks, those that changed most first: by distance over the allowed one, then by distance."""
    blocks: tuple[ComparedBlock, ...]
    """Losses and skip gains; empty where they were not wanted."""


def ranked(blocks: Sequence[BlockDivergence]) -> tuple[int, ...]:
    """Numbers of the blocks, those that changed most first; one that is not finite where the other is comes first."""
    return tuple(block.block for block in sorted(blocks, key=_size, reverse=True))


def excess(block: BlockDivergence) -> float | None:
    """Distance over the allowed one; infinite where none is allowed and there is one; None where it is not known."""
    if block.l2 is None or block.allowed is None:
        return None
    if block.allowed == 0.0:
        return math.inf if block.l2 > 0.0 else 0.0
    return block.l2 / block.allowed


def side_by_side(a: AlphaScanFinding | None, b: AlphaScanFinding | None) -> tuple[ComparedBlock, ...]:
    """Losses and skip gains of two scans of the same sequences; empty where there are none."""
    if a is None or b is None:
        return ()
    return tuple(
        ComparedBlock(block=score.block, a=_cost(a, score.block), b=_cost(b, score.block)) for score in a.blocks
    )


def _cost(finding: AlphaScanFinding, block: int) -> SkipCost:
    return SkipCost(loss_without_nats=loss_without(finding, block), skip_gain_nats=finding.blocks[block].skip_gain)


def _size(block: BlockDivergence) -> tuple[float, float]:
    if block.l2 is None:
        unknown = math.inf if block.departs else -1.0
        return unknown, unknown
    over = excess(block)
    return (0.0 if over is None else over), block.l2
