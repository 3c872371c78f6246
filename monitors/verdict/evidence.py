"""Evidence about one server: what the monitors found, as questions that are answered with yes, no or unknown.

Findings are of different times.  A monitor that found nothing wrong before another one began to see something says
nothing about what that one sees: its `no` becomes unknown, and it is named among those that ought to look again.  So a
clean sweep of five minutes ago does not make a fault of one minute ago a compute fault.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from ..alpha_scan.finding import AlphaScanFinding
from ..canary.finding import NAME as CANARY
from ..canary.finding import CanaryFinding, Symptom
from ..canary.pulse import Beat, Pulse
from ..differential.facts import NAME as DIFFERENTIAL
from ..differential.finding import DifferentialFinding
from ..finding import Finding, Health
from ..fingerprint.judgement import NAME as FINGERPRINT
from ..fingerprint.judgement import FingerprintFinding

F = TypeVar("F", bound=Finding)

ALPHA_SCAN = "alpha_scan"
HEARTBEAT = "heartbeat"


class Question(StrEnum):
    """What is asked of the evidence."""

    HUNG = "hung"
    """Do requests wait while nothing moves?"""
    BYTES_CHANGED = "bytes_changed"
    """Are there bytes of the weights that are not those of the baseline?"""
    BLOCK_STANDS_OUT = "block_stands_out"
    """Does a block do harm, or compute something else than its reference, while it is served at alpha 1?"""
    LOSS_OFF = "loss_off"
    """Is the loss not finite, or above its healthy value?"""
    ANSWERS_WRONG = "answers_wrong"
    """Are answers through the server's real path wrong?"""
    MITIGATED = "mitigated"
    """Is a block left out or scaled now?"""
    LOADED_BAD = "loaded_bad"
    """Were the weights bad when they were loaded, or are they not the checkpoint's, or is that not the publisher's?"""


class Answer(StrEnum):
    """To a question."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


class Sign(BaseModel):
    """One question, answered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    question: Question
    answer: Answer
    sentence: str
    """Why, with the numbers; without a capital and a full stop."""


@dataclass(frozen=True)
class Seen(Generic[F]):
    """The last finding of one monitor that still counts."""

    finding: F | None
    """None: there is none."""
    why: str = ""
    """Why there is none, one sentence."""
    began: float = 0.0
    """When its measurement began, epoch seconds."""
    since: float = 0.0
    """When the first of the findings ended that say the same without a break, epoch seconds."""


@dataclass(frozen=True)
class Heard:
    """All that is known of one server."""

    fingerprint: Seen[FingerprintFinding]
    scan: Seen[AlphaScanFinding]
    differential: Seen[DifferentialFinding]
    canary: Seen[CanaryFinding]
    beat: Beat
    gates: tuple[float, ...] | None
    """Alpha of each block as served; None where that is not known."""


@dataclass(frozen=True)
class Evidence:
    """All questions, answered."""

    signs: Mapping[Question, Sign]
    """In the order in which they are told."""
    witnesses: Mapping[Question, tuple[str, ...]]
    """Monitors that say yes."""
    stale: tuple[str, ...]
    """Monitors whose `no` is older than what others see."""
    blocks: tuple[int, ...]
    """Blocks that the evidence points at."""

    @property
    def answers(self) -> dict[Question, Answer]:
        """Without the sentences."""
        return {question: sign.answer for question, sign in self.signs.items()}


@dataclass(frozen=True)
class _Reply:
    """An answer, whose it is, and from when."""

    answer: Answer
    sentence: str
    monitors: tuple[str, ...] = ()
    began: float = 0.0
    """Of a `no`."""
    since: float = 0.0
    """Of a `yes`."""


def gather(heard: Heard) -> Evidence:
    """Answer all questions."""
    gates = heard.gates
    replies = {
        Question.HUNG: _hung(heard.beat),
        Question.BYTES_CHANGED: _bytes_changed(heard.fingerprint),
        Question.BLOCK_STANDS_OUT: _block(heard.scan, heard.differential, gates),
        Question.LOSS_OFF: _loss(heard.scan, heard.differential),
        Question.ANSWERS_WRONG: _answers(heard.canary, gates),
        Question.MITIGATED: _mitigated(gates),
        Question.LOADED_BAD: _loaded_bad(heard.fingerprint),
    }
    stale: list[str] = []
    signs = {}
    for question, reply in replies.items():
        newer = _newer(reply, replies)
        if newer is not None:
            stale += [monitor for monitor in reply.monitors if monitor not in stale]
            reply = _Reply(Answer.UNKNOWN, f"{_listed(reply.monitors)} looked before {_listed(newer)} saw that")
        signs[question] = Sign(question=question, answer=reply.answer, sentence=reply.sentence)
    return Evidence(
        signs=signs,
        witnesses={question: reply.monitors for question, reply in replies.items() if reply.answer is Answer.YES},
        stale=tuple(stale),
        blocks=_blocks(heard),
    )


