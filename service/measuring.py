"""One measurement of the live model: ordered at the probe, advanced in parts, and of one and the same vLLM process.

ScanError       the scan cannot be done; one sentence (becomes the reason of an `unknown` finding)
    ModelChanged    vLLM was restarted, or its gates changed, while it was measured
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from ..monitors.wire import MeasureOrder, ModelFacts, Progress
from .job import Note
from .live import Tally
from .pace import Pace
from .probe import Probe, ProbeError, ProbeRefused
from .settings import ScanSettings


class ScanError(Exception):
    """The scan cannot be done; the message is one sentence."""


class ModelChanged(ScanError):
    """The model that the measurement began with is gone; its numbers would mix two models."""


class Measurer:
    """Measures for one monitor.  Its caller sees to it that nothing else measures meanwhile.

    `look` gives the facts of the measured model as it is now, or raises `ProbeError`.
    """

    def __init__(
        self,
        settings: ScanSettings,
        tally: Tally,
        probe: Probe,
        look: Callable[[], Awaitable[ModelFacts]],
        *,
        rest: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._part_budget_ms = settings.part_budget_ms
        self._duty = settings.duty
        self._tally = tally
        self._probe = probe
        self._look = look
        self._rest = rest

    async def run(
        self, order: MeasureOrder, facts: ModelFacts, note: Note, *, before: int = 0, duty: float | None = None
    ) -> Progress:
        """The whole of one order; the last progress, which has the reading.

        Args:
            order: Monitor and plan.
            facts: The model as it was when the scan began.
            note: Hears of the steps, those of the orders before this one included.
            before: How many these were.
            duty: Share of wall time that parts may hold the engine; that of the settings unless said.

        Raises:
            ScanError, ProbeError: it did not come to its end.
        """
        try:
            progress = await self._probe.order(order)
        except ProbeRefused as refused:
            raise ScanError(f"The probe refused to measure (HTTP {refused.status}): {refused.detail}") from refused
        try:
            return await self._advance(progress, duty or self._duty, before, note)
        except ProbeRefused as refused:
            raise await self._explained(refused, facts) from refused

    async def same_process(self, facts: ModelFacts) -> ModelFacts:
        """The model of now; raises `ModelChanged` when it is not in the process of `facts`, or `ProbeError`."""
        after = await self._look()
        if after.boot_id != facts.boot_id:
            raise ModelChanged("vLLM was restarted while it was measured.")
        return after

    async def same_model(self, facts: ModelFacts) -> None:
        """Raises `ModelChanged` when process, gates or faults are not those of `facts`, or `ProbeError`."""
        after = await self.same_process(facts)
        if after.gates != facts.gates or after.faults != facts.faults:
            raise ModelChanged("The model was changed while it was measured.")

    async def _advance(self, progress: Progress, duty: float, before: int, note: Note) -> Progress:
        pace = Pace(self._part_budget_ms / 1000.0, duty)
        try:
            note(before + progress.steps_done, before + progress.steps_total)
            while progress.reading is None:
                done, asked_at = progress.steps_done, time.monotonic()
                progress = await self._probe.advance(progress.id, pace.steps)
                wall = time.monotonic() - asked_at
                self._tally.parts += 1
                self._tally.held_seconds += progress.seconds
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
        now = await self._look()
        if now.boot_id != before.boot_id:
            return ModelChanged("vLLM was restarted while it was measured.")
        if refused.status == 409:
            return ModelChanged(f"The measurement is void: {refused.detail}")
        return ScanError(f"The probe gave up (HTTP {refused.status}): {refused.detail}")
