"""Sizes of parts, on simulated engines."""

from collections.abc import Iterator

import numpy as np
import pytest

from flipwatch.service.pace import Pace

BUDGET = 0.05


def _parts(costs: list[float], pace: Pace) -> Iterator[float]:
    """Seconds of each part of a measurement whose steps cost so much."""
    done = 0
    while done < len(costs):
        part = costs[done : done + pace.steps]
        done += len(part)
        pace.observe(len(part), sum(part), max(part))
        yield sum(part)


def _scan(block: float, loss: float, blocks: int = 30) -> list[float]:
    """Costs of the steps of an alpha-scan: units that end in a loss, each shorter than the one before."""
    return [block] * blocks + [loss] + [cost for unit in range(blocks) for cost in [block] * (blocks - unit) + [loss]]


@pytest.mark.parametrize(("block", "loss"), [(0.004, 0.032), (0.006, 0.0225), (0.018, 0.045)])
def test_a_dear_step_now_and_then_seldom_takes_a_part_over_the_budget(block: float, loss: float) -> None:
    """Scans whose losses cost eight, four and three times a block: one part of fifty may be too long."""
    times = list(_parts(_scan(block, loss) * 3, Pace(BUDGET)))
    assert sum(time > BUDGET for time in times) <= len(times) / 50
    # Not by parts of single steps throughout.
    assert sum(times) / len(times) > 0.39 * BUDGET


def test_steps_that_cost_the_same_fill_the_budget() -> None:
    """No part is too long, and once the pace is known each comes near the budget."""
    times = list(_parts([0.001] * 1000, Pace(BUDGET)))
    assert max(times) < BUDGET
    assert min(times[6:-1]) > 0.9 * BUDGET


def test_noise_seldom_takes_a_part_over_the_budget() -> None:
    """With steps that vary by a third, at most one part of twenty is too long."""
    noise = np.random.default_rng(0)
    costs = [cost * noise.uniform(0.67, 1.33) for cost in _scan(0.003, 0.02) * 5]
    times = list(_parts(costs, Pace(BUDGET)))
    assert sum(time > BUDGET for time in times) <= len(times) / 20


def test_a_slow_spell_shrinks_parts_at_once_and_they_grow_slowly() -> None:
    """The first part that shows steps of five times the cost is the last of its size; it comes back by doubling."""
    pace = Pace(BUDGET)
    list(_parts([0.005] * 100, pace))
    assert pace.steps == 10
    list(_parts([0.025] * 10, pace))
    assert pace.steps == 2
    sizes = []
    for _ in range(70):
        pace.observe(pace.steps, 0.005 * pace.steps, 0.005)
        sizes.append(pace.steps)
    assert sizes[:60] == [2] * 60
    assert [size for size in sizes if size > 2][:2] == [4, 8]


def test_steps_longer_than_the_budget_come_one_by_one() -> None:
    """Nothing smaller than a step can be asked for."""
    pace = Pace(BUDGET)
    list(_parts([0.2] * 5, pace))
    assert pace.steps == 1


def test_a_part_without_a_step_says_nothing() -> None:
    """The call that only fetches the reading neither divides by zero nor changes the size."""
    pace = Pace(BUDGET)
    pace.observe(0, 0.0, 0.0)
    assert pace.steps == 1
