"""Robust z-scores: how far one block stands out from the other blocks of the same scan."""

from collections.abc import Sequence
from statistics import median as median_of

MAD_TO_SIGMA = 1.4826
"""For normal data 1.4826 * MAD estimates the standard deviation."""

MIN_SCORES = 4
"""With fewer scores the median and the MAD say nothing, and there is no z."""

RESOLUTION = 1e-4
"""Smallest scale that a z is measured in, in the unit of the scores (nats).

Differences below it are rounding, not behaviour.  It also decides MAD = 0, which is no corner case: when one
fault drives the loss to saturation, every other block scores exactly the same, and the one that does not is
the culprit.  Its z is then finite and very large; the others' is 0.
"""


def median_and_mad(scores: Sequence[float]) -> tuple[float, float]:
    """Median of `scores` and the median absolute deviation from it.  `scores` must not be empty."""
    median = median_of(scores)
    return median, median_of(abs(score - median) for score in scores)


def robust_z(scores: Sequence[float | None], resolution: float = RESOLUTION) -> list[float | None]:
    """`(s - median) / max(1.4826 * MAD, resolution)` of each score, over the scores that are there.

    `None` stays `None` and takes no part.  With fewer than `MIN_SCORES` scores every z is `None`.
    """
    present = [score for score in scores if score is not None]
    if len(present) < MIN_SCORES:
        return [None] * len(scores)
    median, mad = median_and_mad(present)
    scale = max(MAD_TO_SIGMA * mad, resolution)
    return [None if score is None else (score - median) / scale for score in scores]
