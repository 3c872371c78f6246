"""Which plan follows which reading: cheaper scans, and scans that go on when a block was found.

All of this is judgement on numbers, so it runs where readings are judged, and each plan is a measurement of its own.

Strategies of the first round (FPE: forward-pass equivalents, `L` blocks, `|A|` alphas):

    plain      the plan's grid on all blocks                                              2 + |A| (L - 1) / 2 FPE
    two-stage  the same, then the full grid for the blocks that stand out; exact           + 2 + 6 k (1 - depth) FPE
               for those, and BSS over all blocks stays that of the plan's grid
    grouped    alpha 0 for groups of neighbouring blocks, then the plan's grid inside      4 + L / 2g + |A| g FPE
               the two best groups; a block whose group costs more to leave out than
               its damage is missed (`docs/detection` says how often)
    growing    sequences are added, twice as many each time, until the ranking is          what it needs
               stable: see `_is_stable`

Then, when a block was flagged, the model is measured again without it, alpha 0 only, until nothing more is flagged or
`max_faults` blocks are: several faults are found one by one, the strongest first.  Blocks that are not finite or
explode are named all at once, and the model is measured without them however many they are.
"""

from collections.abc import Sequence
from enum import StrEnum

from .finding import Thresholds
from .judgement import flagged_in
from .plan import FULL_GRID, AlphaScanPlan
from .profile import Profile
from .reading import AlphaScanReading, joined, rounds
from .scores import paired_t, scores

GROUP = 4
"""Blocks in a group of the strategy `grouped`."""

FIRST_SEQUENCES = 8
"""Sequences that the strategy `growing` begins with."""

_STAND_OUT = 2
"""Blocks of the second stage beside those that are over tau."""

_STABLE_T = 3.0
"""Standard errors that a difference needs to be no accident of the sequences."""


class Strategy(StrEnum):
    """How the first round of a scan saves work."""

    PLAIN = "plain"
    TWO_STAGE = "two-stage"
    GROUPED = "grouped"
    GROWING = "growing"


def next_plan(
    order: AlphaScanPlan,
    readings: Sequence[AlphaScanReading],
    strategy: Strategy,
    thresholds: Thresholds,
    max_faults: int,
    profile: Profile | None = None,
) -> AlphaScanPlan | None:
    """The plan to measure next; None when the scan is over.

    `order` is what was asked for: all sequences, the grid, all blocks.  `readings` are those so far, oldest first.
    """
    if not readings:
        return _first_plan(order, strategy)
    latest = readings[-1]
    if not order.alphas:
        return None
    models = rounds(readings)
    at = next(number for number, model in enumerate(models) if model.left_out == latest.left_out)
    after = models[at + 1] if at + 1 < len(models) else None
    served = models[0]
    if served.exploding_blocks and any(served.nats):
        # Curves behind an exploding block: it is known to be how this model works, see below.
        order = order.model_copy(update={"explosion_ratio": None})
    elif served.exploding_blocks and at == 1 and not flagged_in(served, latest, thresholds):
        # What looked like an explosion is how this model works: it is worse without.
        order = order.model_copy(update={"explosion_ratio": None})
        return _follow(order, latest, left_out=[], alphas=order.alphas)
    found = flagged_in(models[at], after, thresholds, profile)
    if latest.complete and not latest.left_out:
        refined = _refined(order, [r for r in readings if r.complete and not r.left_out], strategy, thresholds)
        if refined is not None:
            return refined
    left_out = sorted({*latest.left_out, *found})
    enough = latest.complete and len(left_out) >= max_faults
    if left_out == latest.left_out or enough or len(left_out) == len(latest.nats):
        return None
    # A model without curves gets them at last; one with curves has shown them already.
    alphas = order.alphas if not latest.complete and not any(any(m.nats) for m in models) else [0.0]
    return _follow(order, latest, left_out=left_out, alphas=alphas)


