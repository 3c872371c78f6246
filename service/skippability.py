"""What it costs to leave blocks out, as the last scan measured it.

A scan leaves every block out once, so it knows the loss without each of them, and the loss without all that it has
flagged.  For other sets of blocks, the sum of the single changes is a first-order estimate.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ..monitors.alpha_scan import AlphaScanFinding


class Prediction(NamedTuple):
    """Loss of the model with some blocks scaled."""

    nats: float | None
    """Mean per scored token; None: not finite."""
    estimated: bool
    """Added up from single blocks, not measured."""


def loss_without(finding: AlphaScanFinding, block: int) -> float | None:
    """Mean loss in nats per scored token of the model as served, but without this block.

    None: not finite, or not known.  The curves of a scan that had to leave another block out say nothing about it.
    """
    known = predicted(finding, [block], 0.0)
    return None if known is None else known.nats


def predicted(finding: AlphaScanFinding, blocks: Sequence[int], alpha: float) -> Prediction | None:
    """The loss with `blocks` at `alpha`, everything else as in the finding; None where the scan does not know.

    The alpha must be one of the grid: a curve is not straight between its points.
    """
    if alpha == 0.0 and tuple(sorted(blocks)) == finding.flagged and finding.predicted_loss_nats is not None:
        # Measured by the scan itself, all of them at once.
        return Prediction(finding.predicted_loss_nats, estimated=False)
    if finding.left_out:
        return None
    curves = {score.block: dict(score.curve) for score in finding.blocks}
    if any(alpha not in curves.get(block, {}) for block in blocks):
        return None
    losses = [curves[block][alpha] for block in blocks]
    finite = [loss for loss in losses if loss is not None]
    if len(finite) < len(losses):
        # One of them alone is enough.
        return Prediction(None, estimated=False)
    if len(finite) == 1:
        return Prediction(finite[0], estimated=False)
    base = finding.base_loss_nats
    return None if base is None else Prediction(base + sum(loss - base for loss in finite), estimated=True)
