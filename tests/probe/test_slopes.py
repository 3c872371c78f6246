"""Slopes from one backward pass against finite differences of measured losses."""

import pytest
import torch

from flipwatch.monitors.alpha_scan import AlphaScan, AlphaScanPlan
from flipwatch.probe.local import LocalView, run_measurement
from flipwatch.probe.slopes import slopes

from .small_llama import LAYERS, llama, ragged

D = 0.01


@pytest.fixture
def view() -> LocalView:
    """A tiny random model with grouped queries."""
    torch.manual_seed(11)
    return LocalView(llama())


def plan(left_out: tuple[int, ...] = ()) -> AlphaScanPlan:
    """Three sequences of different lengths, in more than one chunk, at two alphas around 1."""
    return AlphaScanPlan(
        alphas=[1 - D, 1 + D], tokens=ragged(), scored_from=[1, 4, 1], tokens_per_step=16, left_out=list(left_out)
    )


def differences(view: LocalView, order: AlphaScanPlan) -> list[list[float]]:
    """Block x N, the central difference of the losses that the scan measures; 0 for what it does not scale."""
    reading = run_measurement(view, AlphaScan(), order)
    found = []
    for block in range(LAYERS):
        below, above = reading.at(block, 1 - D), reading.at(block, 1 + D)
        pairs = zip(below, above, strict=True) if below else [(0.0, 0.0)] * len(order.tokens)
        found.append([(high - low) / (2 * D) for low, high in pairs if low is not None and high is not None])
    return found


@pytest.mark.parametrize("left_out", [(), (1, 3)])
def test_slopes_equal_finite_differences(view: LocalView, left_out: tuple[int, ...]) -> None:
    """For each block and sequence, to 1e-3 of the largest; also behind a scan, which runs under inference mode."""
    order = plan(left_out)
    expected = differences(view, order)
    found = slopes(view, order)
    largest = max(abs(slope) for row in expected for slope in row)
    assert largest > 0.1
    for block in range(LAYERS):
        assert found[block] == pytest.approx(expected[block], abs=1e-3 * largest)
    assert all(found[block] == [0.0] * 3 for block in left_out)


def test_a_gated_block_has_the_slope_of_what_comes_through(view: LocalView) -> None:
    """The view's gates hold: a skipped block has slope 0, and the others are those of the model without it."""
    order = plan()
    view.gates[2] = 0.0
    found = slopes(view, order)
    assert found[2] == [0.0] * 3
    without = slopes(LocalView(view.model), order.model_copy(update={"left_out": [2]}))
    for block in range(LAYERS):
        assert found[block] == pytest.approx(without[block], abs=1e-6)


def test_slopes_leave_the_model_as_it_was(view: LocalView) -> None:
    """No gradient stays at a weight, and the losses are the same bit for bit, inside inference mode or not."""
    order = plan()
    before = run_measurement(view, AlphaScan(), order)
    found = slopes(view, order)
    with torch.inference_mode():
        assert slopes(view, order) == found
    assert all(weight.grad is None for weight in view.model.parameters())
    assert run_measurement(view, AlphaScan(), order) == before
