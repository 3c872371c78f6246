"""What one measurement runs, and what it is predicted to cost."""

import pytest

from flipwatch.monitors.alpha_scan import FULL_GRID, AlphaScanPlan, naive_passes, predicted_passes

from .random_model import plan


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [], "scored_from": []},
        {"tokens": [[1, 2]], "scored_from": [0]},
        {"tokens": [[1, 2]], "scored_from": [2]},
        {"tokens": [[1]], "scored_from": [1]},
        {"tokens": [[1, 2], [1, 2]], "scored_from": [1]},
        {"alphas": [1.0]},
        {"alphas": [0.5, 0.5]},
        {"alphas": [-0.5]},
        {"alphas": [float("nan")]},
        {"tokens_per_step": 0},
        {"blocks": [2, 1]},
        {"blocks": [-1]},
        {"left_out": [1, 1]},
        {"blocks": [1], "group": 2},
        {"group": 0},
        {"explosion_ratio": 1.0},
        {"first_sequence": -1},
    ],
)
def test_bad_plans_are_refused(change: dict[str, object]) -> None:
    """A plan that cannot be measured never reaches the engine."""
    good: dict[str, object] = {"alphas": [0.0], "tokens": [[1, 2]], "scored_from": [1]}
    AlphaScanPlan.model_validate(good)
    with pytest.raises(ValueError, match=r"tokens|alphas|scored_from|blocks|left_out|group|ratio|first_sequence"):
        AlphaScanPlan.model_validate(good | change)


def test_predicted_costs_by_hand() -> None:
    """30 blocks: 2 + |A| 29 / 2 for all of them; a plan of one block walks to it and scans what is behind."""
    order = plan(FULL_GRID)
    assert naive_passes(order, 30) == 1 + 9 * 30
    assert predicted_passes(order, 30) == pytest.approx(2 + 9 * 29 / 2)
    one = order.model_copy(update={"blocks": [9], "alphas": [0.0]})
    assert naive_passes(one, 30) == 2
    assert predicted_passes(one, 30) == pytest.approx(1 + 10 / 30 + 20 / 30)
    without = order.model_copy(update={"alphas": [], "left_out": [3, 4, 5]})
    assert predicted_passes(without, 30) == pytest.approx(0.9)
    groups = order.model_copy(update={"alphas": [0.0], "group": 10})
    assert naive_passes(groups, 30) == 1 + 3
    assert predicted_passes(groups, 30) == pytest.approx(1 + 1 + 20 / 30 + 10 / 30)