_MEASURED = (Question.BYTES_CHANGED, Question.BLOCK_STANDS_OUT, Question.LOSS_OFF, Question.ANSWERS_WRONG)
"""Questions whose answers must be of the same time."""


def _newer(reply: _Reply, replies: Mapping[Question, _Reply]) -> tuple[str, ...] | None:
    """The monitors of a sign that began after this `no` was measured."""
    if reply.answer is not Answer.NO or not reply.monitors:
        return None
    for question in _MEASURED:
        other = replies[question]
        if other.answer is Answer.YES and reply.began < other.since and not set(other.monitors) & set(reply.monitors):
            return other.monitors
    return None


def _hung(beat: Beat) -> _Reply:
    told = _half(beat.reason)
    if beat.pulse is Pulse.HUNG:
        return _Reply(Answer.YES, told, (HEARTBEAT,))
    return _Reply(Answer.UNKNOWN if beat.pulse is Pulse.UNKNOWN else Answer.NO, told)


def _bytes_changed(seen: Seen[FingerprintFinding]) -> _Reply:
    finding = seen.finding
    if finding is None:
        return _Reply(Answer.UNKNOWN, _missing(FINGERPRINT, seen.why))
    if finding.bad_chunks:
        verb = "differs" if finding.bad_chunks == 1 else "differ"
        first = finding.bad[0].pieces[0].tensor if finding.bad and finding.bad[0].pieces else None
        where = "" if first is None else f", first in {first}"
        sentence = f"{finding.bad_chunks} of {finding.chunks} chunks of the weights {verb} from the baseline{where}"
        return _Reply(Answer.YES, sentence, (FINGERPRINT,), since=seen.since)
    if finding.doubts or not finding.chunks:
        why = finding.doubts[0] if finding.doubts else "nothing was compared"
        return _Reply(Answer.UNKNOWN, f"whether bytes have changed is not known: {why}")
    return _Reply(
        Answer.NO, f"all {finding.chunks} chunks of the weights are as loaded", (FINGERPRINT,), began=seen.began
    )


def _block(
    seen: Seen[AlphaScanFinding], compared: Seen[DifferentialFinding], gates: tuple[float, ...] | None
) -> _Reply:
    scan, differential = seen.finding, compared.finding
    flagged = () if scan is None else scan.places
    # Alone, a block is compared at alpha 1, though it may be left out of what is served.
    departing = [
        place for place in (() if differential is None else differential.places) if _alpha(place.block, gates) == 1.0
    ]
    witnesses = [(ALPHA_SCAN, seen.since)] * bool(flagged) + [(DIFFERENTIAL, compared.since)] * bool(departing)
    if witnesses:
        reasons = [place.reason for place in (flagged[:1] or departing[:1])]
        more = len({place.block for place in (*flagged, *departing)}) - 1
        sentence = reasons[0] + (f" (and {more} more)" if more else "")
        return _Reply(
            Answer.YES,
            sentence,
            tuple(monitor for monitor, _ in witnesses),
            # They may see two faults: a `no` must be newer than both.
            since=max(since for _, since in witnesses),
        )
    if scan is None or scan.health is Health.UNKNOWN:
        return _Reply(Answer.UNKNOWN, _missing(ALPHA_SCAN, seen.why if scan is None else scan.reason))
    also = "" if differential is None or differential.health is not Health.OK else ", nor departs from its reference"
    return _Reply(Answer.NO, f"none of {len(scan.blocks)} blocks does harm{also}", (ALPHA_SCAN,), began=seen.began)


