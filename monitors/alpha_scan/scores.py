"""From losses to scores of the blocks, with their standard errors and z."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from ..robust import RESOLUTION, robust_z
from .reading import AlphaScanReading

if TYPE_CHECKING:
    from .profile import Profile

MIN_SEQUENCES = 8
"""With fewer sequences a skip gain has no test: three standard errors happen by accident too often (2 % of the scans
of a healthy model with 4 sequences, none with 8; `docs/detection`)."""

PROFILE_RESOLUTION = 2e-3
"""Smallest scale in nats that a z against a clean profile is measured in.  Two scans of one healthy bf16 model differ
by less when its batches are the same; with a smaller scale, rounding would stand out."""


class BlockScore(BaseModel):
    """Scores of one block in nats (slope: nats per unit alpha).

    `*_z` is a robust z over the blocks of this scan; `*_profile_z` is one of the differences from the block's own
    healthy value.  None: cannot be computed (a loss is not finite, the alpha is not in the grid, the block was not
    measured, no profile was used).
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
    bss_profile_z: float | None = None
    slope_profile_z: float | None = None
    skip_gain_profile_z: float | None = None
    largest_deviation_profile_z: float | None = None
    skip_gain_t: float | None = None
    """Skip gain over its standard error, from the paired losses of the sequences; None below `MIN_SEQUENCES`."""
    without_drift_nats: float | None = None
    """Loss with the block left out, above the same of the healthy model (from a profile).  0 is the mark of the one
    damaged block: without it the damaged model and the healthy one are the same."""
    curve: tuple[tuple[float, float | None], ...] = ()
    """(alpha, mean loss in nats) of each alpha that was measured."""
    flagged: bool = False


def mean(nats: Sequence[float | None], weights: Sequence[int]) -> float | None:
    """Token-weighted mean over the sequences; None when there are none or one is not finite."""
    present = [loss for loss in nats if loss is not None]
    if not weights or len(present) < len(weights):
        return None
    return math.fsum(loss * weight for loss, weight in zip(present, weights, strict=True)) / sum(weights)


def paired_t(
    one: Sequence[float | None], other: Sequence[float | None], weights: Sequence[int]
) -> tuple[float, float] | None:
    """Token-weighted mean of `one - other` over N sequences, and that over its standard error.

    The sequences are the sampling units, and the mean is a ratio estimator (Cochran, Sampling Techniques, 3rd ed.,
    section 6.4): `se^2 = N / (N - 1) * sum(w^2 (d - mean)^2) / (sum w)^2`.  None for fewer than two sequences or a loss
    that is not finite.  A standard error below `RESOLUTION` counts as that.
    """
    differences = [a - b for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    count = len(differences)
    if count < 2 or count < len(weights):
        return None
    total = sum(weights)
    center = math.fsum(d * w for d, w in zip(differences, weights, strict=True)) / total
    squares = math.fsum((w * (d - center)) ** 2 for d, w in zip(differences, weights, strict=True))
    return center, center / max(math.sqrt(squares * count / (count - 1)) / total, RESOLUTION)


def shared_alphas(reading: AlphaScanReading) -> list[float]:
    """Alphas that all measured blocks have, ascending: scores that are compared over blocks use no others."""
    measured = [block for block, rows in enumerate(reading.nats) if any(rows)]
    return sorted(alpha for alpha in reading.alphas if all(reading.at(block, alpha) for block in measured))


def scores(reading: AlphaScanReading, profile: "Profile | None" = None) -> list[BlockScore]:
    """The scores of all blocks of one (joined) reading, over the alphas that they share; a curve has all of them."""
    weights = reading.scored_tokens
    base = mean(reading.base_nats, weights)
    curves = [
        {alpha: mean(row, weights) for alpha in reading.alphas if (row := reading.at(block, alpha))}
        for block in range(len(reading.nats))
    ]
    shared = shared_alphas(reading)
    raw: list[dict[str, float | None]] = []
    for curve in curves:
        at = {alpha: curve[alpha] for alpha in shared if curve} if base is not None else {}
        raw.append({name: formula(at, base or 0.0) for name, formula in FORMULAS.items()})
    against: dict[str, list[float | None]] = {name: [None] * len(raw) for name in FORMULAS}
    if profile is not None and len(profile.base_nats) != len(reading.base_nats):
        # Of some of the sequences only: its scores are means over all of them.
        profile = None
    if profile is not None and profile.alphas == shared and len(profile.blocks) == len(raw):
        for name in FORMULAS:
            healthy = [getattr(block, name) for block in profile.blocks]
            against[name] = robust_z(
                [_minus(score[name], own) for score, own in zip(raw, healthy, strict=True)], PROFILE_RESOLUTION
            )
    z = {name: robust_z([score[name] for score in raw]) for name in FORMULAS}
    found = []
    for block, score in enumerate(raw):
        skipped = reading.at(block, 0.0)
        enough = len(skipped) >= MIN_SEQUENCES
        test = paired_t(reading.base_nats, skipped, weights) if enough else None
        found.append(
            BlockScore.model_validate(
                {
                    "block": block,
                    "curve": tuple(curves[block].items()),
                    "skip_gain_t": None if test is None else test[1],
                    "without_drift_nats": _without_drift(curves[block].get(0.0), block, profile, weights),
                }
                | score
                | {f"{name}_z": z[name][block] for name in FORMULAS}
                | {f"{name}_profile_z": against[name][block] for name in FORMULAS}
            )
        )
    return found


def _without_drift(
    skipped: float | None, block: int, profile: "Profile | None", weights: Sequence[int]
) -> float | None:
    """Loss without the block minus the healthy model's."""
    return None if profile is None else _minus(skipped, profile.loss_without([block], weights))


def _minus(score: float | None, healthy: float | None) -> float | None:
    return None if score is None or healthy is None else score - healthy


Curve = Mapping[float, float | None]


def _deviations(at: Curve, base: float) -> list[float] | None:
    """`L(alpha) - L(1)` for every alpha but 0; None when there is none or one is not finite."""
    scaled = [loss for alpha, loss in at.items() if alpha != 0.0]
    finite = [loss - base for loss in scaled if loss is not None]
    return finite if finite and len(finite) == len(scaled) else None


def _bss(at: Curve, base: float) -> float | None:
    deviations = _deviations(at, base)
    return None if deviations is None else math.sqrt(math.fsum(d * d for d in deviations))


def _largest_deviation(at: Curve, base: float) -> float | None:
    deviations = _deviations(at, base)
    return None if deviations is None else max(abs(d) for d in deviations)


def _slope(at: Curve, base: float) -> float | None:
    """Over the smallest pair 1 - d, 1 + d of the grid; 0 is no end of a pair: it masks, it does not scale."""
    pairs = [(high - 1, low, high) for high in at for low in at if 0 < low < 1 and abs(low + high - 2) < 1e-9]
    if not pairs:
        return None
    d, low, high = min(pairs)
    below, above = at[low], at[high]
    return None if below is None or above is None else (above - below) / (2 * d)


def _skip_gain(at: Curve, base: float) -> float | None:
    skipped = at.get(0.0)
    return None if skipped is None else base - skipped


FORMULAS: dict[str, Callable[[Curve, float], float | None]] = {
    "bss": _bss,
    "slope": _slope,
    "skip_gain": _skip_gain,
    "largest_deviation": _largest_deviation,
}
