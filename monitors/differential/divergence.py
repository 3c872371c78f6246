"""How far one activation lies from another, estimated from their sketches.

A sketch holds K seeded random projections of each row.  By the lemma of Johnson and Lindenstrauss (1984) these keep
lengths and distances: a squared distance of sketches is the one of the activations times chi-squared(K) / K, so
that the distance is estimated with a relative standard deviation of about 1 / sqrt(2 K), 0.125 for K = 32, and the
relative distance, which is the ratio of two such estimates, with at most about 1 / sqrt(K).  Equal activations have
equal sketches, and their distance is exactly 0.
"""

import base64
import binascii
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .facts import Sketch

Row = tuple[float, ...]


class Unknown(StrEnum):
    """Why two activations cannot be compared: part of a sentence."""

    SHAPE = "it has another shape than the reference's"
    REFERENCE = "the reference is not finite"


@dataclass(frozen=True)
class Divergence:
    """From the reference to the live activation, the largest of the rows; infinite where that is not finite."""

    l2: float
    """`|a - b| / |b|`, b being the reference."""
    cosine: float
    """`1 - a.b / (|a| |b|)`, at least 0."""
    partial: bool = False
    """Rows were left out, since the reference is not finite there."""

    @property
    def finite(self) -> bool:
        """Whether there are numbers; if not, the live values are not finite, or not 0 where the reference's are."""
        return math.isfinite(self.l2)


def decode(sketch: Sketch, size: int) -> list[Row]:
    """The rows of a sketch, `size` numbers each.

    Raises:
        ValueError: the text is no base64, or no whole number of rows.
    """
    try:
        data = base64.b64decode(sketch.rows, validate=True)
    except binascii.Error as error:
        raise ValueError(f"A sketch is not base64: {error}.") from error
    if len(data) % (8 * size):
        raise ValueError(f"A sketch of {len(data)} bytes has no whole rows of {size} numbers of 8 bytes.")
    return list(struct.iter_unpack(f"<{size}d", data))


def diverge(live: Sketch, reference: Sketch, size: int) -> Divergence | Unknown:
    """How far `live` lies from `reference`, row by row; rows in which the reference is not finite say nothing.

    Raises:
        ValueError: a sketch cannot be decoded.
    """
    ours, theirs = decode(live, size), decode(reference, size)
    if live.width != reference.width or len(ours) != len(theirs):
        return Unknown.SHAPE
    rows = [_row(a, b) for a, b in zip(ours, theirs, strict=True) if _finite(b)]
    if not rows:
        return Unknown.REFERENCE
    return Divergence(
        l2=max(row.l2 for row in rows), cosine=max(row.cosine for row in rows), partial=len(rows) < len(theirs)
    )


def _row(a: Row, b: Row) -> Divergence:
    if a == b:
        # Arithmetic would leave a rounding error in the cosine.
        return Divergence(0.0, 0.0)
    length = math.hypot(*b)
    far = Divergence(math.inf, math.inf)
    if not _finite(a) or length == 0:
        return far
    l2 = math.dist(a, b) / length
    if not math.isfinite(l2):
        return far
    own = math.hypot(*a)
    # Scaled before they are multiplied: the squares of large values overflow.
    cosine = 1.0 - math.fsum(x / own * (y / length) for x, y in zip(a, b, strict=True)) if own else 1.0
    return Divergence(l2, max(cosine, 0.0))


def _finite(row: Sequence[float]) -> bool:
    return all(map(math.isfinite, row))
