"""The alpha-scan as a monitor: its options, and the way from an order to a finding."""

from collections.abc import Generator, Sequence
from typing import ClassVar

from ..monitor import ModelView, Monitor
from . import measure as measuring
from .finding import AlphaScanFinding, Thresholds
from .judgement import judge
from .plan import AlphaScanPlan
from .profile import Profile
from .reading import AlphaScanReading
from .rounds import Strategy, next_plan


class AlphaScan(Monitor[ModelView, AlphaScanPlan, AlphaScanReading, AlphaScanFinding]):
    """Reference-free localisation of harmful blocks.

    Args:
        thresholds: from where on a number counts.
        strategy: how the first round saves work.
        max_faults: with so many blocks flagged, no other is looked for.
    """

    name: ClassVar[str] = "alpha_scan"
    plan_type = AlphaScanPlan

    def __init__(
        self,
        thresholds: Thresholds = Thresholds(),  # noqa: B008 - frozen
        strategy: Strategy = Strategy.PLAIN,
        max_faults: int = 3,
    ) -> None:
        self.thresholds = thresholds
        self.strategy = strategy
        self.max_faults = max_faults

    def steps(self, plan: AlphaScanPlan, num_blocks: int) -> int:
        """How often `measure` yields on a healthy model.  See `measure.steps`."""
        return measuring.steps(plan, num_blocks)

    def measure(self, model: ModelView, plan: AlphaScanPlan) -> Generator[None, None, AlphaScanReading]:
        """The losses of one plan.  See `measure.measure`."""
        return measuring.measure(model, plan)

    def next_plan(
        self, order: AlphaScanPlan, readings: Sequence[AlphaScanReading], profile: Profile | None = None
    ) -> AlphaScanPlan | None:
        """The plan to measure next.  See `rounds.next_plan`."""
        return next_plan(order, readings, self.strategy, self.thresholds, self.max_faults, profile)

    def judge(self, readings: Sequence[AlphaScanReading], profile: Profile | None = None) -> AlphaScanFinding:
        """Flag the blocks without which the model is better, by a wide margin.  See `judgement.judge`."""
        return judge(readings, self.thresholds, profile)
