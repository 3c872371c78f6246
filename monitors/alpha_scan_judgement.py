"""The judgement half of the alpha-scan: from losses to scores, z-scores and a finding.

A block is flagged when leaving it out makes the model better by at least `min_gain_nats` and its skip gain stands
out with z > tau; when its output is not finite; or when leaving it out is what makes a non-finite loss finite.
BSS z > tau alone never flags: blocks of a healthy model differ that much by nature.
"""

import math
from collections.abc import Callable, Sequence

from pydantic import BaseModel, ConfigDict

from .finding import Action, Finding, Health, Place
from .robust import robust_z
from .wire import Wire


class AlphaScanReading(Wire):
    """Numbers of one scan; N sequences in the plan's order."""

    model_config = ConfigDict(allow_inf_nan=False)

    alphas: list[float]
    gates: list[float]
    """Alpha per block as served while measured."""
    scored_tokens: list[int]
    """(N) scored positions."""
    base_nats: list[float | None]
    """(N) mean loss per scored token of the model as served; None = not finite."""
    nats: list[list[list[float | None]]]
    """Block x alpha x N, as `base_nats`; [] for a block that was not measured."""
    nonfinite_blocks: list[int]
    """Blocks whose output is not finite where their input was, ascending."""
    passes: float
    """Forward-pass equivalents used: tokens through block calls, padding included, over one pass's share."""