def _loss(seen: Seen[AlphaScanFinding], compared: Seen[DifferentialFinding]) -> _Reply:
    scan, differential = seen.finding, compared.finding
    if scan is not None and scan.health is Health.FAILED and scan.base_loss_nats is None:
        return _Reply(Answer.YES, "the loss is not finite", (ALPHA_SCAN,), since=seen.since)
    whole = scan is not None and all(gate == 1.0 for gate in scan.gates)
    drift = None if scan is None or not whole else scan.drift_nats
    if scan is not None and drift is not None and scan.thresholds.drifts(drift):
        told = f"the loss is {_nats(scan.base_loss_nats)}, {drift:+.3f} against the clean profile"
        return _Reply(Answer.YES, told, (ALPHA_SCAN,), since=seen.since)
    if differential is not None and not differential.places and differential.health in (Health.FAILED, Health.DEGRADED):
        told = f"the model departs from what is {differential.reference.value}, though no block does alone"
        if differential.nats is not None and differential.reference_nats is not None:
            told += f" (loss {_nats(differential.nats)}, was {_nats(differential.reference_nats)})"
        return _Reply(Answer.YES, told, (DIFFERENTIAL,), since=compared.since)
    if scan is None or scan.base_loss_nats is None:
        return _Reply(Answer.UNKNOWN, "the loss is not known")
    base = f"the loss is {_nats(scan.base_loss_nats)}"
    if drift is not None:
        return _Reply(Answer.NO, f"{base}, {drift:+.3f} against the clean profile", (ALPHA_SCAN,), began=seen.began)
    why = "no clean profile says what it ought to be" if whole else "a profile says nothing of a gated model"
    return _Reply(Answer.UNKNOWN, f"{base}, and {why}")


def _answers(seen: Seen[CanaryFinding], gates: tuple[float, ...] | None) -> _Reply:
    finding = seen.finding
    if finding is None:
        return _Reply(Answer.UNKNOWN, _missing(CANARY, seen.why))
    told = f"the canary: {_half(finding.reason)}"
    gated = any(gate != 1.0 for gate in gates or ())
    # Nothing is expected of a gated model but that its answers are sound by themselves.
    sound = finding.symptom is Symptom.NONE and finding.answered > 0
    if finding.health is Health.OK or (gated and sound):
        return _Reply(Answer.NO, told, (CANARY,), began=seen.began)
    # A busy server is late, and no answer is none that is wrong; a hung one is told by the heartbeat.
    if finding.health is Health.UNKNOWN or finding.symptom is Symptom.TIMED_OUT:
        return _Reply(Answer.UNKNOWN, told)
    return _Reply(Answer.YES, told, (CANARY,), since=seen.since)


def _mitigated(gates: tuple[float, ...] | None) -> _Reply:
    if gates is None:
        return _Reply(Answer.UNKNOWN, "the gates are not known")
    gated = [f"block {block} at alpha {gate:g}" for block, gate in enumerate(gates) if gate != 1.0]
    if not gated:
        return _Reply(Answer.NO, "all blocks are served in full")
    return _Reply(Answer.YES, f"served with {', '.join(gated)}")


def _loaded_bad(seen: Seen[FingerprintFinding]) -> _Reply:
    finding = seen.finding
    if finding is None:
        return _Reply(Answer.UNKNOWN, "the weights were not compared with the checkpoint")
    if finding.loaded_bad:
        return _Reply(Answer.YES, finding.loaded_bad[0], (FINGERPRINT,), since=seen.since)
    if finding.checkpoint_verified:
        # Not of one time with the others: what was loaded does not change.
        return _Reply(Answer.NO, "the weights were the checkpoint's when that was checked")
    return _Reply(Answer.UNKNOWN, "the weights were not compared with the checkpoint")


def _blocks(heard: Heard) -> tuple[int, ...]:
    pointed: set[int] = set()
    if heard.fingerprint.finding is not None:
        pointed |= set(heard.fingerprint.finding.blocks)
    for finding in (heard.scan.finding, heard.differential.finding):
        if finding is not None:
            pointed |= {place.block for place in finding.places}
    return tuple(sorted(pointed))


def _alpha(block: int, gates: tuple[float, ...] | None) -> float:
    return 1.0 if gates is None or block >= len(gates) else gates[block]


def _missing(monitor: str, why: str) -> str:
    told = f": {_half(why)}" if why else ""
    return f"nothing is known from {monitor}{told}"


def _half(sentence: str) -> str:
    """As a part of a longer sentence: names such as `vLLM` keep their letters."""
    bare = sentence.rstrip(".")
    return bare if bare[1:2].isupper() else bare[:1].lower() + bare[1:]


def _listed(monitors: tuple[str, ...]) -> str:
    return " and ".join(monitors)


def _nats(nats: float | None) -> str:
    return "not finite" if nats is None else f"{nats:.3f} nats"
