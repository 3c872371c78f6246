"""The ways to scan that `scan_cost.py` compares: the naive one, and each strategy of the monitor."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flipwatch.monitors.alpha_scan import (
    FULL_GRID,
    QUICK_GRID,
    AlphaScan,
    AlphaScanFinding,
    AlphaScanPlan,
    AlphaScanReading,
    Strategy,
    chunks,
    padded,
    predicted_passes,
)
from flipwatch.monitors.alpha_scan.scores import mean
from flipwatch.probe.local import LocalView, run_scan
from flipwatch.probe.slopes import PASSES, slopes

Scan = tuple[int | None, float]
"""Which block is scaled by how much; no block for the base loss."""

Losses = dict[Scan, list[float]]
"""Per scan, the loss of each sequence."""


@dataclass
class Ticks:
    """What a progress bar is told."""

    more: Callable[[int], None] = lambda steps: None
    """So many steps will follow."""
    step: Callable[[], None] = lambda: None
    """One of them is done."""


@dataclass
class Outcome:
    """What one way found, and what it took in forward-pass equivalents over the whole set."""

    finding: AlphaScanFinding
    readings: list[AlphaScanReading]
    passes: float
    predicted_passes: float


Way = Callable[[LocalView, AlphaScanPlan, Ticks], Outcome]


def naive_scan(view: LocalView, plan: AlphaScanPlan, on_pass: Callable[[], None]) -> tuple[Losses, float]:
    """One full pass per block and alpha, in batches as large as the scan's.

    Returns the losses, the base ones under `(None, 1.0)`, and the forward-pass equivalents.
    """
    scans: list[Scan] = [(None, 1.0), *((block, alpha) for block in range(view.num_blocks) for alpha in plan.alphas)]
    losses: Losses = {scan: [math.nan] * len(plan.tokens) for scan in scans}
    work = 0
    for rows in chunks(plan.model_copy(update={"alphas": []})):
        tokens, scored = padded(plan, rows)
        for scaled, alpha in scans:
            hidden = view.embed(tokens)
            for index in range(view.num_blocks):
                out = view.block(index, hidden, tokens)
                if scaled == index:
                    mixed = hidden.float() + alpha * (out.float() - hidden.float())
                    out = hidden if alpha == 0.0 else mixed.to(hidden.dtype)
                hidden = out
                work += tokens.numel()
            for row, loss in zip(rows, view.nats(hidden, tokens, scored).tolist(), strict=True):
                losses[scaled, alpha][row] = loss
            on_pass()
    return losses, work / (view.num_blocks * plan.pass_tokens)


def naive_reading(view: LocalView, plan: AlphaScanPlan, losses: Losses, passes: float) -> AlphaScanReading:
    """The naive losses as the monitor's reading, so that the same rules judge them."""

    def finite(row: list[float]) -> list[float | None]:
        return [loss if math.isfinite(loss) else None for loss in row]

    return AlphaScanReading(
        alphas=plan.alphas,
        gates=view.gates,
        scored_tokens=plan.scored_tokens,
        pass_tokens=plan.pass_tokens,
        base_nats=finite(losses[None, 1.0]),
        nats=[[finite(losses[block, alpha]) for alpha in plan.alphas] for block in range(view.num_blocks)],
        nonfinite_blocks=[],
        passes=passes,
    )


def largest_difference(readings: Sequence[AlphaScanReading], naive: AlphaScanReading) -> float:
    """In nats, over every loss that both measured; Inf where only one is finite.

    Losses of groups, and of models without some block, are none that the naive scan has.
    """
    largest = 0.0
    for reading in readings:
        if reading.group > 1 or reading.left_out:
            continue
        part = slice(reading.first_sequence, reading.first_sequence + len(reading.base_nats))
        pairs = [(reading.base_nats, naive.base_nats[part])]
        for block, rows in enumerate(reading.nats):
            if rows:
                pairs += [(reading.at(block, alpha), naive.at(block, alpha)[part]) for alpha in reading.alphas]
        for mine, theirs in pairs:
            for a, b in zip(mine, theirs, strict=True):
                if a is not None and b is not None:
                    largest = max(largest, abs(a - b))
                elif (a is None) != (b is None):
                    largest = math.inf
    return largest


def _monitored(strategy: Strategy, grid: Sequence[float]) -> Way:
    """A scan as the monitor does it, up to the first fault."""

    def way(view: LocalView, order: AlphaScanPlan, ticks: Ticks) -> Outcome:
        return _outcome(view, AlphaScan(strategy=strategy, max_faults=1), _changed(order, alphas=list(grid)), ticks)

    return way


def _steepest_first(view: LocalView, order: AlphaScanPlan, ticks: Ticks) -> Outcome:
    """Slopes of all blocks from one backward pass, then alpha 0 for the quarter with the largest ones."""
    steepness = [abs(mean(row, order.scored_tokens) or 0.0) for row in slopes(view, order)]
    ranked = sorted(range(view.num_blocks), key=lambda block: -steepness[block])
    blocks = sorted(ranked[: max(1, view.num_blocks // 4)])
    outcome = _outcome(view, AlphaScan(max_faults=1), _changed(order, alphas=[0.0], blocks=blocks), ticks)
    outcome.passes += PASSES
    outcome.predicted_passes += PASSES
    return outcome


def _outcome(view: LocalView, monitor: AlphaScan, order: AlphaScanPlan, ticks: Ticks) -> Outcome:
    plans: list[AlphaScanPlan] = []

    def begin(plan: AlphaScanPlan, steps: int) -> None:
        plans.append(plan)
        ticks.more(steps)

    finding, readings = run_scan(view, monitor, order, on_plan=begin, on_step=ticks.step)
    return Outcome(
        finding,
        readings,
        sum(reading.passes * reading.pass_tokens for reading in readings) / order.pass_tokens,
        sum(predicted_passes(plan, view.num_blocks) * plan.pass_tokens for plan in plans) / order.pass_tokens,
    )


def _changed(order: AlphaScanPlan, **changes: object) -> AlphaScanPlan:
    return order.model_copy(update=changes)


WAYS: dict[str, Way] = {
    "quick": _monitored(Strategy.PLAIN, QUICK_GRID),
    "full": _monitored(Strategy.PLAIN, FULL_GRID),
    "two-stage": _monitored(Strategy.TWO_STAGE, QUICK_GRID),
    "grouped": _monitored(Strategy.GROUPED, QUICK_GRID),
    "growing": _monitored(Strategy.GROWING, QUICK_GRID),
    "slopes": _steepest_first,
}
"""What is compared with the naive scan of the full grid."""
