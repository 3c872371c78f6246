"""The comparison with a clean model as jobs for the runner, and the recording of states to be compared with."""

from collections.abc import Callable

from ..monitors.alpha_scan import AlphaScan
from ..monitors.differential.facts import NAME, DifferentialPlan
from ..monitors.differential.finding import DifferentialFinding
from ..monitors.differential.judgement import judge
from ..monitors.differential.reference import Recording, ReferenceKind, misfit
from ..monitors.finding import Finding, Health
from ..monitors.fingerprint.judgement import NAME as FINGERPRINT
from ..monitors.wire import ModelFacts
from .baseline import BaselineError, check_recordable
from .differential_measure import read_states
from .job import Job, Note, Outcome
from .live import Live
from .measuring import Measurer, ScanError
from .peer import Peer
from .recordings import conditions, not_finite
from .records import ScanTrigger
from .replicas import worst
from .settings import DifferentialSettings
from .store import StoreError
from .validation_set import ValidationSet
from .vouched import Vouched
from .watcher import Watcher

_SEQUENCES = 8
_TOKENS = 64


class Differentials:
    """Makes the jobs of the differential monitor; `peer` is None where none is set up."""

    def __init__(
        self,
        settings: DifferentialSettings,
        measurer: Measurer,
        live: Live,
        watcher: Watcher,
        validation: ValidationSet,
        recordings: Vouched[Recording],
        now: Callable[[], float],
        peer: Peer | None,
    ) -> None:
        self._kind = settings.reference
        self._limit = settings.limit
        self._measurer = measurer
        self._live = live
        self._watcher = watcher
        self._validation = validation
        self._recordings = recordings
        self._now = now
        self._peer = peer

    def job(self, trigger: ScanTrigger, kind: ReferenceKind | None = None) -> Job:
        """The model against a reference; without a kind, against that of the settings."""

        async def measure(note: Note) -> Outcome:
            facts = await self._look()
            which = kind or self._kind
            if which is ReferenceKind.CHECKPOINT:
                finding = await self._against_checkpoint(facts, note)
            elif which is ReferenceKind.PEER:
                finding = await self._against_peer(facts, note)
            else:
                finding = await self._against(ReferenceKind.RECORDED, self._kept(facts), facts, note)
            # No readings are kept: they have megabytes, and the finding has the numbers.
            return Outcome(finding, [])

        return Job(NAME, trigger, measure)

    def record(self, actor: str) -> Job:
        """States of the model as it is now, known to be good; then the model against them, which must agree."""

        async def measure(note: Note) -> Outcome:
            facts = await self._look()
            try:
                return Outcome(await self._recorded(facts, actor, note), [])
            except (BaselineError, StoreError) as error:
                why = str(error).rstrip(".")
                reason = f"No states were recorded: {why}"
                return Outcome(
                    Finding(monitor=NAME, health=Health.UNKNOWN, reason=reason), [], recording_refusal=f"{why}."
                )

        return Job(NAME, ScanTrigger.BASELINE, measure)

    def check_recordable(self, facts: ModelFacts) -> None:
        """Raises `BaselineError` when states of this model must not become what is normal."""
        check_recordable(facts)
        for monitor in (AlphaScan.name, FINGERPRINT, NAME):
            state = self._live.state(monitor)
            found = state.finding
            # Old states or a peer may differ because the weights were changed on purpose: that is why one records anew.
            other = isinstance(found, DifferentialFinding) and found.reference is not ReferenceKind.CHECKPOINT
            if state.health is Health.FAILED and not other:
                raise BaselineError(
                    f"No states are recorded of a model that is failed by {monitor}: {state.reason.rstrip('.')}."
                )

    async def _look(self) -> ModelFacts:
        facts = await self._watcher.look()
        if facts.scan_refusal is not None:
            raise ScanError(f"This model cannot be measured: {facts.scan_refusal}")
        return facts

    async def _tokens(self, longest: int) -> list[list[int]]:
        if self._live.model_name is None:
            raise ScanError("vLLM does not say under which name it serves the model, so nothing can be tokenised.")
        found = await self._validation.sequences(self._live.model_name, min(_TOKENS, longest))
        rows = found.tokens[:_SEQUENCES]
        # A walk takes all of them at once, and the server so many tokens.
        return rows[: max(1, longest // max(map(len, rows)))]

    def _kept(self, facts: ModelFacts) -> Recording:
        recording = self._recordings.current
        if recording is None:
            raise ScanError(
                "There is nothing to compare with: record states first (`flipwatch differential record`), while the "
                "model is known to be good."
            )
        why = misfit(recording, conditions(facts), same_weights=True)
        if why is not None:
            raise ScanError(why)
        return recording

    async def _recorded(self, facts: ModelFacts, actor: str, note: Note) -> DifferentialFinding:
        self.check_recordable(facts)
        plan = DifferentialPlan(tokens=await self._tokens(facts.max_tokens), noise=True)
        # Replicas are alike: the states of the first are those of all, if none is found to depart from them.
        reading, steps = await read_states(self._measurer, plan, facts, facts.engines[0], note)
        why = not_finite(reading, plan.size)
        if why is not None:
            raise BaselineError(why)
        made = Recording(recorded_at=self._now(), conditions=conditions(facts), plan=plan, reading=reading)
        finding = await self._against(ReferenceKind.RECORDED, made, facts, note, before=steps)
        if finding.health is not Health.OK:
            raise BaselineError(f"The model is {finding.health.value} against its own states: {finding.reason}")
        self._recordings.keep(made, actor)
        return finding

    async def _against_checkpoint(self, facts: ModelFacts, note: Note) -> DifferentialFinding:
        plan = DifferentialPlan(tokens=await self._tokens(facts.max_tokens), checkpoint=True, noise=True)
        findings, steps = {}, 0
        for engine in facts.engines:
            reading, more = await read_states(self._measurer, plan, facts, engine, note, before=steps)
            findings[engine] = judge(reading, ReferenceKind.CHECKPOINT, None, conditions(facts), self._limit, plan.size)
            steps += more
        return worst(findings)

    async def _against_peer(self, facts: ModelFacts, note: Note) -> DifferentialFinding:
        if self._peer is None:
            raise ScanError("There is no peer: set differential.peer_url and a token for it.")
        there = await self._peer.fitting(facts)
        plan = DifferentialPlan(tokens=await self._tokens(min(there.max_tokens, facts.max_tokens)), noise=True)
        recording, steps = await self._peer.record(there, plan, note, self._now())
        return await self._against(ReferenceKind.PEER, recording, facts, note, before=steps)

    async def _against(
        self, kind: ReferenceKind, recording: Recording, facts: ModelFacts, note: Note, *, before: int = 0
    ) -> DifferentialFinding:
        """Replay a recording in the live model."""
        findings, steps = {}, before
        for engine in facts.engines:
            reading, more = await read_states(self._measurer, recording.replay(), facts, engine, note, before=steps)
            findings[engine] = judge(reading, kind, recording, conditions(facts), self._limit)
            steps += more
        return worst(findings)
