"""The measuring half of the alpha-scan, on a small random model."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flipwatch.monitors.alpha_scan import (
    FULL_GRID,
    QUICK_GRID,
    AlphaScan,
    AlphaScanPlan,
    AlphaScanReading,
    predicted_passes,
)
from flipwatch.monitors.monitor import ModelView
from flipwatch.monitors.table import MONITORS

from .random_model import RandomModel, changed, drain, naive, plan

OPTIONS: list[dict[str, Any]] = [
    {},
    {"alphas": []},
    {"alphas": [0.0]},
    {"alphas": list(FULL_GRID)},
    {"left_out": [0, 3]},
    {"left_out": [0, 1, 2, 3, 4]},
    {"blocks": [0]},
    {"blocks": [1, 4]},
    {"blocks": []},
    {"blocks": [1, 2], "left_out": [2, 3]},
    {"group": 2},
    {"group": 3, "left_out": [1]},
    {"group": 2, "left_out": [2, 3], "alphas": [0.0]},
    {"group": 7},
    {"explosion_ratio": None},
    {"tokens_per_loss": 1},
    {"tokens_per_loss": 10, "group": 2},
]
"""Changes of a plan for five blocks."""


def test_prefix_sharing_equals_naive_full_passes() -> None:
    """Every loss of a shared, padded, batched scan equals a full pass of its own to 1e-6."""
    model, order = RandomModel(), plan(FULL_GRID)
    reading, _ = drain(AlphaScan().measure(model, order))
    assert reading.base_nats == pytest.approx(naive(model, order), abs=1e-6)
    for block in range(model.num_blocks):
        for a, alpha in enumerate(FULL_GRID):
            expected = naive(model, order, range(block, block + 1), alpha)
            assert reading.nats[block][a] == pytest.approx(expected, abs=1e-6)
    assert reading.scored_tokens == [3, 4, 1, 6, 1]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tokens_per_step", [1, 30, 10_000])
def test_steps_are_exact(options: dict[str, Any], tokens_per_step: int) -> None:
    """The number of yields is what `steps` says, for all options and any chunk size."""
    model, order = RandomModel(), changed(plan(tokens_per_step=tokens_per_step), **options)
    _, count = drain(AlphaScan().measure(model, order))
    assert count == AlphaScan().steps(order, model.num_blocks)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_passes_are_as_predicted(options: dict[str, Any]) -> None:
    """For sequences of one length the work is what the cost model says, for all options."""
    rows = [[1, 2, 3, 4]] * 3
    order = changed(AlphaScanPlan(alphas=list(QUICK_GRID), tokens=rows, scored_from=[1, 1, 1]), **options)
    reading, _ = drain(AlphaScan().measure(RandomModel(), order))
    assert reading.passes == pytest.approx(predicted_passes(order, 5))


def test_left_out_blocks_are_not_there() -> None:
    """All losses are those of a model without those blocks; they have no curves and cost nothing."""
    model, order = RandomModel(), changed(plan(), left_out=[1, 3])
    reading, _ = drain(AlphaScan().measure(model, order))
    assert {index for index, _, _ in model.calls} == {0, 2, 4}
    assert reading.left_out == [1, 3]
    assert reading.base_nats == pytest.approx(naive(model, order, left_out=[1, 3]), abs=1e-6)
    for block in (0, 2, 4):
        expected = naive(model, order, range(block, block + 1), 0.7, left_out=[1, 3])
        assert reading.at(block, 0.7) == pytest.approx(expected, abs=1e-6)
    assert [bool(rows) for rows in reading.nats] == [True, False, True, False, True]
    whole, _ = drain(AlphaScan().measure(RandomModel(), plan()))
    assert whole.passes - reading.passes > 1


def test_only_the_wanted_blocks_are_measured() -> None:
    """`blocks` limits the curves, and their losses are the same as in a scan of all."""
    whole, _ = drain(AlphaScan().measure(RandomModel(), plan()))
    some, _ = drain(AlphaScan().measure(RandomModel(), changed(plan(), blocks=[1, 3])))
    assert some.nats == [[], whole.nats[1], [], whole.nats[3], []]


@pytest.mark.parametrize("left_out", [[], [2]])
def test_a_group_is_scaled_as_one_contribution(left_out: list[int]) -> None:
    """What two neighbours add together is scaled; the last group is what remains."""
    model, order = RandomModel(), changed(plan((0.0, 0.7, 1.3)), group=2, left_out=left_out)
    reading, _ = drain(AlphaScan().measure(model, order))
    for run in (range(2), range(2, 4), range(4, 5)):
        for alpha in order.alphas:
            expected = naive(model, order, run, alpha, left_out)
            assert reading.at(run.start, alpha) == pytest.approx(expected, rel=1e-6)
    assert [bool(rows) for rows in reading.nats] == [True, False, True, False, True]
    assert reading.group == 2


@pytest.mark.parametrize("options", [{"blocks": [5]}, {"left_out": [0, 7]}])
def test_a_block_that_is_not_there_is_refused(options: dict[str, Any]) -> None:
    """One sentence, before anything is measured."""
    model, order = RandomModel(), changed(plan(), **options)
    with pytest.raises(ValueError, match=r"block \d does not exist; blocks are 0 to 4"):
        AlphaScan().steps(order, 5)
    with pytest.raises(ValueError, match="does not exist"):
        drain(AlphaScan().measure(model, order))
    assert model.calls == []


def test_at_most_one_block_call_per_step() -> None:
    """No unit holds the engine for more than one block call."""
    model = RandomModel()
    done = 0
    for _ in AlphaScan().measure(model, plan()):
        assert len(model.calls) - done <= 1
        done = len(model.calls)


def test_chunk_size_changes_nothing() -> None:
    """One sequence at a time and all at once give the same losses in the same order."""
    one, _ = drain(AlphaScan().measure(RandomModel(), plan(tokens_per_step=1)))
    everything, _ = drain(AlphaScan().measure(RandomModel(), plan(tokens_per_step=10_000)))
    assert one.base_nats == pytest.approx(everything.base_nats, abs=1e-9)
    for mine, theirs in zip(one.nats, everything.nats, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            assert x == pytest.approx(y, abs=1e-6)


@pytest.mark.parametrize("tokens_per_loss", [1, 9, 20])
def test_losses_in_pieces_are_the_same(tokens_per_loss: int) -> None:
    """Where the losses of one block call are cut changes none of them."""
    whole, _ = drain(AlphaScan().measure(RandomModel(), plan()))
    cut, _ = drain(AlphaScan().measure(RandomModel(), changed(plan(), tokens_per_loss=tokens_per_loss)))
    assert cut.base_nats == pytest.approx(whole.base_nats, abs=1e-9)
    for mine, theirs in zip(cut.nats, whole.nats, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            assert x == pytest.approx(y, abs=1e-9)


def test_no_loss_is_of_more_tokens_than_wanted() -> None:
    """`tokens_per_loss` bounds what goes through the head in one step, down to one sequence."""
    model = RandomModel()
    at_once: list[int] = []
    original = model.nats

    def counting(hidden: Tensor, tokens: Tensor, scored: Tensor) -> Tensor:
        at_once.append(hidden.shape[0] * hidden.shape[1])
        return original(hidden, tokens, scored)

    model.nats = counting  # type: ignore[method-assign]
    drain(AlphaScan().measure(model, changed(plan(), tokens_per_loss=14)))
    assert max(at_once) == 14


def test_chunks_keep_to_their_size() -> None:
    """No block call holds more than `tokens_per_step` tokens when a sequence fits."""
    model = RandomModel()
    drain(AlphaScan().measure(model, plan(tokens_per_step=42)))
    assert max(rows * width for _, rows, width in model.calls) == 42


@pytest.mark.parametrize("part", [1, 3, 1000])
def test_parts_of_any_length_give_the_same_reading(part: int) -> None:
    """A scan advanced in parts, with the model serving others in between, reads the same numbers."""
    whole, _ = drain(AlphaScan().measure(RandomModel(), plan()))
    model = RandomModel()
    steps = AlphaScan().measure(model, plan())
    reading = None
    while reading is None:
        for _ in range(part):
            try:
                next(steps)
            except StopIteration as end:
                reading = end.value
                break
        model.block(0, model.embed(torch.zeros(2, 9, dtype=torch.long)), torch.zeros(2, 9, dtype=torch.long))
    assert reading == whole


def test_passes_follow_the_formula() -> None:
    """The cost is 2 + |A| * (L - 1) / 2 passes; for no grid it is 1, and there are no curves."""
    rows = [[1, 2, 3, 4]] * 3
    order = AlphaScanPlan(alphas=list(QUICK_GRID), tokens=rows, scored_from=[1, 1, 1])
    reading, _ = drain(AlphaScan().measure(RandomModel(), order))
    assert reading.passes == pytest.approx(2 + 3 * (5 - 1) / 2)
    base, _ = drain(AlphaScan().measure(RandomModel(), changed(order, alphas=[])))
    assert base.passes == pytest.approx(1.0)
    assert base.nats == [[]] * 5


def test_gated_blocks_run_as_served_and_are_not_scanned() -> None:
    """A skipped and a damped block have no curve; the others' losses are those of the gated model."""
    gates = [1.0, 0.0, 1.0, 0.5, 1.0]
    model, order = RandomModel(gates=gates), plan()
    reading, _ = drain(AlphaScan().measure(model, order))
    assert reading.gates == gates
    assert [bool(rows) for rows in reading.nats] == [True, False, True, False, True]
    assert reading.base_nats == pytest.approx(naive(model, order), abs=1e-6)
    assert reading.nats[2][1] == pytest.approx(naive(model, order, range(2, 3), 0.7), abs=1e-6)


