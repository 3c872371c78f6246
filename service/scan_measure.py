"""What an alpha-scan measures: the validation set's tokens through the live model, plan after plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..monitors.alpha_scan import FULL_GRID, AlphaScan, AlphaScanPlan, AlphaScanReading, Profile
from ..monitors.wire import Gate, MeasureOrder, ModelFacts, Progress
from .job import Note
from .live import Live
from .measuring import Measurer, ScanError, StepTooLong
from .validation_set import ValidationSet
from .watcher import Watcher

# Sequences x alphas x length of one block call: about as much as a step of serving.
_TOKENS_PER_STEP = 512

# Sequences x length of one piece of a loss, in proportion: with the vocabularies of today, the head of a small model
# costs as much as some of its blocks.
_LOSSES_PER_STEP = 4


@dataclass(frozen=True)
class Measured:
    """What was measured, and on what."""

    facts: ModelFacts
    """As before the measurement; gates and faults were the same after it."""
    engine: int
    """The one that was measured."""
    order: AlphaScanPlan
    readings: list[AlphaScanReading]
    profile: Profile | None = None
    """The clean profile that fits, if there is one."""


class ScanMeasure:
    """Measures the losses of the served model."""

    def __init__(self, live: Live, measurer: Measurer, watcher: Watcher, validation: ValidationSet) -> None:
        self._live = live
        self._measurer = measurer
        self._watcher = watcher
        self._validation = validation
        self._tokens_per_step = _TOKENS_PER_STEP

    async def order(self, grid: list[float]) -> tuple[ModelFacts, AlphaScanPlan]:
        """The model of now, and what a scan of it with these alphas measures.

        Raises `ScanError`, `ProbeError`, `VllmError` or `ValidationSetError`.
        """
        facts = await self._watcher.look()
        if facts.scan_refusal is not None:
            raise ScanError(f"This model cannot be scanned: {facts.scan_refusal}")
        if self._live.model_name is None:
            raise ScanError("vLLM does not say under which name it serves the model, so nothing can be tokenised.")
        # vLLM's own limit for one step holds for a block call too, which takes a sequence at all alphas at once.  The
        # second stage of a scan may want more of them than the first, and every loss shall be one of the same texts.
        longest = facts.max_tokens // max(len(FULL_GRID), len(grid))
        tokens, scored_from = await self._validation.sequences(self._live.model_name, longest)
        order = AlphaScanPlan(
            alphas=grid,
            tokens=tokens,
            scored_from=scored_from,
        )
        return facts, self._sized(order, facts)

    async def measure(
        self,
        monitor: AlphaScan,
        grid: list[float],
        note: Note,
        *,
        urgent: bool = False,
        as_if: Sequence[Gate] = (),
        fitting: Callable[[ModelFacts, AlphaScanPlan], Profile | None] = lambda facts, order: None,
    ) -> list[Measured]:
        """Of each engine one plan after the other, until the monitor wants no more.

        How many there will be is not known before.  Engines are measured in turn, so that the others serve at their own
        pace.  `as_if` are gates in place of the served ones; `fitting` gives the clean profile for this model and
        order.  Raises what `order` raises.
        """
        facts, order = await self.order(grid)
        profile = fitting(facts, order)
        measured = []
        steps = 0
        for engine in facts.engines:
            readings: list[AlphaScanReading] = []
            while (plan := monitor.next_plan(order, readings, profile)) is not None:
                progress = await self._one(monitor.name, plan, facts, engine, note, steps, as_if=as_if, urgent=urgent)
                readings.append(AlphaScanReading.model_validate(progress.reading))
                steps += progress.steps_done
            measured.append(Measured(facts, engine, order, readings, profile))
        await self._measurer.same_model(facts)
        self._tokens_per_step = min(2 * self._tokens_per_step, _TOKENS_PER_STEP)
        return measured

    async def _one(
        self,
        name: str,
        plan: AlphaScanPlan,
        facts: ModelFacts,
        engine: int,
        note: Note,
        before: int,
        *,
        as_if: Sequence[Gate],
        urgent: bool,
    ) -> Progress:
        """One plan; begun again with smaller steps where single steps take longer than a part may."""
        budget = self._measurer.budget_seconds
        while True:
            plan = self._sized(plan, facts)
            # Below this a block call has one sequence, and a piece of a loss too.
            copies = min(max(1, len(plan.alphas)), _LOSSES_PER_STEP)
            smallest = 2 * copies * max(len(row) for row in plan.tokens)
            limit = budget if self._tokens_per_step >= smallest else None
            asked = MeasureOrder(monitor=name, plan=plan.model_dump(mode="json"), as_if=list(as_if), engine=engine)
            try:
                return await self._measurer.run(asked, facts, note, before=before, urgent=urgent, longest_step=limit)
            except StepTooLong as step:
                smaller = min(self._tokens_per_step // 2, int(self._tokens_per_step * budget / step.seconds))
                self._tokens_per_step = max(1, smaller)

    def _sized(self, plan: AlphaScanPlan, facts: ModelFacts) -> AlphaScanPlan:
        tokens = min(self._tokens_per_step, facts.max_tokens)
        return plan.model_copy(
            update={"tokens_per_step": tokens, "tokens_per_loss": max(1, tokens // _LOSSES_PER_STEP)}
        )