def _first_plan(order: AlphaScanPlan, strategy: Strategy) -> AlphaScanPlan:
    if strategy is Strategy.GROUPED and order.alphas:
        return order.model_copy(update={"group": GROUP, "alphas": [0.0]})
    if strategy is Strategy.GROWING and order.alphas:
        return _sequences(order, 0, FIRST_SEQUENCES)
    return order


def _refined(
    order: AlphaScanPlan, readings: Sequence[AlphaScanReading], strategy: Strategy, thresholds: Thresholds
) -> AlphaScanPlan | None:
    """The rest of the first round, if there is one; `readings` are those of the served model that have curves."""
    latest = readings[-1]
    match strategy:
        case Strategy.TWO_STAGE if len(readings) == 1:
            rest = [alpha for alpha in FULL_GRID if alpha not in order.alphas]
            blocks = _standing_out(latest, thresholds)
            return order.model_copy(update={"blocks": blocks, "alphas": rest}) if rest and blocks else None
        case Strategy.GROUPED if latest.group > 1:
            gains = {score.block: score.skip_gain for score in scores(latest)}
            best = sorted((b for b, g in gains.items() if g is not None), key=lambda b: -(gains[b] or 0.0))[:2]
            blocks = sorted(b for start in best for b in range(start, min(start + latest.group, len(latest.nats))))
            # No group can be judged when the loss is not finite: the blocks can.
            return order.model_copy(update={"blocks": blocks or None})
        case Strategy.GROWING:
            so_far = joined(readings)
            done = so_far.first_sequence + len(so_far.base_nats)
            if done >= len(order.tokens) or _is_stable(so_far, thresholds):
                return None
            return _sequences(order, done, 2 * done)
        case _:
            return None


def _is_stable(reading: AlphaScanReading, thresholds: Thresholds) -> bool:
    """The stopping rule of `growing`: more sequences would not change what is flagged, to `_STABLE_T` standard errors.

    Either every block's skip gain is below `min_gain_nats` by so much, or the best is flagged, and ahead of the second
    by so much.
    """
    weights = reading.scored_tokens
    gains = [(score.skip_gain, score) for score in scores(reading) if score.skip_gain is not None]
    if not gains or any(score.skip_gain_t is None for _, score in gains):
        return False
    if all(gain + _STABLE_T * _error(score.skip_gain_t, gain) < thresholds.min_gain_nats for gain, score in gains):
        return True
    ranked = [score.block for _, score in sorted(gains, key=lambda pair: -pair[0])]
    if not flagged_in(reading, None, thresholds):
        return False
    ahead = paired_t(reading.at(ranked[1], 0.0), reading.at(ranked[0], 0.0), weights) if len(ranked) > 1 else None
    return ahead is not None and ahead[1] >= _STABLE_T


def _error(t: float | None, gain: float) -> float:
    """Standard error of a gain whose t is known."""
    return abs(gain / t) if t else 0.0


def _standing_out(reading: AlphaScanReading, thresholds: Thresholds) -> list[int]:
    """The best blocks by skip gain, and all whose BSS z is over tau."""
    found = scores(reading)
    best = sorted((s for s in found if s.skip_gain is not None), key=lambda s: -(s.skip_gain or 0.0))[:_STAND_OUT]
    return sorted(
        {s.block for s in best} | {s.block for s in found if s.bss_z is not None and s.bss_z > thresholds.tau}
    )


def _sequences(order: AlphaScanPlan, start: int, stop: int) -> AlphaScanPlan:
    rows = slice(start, stop)
    return order.model_copy(
        update={"tokens": order.tokens[rows], "scored_from": order.scored_from[rows], "first_sequence": start}
    )


def _follow(
    order: AlphaScanPlan, latest: AlphaScanReading, *, left_out: list[int], alphas: list[float]
) -> AlphaScanPlan:
    """The model without `left_out`, on the sequences that have been measured so far."""
    measured = _sequences(order, 0, latest.first_sequence + len(latest.base_nats))
    return measured.model_copy(update={"left_out": left_out, "alphas": alphas})
