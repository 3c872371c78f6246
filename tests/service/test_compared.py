"""The order in which blocks are said to have changed."""

import math

import pytest

from flipwatch.monitors.differential.finding import BlockDivergence
from flipwatch.service.compared import excess, ranked


def block(number: int, l2: float | None, allowed: float | None, departs: bool | None = None) -> BlockDivergence:
    """One block so far away."""
    return BlockDivergence(
        block=number,
        gate=1.0,
        l2=l2,
        cosine=None,
        allowed=allowed,
        departs=departs,
        walk_l2=None,
        walk_cosine=None,
        reason="",
    )


def test_blocks_rank_by_excess_and_then_by_distance() -> None:
    """Not finite first, then what noise does not explain at all, then by times of what it explains; unknown last."""
    blocks = [
        block(0, 0.0, 0.0),
        block(1, 0.2, 0.1),
        block(2, 0.9, 1.0),
        block(3, None, 0.1, departs=True),
        block(4, 0.01, 0.0),
        block(5, 0.02, 0.0),
        block(6, None, None),
        block(7, 0.5, None),
    ]
    assert ranked(blocks) == (3, 5, 4, 1, 2, 7, 0, 6)
    assert [excess(blocks[at]) for at in (0, 1, 4, 7, 3)] == [0.0, pytest.approx(2.0), math.inf, None, None]
