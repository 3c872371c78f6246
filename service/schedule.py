"""When things happen: scans and sweeps by the clock, scans by served requests, the look at vLLM every few seconds."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime

import structlog
from apscheduler.events import EVENT_JOB_MAX_INSTANCES, EVENT_JOB_MISSED, JobEvent
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from ..monitors.alpha_scan import AlphaScan
from ..monitors.canary.finding import NAME as CANARY
from ..monitors.canary.pulse import Pulse
from ..monitors.differential.facts import NAME as DIFFERENTIAL
from ..monitors.fingerprint.judgement import NAME as FINGERPRINT
from .canary_job import Canaries
from .differential_job import Differentials
from .heart import Heart
from .job import Job
from .live import Live
from .records import ITSELF, ScanTrigger
from .runner import Runner, ScanBusy
from .scan_job import Scans
from .settings import Settings
from .sweep_job import Sweeps
from .vllm import Vllm, VllmError
from .watcher import Watcher

_log = structlog.get_logger(__name__)

_LOOK = "look"
_BEAT = "beat"


class Schedule:
    """The sidecar's clock.

    A scan that is due while another one of the same monitor runs is skipped and counted; one of another monitor is
    waited for.
    """

    def __init__(
        self,
        settings: Settings,
        live: Live,
        runner: Runner,
        scans: Scans,
        sweeps: Sweeps,
        differentials: Differentials,
        canaries: Canaries,
        heart: Heart,
        watcher: Watcher,
        vllm: Vllm,
        looked: Callable[[], Awaitable[None]],
    ) -> None:
        self._looked = looked
        """Awaited after each look at vLLM, whatever was seen."""
        self._every_minutes = {
            AlphaScan.name: settings.scan.every_minutes,
            FINGERPRINT: settings.fingerprint.every_minutes,
            DIFFERENTIAL: settings.differential.every_minutes,
            CANARY: settings.canary.every_minutes,
        }
        self._check_checkpoint = settings.fingerprint.check_checkpoint
        self._every_requests = settings.scan.every_requests
        self._poll_seconds = settings.vllm.poll_seconds
        self._live = live
        self._runner = runner
        self._scans = scans
        self._sweeps = sweeps
        self._heart = heart
        self._watcher = watcher
        self._vllm = vllm
        self._jobs: dict[str, Callable[[ScanTrigger], Job]] = {
            AlphaScan.name: scans.job,
            FINGERPRINT: sweeps.sweep,
            DIFFERENTIAL: differentials.job,
            CANARY: canaries.job,
        }
        self._counted_from: int | None = None
        """vLLM's count of served requests when the last scan by requests began."""
        self._met_boot: str | None = None
        self._meeting: asyncio.Task[None] | None = None
        """Starts the scans of a vLLM that has just arrived, one by one."""
        self._again: dict[str, asyncio.Task[None]] = {}
        """Monitor -> the scan that was asked of it out of turn."""
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
        self._scheduler.add_job(
            self._feel_by_clock,
            "interval",
            id=_BEAT,
            seconds=self._poll_seconds,
            next_run_time=datetime.now(UTC),
            misfire_grace_time=None,
        )
        for monitor, minutes in self._every_minutes.items():
            if minutes is not None:
                # The first scan does not wait for the interval: `look` runs it once vLLM has answered.
                self._scheduler.add_job(
                    self._scan_by_clock, "interval", [monitor], id=monitor, minutes=minutes, misfire_grace_time=60
                )
        self._scheduler.start()

    def stop(self) -> None:
        """End; no job starts afterwards."""
        if self._meeting is not None:
            self._meeting.cancel()
        for task in self._again.values():
            task.cancel()
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    @property
    def running(self) -> bool:
        """Has it been started and not stopped?"""
        return bool(self._scheduler.running)

    async def look(self) -> None:
        """One look at vLLM, and the scans that it makes due."""
        await self._watcher.glance()
        await self._looked()
        facts = self._live.facts
        if not self._live.up or facts is None:
            return
        if self._met_boot != facts.boot_id:
            self._met_boot = facts.boot_id
            self._meet()
        if self._every_requests is not None:
            await self._scan_by_requests(self._every_requests)

    async def met(self) -> None:
        """Wait until the scans of a vLLM that has just arrived have ended."""
        if self._meeting is not None:
            await asyncio.wait({self._meeting})
        await self._runner.idle()

    def again(self, monitors: Iterable[str]) -> None:
        """Let these look again, out of turn, because another one saw something; not those that have no clock."""
        for monitor in monitors:
            pending = self._again.get(monitor)
            if self._every_minutes.get(monitor) is not None and (pending is None or pending.done()):
                self._again[monitor] = asyncio.create_task(self._run_again(monitor), name=f"{monitor} again")

    async def _run_again(self, monitor: str) -> None:
        try:
            await self._runner.run_anew(self._jobs[monitor](ScanTrigger.EVIDENCE))
        except ScanBusy as busy:
            _log.info("no further evidence", monitor=monitor, reason=str(busy))

    def _meet(self) -> None:
        """vLLM is there, or a new process of it: the quick look at its bytes first."""
        jobs = [self._jobs[FINGERPRINT](ScanTrigger.SCHEDULE)] if self._every_minutes[FINGERPRINT] else []
        if self._check_checkpoint:
            jobs.append(self._sweeps.check(ScanTrigger.SCHEDULE, ITSELF))
        for monitor in (AlphaScan.name, DIFFERENTIAL):
            if self._every_minutes[monitor]:
                jobs.append(self._jobs[monitor](ScanTrigger.SCHEDULE))
        if self._meeting is not None:
            self._meeting.cancel()
        if jobs and not self._runner.running:
            self._begin(jobs.pop(0))
        if self._every_minutes[CANARY]:
            self._begin(self._jobs[CANARY](ScanTrigger.SCHEDULE))
        # What still runs is about to find that its vLLM is gone.
        self._meeting = asyncio.create_task(self._one_by_one(jobs), name="scans of a vLLM that arrived")

    async def _one_by_one(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            await self._runner.idle()
            try:
                # Behind what the clock may have begun meanwhile: the next arrival may be months away.
                await self._runner.run_anew(job)
            except ScanBusy:
                self._skipped(job.monitor, "running")

    async def _look_by_clock(self) -> None:
        # A job that is cut off by the end of the scheduler has not failed.
        with suppress(asyncio.CancelledError):
            await self.look()

    async def _feel_by_clock(self) -> None:
        with suppress(asyncio.CancelledError):
            pulses = self._live.beat.pulse, (await self._heart.feel()).pulse
            # The next look takes in other changes; it may be long in coming while the engine hangs.
            if (pulses[0] is Pulse.HUNG) != (pulses[1] is Pulse.HUNG):
                await self._looked()

    async def _scan_by_clock(self, monitor: str) -> None:
        with suppress(asyncio.CancelledError):
            try:
                await self._runner.run(self._jobs[monitor](ScanTrigger.SCHEDULE))
            except ScanBusy:
                self._skipped(monitor, "running")

    async def _scan_by_requests(self, every: int) -> None:
        try:
            served = await self._vllm.served_requests()
        except VllmError as error:
            _log.warning("served requests not known", reason=str(error))
            return
        if self._counted_from is None or served < self._counted_from:
            # The first count, or a restarted vLLM that counts from zero.
            self._counted_from = served
        # After a scan of another monitor there is a next look.
        if served - self._counted_from >= every and self._runner.in_the_way(AlphaScan.name) in (None, AlphaScan.name):
            self._counted_from = served
            self._begin(self._scans.job(ScanTrigger.REQUESTS))

    def _begin(self, job: Job) -> None:
        try:
            self._runner.start(job)
        except ScanBusy:
            self._skipped(job.monitor, "running")

    def _not_run(self, event: JobEvent) -> None:
        if event.job_id in self._every_minutes:
            self._skipped(event.job_id, "running" if event.code == EVENT_JOB_MAX_INSTANCES else "misfire")

    def _skipped(self, monitor: str, reason: str) -> None:
        self._live.tally(monitor).skipped[reason] += 1
        _log.warning("scan skipped", monitor=monitor, reason=reason)
