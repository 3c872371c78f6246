"""What came back for the canary's prompts: facts, no judgement."""

from enum import StrEnum

from pydantic import Field

from ..strict import Wire


class Failure(StrEnum):
    """Why there is no answer."""

    NOT_FINITE = "not_finite"
    """vLLM could not write the log probabilities, because one of them is no finite number."""
    TIMED_OUT = "timed_out"
    REFUSED = "refused"
    """vLLM answered with an error of its own (HTTP 5xx)."""


class Answer(Wire):
    """One prompt, answered greedily or not at all."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    """Log probability of each token, nats; None where there is no finite one."""
    margins: tuple[float | None, ...] = ()
    """By how much each lies above that of the next best token, nats; None where that is not known."""
    seconds: float = Field(default=0.0, ge=0.0)
    failure: Failure | None = Field(default=None, strict=False)
    detail: str = ""
    """What vLLM said of a failure, one sentence."""

    @property
    def finite(self) -> bool:
        """There is a token, and every log probability is a number."""
        return bool(self.tokens) and None not in self.logprobs


class CanaryReading(Wire):
    """The prompts, each asked twice, in the order of the plan; after a time-out the rest is not asked."""

    anew: tuple[Answer, ...]
    """Nothing came from the prefix cache: the salt was new."""
    again: tuple[Answer, ...]
    """With a salt that stays: the prompt may have come from the prefix cache.  One shorter than `anew` where the first
    of two was a time-out."""
    busy: bool | None = None
    """After a time-out: whether vLLM computed anything else meanwhile; None where that is not known."""

    @property
    def answers(self) -> tuple[Answer, ...]:
        """All of them."""
        return (*self.anew, *self.again)
