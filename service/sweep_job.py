"""The fingerprint as jobs for the runner: sweeps, new baselines that somebody announced, checks of the checkpoint."""

from collections.abc import Callable
from typing import Any

import structlog

from ..monitors.fingerprint.facts import (
    COMPARE,
    CORRECT,
    RECORD,
    CheckpointReading,
    Corrected,
    CorrectionPlan,
    FileDigest,
    FingerprintPlan,
    FingerprintReading,
    IntegrityFacts,
    Recorded,
)
from ..monitors.fingerprint.judgement import NAME, CheckpointVerdict, judge
from ..monitors.fingerprint.manifest import check_manifest
from ..monitors.wire import MeasureOrder, ModelFacts, Progress
from .job import Job, Note, Outcome
from .live import Live
from .measuring import Measurer, ModelChanged, ScanError
from .probe import Probe, ProbeRefused
from .records import Event, ScanTrigger
from .repair_steps import SweepUnavailable
from .store import Store, StoreError
from .watcher import Watcher

_CHECKED = "checkpoint checked"
_RECORDED = "fingerprint recorded"
_CORRECTED = "fingerprint corrected"
_EVENTS = 10_000
# As long as somebody takes to answer an alert with an order.
_RECENT_SECONDS = 60.0

_log = structlog.get_logger(__name__)