class BlockScore(BaseModel):
    """Scores of one block in nats (slope: nats per unit alpha), each with its robust z over the blocks.

    None: cannot be computed (a loss is not finite, the alpha is not in the grid, the block was not measured).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    block: int
    bss: float | None = None
    slope: float | None = None
    skip_gain: float | None = None
    largest_deviation: float | None = None
    bss_z: float | None = None
    slope_z: float | None = None
    skip_gain_z: float | None = None
    largest_deviation_z: float | None = None
    flagged: bool = False


class AlphaScanFinding(Finding):
    """The judgement, with every number it rests on."""

    base_loss_nats: float | None
    """Mean loss per scored token as served; None = not finite, or no data."""
    tau: float
    min_gain_nats: float
    blocks: tuple[BlockScore, ...]
    flagged: tuple[int, ...]
    gates: tuple[float, ...]


def judge(reading: AlphaScanReading, tau: float, min_gain_nats: float) -> AlphaScanFinding:
    """Score all blocks, flag those that do harm, and say why in one sentence."""
    weights = reading.scored_tokens
    base = _mean(reading.base_nats, weights)
    losses = [[_mean(row, weights) for row in rows] for rows in reading.nats]
    blocks = _scores(losses, reading.alphas, base)

    places: dict[int, Place] = {}
    for block in reading.nonfinite_blocks:
        places[block] = Place(block=block, reason=f"block {block}: its output is not finite where its input was")
    if base is None and weights and not reading.nonfinite_blocks:
        places |= _ways_out(losses, reading.alphas)
    for score in blocks:
        gain, z = score.skip_gain, score.skip_gain_z
        if gain is not None and z is not None and gain > 0 and gain >= min_gain_nats and z > tau:
            reason = f"block {score.block}: without it the loss is {gain:.3f} nats lower, z {z:.1f} over tau {tau:g}"
            places[score.block] = Place(block=score.block, reason=reason)
    flagged = tuple(sorted(places))
    blocks = [score.model_copy(update={"flagged": score.block in places}) for score in blocks]

    health, reason = _verdict(reading, base, blocks, [places[block] for block in flagged], tau)
    action = Action.NONE
    if health is Health.FAILED:
        action = Action.SKIP if flagged else Action.INVESTIGATE
    return AlphaScanFinding(
        monitor="alpha_scan",
        health=health,
        reason=reason,
        places=tuple(places[block] for block in flagged),
        action=action,
        base_loss_nats=base,
        tau=tau,
        min_gain_nats=min_gain_nats,
        blocks=tuple(blocks),
        flagged=flagged,
        gates=tuple(reading.gates),
    )


def _mean(nats: Sequence[float | None], weights: Sequence[int]) -> float | None:
    """Token-weighted mean over the sequences; None when there are none or one is not finite."""
    present = [loss for loss in nats if loss is not None]
    if not weights or len(present) < len(weights):
        return None
    return math.fsum(loss * weight for loss, weight in zip(present, weights, strict=True)) / sum(weights)


def _scores(losses: list[list[float | None]], alphas: list[float], base: float | None) -> list[BlockScore]:
    """Block x alpha losses -> scores with their z."""
    raw: list[dict[str, float | None]] = []
    for row in losses:
        at = dict(zip(alphas, row, strict=True)) if row and base is not None else {}
        raw.append({name: formula(at, base or 0.0) for name, formula in _FORMULAS.items()})
    z = {name: robust_z([scores[name] for scores in raw]) for name in _FORMULAS}
    return [
        BlockScore.model_validate({"block": block} | scores | {f"{name}_z": z[name][block] for name in _FORMULAS})
        for block, scores in enumerate(raw)
    ]


def _deviations(at: dict[float, float | None], base: float) -> list[float] | None:
    """`L(alpha) - L(1)` for every alpha but 0; None when there is none or one is not finite."""
    scaled = [loss for alpha, loss in at.items() if alpha != 0.0]
    finite = [loss - base for loss in scaled if loss is not None]
    return finite if finite and len(finite) == len(scaled) else None


def _bss(at: dict[float, float | None], base: float) -> float | None:
    deviations = _deviations(at, base)
    return None if deviations is None else math.sqrt(math.fsum(d * d for d in deviations))


def _largest_deviation(at: dict[float, float | None], base: float) -> float | None:
    deviations = _deviations(at, base)
    return None if deviations is None else max(abs(d) for d in deviations)


def _slope(at: dict[float, float | None], base: float) -> float | None:
    """Over the smallest pair 1 - d, 1 + d of the grid; 0 is no end of a pair: it masks, it does not scale."""
    pairs = [(high - 1, low, high) for high in at for low in at if 0 < low < 1 and abs(low + high - 2) < 1e-9]
    if not pairs:
        return None
    d, low, high = min(pairs)
    below, above = at[low], at[high]
    return None if below is None or above is None else (above - below) / (2 * d)


def _skip_gain(at: dict[float, float | None], base: float) -> float | None:
    skipped = at.get(0.0)
    return None if skipped is None else base - skipped


_FORMULAS: dict[str, Callable[[dict[float, float | None], float], float | None]] = {
    "bss": _bss,
    "slope": _slope,
    "skip_gain": _skip_gain,
    "largest_deviation": _largest_deviation,
}


def _ways_out(losses: list[list[float | None]], alphas: list[float]) -> dict[int, Place]:
    """Blocks without which a loss that is not finite becomes finite."""
    if 0.0 not in alphas:
        return {}
    at = alphas.index(0.0)
    found = {}
    for block, row in enumerate(losses):
        loss = row[at] if row else None
        if loss is not None:
            reason = f"block {block}: the loss is finite only without it, {loss:.3f} nats"
            found[block] = Place(block=block, reason=reason)
    return found


def _verdict(
    reading: AlphaScanReading, base: float | None, blocks: list[BlockScore], places: list[Place], tau: float
) -> tuple[Health, str]:
    """Health and the one sentence."""
    tokens = sum(reading.scored_tokens)
    if not tokens:
        return Health.UNKNOWN, "no sequences were measured"
    measured = sum(1 for rows in reading.nats if rows)
    over = f"{tokens} tokens in {len(reading.base_nats)} sequences"
    gated = _gated(reading.gates)
    if base is None:
        start = f"{gated}the loss over {over} is not finite"
        if places:
            return Health.FAILED, f"{start}; " + "; ".join(place.reason for place in places)
        return Health.FAILED, f"{start}, and none of {measured} blocks measured is the only cause"
    start = f"{gated}base loss {base:.3f} nats over {over}"
    if places:
        return Health.FAILED, f"{start}; " + "; ".join(place.reason for place in places) + _bss_note(blocks, tau)
    if not any(score.skip_gain_z is not None for score in blocks):
        return Health.UNKNOWN, f"{start}; no block can be judged: {measured} measured at alphas {reading.alphas}"
    best = max((s for s in blocks if s.skip_gain is not None), key=lambda s: s.skip_gain or 0.0)
    gain, z = best.skip_gain, best.skip_gain_z
    sentence = (
        f"{start}; none of {measured} blocks does harm; strongest by skip gain is block {best.block} "
        f"({gain:+.3f} nats, z {z:.1f})" + _bss_note(blocks, tau)
    )
    return (Health.DEGRADED if gated else Health.OK), sentence


def _gated(gates: Sequence[float]) -> str:
    """`serving without block 4; ` or nothing."""
    skipped = [f"block {block}" for block, gate in enumerate(gates) if gate == 0.0]
    scaled = [f"block {block} at alpha {gate:g}" for block, gate in enumerate(gates) if gate not in (0.0, 1.0)]
    parts = [f"without {', '.join(skipped)}"] * bool(skipped) + [f"with {', '.join(scaled)}"] * bool(scaled)
    return f"serving {' and '.join(parts)}; " if parts else ""


def _bss_note(blocks: list[BlockScore], tau: float) -> str:
    scored = [s for s in blocks if s.bss is not None and s.bss_z is not None]
    if not scored:
        return ""
    best = max(scored, key=lambda s: s.bss or 0.0)
    note = f"; by BSS block {best.block} ({best.bss:.3f} nats, z {best.bss_z:.1f}"
    if best.bss_z is not None and best.bss_z > tau:
        note += f", over tau {tau:g}, which alone is no alarm"
    return note + ")"
