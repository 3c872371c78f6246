"""The finding of the alpha-scan, and from where on a number counts."""

from pydantic import BaseModel, ConfigDict, Field

from ..finding import Finding
from .scores import BlockScore

Drift = tuple[float, float | None]
"""Base loss above its healthy value in nats, and that over its standard error, which a single sequence has not."""


class Thresholds(BaseModel):
    """From where on a number counts.  Defaults are chosen by the figures in `docs/detection`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    tau: float = Field(default=6.0, gt=0)
    """A z over this stands out."""
    min_gain_nats: float = Field(default=0.1, ge=0)
    """Rule harm: leaving a harmful block out wins at least so much."""
    min_gain_t: float = Field(default=3.0, ge=0)
    """Rule harm: and at least so many standard errors of the gain."""
    min_drift_nats: float = Field(default=0.05, ge=0)
    """Rule drift: a damaged model's loss is at least so far above its healthy value.  The sequences are the same, so
    that only rounding is to be told apart, and no standard error is asked for."""

    def drifts(self, drift_nats: float) -> bool:
        """The rule drift."""
        return drift_nats >= self.min_drift_nats


class AlphaScanFinding(Finding):
    """The judgement, with every number it rests on."""

    base_loss_nats: float | None
    """Mean loss per scored token as served; None = not finite, or no data."""
    predicted_loss_nats: float | None = None
    """The same with the flagged blocks left out, as measured inside the scan; None when nothing is flagged."""
    drift_nats: float | None = None
    """Base loss above its healthy value; None without a profile."""
    drift_t: float | None = None
    """Drift over its standard error; None for a single sequence."""
    profile_recorded_at: float | None = None
    """Which clean profile was used: UTC epoch seconds of its recording; None: none."""
    thresholds: Thresholds
    blocks: tuple[BlockScore, ...]
    left_out: tuple[int, ...] = ()
    """Blocks without which `blocks` were scored, since there are no curves with them."""
    flagged: tuple[int, ...]
    gates: tuple[float, ...]
    sequences: int = 0
    passes: float = 0.0
    """Forward-pass equivalents that the scan took, all rounds together."""
