"""One thing to measure and judge, as the runner runs it, whatever the monitor."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ..monitors.finding import Finding
from .records import ScanTrigger

Note = Callable[[int, int], None]
"""Hears after each part how many steps are done, and of how many."""


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    finding: Finding
    readings: list[dict[str, Any]]
    """What the finding rests on, as JSON."""
    profile_refusal: str | None = None
    """Why no clean profile was made of it, though that was asked for, one sentence."""
    recording_refusal: str | None = None
    """Why no states were kept, though that was asked for, one sentence."""


@dataclass(frozen=True)
class Job:
    """Work for the runner, to be done once.

    `measure` may raise `ScanError`, `ProbeError`, `VllmError` or `ValidationSetError`: their sentence becomes the
    reason of an `unknown` finding.
    """

    monitor: str
    trigger: ScanTrigger
    measure: Callable[[Note], Awaitable[Outcome]]