def test_skip_masks_an_infinite_contribution() -> None:
    """Alpha 0 takes the stream in front of the block, it never multiplies 0 by Inf."""

    class Late(RandomModel):
        """Block 2 is finite in the base pass and overflows in the scan pass."""

        def block(self, index: int, hidden: Tensor, tokens: Tensor) -> Tensor:
            out = super().block(index, hidden, tokens)
            calls = sum(1 for called, _, _ in self.calls if called == 2)
            return torch.full_like(out, torch.inf) if index == 2 and calls == 2 else out

    order = AlphaScanPlan(alphas=list(QUICK_GRID), tokens=[[1, 2, 3]], scored_from=[1])
    gates = [0.5, 0.5, 1.0]
    sound, _ = drain(AlphaScan().measure(RandomModel(3, gates), order))
    reading, _ = drain(AlphaScan().measure(Late(3, gates), order))
    assert reading.nats[2][0] == sound.nats[2][0]
    assert reading.nats[2][1:] == [[None], [None]]


def test_plan_and_reading_survive_json() -> None:
    """Both cross the process border unchanged."""
    order = plan()
    assert AlphaScanPlan.model_validate_json(order.model_dump_json()) == order
    reading, _ = drain(AlphaScan().measure(RandomModel(), order))
    assert AlphaScanReading.model_validate_json(reading.model_dump_json()) == reading


def test_table_lists_the_scan() -> None:
    """The scan is found by its name, and the fake has the shape of a view."""
    view: ModelView = RandomModel()
    assert view.num_blocks == 5
    assert MONITORS["alpha_scan"] is AlphaScan
