"""Two models held against each other: an update and what it replaces, a quantised build and its original.

The same token sequences go through both.  A is recorded: what each of its blocks is fed, and what comes out.  The
blocks of B are fed the same, so that each is compared by itself, whatever the blocks in front of it have become.
Beside it both models are walked as served, and measured without each of their blocks (the alpha-scan's alpha 0).

One model is held at a time: A is closed before B is opened.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel

from .. import __version__
from ..monitors.alpha_scan import AlphaScan, AlphaScanFinding, AlphaScanPlan, AlphaScanReading
from ..monitors.differential.facts import DifferentialPlan, DifferentialReading
from ..monitors.differential.judgement import judge
from ..monitors.differential.monitor import Differential
from ..monitors.differential.reference import Conditions, Recording, ReferenceKind, misfit
from ..monitors.monitor import Monitor
from .compared import ComparedSide, Comparison, ranked, side_by_side

# Sequences x length of one block call: about as much as a step of serving.
_TOKENS_PER_STEP = 512

P = TypeVar("P", bound=BaseModel)
R = TypeVar("R", bound=BaseModel)

Note = Callable[[str, int, int], None]
"""Hears what is being measured, the steps done, and how many there are."""


class ComparisonError(Exception):
    """The two cannot be compared; the message is one sentence."""


class Shape(NamedTuple):
    """What two models must have in common, known before anything is measured."""

    architecture: str
    num_blocks: int
    longest: int
    """Tokens of the longest sequence that it takes."""


class OpenModel(Protocol):
    """A model that can be measured now."""

    conditions: Conditions

    @property
    def gates(self) -> Sequence[float]:
        """Alpha per block as served."""
        ...

    def measure(self, monitor: Monitor[Any, P, R, Any], plan: P, kind: type[R], note: Callable[[int, int], None]) -> R:
        """The whole of one plan; `kind` is the reading's type, and `note` hears of the steps."""
        ...


class Side(Protocol):
    """A checkpoint or a server.  Whatever is wrong with it is an error of one sentence."""

    source: str

    def shape(self) -> Shape:
        """Looked up without loading anything."""
        ...

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, with the special tokens that the tokenizer adds."""
        ...

    def opened(self, tokens: list[list[int]]) -> AbstractContextManager[OpenModel]:
        """The model, for as long as it is needed to measure these sequences."""
        ...


def compare(
    a: Side,
    b: Side,
    texts: Sequence[str],
    *,
    max_tokens: int,
    limit: float | None,
    gains: bool,
    note: Note = lambda what, done, total: None,
) -> Comparison:
    """Hold B against A.

    Args:
        a: The reference.
        b: What is judged.
        texts: The sequences; each is cut to `max_tokens`, or to what both sides take at once.
        max_tokens: At least 2.
        limit: Largest relative L2 distance of a block's output that is allowed; None: what noise explains.
        gains: Measure losses without each block, too.
        note: Hears of the progress.

    Raises:
        ComparisonError: the two have no vocabulary, architecture or number of blocks in common, or no text is long
            enough.
    """
    longest = _longest(a, b)
    tokens = _sequences(a, b, texts, min(max_tokens, longest))
    without = _without_each(tokens, longest) if gains else None
    recording, of_a, gains_a = _record(a, tokens, without, note)
    reading, of_b, gains_b = _replay(b, recording, without, note)
    finding = judge(reading, ReferenceKind.PEER, recording, of_b.conditions, limit)
    return Comparison(
        flipwatch_version=__version__,
        a=of_a,
        b=of_b,
        sequences=len(tokens),
        tokens=sum(map(len, tokens)),
        limit=limit,
        finding=finding,
        ranking=ranked(finding.blocks),
        blocks=side_by_side(gains_a, gains_b),
    )


def _longest(a: Side, b: Side) -> int:
    """Tokens that both take at once; refuses models whose blocks are no pairs."""
    one, other = a.shape(), b.shape()
    for what, of_a, of_b in (
        ("architecture", one.architecture, other.architecture),
        ("number of blocks", one.num_blocks, other.num_blocks),
    ):
        if of_a != of_b:
            raise ComparisonError(
                f"{a.source} and {b.source} differ in their {what}, {of_a} and {of_b}: their blocks are no pairs."
            )
    return min(one.longest, other.longest)


def _sequences(a: Side, b: Side, texts: Sequence[str], cut: int) -> list[list[int]]:
    """The tokens of both, which must be the same."""
    rows = [row[:cut] for row in a.tokenize(texts)]
    if rows != [row[:cut] for row in b.tokenize(texts)]:
        raise ComparisonError(
            f"The tokenizers of {a.source} and {b.source} give other ids for the same text: a comparison needs one "
            "vocabulary."
        )
    # A loss needs a token in front.
    tokens = [row for row in rows if len(row) >= 2]
    if not tokens:
        raise ComparisonError(f"No text has 2 tokens within {cut}: use longer texts.")
    return tokens


def _without_each(tokens: list[list[int]], longest: int) -> AlphaScanPlan:
    """Every block left out once."""
    return AlphaScanPlan(
        alphas=[0.0],
        tokens=tokens,
        scored_from=[1] * len(tokens),
        tokens_per_step=min(_TOKENS_PER_STEP, longest),
    )


def _record(
    side: Side, tokens: list[list[int]], without: AlphaScanPlan | None, note: Note
) -> tuple[Recording, ComparedSide, AlphaScanFinding | None]:
    plan = DifferentialPlan(tokens=tokens, noise=True)
    with side.opened(tokens) as model:
        reading = model.measure(
            Differential(), plan, DifferentialReading, lambda done, total: note("A: blocks", done, total)
        )
        recording = Recording(recorded_at=time.time(), conditions=model.conditions, plan=plan, reading=reading)
        return recording, _side(side, model), _gains(model, without, "A", note)


def _replay(
    side: Side, recording: Recording, without: AlphaScanPlan | None, note: Note
) -> tuple[DifferentialReading, ComparedSide, AlphaScanFinding | None]:
    with side.opened(recording.plan.tokens) as model:
        if why := misfit(recording, model.conditions, same_weights=False):
            raise ComparisonError(why)
        reading = model.measure(
            Differential(),
            recording.replay(),
            DifferentialReading,
            lambda done, total: note("B: blocks", done, total),
        )
        return reading, _side(side, model), _gains(model, without, "B", note)


def _gains(model: OpenModel, plan: AlphaScanPlan | None, name: str, note: Note) -> AlphaScanFinding | None:
    """Losses and gains; what such a scan would flag is not asked for."""
    if plan is None:
        return None
    monitor = AlphaScan()
    reading = model.measure(
        monitor, plan, AlphaScanReading, lambda done, total: note(f"{name}: without each block", done, total)
    )
    return monitor.judge([reading])


def _side(side: Side, model: OpenModel) -> ComparedSide:
    return ComparedSide(source=side.source, conditions=model.conditions, gates=tuple(model.gates))
