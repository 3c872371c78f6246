"""All parts of the sidecar, wired together once: what the app serves."""

import asyncio
import time
from types import TracebackType
from typing import Self

import structlog

from ..monitors.alpha_scan import AlphaScan
from ..monitors.finding import Finding, Health
from ..monitors.wire import ModelFacts
from .alerts import Alerts
from .baseline import Baseline
from .gates import unrecorded
from .live import Live
from .mitigation import Mitigator
from .mitigation_steps import ITSELF
from .probe import Probe
from .records import IN_FLIGHT, Event, FindingRecord, MitigationRecord, ScanTrigger
from .runner import Runner, ScanBusy
from .schedule import Schedule
from .settings import ConfigurationError, Settings
from .store import Store, StoreError
from .validation_set import ValidationSet
from .vllm import Vllm
from .watcher import Watcher
from .webhook import Webhook

_log = structlog.get_logger(__name__)


class Sidecar:
    """Built from settings, then entered: `async with Sidecar(settings)` runs the schedule.

    Building raises `ConfigurationError`, `StoreError` or `ValidationSetError`, each with one sentence; vLLM need not
    be there yet.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tokens = settings.api_tokens()
        secret = settings.probe_secret()
        url = settings.vllm.base_url
        key = settings.vllm.api_key
        self.live = Live(monitors=(AlphaScan.name,), every_minutes=settings.scan.every_minutes)
        self.probe = Probe(url, secret)
        self.vllm = Vllm(url, None if key is None else key.get_secret_value())
        validation = ValidationSet(settings.validation, self.vllm, settings.data_dir / "cache")
        self.watcher = Watcher(self.live, self.probe, self.vllm, seen=self._seen, arrived=self._arrived)
        self.store = _open_store(settings)
        self.baseline = Baseline(self.store, self.now)
        hook = settings.alerts.webhook_url
        self.webhook = None if hook is None else Webhook(str(hook))
        self.alerts = Alerts(
            k=settings.alerts.k, n=settings.alerts.n, send=None if self.webhook is None else self.webhook.send
        )
        self.runner = Runner(
            settings.scan,
            AlphaScan(settings.alpha_scan, settings.scan.strategy, settings.scan.max_faults),
            live=self.live,
            store=self.store,
            probe=self.probe,
            watcher=self.watcher,
            validation=validation,
            baseline=self.baseline,
            told=self._told,
            changing=lambda: self.mitigator.busy,
        )
        self.mitigator = Mitigator(
            self.probe,
            self.store,
            settings.mitigation,
            self.runner.loss,
            lambda boot_id: self.live.state_in(boot_id, AlphaScan.name),
        )
        self.schedule = Schedule(settings, self.live, self.runner, self.watcher, self.vllm)
        self._judged = 0
        """Findings about the vLLM process of now."""
        self._followers: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        if self.webhook is not None:
            await self.webhook.__aenter__()
        self.runner.forget_unfinished()
        self._restore_alerts()
        self.schedule.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.schedule.stop()
        for follower in self._followers:
            follower.cancel()
        await self.mitigator.close()
        await self.runner.interrupt("The sidecar was stopped.")
        if self.webhook is not None:
            await self.webhook.__aexit__(kind, error, trace)
        await self.probe.__aexit__(kind, error, trace)
        await self.vllm.__aexit__(kind, error, trace)
        self.store.close()

    def _restore_alerts(self) -> None:
        """From the last n findings, and from the last n that say something: unknown ones may lie between."""
        n = self.settings.alerts.n
        recent = {finding.id: finding for finding in self.store.findings(n) + self.store.findings(n, judged=True)}
        self.alerts.restore(sorted(recent.values(), key=lambda finding: finding.created_at))

    def now(self) -> float:
        """Epoch seconds."""
        return time.time()

    async def follow(self, record: MitigationRecord) -> None:
        """A mitigation was started or is being undone: let the scan give way, and scan again afterwards."""
        if record.state not in IN_FLIGHT:
            return
        await self.runner.interrupt("A mitigation took the engine; a new scan follows.")
        task = asyncio.create_task(self._verify(), name=f"follow {record.id}")
        self._followers.add(task)
        task.add_done_callback(self._followers.discard)

    async def _verify(self) -> None:
        await self.mitigator.settled()
        # The gates are not what they were at the last look, and vLLM may have been restarted meanwhile.
        await self.watcher.glance()
        try:
            self.runner.start(ScanTrigger.VERIFICATION)
        except ScanBusy as busy:
            _log.info("no scan after the mitigation", reason=str(busy))

    def _seen(self, facts: ModelFacts) -> None:
        """vLLM answered: do the records still say what its gates say?"""
        try:
            for record in self.mitigator.recover(facts):
                _log.warning("mitigation", id=record.id, state=record.state.value, message=record.message)
        except StoreError as error:
            _log.error("mitigations not compared with the gates", reason=str(error))

    def _arrived(self, facts: ModelFacts) -> None:
        """vLLM is there, for the first time or as a new process."""
        self._judged = 0
        detail = {"boot_id": facts.boot_id, "model": facts.model, "armed": facts.armed}
        try:
            self.store.add_event(Event(at=self.now(), actor=ITSELF, what="vllm arrived", detail=detail))
            for gate in unrecorded(facts, self.store.open_mitigations()):
                _log.warning("gate without a mitigation", block=gate.block, alpha=gate.alpha)
        except StoreError as error:
            _log.error("arrival of vLLM not stored", reason=str(error))

    async def _told(self, finding: Finding, kept: FindingRecord) -> None:
        """A finding is there: alert, and act if that is allowed."""
        self.alerts.observe(kept, self.live.model_name or "")
        self._judged += finding.health is not Health.UNKNOWN
        # What was found in a process that is gone is no reason to change this one.
        enough = self._judged >= self.settings.alerts.k
        record = await self.mitigator.consider(finding, self.alerts.confirmed_blocks if enough else frozenset())
        if record is not None:
            await self.follow(record)


def _open_store(settings: Settings) -> Store:
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"The setting data_dir names {settings.data_dir}, which cannot be made: {error.strerror}."
        ) from None
    return Store(settings.data_dir / "flipwatch.db")
