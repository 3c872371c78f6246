"""The walk through all blocks as served: where its divergence from the reference jumps.

The divergence behind each block is a curve that a fault lifts, and the blocks behind it hold up or carry on.  The fault
enters where the first difference of the curve exceeds `median + tau * 1.4826 * MAD` of all differences for the first
time, provided that the divergence there is more than noise.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from ..robust import MAD_TO_SIGMA, MIN_SCORES, median_and_mad
from .comparison import Comparison, together
from .pair import Pair

TAU = 6.0
"""Standard deviations, as far as the MAD estimates them, above which a difference is a jump."""


def walk(pairs: Sequence[Pair], blocks: int, limit: float | None) -> list[Comparison]:
    """The streams of all ranks: in front of the blocks, where `limit` holds, then behind each."""
    return [together(pair.compare_walk(at, limit if at == 0 else None) for pair in pairs) for at in range(blocks + 1)]


def first_jump(streams: Sequence[Comparison]) -> int | None:
    """The block at which the curve jumps first; None: at none, or the streams could not be compared."""
    curve = [stream.divergence.l2 for stream in streams if stream.divergence is not None]
    if len(curve) < len(streams):
        return None
    # Behind a stream that is not finite there is no difference.
    rises = [after - before if math.isfinite(before) else -math.inf for before, after in pairwise(curve)]
    finite = [rise for rise in rises if math.isfinite(rise)]
    threshold = 0.0
    if len(finite) >= MIN_SCORES:
        median, mad = median_and_mad(finite)
        threshold = median + TAU * MAD_TO_SIGMA * mad
    return next((block for block, rise in enumerate(rises) if rise > threshold and streams[block + 1].departs), None)
