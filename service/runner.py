"""The one loop that measures: orders a scan, advances it in parts, judges, stores, tells.

ScanBusy        another measurement runs
ScanError       the scan cannot be done; one sentence (becomes the reason of an `unknown` finding)
    ModelChanged    vLLM was restarted, or its gates changed, while it was measured
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from uuid import uuid4

import structlog

from ..monitors.alpha_scan import FULL_GRID, QUICK_GRID, AlphaScan, AlphaScanFinding, AlphaScanPlan, AlphaScanReading
from ..monitors.finding import Action, Finding, Health
from ..monitors.wire import MeasureOrder, ModelFacts, Progress
from .live import Live
from .mitigation_steps import LossUnavailable
from .pace import Pace
from .probe import Probe, ProbeError, ProbeRefused
from .records import FindingRecord, ScanRecord, ScanState, ScanTrigger
from .settings import ScanSettings
from .store import Store, StoreError
from .validation_set import ValidationSet, ValidationSetError
from .vllm import VllmError
from .watcher import Watcher

Grid = str | list[float]

# Sequences x alphas x length of one block call: about as much as a step of serving.
_TOKENS_PER_STEP = 512

_log = structlog.get_logger(__name__)


class ScanBusy(Exception):
    """A scan cannot start: another measurement runs."""


class ScanError(Exception):
    """The scan cannot be done; the message is one sentence."""


class ModelChanged(ScanError):
    """The model that the measurement began with is gone; its numbers would mix two models."""


class Runner:
    """Runs one measurement at a time.

    `told` is awaited with each finding after it has been stored: alerts and automatic mitigation hang on it.
    `changing` says whether somebody changes the model right now: no scan starts then.
    """

    def __init__(
        self,
        settings: ScanSettings,
        monitor: AlphaScan,
        *,
        live: Live,
        store: Store,
        probe: Probe,
        watcher: Watcher,
        validation: ValidationSet,
        told: Callable[[Finding, FindingRecord], Awaitable[None]],
        changing: Callable[[], bool],
        rest: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._monitor = monitor
        self._live = live
        self._store = store
        self._probe = probe
        self._watcher = watcher
        self._validation = validation
        self._told = told
        self._changing = changing
        self._rest = rest
        self._now = now
        self._engine = asyncio.Lock()
        """Held by whoever measures."""
        self._task: asyncio.Task[None] | None = None
        self._progress: ScanRecord | None = None

    # Scans

    def start(self, trigger: ScanTrigger, grid: Grid | None = None) -> ScanRecord:
        """Start a scan in the background; raises `ScanBusy` when one runs or the model is being changed.

        A store that does not work stops no scan: what is found is shown and alerted on all the same.
        """
        if self.running:
            raise ScanBusy("A scan runs already: wait until it has ended.")
        if self._changing():
            raise ScanBusy("A mitigation is on its way: wait until it has ended.")
        record = ScanRecord(
            id=uuid4().hex,
            monitor=self._monitor.name,
            state=ScanState.QUEUED,
            trigger=trigger,
            created_at=self._now(),
        )
        self._keep(record)
        self._task = asyncio.create_task(self._scan(record, grid), name=f"scan {record.id}")
        return record

    async def run(self, trigger: ScanTrigger) -> None:
        """Start a scan and wait for its end, whatever that is; raises `ScanBusy`."""
        self.start(trigger)
        await self.idle()

    async def idle(self) -> None:
        """Wait for the end of the scan that runs, if any."""
        if self._task is not None:
            await asyncio.wait({self._task})

    @property
    def running(self) -> bool:
        """Is anything being measured?"""
        return self._engine.locked() or (self._task is not None and not self._task.done())

    def record(self, scan_id: str) -> ScanRecord | None:
        """The scan of this id, with its progress of right now."""
        if self._progress is not None and self._progress.id == scan_id:
            return self._progress
        return self._store.scan(scan_id)

    def forget_unfinished(self) -> None:
        """At start: the scans that a killed sidecar left behind will not go on."""
        for record in self._store.open_scans():
            self._end(record, ScanState.FAILED, error="The sidecar ended while this scan ran.")

    async def interrupt(self, why: str) -> None:
        """End the scan that runs, if any, and forget its measurement; `why` becomes its error."""
        while self._task is not None and not self._task.done() and self._unfinished() is not None:
            self._task.cancel(why)
            await asyncio.wait({self._task})
        record = self._unfinished()
        if record is not None:
            # Cancelled before its first step: the task had no chance to say so itself.
            self._interrupted(record, why)

    async def loss(self) -> float | None:
        """Loss in nats per scored token of the model as served now; None when it is not finite.

        A running scan gives way: the model is about to change under it.  Parts keep to their budget, but nothing rests
        between them: help must not wait.  Raises `LossUnavailable` or `ProbeError`.
        """
        await self.interrupt("A mitigation took the engine; a new scan follows.")
        async with self._engine:
            try:
                (reading,) = await self._measure([], duty=1.0)
            except (ScanError, VllmError, ValidationSetError) as error:
                raise LossUnavailable(str(error)) from error
        finding = self._monitor.judge([reading])
        if finding.base_loss_nats is None and not reading.scored_tokens:
            raise LossUnavailable("Nothing was measured.")
        return finding.base_loss_nats

    async def _scan(self, record: ScanRecord, grid: Grid | None) -> None:
        log = _log.bind(scan_id=record.id)
        self._live.scans += 1
        started = time.monotonic()
        readings: list[AlphaScanReading] = []
        error: str | None = None
        try:
            async with self._engine:
                self._keep(record.model_copy(update={"state": ScanState.RUNNING}))
                readings = await self._measure(alphas(grid or self._settings.grid), duty=self._settings.duty)
            finding = self._as_offered(self._monitor.judge(readings))
        except asyncio.CancelledError as cancelled:
            self._interrupted(self._current(record), str(cancelled) or "The sidecar was stopped.")
            raise
        except (ScanError, ProbeError, VllmError, ValidationSetError) as known:
            error = str(known)
        except Exception as unknown:
            # The one broad catch: whatever a monitor or an answer does, the loop goes on and says so.
            log.exception("scan broke off")
            error = f"The scan failed inside Flipwatch ({type(unknown).__name__}: {unknown})."
        if error is None:
            self._live.last_scan_at = self._now()
            self._live.last_scan_seconds = time.monotonic() - started
        else:
            self._live.scan_failures += 1
            finding = Finding(monitor=self._monitor.name, health=Health.UNKNOWN, reason=error)
        kept = self._conclude(self._current(record), finding, readings, error)
        log.info("scan ended", health=finding.health.value, reason=finding.reason)
        await self._told(finding, kept)

    def _conclude(
        self, record: ScanRecord, finding: Finding, readings: list[AlphaScanReading], error: str | None
    ) -> FindingRecord:
        """Show and store the outcome."""
        kept = FindingRecord(
            id=uuid4().hex,
            scan_id=record.id,
            monitor=finding.monitor,
            created_at=self._now(),
            health=finding.health,
            body=finding.model_dump(mode="json"),
        )
        self._live.found(finding, kept.id, kept.created_at)
        state = ScanState.DONE if error is None else ScanState.FAILED
        finding_id: str | None = kept.id
        try:
            self._store.add_finding(kept, [reading.model_dump(mode="json") for reading in readings])
        except StoreError as full:
            _log.error("finding not stored", reason=str(full))
            finding_id, error = None, error or str(full)
        self._end(record, state, error=error, finding_id=finding_id)
        return kept

    def _as_offered(self, finding: AlphaScanFinding) -> Finding:
        """Suggest a skip only where the gates are known to act."""
        refusal = self._live.gates_refusal()
        if finding.action is not Action.SKIP or refusal is None:
            return finding
        return finding.model_copy(
            update={"action": Action.INVESTIGATE, "reason": f"{finding.reason}; no skip is offered: {refusal}"}
        )

    # Measuring

    async def _measure(self, grid: list[float], *, duty: float) -> list[AlphaScanReading]:
        """One plan after the other, until the monitor wants no more; checks that it was one model all the time."""
        facts = await self._watcher.look()
        if facts.scan_refusal is not None:
            raise ScanError(f"This model cannot be scanned: {facts.scan_refusal}")
        if self._live.model_name is None:
            raise ScanError("vLLM does not say under which name it serves the model, so nothing can be tokenised.")
        # vLLM's own limit for one step holds for a block call too, which takes a sequence at all alphas at once.
        longest = facts.max_tokens // max(1, len(grid))
        tokens, scored_from = await self._validation.sequences(self._live.model_name, longest)
        order = AlphaScanPlan(
            alphas=grid,
            tokens=tokens,
            scored_from=scored_from,
            tokens_per_step=min(_TOKENS_PER_STEP, facts.max_tokens),
        )
        readings: list[AlphaScanReading] = []
        while (plan := self._monitor.next_plan(order, readings)) is not None:
            readings.append(await self._reading(plan, facts, duty))
        after = await self._watcher.look()
        if after.boot_id != facts.boot_id:
            raise ModelChanged("vLLM was restarted while it was measured.")
        if after.gates != facts.gates or after.faults != facts.faults:
            raise ModelChanged("The model was changed while it was measured.")
        return readings

    async def _reading(self, plan: AlphaScanPlan, facts: ModelFacts, duty: float) -> AlphaScanReading:
        """Order one plan and advance it to the end."""
        order = MeasureOrder(monitor=self._monitor.name, plan=plan.model_dump(mode="json"))
        try:
            progress = await self._probe.order(order)
        except ProbeRefused as refused:
            raise ScanError(f"The probe refused the scan (HTTP {refused.status}): {refused.detail}") from refused
        try:
            return AlphaScanReading.model_validate(await self._advance(progress, duty))
        except ProbeRefused as refused:
            raise await self._explained(refused, facts) from refused

    async def _advance(self, progress: Progress, duty: float) -> dict[str, Any]:
        """All parts of an ordered measurement; its reading."""
        pace = Pace(self._settings.part_budget_ms / 1000.0, duty)
        before = 0 if self._progress is None else self._progress.steps_done
        try:
            self._note(progress, before)
            while progress.reading is None:
                done, asked_at = progress.steps_done, time.monotonic()
                progress = await self._probe.advance(progress.id, pace.steps)
                wall = time.monotonic() - asked_at
                self._live.scan_parts += 1
                self._note(progress, before)
                if progress.reading is None and progress.steps_done <= done:
                    raise ScanError(f"The probe made no progress after step {done} of {progress.steps_total}.")
                pace.observe(progress.steps_done - done, progress.seconds)
                await self._rest(pace.rest(progress.seconds, wall))
            return progress.reading
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

    # Book-keeping

    def _note(self, progress: Progress, before: int) -> None:
        """The record counts all plans of a scan; how many there will be is not known before."""
        self._live.engine_held_seconds += progress.seconds
        if self._progress is not None and self._progress.state is ScanState.RUNNING:
            self._progress = self._progress.model_copy(
                update={"steps_done": before + progress.steps_done, "steps_total": before + progress.steps_total}
            )

    def _interrupted(self, record: ScanRecord, why: str) -> None:
        self._live.scans_skipped["interrupted"] += 1
        _log.info("scan interrupted", scan_id=record.id, reason=why)
        self._end(record, ScanState.FAILED, error=why)

    def _unfinished(self) -> ScanRecord | None:
        record = self._progress
        return record if record is not None and record.state in (ScanState.QUEUED, ScanState.RUNNING) else None

    def _current(self, record: ScanRecord) -> ScanRecord:
        return self._progress if self._progress is not None and self._progress.id == record.id else record

    def _keep(self, record: ScanRecord) -> None:
        self._progress = record
        try:
            self._store.save_scan(record)
        except StoreError as full:
            _log.error("scan not stored", scan_id=record.id, reason=str(full))

    def _end(self, record: ScanRecord, state: ScanState, *, error: str | None, finding_id: str | None = None) -> None:
        update = {"state": state, "error": error, "finding_id": finding_id, "finished_at": self._now()}
        self._keep(record.model_copy(update=update))


def alphas(grid: Grid) -> list[float]:
    """The alphas of a named grid, or the given ones."""
    if grid == "quick":
        return list(QUICK_GRID)
    if grid == "full":
        return list(FULL_GRID)
    return [float(alpha) for alpha in grid]
