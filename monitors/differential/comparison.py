"""One activation held against its reference: the distance, what noise explains of it, and whether it departs."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .divergence import Divergence, Unknown, diverge
from .facts import Noise, Sketch

REPEATED_FACTOR = 4.0
"""How many times the noise of repetition is allowed, where equal weights give equal bits but for repetition.

The noise is the largest of few repetitions and so lies below what many would show, and a distance is known from its
sketch with an error of a fifth: four times covers both, and a repetition that gives equal bits allows nothing."""

ROUNDING_FACTOR = 8.0
"""How many times the noise of rounding is allowed, where other kernels, types or parallel sizes computed.

The noise has one rounding, at the input of the block; other kernels round otherwise in each operation inside.  Healthy
pairs of vLLM and transformers, bf16 and fp32, needed up to 4.6 (`bench/differential.py`, docs/differential)."""

NOT_MEASURED = "it was not measured"
NO_NOISE = "no noise is known"


@dataclass(frozen=True)
class Comparison:
    """What came of holding one activation against its reference."""

    divergence: Divergence | None
    """None: they could not be compared."""
    allowed: float | None
    """Relative L2 distance that is allowed; None: not known."""
    departs: bool | None
    """None: it cannot be told, and `why` says why."""
    why: str = ""

    @property
    def l2(self) -> float | None:
        """Relative L2 distance; None where it is not finite or not known."""
        return self.divergence.l2 if self.divergence is not None and self.divergence.finite else None

    @property
    def cosine(self) -> float | None:
        """1 - cosine similarity; None where it is not finite or not known."""
        return self.divergence.cosine if self.divergence is not None and self.divergence.finite else None


_UNITS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Relative size of a unit in the last place."""


def coarseness(live: str, reference: str) -> float:
    """How many times a unit in the last place is larger in the live type than in the reference's; at least 1.

    Where a type is not known, they are taken as equally fine.
    """
    if live not in _UNITS or reference not in _UNITS:
        return 1.0
    return max(1.0, _UNITS[live] / _UNITS[reference])


def allowance(noise: Noise | None, same: bool, coarser: float = 1.0) -> float | None:
    """The relative L2 distance that noise explains; None where it is not known.

    Args:
        noise: As measured.
        same: Both sides were computed by the same kernels.
        coarser: See `coarseness`.  To first order, rounding grows with the unit in the last place.
    """
    if noise is None or not _known(noise.repeated):
        return None
    if same:
        return REPEATED_FACTOR * (noise.repeated or 0.0)
    if not _known(noise.rounding):
        return None
    return ROUNDING_FACTOR * max(noise.repeated or 0.0, coarser * (noise.rounding or 0.0))


def compare(live: Sketch | None, reference: Sketch | None, allowed: float | None, size: int) -> Comparison:
    """Hold `live` against `reference`; what is not finite where the reference is departs without any noise known.

    Raises:
        ValueError: a sketch cannot be decoded.
    """
    if live is None or reference is None:
        return Comparison(None, allowed, None, NOT_MEASURED)
    divergence = diverge(live, reference, size)
    if isinstance(divergence, Unknown):
        return Comparison(None, allowed, None, divergence.value)
    if not divergence.finite:
        return Comparison(divergence, allowed, True)
    if allowed is None:
        return Comparison(divergence, None, None, NO_NOISE)
    departs = divergence.l2 > allowed
    if divergence.partial and not departs:
        return Comparison(None, allowed, None, f"{Unknown.REFERENCE.value} in some rows")
    return Comparison(divergence, allowed, departs)


def together(ranks: Iterable[Comparison]) -> Comparison:
    """That of all ranks which decides: one that departs before one that cannot be told, then the largest distance."""
    return max(ranks, key=_weight, default=Comparison(None, None, None, NOT_MEASURED))


def _weight(comparison: Comparison) -> tuple[int, float]:
    order = {True: 2, None: 1, False: 0}
    return order[comparison.departs], -1.0 if comparison.divergence is None else comparison.divergence.l2


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
