"""One measurement of the live model: ordered at the probe, advanced in parts, and of one and the same vLLM process.

ScanError       the scan cannot be done; one sentence (becomes the reason of an `unknown` finding)
    ModelChanged    vLLM was restarted, or its gates changed, while it was measured
    StepTooLong     single steps hold the engine for longer than was allowed
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from ..monitors.wire import MeasureOrder, ModelFacts, Progress
from .duty import Duty
from .job import Note
from .live import Tally
from .pace import Pace
from .probe import Probe, ProbeError, ProbeRefused
from .settings import ScanSettings

# How long a part lets requests go first that wait for their first token.  Under a load that never ends it runs then.
_PATIENCE_SECONDS = 0.5

# A single step that took too long may have been an accident.
_TOO_LONG = 2


class ScanError(Exception):
    """The scan cannot be done; the message is one sentence."""


class ModelChanged(ScanError):
    """The model that the measurement began with is gone; its numbers would mix two models."""


class StepTooLong(ScanError):
    """Steps of this order hold the engine for longer than was allowed; `seconds` is what the longest took."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"A single step of the measurement takes {seconds:.3f} s.")
        self.seconds = seconds


class Measurer:
    """Measures for one monitor.  Its caller sees to it that nothing else of the same kind measures meanwhile.

    `duty` is shared by all that measure on this engine.  `look` gives the facts of the measured model as it is now,
    or raises `ProbeError`.
    """

    def __init__(
        self,
        settings: ScanSettings,
        tally: Tally,
        duty: Duty,
        probe: Probe,
        look: Callable[[], Awaitable[ModelFacts]],
        *,
        rest: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.budget_seconds = settings.part_budget_ms / 1000.0
        """What one part may hold the engine."""
        self._paces: dict[str, Pace] = {}
        """By what is measured: a sweep's steps say nothing about a check's."""
        self._tally = tally
        self._duty = duty
        self._probe = probe
        self._look = look
        self._rest = rest

    async def run(
        self,
        order: MeasureOrder,
        facts: ModelFacts,
        note: Note,
        *,
        before: int = 0,
        urgent: bool = False,
        longest_step: float | None = None,
    ) -> Progress:
        """The whole of one order; the last progress, which has the reading.

        Args:
            order: Monitor and plan.
            facts: The model as it was when the scan began.
            note: Hears of the steps, those of the orders before this one included.
            before: How many these were.
            urgent: A mitigation waits for it: parts keep to their budget and are counted, but nothing rests.
            longest_step: Seconds that a step may take; None: it cannot be made smaller.

        Raises:
            ScanError, ProbeError: it did not come to its end.
            StepTooLong: steps took longer than `longest_step`.
        """
        try:
            progress = await self._probe.order(order)
        except ProbeRefused as refused:
            raise ScanError(f"The probe refused to measure (HTTP {refused.status}): {refused.detail}") from refused
        try:
            pace = self._paces.setdefault(order.monitor, Pace(self.budget_seconds))
            return await self._advance(progress, pace, before, note, urgent, longest_step)
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

    async def _advance(
        self, progress: Progress, pace: Pace, before: int, note: Note, urgent: bool, longest_step: float | None
    ) -> Progress:
        too_long = 0
        try:
            note(before + progress.steps_done, before + progress.steps_total)
            while progress.reading is None:
                done = progress.steps_done
                async with self._duty.turn:
                    if not urgent:
                        await self._rest(self._duty.rest())
                    patience = 0.0 if urgent else _PATIENCE_SECONDS
                    progress = await self._probe.advance(progress.id, pace.steps, patience)
                    self._duty.record(progress.seconds, busy=_busy(progress))
                self._tally.parts += 1
                self._tally.held_seconds += progress.seconds
                note(before + progress.steps_done, before + progress.steps_total)
                if progress.reading is None and progress.steps_done <= done:
                    raise ScanError(f"The probe made no progress after step {done} of {progress.steps_total}.")
                pace.observe(progress.steps_done - done, progress.seconds, progress.dearest_seconds)
                if longest_step is not None and progress.dearest_seconds > longest_step:
                    too_long += 1
                    if too_long >= _TOO_LONG and progress.reading is None:
                        raise StepTooLong(progress.dearest_seconds)
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


def _busy(progress: Progress) -> bool:
    """Somebody may be waiting for tokens; so it is assumed where nobody knows."""
    return progress.requests is None or progress.requests > 0
