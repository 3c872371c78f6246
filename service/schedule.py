"""When things happen: scans by the clock and by served requests, and the look at vLLM every few seconds."""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime

import structlog
from apscheduler.events import EVENT_JOB_MAX_INSTANCES, EVENT_JOB_MISSED, JobEvent
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from .live import Live
from .records import ScanTrigger
from .runner import Runner, ScanBusy
from .settings import Settings
from .vllm import Vllm, VllmError
from .watcher import Watcher

_log = structlog.get_logger(__name__)

_SCAN = "scan"
_LOOK = "look"


class Schedule:
    """The sidecar's clock.  A scan that is due while another one runs is skipped and counted."""

    def __init__(self, settings: Settings, live: Live, runner: Runner, watcher: Watcher, vllm: Vllm) -> None:
        self._every_minutes = settings.scan.every_minutes
        self._every_requests = settings.scan.every_requests
        self._poll_seconds = settings.vllm.poll_seconds
        self._live = live
        self._runner = runner
        self._watcher = watcher
        self._vllm = vllm
        self._counted_from: int | None = None
        """vLLM's count of served requests when the last scan by requests began."""
        self._scanned_boot: str | None = None
        self._scheduler = AsyncIOScheduler(timezone=UTC, job_defaults={"coalesce": True, "max_instances": 1})
        self._scheduler.add_listener(self._not_run, EVENT_JOB_MAX_INSTANCES | EVENT_JOB_MISSED)

    def start(self) -> None:
        """Begin; needs a running event loop."""
        self._scheduler.add_job(
            self._look_by_clock,
            "interval",
            id=_LOOK,
            seconds=self._poll_seconds,
            next_run_time=datetime.now(UTC),
            misfire_grace_time=None,
        )
        if self._every_minutes is not None:
            # The first scan does not wait for the interval: `look` runs it once vLLM has answered.
            self._scheduler.add_job(
                self._scan_by_clock, "interval", id=_SCAN, minutes=self._every_minutes, misfire_grace_time=60
            )
        self._scheduler.start()

    def stop(self) -> None:
        """End; no job starts afterwards."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    @property
    def running(self) -> bool:
        """Has it been started and not stopped?"""
        return bool(self._scheduler.running)

    async def look(self) -> None:
        """One look at vLLM, and the scans that it makes due."""
        await self._watcher.glance()
        facts = self._live.facts
        if not self._live.up or facts is None:
            return
        if self._every_minutes is not None and self._scanned_boot != facts.boot_id:
            self._scanned_boot = facts.boot_id
            self._begin(ScanTrigger.SCHEDULE)
        if self._every_requests is not None:
            await self._scan_by_requests(self._every_requests)

    async def _look_by_clock(self) -> None:
        # A job that is cut off by the end of the scheduler has not failed.
        with suppress(asyncio.CancelledError):
            await self.look()

    async def _scan_by_clock(self) -> None:
        with suppress(asyncio.CancelledError):
            try:
                await self._runner.run(ScanTrigger.SCHEDULE)
            except ScanBusy:
                self._skipped("running")

    async def _scan_by_requests(self, every: int) -> None:
        try:
            served = await self._vllm.served_requests()
        except VllmError as error:
            _log.warning("served requests not known", reason=str(error))
            return
        if self._counted_from is None or served < self._counted_from:
            # The first count, or a restarted vLLM that counts from zero.
            self._counted_from = served
        if served - self._counted_from >= every:
            self._counted_from = served
            self._begin(ScanTrigger.REQUESTS)

    def _begin(self, trigger: ScanTrigger) -> None:
        try:
            self._runner.start(trigger)
        except ScanBusy:
            self._skipped("running")

    def _not_run(self, event: JobEvent) -> None:
        if event.job_id == _SCAN:
            self._skipped("running" if event.code == EVENT_JOB_MAX_INSTANCES else "misfire")

    def _skipped(self, reason: str) -> None:
        self._live.scans_skipped[reason] += 1
        _log.warning("scan skipped", reason=reason)
