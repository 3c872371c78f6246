"""The judgement half of the alpha-scan: from losses to scores, z-scores and a finding.

Flagged are

- the block with the largest skip gain, when that is at least `min_gain_nats`;
- any further block with such a gain whose z is over tau;
- blocks whose output is not finite;
- blocks without which a loss that is not finite becomes finite.

The natural reference of the skip gain is 0: a healthy block costs something to leave out.  A z over the blocks cannot
replace it, because healthy blocks cost very different amounts: on SmolLM2-135M a burst in block 15 that cost 2.3 nats,
2.0 of which the skip wins back, has z 5.2, and one in block 4 that cost 1.1 has z 3.1.  But a strong fault makes other
blocks look harmful as well (a neighbour that amplifies the damage), so the others need the z too; the sentence
names them, and a scan after the worst one is out shows them again if they are really bad.

BSS z > tau alone never flags: blocks of a healthy model differ that much by nature (z 16 on the same model).
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
    harmful = _harmful(blocks, min_gain_nats)
    for rank, (score, gain, z) in enumerate(harmful):
        if rank == 0 or (z is not None and z > tau):
            reason = f"block {score.block}: without it the loss is {gain:.3f} nats lower (z {_number(z)})"
            places[score.block] = Place(block=score.block, reason=reason)
    flagged = tuple(sorted(places))
    blocks = [score.model_copy(update={"flagged": score.block in places}) for score in blocks]

    health, reason = _verdict(reading, base, blocks, [places[block] for block in flagged], tau)
    shadows = [f"block {score.block} ({gain:+.3f})" for score, gain, _ in harmful if score.block not in places]
    if shadows:
        reason += f"; also better without {', '.join(shadows)}, perhaps by the same fault"
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


def _harmful(blocks: list[BlockScore], min_gain_nats: float) -> list[tuple[BlockScore, float, float | None]]:
    """Blocks without which the model is better by enough, worst first, with their gain and its z."""
    found = [
        (score, score.skip_gain, score.skip_gain_z)
        for score in blocks
        if score.skip_gain is not None and score.skip_gain > 0 and score.skip_gain >= min_gain_nats
    ]
    return sorted(found, key=lambda entry: -entry[1])


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
    best = max((s for s in blocks if s.skip_gain is not None), key=lambda s: s.skip_gain or 0.0, default=None)
    if best is None:
        return Health.UNKNOWN, f"{start}; no block can be judged: {measured} measured at alphas {reading.alphas}"
    sentence = (
        f"{start}; none of {measured} blocks does harm; strongest by skip gain is block {best.block} "
        f"({best.skip_gain:+.3f} nats, z {_number(best.skip_gain_z)})" + _bss_note(blocks, tau)
    )
    return (Health.DEGRADED if gated else Health.OK), sentence


def _gated(gates: Sequence[float]) -> str:
    """`serving without block 4; ` or nothing."""
    skipped = [f"block {block}" for block, gate in enumerate(gates) if gate == 0.0]
    scaled = [f"block {block} at alpha {gate:g}" for block, gate in enumerate(gates) if gate not in (0.0, 1.0)]
    parts = [f"without {', '.join(skipped)}"] * bool(skipped) + [f"with {', '.join(scaled)}"] * bool(scaled)
    return f"serving {' and '.join(parts)}; " if parts else ""


def _bss_note(blocks: list[BlockScore], tau: float) -> str:
    """The block that stands out most by BSS, and that this is no alarm."""
    best = max((s for s in blocks if s.bss is not None), key=lambda s: s.bss or 0.0, default=None)
    if best is None:
        return ""
    note = f"; by BSS block {best.block} ({best.bss:.3f} nats, z {_number(best.bss_z)}"
    if best.bss_z is not None and best.bss_z > tau:
        note += f", over tau {tau:g}" + ("" if best.flagged else ", which alone is no alarm")
    return note + ")"


def _number(z: float | None) -> str:
    """Too few blocks have no z."""
    return "unknown" if z is None else f"{z:.1f}"
