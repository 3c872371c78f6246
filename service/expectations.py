"""The answers that an operator vouched for, and that the canary holds the model against: how they are kept."""

from collections.abc import Callable

import structlog
from pydantic import ValidationError

from ..monitors.canary.expectation import Expectation
from .records import Event
from .store import Store

_log = structlog.get_logger(__name__)


class Expectations:
    """The recorded answers, or none.  They outlive a restart of the sidecar and of vLLM."""

    def __init__(self, store: Store, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self.recorded: Expectation | None = _stored(store)

    @property
    def recorded_at(self) -> float | None:
        """Epoch seconds; None when there are none."""
        return None if self.recorded is None else self.recorded.recorded_at

    def keep(self, expectation: Expectation, actor: str) -> None:
        """Hold the model against these answers from now on; raises `StoreError`."""
        self._set(expectation, actor, "answers recorded")

    def remove(self, actor: str) -> None:
        """Forget them; raises `StoreError`."""
        self._set(None, actor, "answers removed")

    def _set(self, expectation: Expectation | None, actor: str, what: str) -> None:
        shown = expectation or self.recorded
        detail = {} if shown is None else {"recorded_at": shown.recorded_at, **shown.conditions.model_dump()}
        self._store.set_expectation(expectation, Event(at=self._now(), actor=actor, what=what, detail=detail))
        self.recorded = expectation


def _stored(store: Store) -> Expectation | None:
    try:
        return store.expectation()
    except ValidationError as error:
        # Another version of Flipwatch may have recorded other facts.
        _log.warning("recorded answers cannot be read, record them again", errors=error.error_count())
        return None
