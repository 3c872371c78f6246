"""What all evidence about one server, taken together, says: one state, why, and what to do."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from ..finding import Action, Health
from .evidence import Question, Sign


class Verdict(StrEnum):
    """The states of a server."""

    OK = "ok"
    """Bytes, blocks, answers and heartbeat are known, and all of it is good."""
    MITIGATED = "mitigated"
    """Sane, because blocks are left out or scaled."""
    WEIGHT_FAULT = "weight_fault"
    """Bytes have changed, and it shows."""
    LATENT_WEIGHT_FAULT = "latent_weight_fault"
    """Bytes have changed, and nothing else shows it."""
    OLD_FAULT = "old_fault"
    """No byte has changed, and a block or the loss is bad: wrong since before the baseline, or a compute fault."""
    SERVING_FAULT = "serving_fault"
    """Weights and blocks are good, and the answers are wrong: KV cache, graph, sampler or kernel."""
    HUNG = "hung"
    """Requests are there, and nothing moves."""
    UNKNOWN = "unknown"
    """The evidence does not suffice; something may be known to be bad all the same, and then the health is `failed`."""


class Joined(BaseModel):
    """The verdict on one server as it is now."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    verdict: Verdict
    health: Health
    reason: str
    """One sentence with what each kind of evidence says, also when `ok`."""
    action: Action = Action.NONE
    """The first thing to try."""
    advice: str = ""
    """That and what else helps, for people."""
    blocks: tuple[int, ...] = ()
    """Blocks that the evidence points at."""
    signs: tuple[Sign, ...] = ()
    """The evidence, question by question."""
    rests_on: tuple[Question, ...] = ()
    """The questions whose yes makes this verdict; a no to any of them ends it."""
    grounds: tuple[str, ...] = ()
    """Monitors, or the heartbeat, that saw the bad things that this verdict rests on."""
    stale: tuple[str, ...] = ()
    """Monitors that looked before others saw something: they ought to look again now."""
