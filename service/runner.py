"""The one loop that scans: measures, judges, stores, tells.

ScanBusy        another measurement runs
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from uuid import uuid4

import structlog

from ..monitors.alpha_scan import (
    AlphaScan,
    AlphaScanFinding,
    AlphaScanPlan,
    AlphaScanReading,
    Strategy,
    alphas_of,
)
from ..monitors.finding import Action, Finding, Health
from ..monitors.wire import ModelFacts
from .baseline import Baseline, BaselineError
from .live import Live
from .measuring import Measured, Measurer, ScanError
from .mitigation_steps import ITSELF, LossUnavailable
from .probe import Probe, ProbeError
from .records import FindingRecord, ScanRecord, ScanState, ScanTrigger
from .settings import ScanSettings
from .store import Store, StoreError
from .validation_set import ValidationSet, ValidationSetError
from .vllm import VllmError
from .watcher import Watcher

Grid = str | list[float]

_log = structlog.get_logger(__name__)


class ScanBusy(Exception):
    """A scan cannot start: another measurement runs."""


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
        baseline: Baseline,
        told: Callable[[Finding, FindingRecord], Awaitable[None]],
        changing: Callable[[], bool],
        rest: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._monitor = monitor
        self._live = live
        self._store = store
        self._measurer = Measurer(
            part_budget_ms=settings.part_budget_ms,
            live=live,
            probe=probe,
            watcher=watcher,
            validation=validation,
            rest=rest,
        )
        self._baseline = baseline
        self._told = told
        self._changing = changing
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
                measured = await self._measurer.measure(self._monitor, [], duty=1.0, note=lambda *_: None)
            except (ScanError, VllmError, ValidationSetError) as error:
                raise LossUnavailable(str(error)) from error
        finding = self._monitor.judge(measured.readings)
        if not finding.sequences:
            raise LossUnavailable("Nothing was measured.")
        return finding.base_loss_nats

    async def order(self) -> tuple[ModelFacts, AlphaScanPlan]:
        """The model of now, and what a scan of it by the settings measures; raises what `Measurer.order` raises."""
        return await self._measurer.order(alphas_of(self._settings.grid))

    async def _scan(self, record: ScanRecord, grid: Grid | None) -> None:
        log = _log.bind(scan_id=record.id)
        self._live.scans += 1
        started = time.monotonic()
        readings: list[AlphaScanReading] = []
        error: str | None = None
        profile_refusal: str | None = None
        try:
            async with self._engine:
                self._keep(record.model_copy(update={"state": ScanState.RUNNING}))
                measured = await self._measurer.measure(
                    self._scanner(record.trigger),
                    alphas_of(grid or self._settings.grid),
                    duty=self._settings.duty,
                    note=self._note,
                    fitting=self._baseline.fitting,
                )
            readings = measured.readings
            judged = self._judge(measured)
            if record.trigger is ScanTrigger.BASELINE:
                profile_refusal = self._recorded(measured, judged)
            finding: Finding = self._as_offered(judged)
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
        ended = self._current(record).model_copy(update={"profile_refusal": profile_refusal})
        kept = self._conclude(ended, finding, readings, error)
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

    def _scanner(self, trigger: ScanTrigger) -> AlphaScan:
        """The monitor of the settings; for a profile it measures every block on every sequence."""
        if trigger is not ScanTrigger.BASELINE:
            return self._monitor
        return AlphaScan(self._monitor.thresholds, Strategy.PLAIN, self._monitor.max_faults)

    def _judge(self, measured: Measured) -> AlphaScanFinding:
        """With the clean profile where it fits; where it does not, the reason says so."""
        finding = self._monitor.judge(measured.readings, measured.profile)
        if self._baseline.misfit is None:
            return finding
        return finding.model_copy(
            update={"reason": f"{finding.reason}; the one that is kept does not fit: {self._baseline.misfit}"}
        )

    def _recorded(self, measured: Measured, finding: AlphaScanFinding) -> str | None:
        """Make the clean profile of this scan; why that cannot be, or None."""
        try:
            self._baseline.record(measured, finding, ITSELF)
        except (BaselineError, StoreError) as refusal:
            return str(refusal)
        return None

    def _as_offered(self, finding: AlphaScanFinding) -> Finding:
        """Suggest a skip only where the gates are known to act."""
        refusal = self._live.gates_refusal()
        if finding.action is not Action.SKIP or refusal is None:
            return finding
        return finding.model_copy(
            update={"action": Action.INVESTIGATE, "reason": f"{finding.reason}; no skip is offered: {refusal}"}
        )

    # Book-keeping

    def _note(self, done: int, total: int) -> None:
        if self._progress is not None and self._progress.state is ScanState.RUNNING:
            self._progress = self._progress.model_copy(update={"steps_done": done, "steps_total": total})

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