class Sweeps:
    """Makes the jobs of the fingerprint.

    `manifest` says which SHA-256 each file of the checkpoint ought to have, None that nobody knows; `manifest_name` is
    what people call it.
    """

    def __init__(
        self,
        measurer: Measurer,
        live: Live,
        probe: Probe,
        watcher: Watcher,
        store: Store,
        now: Callable[[], float],
        *,
        manifest: dict[str, str] | None,
        manifest_name: str,
    ) -> None:
        self._measurer = measurer
        self._live = live
        self._probe = probe
        self._watcher = watcher
        self._store = store
        self._now = now
        self._manifest = manifest
        self._manifest_name = manifest_name
        self._last: tuple[float, ModelFacts, FingerprintReading] | None = None
        """When the last sweep ended, the model that it saw, and its reading."""

    def sweep(self, trigger: ScanTrigger) -> Job:
        """All chunks against their baseline."""

        async def measure(note: Note) -> Outcome:
            facts, seals = await self._look()
            return await self._swept(facts, seals, note)

        return Job(NAME, trigger, measure)

    def record(self, reason: str, actor: str) -> Job:
        """A new baseline of what lies in memory now, because `actor` changed it on purpose; then a sweep."""

        async def measure(note: Note) -> Outcome:
            facts, seals = await self._look()
            progress = await self._measure(RECORD, facts, _whole(seals), note)
            recorded = Recorded.model_validate(progress.reading)
            self._audit(_RECORDED, actor, reason=reason, changed_chunks=recorded.changed_chunks)
            seals = seals.model_copy(update={"ranks": recorded.ranks})
            self._live.integrity.facts = seals
            if recorded.changed_chunks:
                self._live.integrity.verdict = _after_a_change(self._live.integrity.verdict)
            return await self._swept(facts, seals, note, before=progress.steps_done)

        return Job(NAME, ScanTrigger.BASELINE, measure)

    def correct(self, tensors: list[str], reason: str, actor: str) -> Job:
        """The checkpoint's values of these tensors become their baseline, because that was wrong; then a sweep.

        Nothing is written to the served weights: the sweep finds them changed, and a repair can put them right.
        """

        async def measure(note: Note) -> Outcome:
            facts, seals = await self._look()
            if self._manifest is not None:
                found = {file.file: file.sha256 for file in await self._digests()}
                if problems := check_manifest(self._manifest, found):
                    raise ScanError(f"Nothing was corrected, the files are not those of the manifest: {problems[0]}")
            progress = await self._measure(CORRECT, facts, CorrectionPlan(tensors=tensors), note)
            ranks = Corrected.model_validate(progress.reading).ranks
            corrected = sorted({tensor for rank in ranks for tensor in rank.corrected})
            refused = sorted({sentence for rank in ranks for sentence in rank.refused})
            self._audit(_CORRECTED, actor, reason=reason, corrected=corrected, refused=refused)
            if refused:
                others = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
                raise ScanError(f"{len(corrected)} of {len(tensors)} were corrected: {refused[0]}{others}")
            if not corrected:
                raise ScanError("Nothing was corrected: the baseline has the checkpoint's values already.")
            return await self._swept(facts, seals, note, before=progress.steps_done)

        return Job(NAME, ScanTrigger.BASELINE, measure)

    def check(self, trigger: ScanTrigger, actor: str) -> Job:
        """The checkpoint's files against the manifest, and memory against the files; then a sweep."""

        async def measure(note: Note) -> Outcome:
            facts, seals = await self._look()
            files = await self._digests()
            progress = await self._measure(COMPARE, facts, _whole(seals), note)
            await self._measurer.same_process(facts)
            verdict = self._verdict(facts, files, CheckpointReading.model_validate(progress.reading))
            self._live.integrity.verdict = verdict
            self._audit(_CHECKED, actor, verdict=verdict.model_dump(mode="json"), message=f"{verdict.sentence}.")
            return await self._swept(facts, seals, note, before=progress.steps_done)

        return Job(NAME, trigger, measure)

    async def reading(self) -> FingerprintReading:
        """A sweep for a repair: nothing rests between its parts.  Raises `SweepUnavailable` or `ProbeError`."""
        try:
            facts, seals = await self._look()
            return await self._sweep(facts, seals, lambda *_: None, urgent=True)
        except ScanError as error:
            raise SweepUnavailable(str(error)) from error

    def recent(self, facts: ModelFacts) -> FingerprintReading | None:
        """What a sweep has just found in this vLLM process with these faults injected; None where it is too old."""
        if self._last is None:
            return None
        at, then, reading = self._last
        same = then.boot_id == facts.boot_id and then.faults == facts.faults
        return reading if same and self._now() - at <= _RECENT_SECONDS else None

    def restore(self) -> None:
        """At start: the last check of the checkpoint, which counts if vLLM is the same process still.

        Raises `StoreError`.
        """
        changed = False
        for event in self._store.events(_EVENTS):
            if event.what == _CHECKED:
                verdict = CheckpointVerdict.model_validate(event.detail["verdict"])
                self._live.integrity.verdict = _after_a_change(verdict) if changed else verdict
                return
            changed |= event.what == _RECORDED and event.detail["changed_chunks"] > 0

    async def _look(self) -> tuple[ModelFacts, IntegrityFacts]:
        """Model and baselines of now."""
        facts = await self._watcher.look()
        try:
            seals = await self._probe.integrity()
        except ProbeRefused as refused:
            raise ScanError(f"The probe has no fingerprints (HTTP {refused.status}): {refused.detail}") from refused
        if seals.boot_id != facts.boot_id:
            raise ModelChanged("vLLM was restarted while it was measured.")
        known = self._live.integrity
        known.facts = seals
        if known.verdict is not None and known.verdict.boot_id != facts.boot_id:
            known.verdict = None
        if seals.refusal is not None:
            raise ScanError(f"There are no fingerprints of the weights: {seals.refusal}")
        return facts, seals

    async def _swept(self, facts: ModelFacts, seals: IntegrityFacts, note: Note, *, before: int = 0) -> Outcome:
        reading = await self._sweep(facts, seals, note, before=before)
        known = self._live.integrity
        return Outcome(judge(reading, known.verdict), [reading.model_dump(mode="json")])

    async def _sweep(
        self, facts: ModelFacts, seals: IntegrityFacts, note: Note, *, before: int = 0, urgent: bool = False
    ) -> FingerprintReading:
        progress = await self._measure(NAME, facts, _whole(seals), note, before=before, urgent=urgent)
        await self._measurer.same_process(facts)
        reading = FingerprintReading.model_validate(progress.reading)
        self._live.integrity.reading = reading
        self._last = (self._now(), facts, reading)
        return reading

    async def _measure(
        self,
        name: str,
        facts: ModelFacts,
        plan: FingerprintPlan | CorrectionPlan,
        note: Note,
        *,
        before: int = 0,
        urgent: bool = False,
    ) -> Progress:
        order = MeasureOrder(monitor=name, plan=plan.model_dump(mode="json"))
        return await self._measurer.run(order, facts, note, before=before, urgent=urgent)

    async def _digests(self) -> list[FileDigest]:
        try:
            checkpoint = await self._probe.checkpoint()
            if checkpoint.refusal is None:
                return [await self._probe.file_digest(file.name) for file in checkpoint.files]
        except ProbeRefused as refused:
            raise ScanError(f"The probe could not read the checkpoint (HTTP {refused.status}): {refused}") from refused
        raise ScanError(f"The checkpoint cannot be checked: {checkpoint.refusal}")

    def _verdict(self, facts: ModelFacts, files: list[FileDigest], reading: CheckpointReading) -> CheckpointVerdict:
        digests = {file.file: file.sha256 for file in files}
        return CheckpointVerdict(
            at=self._now(),
            boot_id=facts.boot_id,
            files=files,
            manifest=None if self._manifest is None else self._manifest_name,
            problems=[] if self._manifest is None else check_manifest(self._manifest, digests),
            ranks=reading.ranks,
        )

    def _audit(self, what: str, actor: str, **detail: Any) -> None:
        try:
            self._store.add_event(Event(at=self._now(), actor=actor, what=what, detail=detail))
        except StoreError as full:
            _log.error("event not stored", what=what, reason=str(full))


def _whole(seals: IntegrityFacts) -> FingerprintPlan:
    return FingerprintPlan(steps=seals.steps)


def _after_a_change(verdict: CheckpointVerdict | None) -> CheckpointVerdict | None:
    """Nobody has compared the new bytes with anything; but what was wrong stays so until the next check."""
    return None if verdict is None or verdict.verified else verdict
