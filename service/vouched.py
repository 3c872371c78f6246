"""What an operator vouched for, and the live model is held against: how it is kept."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import structlog
from pydantic import ValidationError

from ..monitors.differential.reference import Conditions
from .records import Event

_log = structlog.get_logger(__name__)


class Recorded(Protocol):
    """Made of a model under conditions, at a moment."""

    @property
    def recorded_at(self) -> float:
        """Epoch seconds."""
        ...

    @property
    def conditions(self) -> Conditions:
        """Whose it is."""
        ...


T = TypeVar("T", bound=Recorded)


class Vouched(Generic[T]):
    """The one of its kind, or none.  It outlives a restart of the sidecar and of vLLM.

    `what` is its name in the audit log, "states" or "answers"; `read` and `write` are the store's.
    """

    def __init__(
        self,
        what: str,
        read: Callable[[], T | None],
        write: Callable[[T | None, Event], None],
        now: Callable[[], float],
    ) -> None:
        self.what = what
        self._write = write
        self._now = now
        self.current: T | None = None
        try:
            self.current = read()
        except ValidationError as error:
            # Another version of Flipwatch may have recorded other facts; they would fit nothing that is measured now.
            _log.warning(f"recorded {what} cannot be read, record them again", errors=error.error_count())

    @property
    def recorded_at(self) -> float | None:
        """Epoch seconds; None when there is none."""
        return None if self.current is None else self.current.recorded_at

    def keep(self, made: T, actor: str) -> None:
        """Hold the model against this from now on; raises `StoreError`."""
        self._set(made, actor, f"{self.what} recorded")

    def remove(self, actor: str) -> None:
        """Forget it; raises `StoreError`."""
        self._set(None, actor, f"{self.what} removed")

    def _set(self, made: T | None, actor: str, done: str) -> None:
        shown = made or self.current
        detail = {} if shown is None else {"recorded_at": shown.recorded_at, **shown.conditions.model_dump()}
        self._write(made, Event(at=self._now(), actor=actor, what=done, detail=detail))
        self.current = made
