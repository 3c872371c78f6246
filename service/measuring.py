"""One measurement of the live model: orders plan after plan, advances each in parts, and checks that it was one model.

ScanError       the scan cannot be done; one sentence (becomes the reason of an `unknown` finding)
    ModelChanged    vLLM was restarted, or its gates changed, while it was measured
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from ..monitors.alpha_scan import FULL_GRID, AlphaScan, AlphaScanPlan, AlphaScanReading, Profile
from ..monitors.wire import MeasureOrder, ModelFacts, Progress
from .live import Live
from .pace import Pace
from .probe import Probe, ProbeError, ProbeRefused
from .validation_set import ValidationSet
from .watcher import Watcher

# Sequences x alphas x length of one block call: about as much as a step of serving.
_TOKENS_PER_STEP = 512


class ScanError(Exception):
    """The scan cannot be done; the message is one sentence."""


class ModelChanged(ScanError):
    """The model that the measurement began with is gone; its numbers would mix two models."""


@dataclass(frozen=True)
class Measured:
    """What was measured, and on what."""

    facts: ModelFacts
    """As before the measurement; gates and faults were the same after it."""
    order: AlphaScanPlan
    readings: list[AlphaScanReading]
    profile: Profile | None = None
    """The clean profile that fits, if there is one."""


class Measurer:
    """Measures the model at the probe.  Its caller sees to it that nothing else measures meanwhile."""

    def __init__(
        self,
        *,
        part_budget_ms: float,
        live: Live,
        probe: Probe,
        watcher: Watcher,
        validation: ValidationSet,
        rest: Callable[[float], Awaitable[None]],
    ) -> None:
        self._part_budget_ms = part_budget_ms
        self._live = live
        self._probe = probe
        self._watcher = watcher
        self._validation = validation
        self._rest = rest

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
            tokens_per_step=min(_TOKENS_PER_STEP, facts.max_tokens),
        )
        return facts, order

    async def measure(
        self,
        monitor: AlphaScan,
        grid: list[float],
        *,
        duty: float,
        note: Callable[[int, int], None],
        fitting: Callable[[ModelFacts, AlphaScanPlan], Profile | None] = lambda facts, order: None,
    ) -> Measured:
        """One plan after the other, until the monitor wants no more.

        `note` hears after each part how many steps of all plans are done, and of how many; how many plans there will
        be is not known before.  `fitting` gives the clean profile for this model and order.  Raises what `order`
        raises.
        """
        facts, order = await self.order(grid)
        profile = fitting(facts, order)
        readings: list[AlphaScanReading] = []
        steps = 0
        while (plan := monitor.next_plan(order, readings, profile)) is not None:
            asked = MeasureOrder(monitor=monitor.name, plan=plan.model_dump(mode="json"))
            try:
                progress = await self._probe.order(asked)
            except ProbeRefused as refused:
                raise ScanError(f"The probe refused the scan (HTTP {refused.status}): {refused.detail}") from refused
            try:
                progress = await self._advance(progress, duty, steps, note)
            except ProbeRefused as refused:
                raise await self._explained(refused, facts) from refused
            readings.append(AlphaScanReading.model_validate(progress.reading))
            steps += progress.steps_done
        after = await self._watcher.look()
        if after.boot_id != facts.boot_id:
            raise ModelChanged("vLLM was restarted while it was measured.")
        if after.gates != facts.gates or after.faults != facts.faults:
            raise ModelChanged("The model was changed while it was measured.")
        return Measured(facts, order, readings, profile)

    async def _advance(
        self, progress: Progress, duty: float, before: int, note: Callable[[int, int], None]
    ) -> Progress:
        """All parts of an ordered measurement; the last progress, which has the reading."""
        pace = Pace(self._part_budget_ms / 1000.0, duty)
        try:
            note(before + progress.steps_done, before + progress.steps_total)
            while progress.reading is None:
                done, asked_at = progress.steps_done, time.monotonic()
                progress = await self._probe.advance(progress.id, pace.steps)
                wall = time.monotonic() - asked_at
                self._live.scan_parts += 1
                self._live.engine_held_seconds += progress.seconds
                note(before + progress.steps_done, before + progress.steps_total)
                if progress.reading is None and progress.steps_done <= done:
                    raise ScanError(f"The probe made no progress after step {done} of {progress.steps_total}.")
                pace.observe(progress.steps_done - done, progress.seconds)
                await self._rest(pace.rest(progress.seconds, wall))
            return progress
        finally:
            # Also when cancelled: what the measurement holds on the device must not outlive it.  With its reading
            # the probe has dropped it.
            if progress.reading is None:
                with suppress(ProbeError):
                    await asyncio.shield(self._probe.drop(progress.id))

    async def _explained(self, refused: ProbeRefused, before: ModelFacts) -> ScanError:
        """What a refusal in the middle of a measurement means."""
        now = await self._watcher.look()
        if now.boot_id != before.boot_id:
            return ModelChanged("vLLM was restarted while it was measured.")
        if refused.status == 409:
            return ModelChanged(f"The measurement is void: {refused.detail}")
        return ScanError(f"The probe gave the scan up (HTTP {refused.status}): {refused.detail}")
