"""The one loop that scans: runs a job, stores what it found, tells.

ScanBusy        another measurement of the kind runs
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar
from uuid import uuid4

import structlog

from ..monitors.canary.finding import NAME as CANARY
from ..monitors.finding import Finding, Health
from ..monitors.fingerprint.judgement import NAME as FINGERPRINT
from .job import Job, Outcome
from .live import Live
from .measuring import ScanError
from .probe import ProbeError
from .records import FindingRecord, ScanRecord, ScanState
from .store import Store, StoreError
from .validation_set import ValidationSetError
from .vllm import VllmError

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class ScanBusy(Exception):
    """A scan cannot start: another measurement runs."""


class _Lane:
    """One measurement at a time."""

    def __init__(self) -> None:
        self.engine = asyncio.Lock()
        """Held by whoever measures."""
        self.task: asyncio.Task[None] | None = None
        self.progress: ScanRecord | None = None

    @property
    def unfinished(self) -> ScanRecord | None:
        """The scan that has not ended, if there is one."""
        record = self.progress
        return record if record is not None and record.state in (ScanState.QUEUED, ScanState.RUNNING) else None

    @property
    def scanning(self) -> str | None:
        """The monitor whose scan runs, if any."""
        return None if self.task is None or self.task.done() or self.progress is None else self.progress.monitor

    def note(self, done: int, total: int) -> None:
        """A part of the scan has ended."""
        if self.progress is not None and self.progress.state is ScanState.RUNNING:
            self.progress = self.progress.model_copy(update={"steps_done": done, "steps_total": total})


class Runner:
    """Runs one measurement of the model at a time, one of the bytes beside it, and one that only asks for answers.

    On a busy server a scan takes long, and a sweep that waited for its end would come too late: their parts alternate.
    The canary does not hold the engine at all.

    `told` is awaited with each finding after it has been stored: alerts, verdict and automation hang on it.
    `changing` says whether somebody changes the model right now: no scan starts then.
    """

    def __init__(
        self,
        *,
        live: Live,
        store: Store,
        told: Callable[[Finding, FindingRecord], Awaitable[None]],
        changing: Callable[[], bool],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._live = live
        self._store = store
        self._told = told
        self._changing = changing
        self._now = now
        self._model, self._bytes, self._answers = self._lanes = _Lane(), _Lane(), _Lane()

    # Scans

    def start(self, job: Job) -> ScanRecord:
        """Start a scan in the background; raises `ScanBusy` when one runs or the model is being changed.

        A store that does not work stops no scan: what is found is shown and alerted on all the same.
        """
        lane = self._lane(job.monitor)
        if lane.engine.locked() or lane.scanning is not None:
            raise ScanBusy("A scan runs already: wait until it has ended.")
        if self._changing():
            raise ScanBusy("A mitigation is on its way: wait until it has ended.")
        record = ScanRecord(
            id=uuid4().hex,
            monitor=job.monitor,
            state=ScanState.QUEUED,
            trigger=job.trigger,
            created_at=self._now(),
        )
        self._keep(record)
        lane.task = asyncio.create_task(self._scan(record, job), name=f"scan {record.id}")
        return record

    async def run(self, job: Job) -> None:
        """Start a scan and wait for its end, whatever that is; raises `ScanBusy`.

        A scan of another monitor that is in the way goes first: two that are due at the same time must not shut each
        other out.
        """
        lane = self._lane(job.monitor)
        while lane.task is not None and lane.scanning not in (None, job.monitor):
            await asyncio.wait({lane.task})
        self.start(job)
        if lane.task is not None:
            await asyncio.wait({lane.task})

    async def idle(self) -> None:
        """Wait for the end of the scans that run now, if any."""
        if tasks := {lane.task for lane in self._lanes if lane.task is not None}:
            await asyncio.wait(tasks)

    @property
    def running(self) -> bool:
        """Is anything being measured?"""
        return any(lane.engine.locked() or lane.scanning is not None for lane in self._lanes)

    async def run_anew(self, job: Job) -> None:
        """As `run`, but behind a scan of the same monitor that is under way, too: that one may have begun too early."""
        while self.in_the_way(job.monitor) is not None:
            await self.ended(job.monitor)
        await self.run(job)

    async def ended(self, monitor: str) -> None:
        """Wait for the end of the scan that is in the way of one of this monitor, if any."""
        task = self._lane(monitor).task
        if task is not None:
            await asyncio.wait({task})

    def in_the_way(self, monitor: str) -> str | None:
        """The monitor whose scan must end before one of this monitor can start, if any."""
        return self._lane(monitor).scanning

    def record(self, scan_id: str) -> ScanRecord | None:
        """The scan of this id, with its progress of right now."""
        for lane in self._lanes:
            if lane.progress is not None and lane.progress.id == scan_id:
                return lane.progress
        return self._store.scan(scan_id)

    def forget_unfinished(self) -> None:
        """At start: the scans that a killed sidecar left behind will not go on."""
        for record in self._store.open_scans():
            self._end(record, ScanState.FAILED, error="The sidecar ended while this scan ran.")

    async def interrupt(self, why: str) -> None:
        """End the scans that run, if any, and forget their measurements; `why` becomes their error.

        All of them are cancelled before anything else happens: a change that was just started writes behind that.
        """
        while running := {
            lane.task
            for lane in self._lanes
            if lane.task is not None and not lane.task.done() and lane.unfinished is not None
        }:
            for task in running:
                task.cancel(why)
            await asyncio.wait(running)
        for lane in self._lanes:
            if (record := lane.unfinished) is not None:
                # Cancelled before its first step: the task had no chance to say so itself.
                self._interrupted(record, why)

    async def alone(self, measure: Callable[[], Awaitable[T]]) -> T:
        """Measure for a mitigation: a scan that runs gives way, because the model is about to change under it."""
        await self.interrupt("A mitigation took the engine; a new scan follows.")
        async with self._model.engine, self._bytes.engine:
            return await measure()

    async def _scan(self, record: ScanRecord, job: Job) -> None:
        log = _log.bind(scan_id=record.id, monitor=job.monitor)
        tally = self._live.tally(job.monitor)
        tally.started += 1
        started = time.monotonic()
        error: str | None = None
        lane = self._lane(job.monitor)
        try:
            async with lane.engine:
                self._keep(record.model_copy(update={"state": ScanState.RUNNING}))
                outcome = await job.measure(lane.note)
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
            tally.last_at = self._now()
            tally.last_seconds = time.monotonic() - started
        else:
            tally.failures += 1
            outcome = Outcome(Finding(monitor=job.monitor, health=Health.UNKNOWN, reason=error), [])
        kept = self._conclude(self._current(record), outcome, error)
        log.info("scan ended", health=outcome.finding.health.value, reason=outcome.finding.reason)
        await self._told(outcome.finding, kept)

    def _conclude(self, record: ScanRecord, outcome: Outcome, error: str | None) -> FindingRecord:
        """Show and store the outcome."""
        finding = outcome.finding
        kept = FindingRecord(
            id=uuid4().hex,
            scan_id=record.id,
            monitor=finding.monitor,
            created_at=self._now(),
            health=finding.health,
            body=finding.model_dump(mode="json"),
            boot_id=None if self._live.facts is None else self._live.facts.boot_id,
        )
        self._live.found(finding, kept.id, kept.created_at, record.created_at)
        state = ScanState.DONE if error is None else ScanState.FAILED
        finding_id: str | None = kept.id
        try:
            self._store.add_finding(kept, outcome.readings)
        except StoreError as full:
            _log.error("finding not stored", reason=str(full))
            finding_id, error = None, error or str(full)
        ended = record.model_copy(
            update={"profile_refusal": outcome.profile_refusal, "recording_refusal": outcome.recording_refusal}
        )
        self._end(ended, state, error=error, finding_id=finding_id)
        return kept

    # Book-keeping

    def _lane(self, monitor: str) -> _Lane:
        return {FINGERPRINT: self._bytes, CANARY: self._answers}.get(monitor, self._model)

    def _interrupted(self, record: ScanRecord, why: str) -> None:
        self._live.tally(record.monitor).skipped["interrupted"] += 1
        _log.info("scan interrupted", scan_id=record.id, reason=why)
        self._end(record, ScanState.FAILED, error=why)

    def _current(self, record: ScanRecord) -> ScanRecord:
        known = self._lane(record.monitor).progress
        return known if known is not None and known.id == record.id else record

    def _keep(self, record: ScanRecord) -> None:
        self._lane(record.monitor).progress = record
        try:
            self._store.save_scan(record)
        except StoreError as full:
            _log.error("scan not stored", scan_id=record.id, reason=str(full))

    def _end(self, record: ScanRecord, state: ScanState, *, error: str | None, finding_id: str | None = None) -> None:
        update = {"state": state, "error": error, "finding_id": finding_id, "finished_at": self._now()}
        self._keep(record.model_copy(update=update))
