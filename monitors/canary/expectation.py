"""What the canary expects: answers of the healthy server, and how far rounding moved them.

A server does not give the same log probabilities twice: with other requests beside it a prompt is computed in another
batch, by other kernels, and is rounded otherwise.  So the prompts are asked several times, alone and all at once, and
what moved between these runs is the tolerance.  Where two tokens lie so close that rounding may turn one into the
other, the rest of that answer says nothing: it is not compared.

Moves are measured as scatter, |change of log p| / (1 - p).  To first order a change e of the logits changes log p of
token i by e_i - sum_j p_j e_j, which is at most 2 (1 - p_i) max |e|: a sure token moves little, so little is allowed to
it, and a fault shows there first.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from ..differential.reference import Conditions
from ..strict import Wire
from .answers import Answer
from .plan import PROMPTS

FORMAT = 1

FACTOR = 3.0
"""So many times the largest scatter of the runs is allowed: a few runs need not meet the worst batch."""

FLOOR = 0.1
"""The least that is allowed, where the runs repeat themselves bit for bit: others beside them may still round."""

MOST = 1.5
"""A server whose answers scatter by more than this would have to be allowed, gives nothing to compare with."""

_LEAST_DOUBT = 0.05
"""1 - p counts as no less: near p = 1 what is left is the rounding of log p itself."""


class ReferenceKind(StrEnum):
    """Where expected answers come from."""

    RECORDED = "recorded"
    """An operator vouched for them."""
    FIRST = "first"
    """The first answers of this vLLM process."""


class Unstable(ValueError):
    """The runs differ by more than rounding; one sentence."""


class Expected(Wire):
    """The answer to one prompt, as far as all runs agree."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float | None, ...]

    @classmethod
    def of(cls, answer: Answer, length: int | None = None) -> "Expected":
        """The first tokens of a finite answer; all of them without a length."""
        numbers = tuple(value for value in answer.logprobs if value is not None)
        return cls(tokens=answer.tokens[:length], logprobs=numbers[:length], margins=answer.margins[:length])


class Expectation(Wire):
    """The answers to all prompts, whose they are, and what is allowed."""

    format: int = FORMAT
    recorded_at: float
    """Epoch seconds."""
    conditions: Conditions
    prompts: tuple[str, ...]
    answers: tuple[Expected, ...]
    runs: int
    scatter: float
    """The largest between the runs."""
    tolerance: float
    """The scatter that is allowed."""


class Comparison(NamedTuple):
    """One answer against what was expected."""

    scatter: float
    """The largest, as far as the two were compared; infinite for another token."""
    position: int
    """Of the token with it."""
    expected: float
    """Its log probability that was expected, nats."""
    found: float | None
    """What was found at its place; None where the answer had ended, or gave no number."""
    other_token: bool


def make_expectation(runs: Sequence[Sequence[Answer]], conditions: Conditions, recorded_at: float) -> Expectation:
    """What to expect, from several runs over all prompts, all of them finite.

    The first run is what counts; the others say how far it moves.  Raises `Unstable` where they differ by more than
    rounding can explain.
    """
    scatter = 0.0
    answers = []
    for first, *others in zip(*runs, strict=True):
        length = len(first.tokens)
        for other in others:
            moved, agreed = _moved(Expected.of(first), other)
            scatter, length = max(scatter, moved), min(length, agreed)
        answers.append(Expected.of(first, length))
    tolerance = max(FLOOR, FACTOR * scatter)
    if tolerance > MOST:
        raise Unstable(
            f"The answers of {len(runs)} runs scatter by {scatter:.3g} (|change of log p| / (1 - p)): that is no "
            "rounding, so there is nothing to compare with."
        )
    return Expectation(
        recorded_at=recorded_at,
        conditions=conditions,
        prompts=PROMPTS,
        answers=tuple(answers),
        runs=len(runs),
        scatter=scatter,
        tolerance=tolerance,
    )


def compare(expected: Expected, answer: Answer, tolerance: float) -> Comparison | None:
    """The worst of one answer, up to the first near tie that turned; None where nothing could be compared."""
    worst: Comparison | None = None
    for position, (token, logprob, margin) in enumerate(
        zip(expected.tokens, expected.logprobs, expected.margins, strict=True)
    ):
        if position >= len(answer.tokens):
            return Comparison(math.inf, position, logprob, None, other_token=True)
        found = answer.logprobs[position]
        if answer.tokens[position] != token:
            near_tie = margin is not None and margin <= tolerance
            return worst if near_tie else Comparison(math.inf, position, logprob, found, other_token=True)
        moved = math.inf if found is None else _scatter(logprob, found)
        if worst is None or moved > worst.scatter:
            worst = Comparison(moved, position, logprob, found, other_token=False)
    return worst


def misfit(expectation: Expectation, now: Conditions) -> str | None:
    """Why this is not what the live model must answer, half a sentence; None when it is."""
    then = expectation.conditions
    if expectation.format != FORMAT or expectation.prompts != PROMPTS:
        return "the recorded answers are to the prompts of another version of Flipwatch"
    if None in (then.model_digest, now.model_digest):
        return "nothing says whose answers were recorded, the probe has no digest of the weights"
    if then.model_digest != now.model_digest:
        return f"the answers were recorded of {then.model}, loaded with other weights"
    for name in ("dtype", "engine", "torch_version", "hardware", "tensor_parallel_size"):
        one, other = getattr(then, name), getattr(now, name)
        if one != other:
            return f"the answers were recorded with another {name.replace('_', ' ')}: {one}, not {other}"
    return None


def _moved(expected: Expected, other: Answer) -> tuple[float, int]:
    """How far another run scatters, and up to which token the two agree."""
    moved = 0.0
    length = min(len(expected.tokens), len(other.tokens))
    for position in range(length):
        logprob, margin, found = expected.logprobs[position], expected.margins[position], other.logprobs[position]
        if expected.tokens[position] != other.tokens[position]:
            # The two best have changed places: what lay between them has moved.
            return max(moved, math.inf if margin is None else margin), position
        moved = max(moved, math.inf if found is None else _scatter(logprob, found))
    return (moved if len(expected.tokens) == len(other.tokens) else math.inf), length


def _scatter(expected: float, found: float) -> float:
    return abs(found - expected) / max(1.0 - math.exp(expected), _LEAST_DOUBT)
