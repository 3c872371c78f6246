"""What the canary concludes from its answers."""

from enum import StrEnum

from ..finding import Finding
from .expectation import ReferenceKind

NAME = "canary"


class Symptom(StrEnum):
    """What is wrong with the answers; the first of these that holds is told."""

    NONE = "none"
    NOT_FINITE = "not_finite"
    """A log probability is no number, or vLLM gave no token for want of one."""
    TIMED_OUT = "timed_out"
    REFUSED = "refused"
    """vLLM answered with an error."""
    DEGENERATE = "degenerate"
    """One token repeated, or soup: without any reference."""
    CACHE_DIFFERS = "cache_differs"
    """The same prompt from the prefix cache gives something else than computed anew."""
    CHANGED = "changed"
    """Other tokens or log probabilities than expected, beyond the measured tolerance."""


class CanaryFinding(Finding):
    """`failed` with a symptom, `ok` without one, `unknown` where the prompts could not be sent or nothing is known
    to compare with."""

    symptom: Symptom = Symptom.NONE
    wrong: tuple[int, ...] = ()
    """Prompts with the symptom, by their place in the set."""
    reference: ReferenceKind | None = None
    """What the answers were held against: `recorded` (an operator vouched for it), `first` (the first answers of this
    vLLM process), None: nothing, only what shows without a reference."""
    answered: int = 0
    """Prompts that were answered, both times."""
    seconds: float | None = None
    """Longest time that one answer took; None without any."""
    scatter: float | None = None
    """The largest |change of log p| / (1 - p) against the reference; None without one, or for another token."""
    tolerance: float | None = None
    """The scatter that is allowed."""
