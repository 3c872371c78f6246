"""All parts of the sidecar, wired together once: what the app serves."""

import asyncio
import time
from types import TracebackType
from typing import Self

import structlog

from ..monitors.alpha_scan import AlphaScan
from ..monitors.canary.finding import NAME as CANARY
from ..monitors.differential.facts import NAME as DIFFERENTIAL
from ..monitors.differential.finding import DifferentialFinding
from ..monitors.finding import Finding
from ..monitors.fingerprint.judgement import NAME as FINGERPRINT
from ..monitors.verdict.verdict import Joined, Verdict
from ..monitors.wire import ModelFacts
from .alerts import Alerts
from .automatic import Automatic
from .baseline import Baseline
from .canary_job import Canaries
from .differential_job import Differentials
from .duty import Duty
from .gates import unrecorded
from .heart import Heart
from .job import Job
from .live import Live
from .measuring import Measurer
from .mitigation import Mitigator
from .peer import Peer
from .probe import Probe
from .records import ARRIVED, IN_FLIGHT, ITSELF, Event, FindingRecord, MitigationAction, MitigationRecord, ScanTrigger
from .runner import Runner, ScanBusy
from .scan_job import Scans
from .scan_measure import ScanMeasure
from .schedule import Schedule
from .settings import ConfigurationError, Settings
from .store import Store, StoreError
from .sweep_job import Sweeps
from .validation_set import ValidationSet
from .verdicts import Verdicts
from .vllm import Vllm
from .vouched import Vouched
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
        manifest = settings.manifest()
        peer = settings.peer()
        policy = settings.policy()
        # Without a clock of its own it only runs when somebody asks: a state that nobody wants must not be unknown.
        compares = settings.differential.every_minutes is not None
        asks = settings.canary.every_minutes is not None
        duty = Duty(settings.scan.duty, settings.scan.idle_duty)

        def measurer(monitor: str) -> Measurer:
            return Measurer(settings.scan, self.live.tally(monitor), duty, self.probe, self.watcher.look)

        self.live = Live(
            monitors=(AlphaScan.name, FINGERPRINT, *([DIFFERENTIAL] if compares else []), *([CANARY] if asks else [])),
            every_minutes={
                AlphaScan.name: settings.scan.every_minutes,
                FINGERPRINT: settings.fingerprint.every_minutes,
                DIFFERENTIAL: settings.differential.every_minutes,
                CANARY: settings.canary.every_minutes,
            },
        )
        self.vllm = Vllm(url, None if key is None else key.get_secret_value())
        self.heart = Heart(
            self.live,
            self.vllm,
            settings.canary.hung_seconds,
            every_seconds=settings.vllm.poll_seconds,
            resting=lambda: self.mitigator.busy,
        )
        self.probe = Probe(url, secret, heard=self.heart.heard)
        self.watcher = Watcher(self.live, self.probe, self.vllm, self.heart, seen=self._seen, arrived=self._arrived)
        validation = ValidationSet(settings.validation, self.vllm, settings.data_dir / "cache")
        self.store = _open_store(settings)
        self.baseline = Baseline(self.store, self.now)
        hook = settings.alerts.webhook_url
        self.webhook = None if hook is None else Webhook(str(hook))
        self.alerts = Alerts(
            k=settings.alerts.k,
            n=settings.alerts.n,
            send=None if self.webhook is None else self.webhook.send,
            on_request=[*([] if compares else [DIFFERENTIAL]), *([] if asks else [CANARY])],
        )
        self.verdicts = Verdicts(self.live, self.store, self.alerts, self.now)
        self.scans = Scans(
            settings.scan,
            AlphaScan(settings.alpha_scan, settings.scan.strategy, settings.scan.max_faults),
            ScanMeasure(self.live, measurer(AlphaScan.name), self.watcher, validation),
            self.baseline,
            self.live,
        )
        self.sweeps = Sweeps(
            measurer(FINGERPRINT),
            self.live,
            self.probe,
            self.watcher,
            self.store,
            self.now,
            manifest=manifest,
            manifest_name=str(settings.fingerprint.manifest),
        )
        self.peer = None if peer is None else Peer(Probe(*peer), settings.scan)
        self.recordings = Vouched("states", self.store.recording, self.store.set_recording, self.now)
        self.differentials = Differentials(
            settings.differential,
            measurer(DIFFERENTIAL),
            self.live,
            self.watcher,
            validation,
            self.recordings,
            self.now,
            self.peer,
        )
        self.expectations = Vouched("answers", self.store.expectation, self.store.set_expectation, self.now)
        self.canaries = Canaries(
            settings.canary, self.live, self.watcher, self.vllm, self.heart, self.expectations, self.now
        )
        self.runner = Runner(
            live=self.live,
            store=self.store,
            told=self._told,
            changing=lambda: self.mitigator.busy,
        )
        self.mitigator = Mitigator(
            self.probe,
            self.store,
            settings.mitigation,
            lambda as_if: self.runner.alone(lambda: self.scans.loss(as_if)),
            lambda boot_id: self.live.state_in(boot_id, AlphaScan.name),
            lambda: self.runner.alone(self.sweeps.reading),
            recent=self.sweeps.recent,
        )
        self.automatic = Automatic(policy, self.mitigator, self.store, settings.mitigation)
        self.schedule = Schedule(
            settings,
            self.live,
            self.runner,
            self.scans,
            self.sweeps,
            self.differentials,
            self.canaries,
            self.heart,
            self.watcher,
            self.vllm,
            self.verdicts.looked,
        )
        self.verdicts.listen(self._complete)
        self.verdicts.listen(self._act)
        self._followers: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        if self.webhook is not None:
            await self.webhook.__aenter__()
        self.runner.forget_unfinished()
        self._restore_alerts()
        self.sweeps.restore()
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
        if self.peer is not None:
            await self.peer.close()
        await self.probe.__aexit__(kind, error, trace)
        await self.vllm.__aexit__(kind, error, trace)
        self.store.close()

    def _restore_alerts(self) -> None:
        """From each monitor's last n findings, and its last n that say something: unknown ones may lie between."""
        n = self.settings.alerts.n
        recent = {
            finding.id: finding
            for monitor in (AlphaScan.name, FINGERPRINT, DIFFERENTIAL, CANARY)
            for judged in (False, True)
            for finding in self.store.findings(n, monitor, judged=judged)
        }
        self.alerts.restore(sorted(recent.values(), key=lambda finding: finding.created_at))
        self.verdicts.restore()

    def now(self) -> float:
        """Epoch seconds."""
        return time.time()

    def last_heard_of(self) -> str | None:
        """Boot id of the vLLM process that was last heard of, be it by the sidecar before this one; or None.

        A server that hangs answers no sidecar that is started beside it.  Raises `StoreError`.
        """
        if self.live.facts is not None:
            return self.live.facts.boot_id
        arrived = self.store.last_event(ARRIVED)
        return None if arrived is None else str(arrived.detail["boot_id"])

    async def follow(self, record: MitigationRecord) -> None:
        """A mitigation was started or is being undone: let the scan give way, and scan again afterwards."""
        if record.state not in IN_FLIGHT:
            return
        await self.runner.interrupt("A mitigation took the engine; a new scan follows.")
        task = asyncio.create_task(self._verify(record), name=f"follow {record.id}")
        self._followers.add(task)
        task.add_done_callback(self._followers.discard)

    async def _verify(self, record: MitigationRecord) -> None:
        await self.mitigator.settled()
        if record.action is MitigationAction.REPAIR:
            self.live.repaired_at = self.now()
        # The gates are not what they were at the last look, and vLLM may have been restarted meanwhile.
        await self.watcher.glance()
        try:
            if record.action is MitigationAction.REPAIR:
                await self.runner.run_anew(self._sweep_after_repair())
            if CANARY in self.live.monitors:
                await self.runner.run_anew(self.canaries.job(ScanTrigger.VERIFICATION))
            await self.runner.run_anew(self.scans.job(ScanTrigger.VERIFICATION))
            compared = self.live.state(DIFFERENTIAL).finding
            if record.action is MitigationAction.REPAIR and isinstance(compared, DifferentialFinding):
                await self.runner.run_anew(self.differentials.job(ScanTrigger.VERIFICATION, compared.reference))
        except ScanBusy as busy:
            _log.info("no scan after the mitigation", reason=str(busy))

    def _sweep_after_repair(self) -> Job:
        """What was found to differ from the checkpoint may be right now: only another comparison tells."""
        verdict = self.live.integrity.verdict
        if verdict is not None and verdict.faults:
            return self.sweeps.check(ScanTrigger.VERIFICATION, ITSELF)
        return self.sweeps.sweep(ScanTrigger.VERIFICATION)

    def _seen(self, facts: ModelFacts) -> None:
        """vLLM answered: do the records still say what its gates say?"""
        try:
            for record in self.mitigator.recover(facts):
                _log.warning("mitigation", id=record.id, state=record.state.value, message=record.message)
        except StoreError as error:
            _log.error("mitigations not compared with the gates", reason=str(error))

    def _arrived(self, facts: ModelFacts) -> None:
        """vLLM is there, for the first time or as a new process."""
        detail = {"boot_id": facts.boot_id, "model": facts.model, "armed": facts.armed}
        try:
            self.store.add_event(Event(at=self.now(), actor=ITSELF, what=ARRIVED, detail=detail))
            for gate in unrecorded(facts, self.store.open_mitigations()):
                _log.warning("gate without a mitigation", block=gate.block, alpha=gate.alpha)
        except StoreError as error:
            _log.error("arrival of vLLM not stored", reason=str(error))

    async def _told(self, finding: Finding, kept: FindingRecord) -> None:
        """A finding is there: alert, and judge all evidence anew."""
        self.alerts.observe(kept, self.live.model_name or "")
        await self.verdicts.found()

    async def _act(self, joined: Joined) -> None:
        """The policy says what is done about a verdict."""
        if self.live.facts is None and not (joined.verdict is Verdict.HUNG and self.live.silent):
            # Of the process of now nothing is known.  One that hangs does not tell, and can be drained; one that
            # answers without the probe is another one.
            return
        try:
            boot_id = self.last_heard_of()
        except StoreError as error:
            _log.error("automation cannot tell which vLLM process this is", reason=str(error))
            return
        if boot_id is None:
            return
        confirmed = self.alerts.confirmed_blocks(boot_id)
        found = [self.live.state(monitor).at for monitor in joined.grounds or self.live.monitors]
        heard_at = max((at for at in found if at is not None), default=None)
        record = await self.automatic.consider(joined, boot_id, confirmed, heard_at)
        if record is not None:
            await self.follow(record)

    async def _complete(self, joined: Joined) -> None:
        """Evidence that is older than what it is joined with is taken anew."""
        self.schedule.again(joined.stale)


def _open_store(settings: Settings) -> Store:
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"The setting data_dir names {settings.data_dir}, which cannot be made: {error.strerror}."
        ) from None
    return Store(settings.data_dir / "flipwatch.db")
