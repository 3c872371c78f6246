"""The heartbeat of a server, from vLLM's own counters: does it move while there is work?

A server that is busy and one that hangs look alike to who waits for an answer.  vLLM counts what it computes: while any
of its counters moves, it is busy, however long the queue.  Work is a request that vLLM counts as running or waiting;
and a question of Flipwatch's own that the engine has left unanswered, because vLLM counts a request only once the
engine has seen it, which one that hangs never does.

What it cannot see: a single engine step that takes longer than the time that is allowed looks like a hang.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Pulse(StrEnum):
    """What the counters say."""

    IDLE = "idle"
    """No request is there."""
    MOVING = "moving"
    """Requests are there, and tokens come."""
    HUNG = "hung"
    """Requests have been there for the whole time that is allowed, and no token came."""
    UNKNOWN = "unknown"
    """The counters could not be read, or not for long enough."""


@dataclass(frozen=True)
class Counts:
    """vLLM's counters at one moment."""

    running: int
    waiting: int
    moving: tuple[float, ...]
    """All that moves while the engine computes: counters of tokens and iterations, use of the KV cache."""


def total(engines: Collection[Counts]) -> Counts:
    """The counters of all engines of a server together."""
    return Counts(
        running=sum(counts.running for counts in engines),
        waiting=sum(counts.waiting for counts in engines),
        moving=tuple(value for counts in engines for value in counts.moving),
    )


@dataclass(frozen=True)
class Look:
    """One look at them."""

    at: float
    """Seconds of a clock that never goes back."""
    counts: Counts | None
    """None: they could not be read."""
    silent_since: float | None = None
    """From when on the engine has answered none of Flipwatch's own questions, by the same clock; None: none is open."""
    resting: bool = False
    """The engine stands still because somebody told it to: it sleeps, is paused, or Flipwatch changes the model."""

    @property
    def work(self) -> bool:
        """Is there anything that should move the counters?"""
        return self.silent_since is not None or self.requests > 0

    @property
    def requests(self) -> int:
        """Requests that vLLM counts."""
        return 0 if self.counts is None else self.counts.running + self.counts.waiting


@dataclass(frozen=True)
class Beat:
    """What a sequence of looks says."""

    pulse: Pulse
    reason: str
    """One sentence with the numbers in it."""


def remember(looks: Sequence[Look], new: Look) -> tuple[Look, ...]:
    """The looks that count from now on: of a time in which nothing changed, the first and the last one."""
    # One that could not read the counters tells neither that they moved nor that they did not.
    known = [look for look in looks if look.counts is not None]
    if new.counts is None:
        return (*known, new)
    kept = [*known, new]
    start = _still_from(kept)
    # One look in front of it tells that the counters did move.
    front = kept[max(0, start - 1) : start + 1]
    return tuple(front if start == len(kept) - 1 else [*front, new])


def heartbeat(looks: Sequence[Look], hung_seconds: float) -> Beat:
    """The pulse as of the last look; `hung_seconds` without a move, while there is work, are a hang."""
    if not looks or looks[-1].counts is None:
        return Beat(Pulse.UNKNOWN, "vLLM's counters could not be read.")
    last, counts = looks[-1], looks[-1].counts
    if last.resting:
        return Beat(Pulse.UNKNOWN, "The engine was told to stand still: it sleeps, is paused, or is being changed.")
    if not last.work:
        return Beat(Pulse.IDLE, "No request is there.")
    there = f"{counts.running} requests run and {counts.waiting} wait"
    if last.silent_since is not None:
        there += f", the engine has owed Flipwatch an answer for {last.at - last.silent_since:.0f} s"
    start = _still_from(looks)
    still = last.at - looks[start].at
    if still >= hung_seconds:
        return Beat(Pulse.HUNG, f"{there}, and no counter has moved for {still:.0f} s ({hung_seconds:g} are allowed).")
    if start == 0:
        return Beat(Pulse.UNKNOWN, f"{there}; vLLM has been watched for {still:.0f} s, too short to tell.")
    return Beat(Pulse.MOVING, f"{there}; no counter has moved for {still:.0f} s ({hung_seconds:g} are allowed).")


def _still_from(looks: Sequence[Look]) -> int:
    """Where the time begins, up to the last look, in which there was work and no counter moved."""
    last = looks[-1]
    start = len(looks) - 1
    while start > 0 and _alike(looks[start - 1], last):
        start -= 1
    return start


def _alike(one: Look, other: Look) -> bool:
    if one.counts is None or other.counts is None:
        return False
    return _told(one) == _told(other)


def _told(look: Look) -> object:
    # An answer to a question is a move only where there is no other work: requests can be stuck in an engine that
    # answers.
    moved = look.silent_since if look.requests == 0 else None
    return look.resting, look.work, look.requests == 0, moved, None if look.counts is None else look.counts.moving
