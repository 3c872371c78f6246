"""The canary as jobs for a runner: fixed prompts asked like any client asks, and what is expected of the answers.

It does not hold the engine, so it waits for nobody who does.  Each replica of a data-parallel server is judged by
itself.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..monitors.alpha_scan import AlphaScan
from ..monitors.canary.answers import CanaryReading, Failure
from ..monitors.canary.expectation import Expectation, ReferenceKind, Unstable, make_expectation, misfit
from ..monitors.canary.finding import NAME, CanaryFinding, Symptom
from ..monitors.canary.judgement import Reference, judge, symptom_of
from ..monitors.canary.plan import PROMPTS
from ..monitors.differential.facts import NAME as DIFFERENTIAL
from ..monitors.finding import Finding, Health
from ..monitors.fingerprint.judgement import NAME as FINGERPRINT
from ..monitors.wire import ModelFacts
from .asking import PATIENCE_SECONDS, Asking
from .baseline import BaselineError, check_recordable
from .heart import Heart
from .job import Job, Note, Outcome
from .live import Live
from .measuring import ModelChanged, ScanError
from .probe import ProbeAsleep, ProbeError
from .recordings import conditions
from .records import ScanTrigger
from .replicas import worst
from .settings import CanarySettings
from .store import StoreError
from .vllm import Vllm
from .vouched import Vouched
from .watcher import Watcher

# All prompts at once, so many times over: two sizes of batch other than one.
_COPIES = (1, 2)

_DIFFER = "the engines answer otherwise than each other, and nobody knows which one is right"


@dataclass(frozen=True)
class _First:
    """The first answers, and whose they are."""

    boot_id: str
    baseline: float | None
    """Of the weights when they came, epoch seconds; None where it was not known."""
    expectation: Expectation


class Canaries:
    """Makes the jobs of the canary."""

    def __init__(
        self,
        settings: CanarySettings,
        live: Live,
        watcher: Watcher,
        vllm: Vllm,
        heart: Heart,
        expectations: Vouched[Expectation],
        now: Callable[[], float],
    ) -> None:
        self._asking = Asking(vllm, live, heart, settings.timeout_seconds)
        self._live = live
        self._watcher = watcher
        self._expectations = expectations
        self._now = now
        self._first: _First | None = None

    def job(self, trigger: ScanTrigger) -> Job:
        """Ask now."""

        async def measure(note: Note) -> Outcome:
            facts = await self._look()
            readings = await self._asking.one_by_one(facts or self._live.facts, note)
            await self._same_model(facts, timed_out=_timed_out(readings))
            reference, why_not = self._reference(facts)
            if facts is not None and reference is None and self._may_be_first(facts, readings):
                return Outcome(await self._become_first(facts, readings), [])
            return Outcome(_judged(readings, reference, why_not), [])

        return Job(NAME, trigger, measure)

    def record(self, actor: str) -> Job:
        """Ask several times, alone and all at once; sound answers of the model as it is now are what is expected."""

        async def measure(note: Note) -> Outcome:
            facts = await self._watcher.look()
            try:
                self.check_recordable(facts)
                readings = await self._asking.one_by_one(facts, note)
                await self._same_model(facts, timed_out=_timed_out(readings))
                for engine, reading in readings.items():
                    symptom, wrong = symptom_of(reading, None)
                    if symptom is not Symptom.NONE:
                        who = f"Engine {engine}, prompt" if len(readings) > 1 else "Prompt"
                        raise BaselineError(f"{who} {next(iter(wrong))} {next(iter(wrong.values()))}.")
                made = await self._expected(facts, readings)
                finding = _judged(readings, Reference(ReferenceKind.RECORDED, made))
                if finding.health is not Health.OK and len(readings) > 1:
                    raise BaselineError(f"{finding.reason.rstrip('.')}; {_DIFFER}.")
                self._expectations.keep(made, actor)
            except (BaselineError, StoreError, Unstable) as error:
                why = str(error).rstrip(".")
                reason = f"No answers were recorded: {why}"
                return Outcome(
                    Finding(monitor=NAME, health=Health.UNKNOWN, reason=reason), [], recording_refusal=f"{why}."
                )
            return Outcome(finding, [])

        return Job(NAME, ScanTrigger.BASELINE, measure)

    def check_recordable(self, facts: ModelFacts) -> None:
        """Raises `BaselineError` when answers of this model must not become what is expected."""
        check_recordable(facts)
        for monitor in (AlphaScan.name, FINGERPRINT, DIFFERENTIAL):
            state = self._live.state(monitor)
            if state.health is Health.FAILED:
                raise BaselineError(
                    f"No answers are recorded of a model that is failed by {monitor}: {state.reason.rstrip('.')}."
                )

    # What is expected

    def _reference(self, facts: ModelFacts | None) -> tuple[Reference | None, str | None]:
        """What the answers are held against, and why against nothing or nothing better, half a sentence."""
        if facts is None:
            return None, "the probe inside vLLM does not answer, so nothing says which model this is"
        gated = [str(block) for block, alpha in enumerate(facts.gates) if alpha != 1.0]
        if gated:
            return None, f"answers are expected of the whole model, and block {', '.join(gated)} is not in it as it was"
        recorded, why_not = self._expectations.current, self._misfit(facts)
        if recorded is not None and why_not is None:
            return Reference(ReferenceKind.RECORDED, recorded), None
        if self._first is not None and self._first_fits(self._first, facts):
            return Reference(ReferenceKind.FIRST, self._first.expectation), why_not
        none = "this vLLM process has given no answers that can be trusted"
        return None, none if why_not is None else f"{why_not}, and {none}"

    def _misfit(self, facts: ModelFacts) -> str | None:
        """Why the recorded answers are not used; None where they are, or there are none."""
        recorded = self._expectations.current
        return None if recorded is None else misfit(recorded, conditions(facts))

    def _first_fits(self, first: _First, facts: ModelFacts) -> bool:
        """Whether these are first answers of this process, and no baseline was taken anew since."""
        now = self._baseline()
        if first.baseline is None:
            # They came before the first sweep told of the baseline.
            self._first = replace(first, baseline=now)
        return first.boot_id == facts.boot_id and (None in (first.baseline, now) or first.baseline == now)

    def _baseline(self) -> float | None:
        """When the baseline of the weights was taken: a new one means that they were changed on purpose."""
        known = self._live.integrity.facts
        return None if known is None else max((rank.recorded_at for rank in known.ranks), default=None)

    def _may_be_first(self, facts: ModelFacts, readings: Mapping[int, CanaryReading]) -> bool:
        """Nobody vouches for first answers, so nothing at all may speak against them."""
        untouched = not facts.faults and all(alpha == 1.0 for alpha in facts.gates)
        suspected = any(
            self._live.state(monitor).health is Health.FAILED for monitor in (AlphaScan.name, FINGERPRINT, DIFFERENTIAL)
        )
        sound = all(symptom_of(reading, None)[0] is Symptom.NONE for reading in readings.values())
        return untouched and not suspected and sound

    async def _become_first(self, facts: ModelFacts, readings: Mapping[int, CanaryReading]) -> CanaryFinding:
        try:
            made = await self._expected(facts, readings)
        except Unstable as unstable:
            return _judged(readings, None, str(unstable).rstrip("."))
        finding = _judged(readings, Reference(ReferenceKind.FIRST, made), self._misfit(facts))
        if finding.health is not Health.OK and len(readings) > 1:
            return finding.model_copy(update={"reason": f"{finding.reason.rstrip('.')}; {_DIFFER}"})
        self._first = _First(facts.boot_id, self._baseline(), made)
        return finding

    async def _expected(self, facts: ModelFacts, readings: Mapping[int, CanaryReading]) -> Expectation:
        """What to expect of all replicas, by the answers of the first.

        Raises `Unstable`, or `ScanError` where a later answer does not come.
        """
        first = next(iter(readings))
        reading = readings[first]
        runs = [reading.anew, reading.again]
        for copies in _COPIES:
            asked = await self._asking.at_once(facts, first, copies)
            if any(not answer.finite for answer in asked):
                raise ScanError("Not all prompts were answered when they were asked at once.")
            runs += [tuple(asked[start : start + len(PROMPTS)]) for start in range(0, len(asked), len(PROMPTS))]
        await self._same_model(facts)
        return make_expectation(runs, conditions(facts), self._now())

    # The model that is asked

    async def _look(self) -> ModelFacts | None:
        """The model as it is now; None where the probe does not say, which must not keep the canary from asking.

        Raises `ProbeAsleep`: an engine that somebody told to stand still owes nobody an answer.
        """
        look = asyncio.ensure_future(self._watcher.look())
        # It goes on by itself: what it sees is true, however late.
        look.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait({look}, timeout=PATIENCE_SECONDS)
        try:
            return look.result() if look.done() else None
        except ProbeAsleep:
            raise
        except ProbeError:
            return None

    async def _same_model(self, before: ModelFacts | None, *, timed_out: bool = False) -> None:
        """Raises `ModelChanged` where the answers are of two models, unless they `timed_out`; `ProbeAsleep` where vLLM
        was put to sleep."""
        after = await self._look()
        if before is None or after is None or timed_out:
            return
        if (after.boot_id, after.gates, after.faults) != (before.boot_id, before.gates, before.faults):
            raise ModelChanged("The model was changed while it was asked.")


def _timed_out(readings: Mapping[int, CanaryReading]) -> bool:
    """Whether none of them is whole: that no answer comes is true of whatever model it is."""
    return all(any(answer.failure is Failure.TIMED_OUT for answer in one.answers) for one in readings.values())


def _judged(
    readings: Mapping[int, CanaryReading], reference: Reference | None, why_not: str | None = None
) -> CanaryFinding:
    findings = {engine: judge(reading, reference, why_not) for engine, reading in readings.items()}
    slowest = max((one.seconds for one in findings.values() if one.seconds is not None), default=None)
    return worst(findings, _rank).model_copy(update={"seconds": slowest})


def _rank(finding: CanaryFinding) -> tuple[bool, int, float]:
    """Of engines of the same health, the worst first: one whose answers are wrong, one that gave fewer, one that moved
    further."""
    return finding.symptom is Symptom.TIMED_OUT, finding.answered, -(finding.scatter or 0.0)
