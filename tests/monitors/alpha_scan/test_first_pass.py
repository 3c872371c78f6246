"""The first pass: blocks that are not finite or explode are named, left out, and the pass goes on."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flipwatch.monitors.alpha_scan import QUICK_GRID, AlphaScan, AlphaScanPlan

from .random_model import RandomModel, changed, drain, naive, plan


def test_two_nonfinite_blocks_are_named_in_one_pass() -> None:
    """NaN in one block and Inf in another: both named, no curves, the base losses are None."""
    model = RandomModel()
    model.weights[1, 0, 0] = torch.nan
    model.weights[3] = torch.inf
    reading, count = drain(AlphaScan().measure(model, plan()))
    assert reading.nonfinite_blocks == [1, 3]
    assert reading.base_nats == [None] * 5
    assert reading.nats == [[]] * 5
    assert reading.passes < 2
    assert count < AlphaScan().steps(plan(), 5)
    assert AlphaScan().judge([reading]).flagged == (1, 3)


def test_nan_that_one_sequence_meets_leaves_the_others_finite() -> None:
    """A block that fails on one token only: it is named, and the other sequences keep their base loss."""

    class Picky(RandomModel):
        def block(self, index: int, hidden: Tensor, tokens: Tensor) -> Tensor:
            out = super().block(index, hidden, tokens)
            return torch.where((tokens == 16)[:, :, None], torch.nan, out) if index == 2 else out

    order = AlphaScanPlan(alphas=[0.0], tokens=[[1, 2, 3], [1, 16, 3], [4, 5, 6, 7]], scored_from=[1, 1, 1])
    reading, _ = drain(AlphaScan().measure(Picky(), order))
    assert reading.nonfinite_blocks == [2]
    assert [loss is None for loss in reading.base_nats] == [False, True, False]


def test_broken_embedding_blames_no_block() -> None:
    """A stream that is not finite before the first block has no culprit among the blocks."""
    model = RandomModel()
    model.table[:] = torch.nan
    reading, _ = drain(AlphaScan().measure(model, plan()))
    assert reading.nonfinite_blocks == []
    assert reading.base_nats == [None] * 5
    assert AlphaScan().judge([reading]).health == "failed"


def test_overflow_behind_the_blocks_names_the_block_to_leave_out() -> None:
    """Every block's output is finite but the loss is not: only leaving block 2 out makes it finite."""

    class Overflowing(RandomModel):
        def block(self, index: int, hidden: Tensor, tokens: Tensor) -> Tensor:
            out = super().block(index, hidden, tokens)
            return out + 1e30 if index == 2 else out

        def nats(self, hidden: Tensor, tokens: Tensor, scored: Tensor) -> Tensor:
            losses = super().nats(hidden, tokens, scored)
            return torch.where(hidden.abs().amax((1, 2)) > 1e20, torch.nan, losses)

    reading, _ = drain(AlphaScan().measure(Overflowing(), changed(plan(), explosion_ratio=None)))
    assert reading.base_nats == [None] * 5
    assert AlphaScan().judge([reading]).flagged == (2,)


class Exploding(RandomModel):
    """Blocks 1 and 3 add 1e6 to the stream, block 1 from token 16 only; block 2 is not finite on token 15."""

    def block(self, index: int, hidden: Tensor, tokens: Tensor) -> Tensor:
        out = super().block(index, hidden, tokens)
        copies = hidden.shape[0] // tokens.shape[0]
        token = tokens.repeat(copies, 1)[:, :, None]
        if index == 1:
            return torch.where(token == 16, out + 1e6, out)
        if index == 2:
            return torch.where(token == 15, torch.nan, out)
        return out + 1e6 if index == 3 else out


def exploding_plan() -> AlphaScanPlan:
    """The first sequence meets one exploding block, the second both, the third a NaN as well, all in one chunk."""
    tokens = [[1, 2, 3, 4], [1, 16, 3, 4], [1, 15, 16, 4]]
    return AlphaScanPlan(alphas=list(QUICK_GRID), tokens=tokens, scored_from=[1, 1, 1])


@pytest.mark.parametrize("tokens_per_step", [1, 512])
def test_exploding_and_nonfinite_blocks_are_named_in_one_pass(tokens_per_step: int) -> None:
    """All are named at once; the base loss stays the one as served, None only where that is not finite."""
    model, order = Exploding(), changed(exploding_plan(), tokens_per_step=tokens_per_step)
    reading, count = drain(AlphaScan().measure(model, order))
    assert (reading.nonfinite_blocks, reading.exploding_blocks) == ([2], [1, 3])
    assert not reading.complete
    assert reading.nats == [[]] * 5
    served = naive(model, order)
    assert reading.base_nats[:2] == pytest.approx(served[:2], rel=1e-9)
    assert served[2] != served[2]
    assert reading.base_nats[2] is None
    assert count <= AlphaScan().steps(order, 5)


def test_exploding_blocks_are_left_out_behind_one_another() -> None:
    """Behind block 1 the stream is 1e6, so that block 3 would not stand out unless block 1 was left out first."""
    order = changed(exploding_plan(), tokens=[[1, 16, 16, 16]], scored_from=[1])
    reading, _ = drain(AlphaScan().measure(Exploding(), order))
    assert reading.exploding_blocks == [1, 3]
    without, _ = drain(AlphaScan().measure(Exploding(), changed(order, left_out=[1, 3])))
    assert without.complete
    assert without.base_nats == pytest.approx(naive(Exploding(), order, left_out=[1, 3]), abs=1e-6)


def test_without_a_ratio_no_block_explodes() -> None:
    """`explosion_ratio` None: the same model has curves."""
    order = changed(exploding_plan(), tokens=[[1, 16, 3, 4]], scored_from=[1], explosion_ratio=None)
    reading, _ = drain(AlphaScan().measure(Exploding(), order))
    assert reading.complete
    assert all(reading.nats)
    assert reading.at(1, 0.0) == pytest.approx(naive(Exploding(), order, range(1, 2), 0.0), rel=1e-6)


def test_growth_is_taken_over_the_scored_positions() -> None:
    """A massive activation of the first position, as healthy models have it, is no explosion."""

    class Massive(RandomModel):
        def block(self, index: int, hidden: Tensor, tokens: Tensor) -> Tensor:
            out = super().block(index, hidden, tokens).clone()
            out[:, 0] += 1e6 if index == 2 else 0.0
            return out

    reading, _ = drain(AlphaScan().measure(Massive(), plan()))
    assert reading.complete


@pytest.mark.parametrize("ratio", [999.0, 1001.0])
def test_a_block_explodes_above_the_ratio(ratio: float) -> None:
    """A block that adds 1000 times the stream explodes for a ratio of 999 and not for one of 1001."""

    class Growing(RandomModel):
        def block(self, index: int, hidden: Tensor, tokens: Tensor) -> Tensor:
            return 1001.0 * hidden if index == 2 else super().block(index, hidden, tokens)

    reading, _ = drain(AlphaScan().measure(Growing(), changed(plan(), explosion_ratio=ratio)))
    assert reading.exploding_blocks == ([2] if ratio < 1000 else [])


@pytest.mark.parametrize("options", [{"alphas": []}, {"blocks": []}])
def test_where_no_curve_is_wanted_no_block_explodes(options: dict[str, Any]) -> None:
    """The base loss alone takes one pass, exploding blocks or not."""
    order = changed(exploding_plan(), **options)
    reading, count = drain(AlphaScan().measure(Exploding(), order))
    assert reading.exploding_blocks == []
    assert reading.passes == pytest.approx(1.0)
    assert count == AlphaScan().steps(order, 5)
