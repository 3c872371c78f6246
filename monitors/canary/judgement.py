"""From the canary's answers to a finding.

Without a reference an answer is degenerate when one token comes `REPEATED` times in a row, and the model when half of
its answers are; or when its best tokens have a log probability below `SOUP_NATS` on average over all answers.
SmolLM2-135M has -0.5 there when it is healthy, and no token twice in a row; with one exponent bit flipped in an
attention output -10.8, which is the log probability of guessing; with one norm weight scaled 16 times the same token.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from ..finding import Action, Health
from ..moment import utc
from .answers import CanaryReading, Failure
from .expectation import Comparison, Expectation, Expected, ReferenceKind, compare
from .finding import NAME, CanaryFinding, Symptom

SOUP_NATS = -4.0
REPEATED = 8

UNMEASURED = 0.6
"""The scatter that is allowed between an answer computed anew and one from the cache while none has been measured:
several times what rounding to bf16 does."""


@dataclass(frozen=True)
class Reference:
    """What the answers are held against."""

    kind: ReferenceKind
    expectation: Expectation


Wrong = Mapping[int, str]
"""Place of a prompt -> what is wrong with its answer, half a sentence with the numbers."""


def judge(reading: CanaryReading, reference: Reference | None, why_not: str | None = None) -> CanaryFinding:
    """What the answers say; `why_not`: why there is no reference, or no better one, half a sentence."""
    symptom, wrong = symptom_of(reading, reference)
    if symptom is Symptom.TIMED_OUT and reading.busy is not False:
        how = "it computes other tokens meanwhile, so it is busy" if reading.busy else "its counters do not say why"
        return _finding(Health.UNKNOWN, f"{_told(reading, wrong)}; {how}.", reading, reference)
    if symptom is not Symptom.NONE:
        against = _held_against(reference, why_not) if symptom is Symptom.CHANGED else ""
        reason = f"{_told(reading, wrong)}{against}."
        return _finding(Health.FAILED, reason, reading, reference, symptom=symptom, wrong=tuple(wrong))
    sane = f"{len(reading.anew)} prompts were answered twice, sound and the same from the prefix cache"
    if reference is None:
        return _finding(Health.UNKNOWN, f"{sane}; they were compared with nothing: {why_not}.", reading, None)
    worst = _worst(reading, reference)
    moved = "nothing could be compared" if worst is None else f"the largest scatter is {worst.scatter:.3g}"
    allowed = f"{reference.expectation.tolerance:.3g} is allowed"
    return _finding(Health.OK, f"{sane}; {moved}, {allowed}{_held_against(reference, why_not)}.", reading, reference)


def symptom_of(reading: CanaryReading, reference: Reference | None) -> tuple[Symptom, Wrong]:
    """The first symptom that holds, and the prompts that have it."""
    return next(((symptom, wrong) for symptom, wrong in _looked_for(reading, reference) if wrong), (Symptom.NONE, {}))


def _looked_for(reading: CanaryReading, reference: Reference | None) -> Iterator[tuple[Symptom, Wrong]]:
    """Each symptom and who has it, one after the other: the later ones take for granted that no earlier one holds."""
    yield Symptom.NOT_FINITE, _not_finite(reading)
    yield Symptom.TIMED_OUT, _failed(reading, Failure.TIMED_OUT)
    yield Symptom.REFUSED, _failed(reading, Failure.REFUSED)
    yield Symptom.DEGENERATE, _degenerate(reading)
    yield (
        Symptom.CACHE_DIFFERS,
        _cache_differs(reading, UNMEASURED if reference is None else reference.expectation.tolerance),
    )
    if reference is not None:
        yield Symptom.CHANGED, _changed(reading, reference)


def _not_finite(reading: CanaryReading) -> Wrong:
    wrong = {}
    for answers in (reading.again, reading.anew):
        for place, answer in enumerate(answers):
            if answer.failure is Failure.NOT_FINITE or (answer.failure is None and not answer.finite):
                wrong[place] = answer.detail or "gave no finite log probability"
    return dict(sorted(wrong.items()))


def _failed(reading: CanaryReading, failure: Failure) -> Wrong:
    found = [*enumerate(reading.again), *enumerate(reading.anew)]
    return dict(sorted((place, answer.detail) for place, answer in found if answer.failure is failure))


def _degenerate(reading: CanaryReading) -> Wrong:
    """Half of the answers repeat one token, or all together know nothing."""
    repeated = {}
    values = []
    for place, answer in enumerate(reading.anew):
        longest = max((len(list(run)) for _, run in groupby(answer.tokens)), default=0)
        if longest >= REPEATED:
            repeated[place] = f"is one token {longest} times in a row"
        values += [value for value in answer.logprobs if value is not None]
    if repeated and 2 * len(repeated) >= len(reading.anew):
        return repeated
    mean = sum(values) / len(values) if values else 0.0
    if mean < SOUP_NATS:
        soup = f"has best tokens of {mean:.1f} nats on average over all prompts, less than {SOUP_NATS:g}"
        return dict.fromkeys(range(len(reading.anew)), soup)
    return {}


def _cache_differs(reading: CanaryReading, tolerance: float) -> Wrong:
    wrong = {}
    for place, (anew, again) in enumerate(zip(reading.anew, reading.again, strict=True)):
        found = compare(Expected.of(anew), again, tolerance)
        if found is not None and found.scatter > tolerance:
            wrong[place] = f"from the prefix cache {_departs(found, tolerance, 'computed anew')}"
    return wrong


def _changed(reading: CanaryReading, reference: Reference) -> Wrong:
    tolerance = reference.expectation.tolerance
    wrong = {}
    for place, (expected, answer) in enumerate(zip(reference.expectation.answers, reading.anew, strict=True)):
        found = compare(expected, answer, tolerance)
        if found is not None and found.scatter > tolerance:
            wrong[place] = _departs(found, tolerance, "expected")
    return wrong


def _departs(found: Comparison, tolerance: float, of_what: str) -> str:
    if found.other_token:
        value = "the end" if found.found is None else f"another of {found.found:.3g} nats"
        return f"has at token {found.position} {value} instead of the one {of_what} ({found.expected:.3g} nats)"
    value = "no number" if found.found is None else f"{found.found:.3g} nats"
    return (
        f"has at token {found.position} {value} instead of {found.expected:.3g} {of_what}, a scatter of "
        f"{found.scatter:.3g} where {tolerance:.3g} is allowed"
    )


def _worst(reading: CanaryReading, reference: Reference) -> Comparison | None:
    expectation = reference.expectation
    # After a time-out there are fewer answers than prompts.
    pairs = zip(expectation.answers, reading.anew, strict=False)
    found = [compare(expected, answer, expectation.tolerance) for expected, answer in pairs if answer.failure is None]
    return max((one for one in found if one is not None), key=lambda one: one.scatter, default=None)


def _told(reading: CanaryReading, wrong: Wrong) -> str:
    places = ", ".join(map(str, wrong))
    first = next(iter(wrong))
    asked = len(reading.anew)
    return f"{len(wrong)} of {asked} prompts ({places}) are answered wrong or not at all: {first} {wrong[first]}"


def _held_against(reference: Reference | None, why_not: str | None) -> str:
    if reference is None:
        return ""
    at = utc(reference.expectation.recorded_at)
    if reference.kind is ReferenceKind.RECORDED:
        return f" (against the answers recorded at {at})"
    remark = "" if why_not is None else f"; {why_not}"
    return f" (against the first answers of this vLLM process, at {at}{remark})"


def _finding(
    health: Health,
    reason: str,
    reading: CanaryReading,
    reference: Reference | None,
    *,
    symptom: Symptom = Symptom.NONE,
    wrong: tuple[int, ...] = (),
) -> CanaryFinding:
    worst = None if reference is None else _worst(reading, reference)
    answered = [not (anew.failure or again.failure) for anew, again in zip(reading.anew, reading.again, strict=False)]
    seconds = [answer.seconds for answer in reading.answers if answer.failure is None]
    return CanaryFinding(
        monitor=NAME,
        health=health,
        reason=reason,
        action=Action.INVESTIGATE if health is Health.FAILED else Action.NONE,
        symptom=symptom,
        wrong=wrong,
        reference=None if reference is None else reference.kind,
        answered=sum(answered),
        seconds=max(seconds, default=None),
        scatter=None if worst is None or worst.other_token or worst.found is None else worst.scatter,
        tolerance=None if reference is None else reference.expectation.tolerance,
    )
