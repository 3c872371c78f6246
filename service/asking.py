"""The canary's prompts, asked of vLLM like any client asks, of each engine of a data-parallel server by itself."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

from ..monitors.canary.answers import Answer, CanaryReading, Failure
from ..monitors.canary.plan import MAX_TOKENS, PROMPTS
from ..monitors.canary.pulse import total
from ..monitors.wire import ModelFacts
from .heart import Heart
from .job import Note
from .live import Live
from .vllm import Vllm, VllmError, VllmFailed, VllmLate

PATIENCE_SECONDS = 5.0
"""Who does not answer a question about itself within this time says nothing: it waits for an engine that hangs."""


@dataclass(frozen=True)
class _Name:
    """What vLLM calls one of several engines; without a name a request goes to whichever it likes."""

    number: int | None = None
    """Its place among those behind the API server: so a request says where it is to go."""
    label: str | None = None
    """In vLLM's counters."""


class Asking:
    """Asks one vLLM server; an answer that does not come within `timeout_seconds` is one that timed out."""

    def __init__(self, vllm: Vllm, live: Live, heart: Heart, timeout_seconds: float) -> None:
        self._vllm = vllm
        self._live = live
        self._heart = heart
        self._timeout = timeout_seconds
        # Not to be guessed, so that nobody else's requests fill or read these blocks.
        self._salt = uuid4().hex

    async def one_by_one(self, facts: ModelFacts | None, note: Note) -> dict[int, CanaryReading]:
        """What each engine answers, by its data-parallel index: all prompts, one after the other, each computed anew
        and from the prefix cache, up to the first time-out.

        Without facts nobody knows how many engines there are: vLLM gives the prompts to whichever it likes.  Raises
        `VllmError` where vLLM could not be asked at all.
        """
        engines = _named(facts)
        readings: dict[int, CanaryReading] = {}
        for place, (engine, name) in enumerate(engines.items()):

            def told(prompts: int, before: int = place * len(PROMPTS)) -> None:
                note(before + prompts, len(engines) * len(PROMPTS))

            readings[engine] = await self._reading(name, told)
        return readings

    async def at_once(self, facts: ModelFacts, engine: int, copies: int) -> list[Answer]:
        """All prompts, so many times over, computed anew by one engine beside each other; raises `VllmError`."""
        name = _named(facts)[engine]
        return await asyncio.gather(*(self._answer(prompt, uuid4().hex, name) for prompt in PROMPTS * copies))

    async def _reading(self, name: _Name, note: Callable[[int], None]) -> CanaryReading:
        before = await self._moving(name)
        anew: list[Answer] = []
        again: list[Answer] = []
        note(0)
        for prompt in PROMPTS:
            for answers, salt in ((anew, uuid4().hex), (again, self._salt)):
                answers.append(await self._answer(prompt, salt, name))
                if answers[-1].failure is Failure.TIMED_OUT:
                    after = await self._moving(name)
                    busy = None if before is None or after is None else before != after
                    return CanaryReading(anew=tuple(anew), again=tuple(again), busy=busy)
            before = await self._moving(name)
            note(len(anew))
        return CanaryReading(anew=tuple(anew), again=tuple(again))

    async def _answer(self, prompt: str, salt: str, name: _Name) -> Answer:
        model = self._live.model_name or await self._vllm.model()
        try:
            with self._heart.asking(name.label):
                answer = await self._vllm.complete(
                    model, prompt, max_tokens=MAX_TOKENS, salt=salt, seconds=self._timeout, engine=name.number
                )
        except VllmLate:
            detail = f"has had no answer for {self._timeout:g} s"
            return Answer(seconds=self._timeout, failure=Failure.TIMED_OUT, detail=detail)
        except VllmFailed as failed:
            self._heart.heard(name.label)
            return Answer(failure=Failure.REFUSED, detail=f"is refused: {str(failed).rstrip('.')}")
        except VllmError:
            self._heart.heard(name.label)
            raise
        self._heart.heard(name.label)
        return answer

    async def _moving(self, name: _Name) -> tuple[float, ...] | None:
        """The counters of one engine, or of all; None where they cannot be read."""
        try:
            counts = await self._vllm.counts(PATIENCE_SECONDS)
        except VllmError:
            return None
        counted = [of_one for label, of_one in counts.items() if name.label in (None, label)]
        return total(counted).moving if counted else None


def _named(facts: ModelFacts | None) -> dict[int, _Name]:
    """By the data-parallel index of each engine."""
    if facts is None or len(facts.engines) == 1:
        return {0: _Name()}
    return {engine: _Name(number, str(engine)) for number, engine in enumerate(facts.engines)}
