"""What it costs to leave blocks out, as the last scan measured it.

A scan leaves every block out once, so it knows the loss without each of them, and the loss without all that it has
flagged.  For other sets of blocks, the sum of the single changes is a first-order estimate.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..monitors.alpha_scan import AlphaScanFinding


class Prediction(NamedTuple):
    """Loss of the model with some blocks scaled."""

    nats: float | None
    """Mean per scored token; None: not finite."""
    estimated: bool
    """Put together from what was measured, not measured itself."""


def loss_without(finding: AlphaScanFinding, block: int) -> float | None:
    """Mean loss in nats per scored token of the model as served, but without this block.

    None: not finite, or not known.  The curves of a scan that had to leave another block out say nothing about it.
    """
    known = predicted(finding, [block], 0.0)
    return None if known is None else known.nats


def predicted(finding: AlphaScanFinding, blocks: Sequence[int], alpha: float) -> Prediction | None:
    """The loss with `blocks` at `alpha`, everything else as in the finding; None where the scan does not know.

    Between two alphas of the grid, 1 included, the curve is taken as straight.
    """
    if alpha == 0.0 and tuple(sorted(blocks)) == finding.flagged and finding.predicted_loss_nats is not None:
        # Measured by the scan itself, all of them at once.
        return Prediction(finding.predicted_loss_nats, estimated=False)
    if finding.left_out:
        return None
    base = finding.base_loss_nats
    curves = {score.block: dict(score.curve) for score in finding.blocks if score.block in blocks}
    single = [_on(curves.get(block, {}), base, alpha) for block in blocks]
    known = [prediction for prediction in single if prediction is not None]
    if len(known) < len(blocks):
        return None
    finite = [prediction.nats for prediction in known if prediction.nats is not None]
    if len(finite) < len(known):
        # One of them alone is enough.
        return Prediction(None, estimated=False)
    if len(known) == 1:
        return known[0]
    return None if base is None else Prediction(base + sum(loss - base for loss in finite), estimated=True)


def _on(curve: Mapping[float, float | None], base: float | None, alpha: float) -> Prediction | None:
    """The loss of one block at `alpha`; None outside what was measured."""
    if alpha in curve:
        return Prediction(curve[alpha], estimated=False)
    points = dict(curve) | {1.0: base}
    below = max((point for point in curve if point < alpha), default=None)
    above = min((point for point in points if point > alpha), default=None)
    if below is None or above is None:
        return None
    low, high = points[below], points[above]
    if low is None or high is None:
        return None
    return Prediction(low + (high - low) * (alpha - below) / (above - below), estimated=True)
