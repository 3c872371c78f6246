"""The verdict as it changes: written into the audit log, alerted on, told to whoever acts on it."""

from collections.abc import Awaitable, Callable

import structlog

from ..monitors.finding import Health
from ..monitors.verdict.evidence import Question
from ..monitors.verdict.verdict import Joined, Verdict
from .alert import VERDICT
from .alerts import Alerts
from .live import Live
from .records import ITSELF, Event
from .store import Store, StoreError

_CHANGED = "verdict changed"
_REFUTED = "verdict refuted"
_EVENTS = 10_000

Listener = Callable[[Joined], Awaitable[None]]

_log = structlog.get_logger(__name__)


class Verdicts:
    """Joins the evidence anew each time that some of it may have changed."""

    def __init__(self, live: Live, store: Store, alerts: Alerts, now: Callable[[], float]) -> None:
        self._live = live
        self._store = store
        self._alerts = alerts
        self._now = now
        self._last: Joined | None = None
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """From now on it is awaited with the verdict of now after each finding, and when a look at vLLM changed it."""
        self._listeners.append(listener)

    def confirmed(self, joined: Joined) -> bool:
        """Whether it rests on evidence that does not err, or that k of the last n findings of a monitor give."""
        return self._alerts.confirmed(joined.grounds)

    def restore(self) -> None:
        """At start: the alert that the last verdict in the audit log made; raises `StoreError`."""
        for event in self._store.events(_EVENTS):
            if event.what == _REFUTED:
                return
            if event.what == _CHANGED and event.detail["to"] != Verdict.UNKNOWN.value:
                detail = event.detail
                self._alerts.restore_verdict(
                    Joined(
                        verdict=Verdict(detail["to"]),
                        health=Health(detail["health"]),
                        reason=detail["reason"],
                        rests_on=tuple(Question(question) for question in detail["rests_on"]),
                        grounds=tuple(detail["grounds"]),
                    ),
                    event.at,
                )
                return

    async def found(self) -> None:
        """A monitor has a new finding."""
        await self._tell(self._judge())

    async def looked(self) -> None:
        """There was a look at vLLM, and time has passed."""
        before = self._last
        joined = self._judge()
        if before is None or _gist(before) != _gist(joined):
            await self._tell(joined)

    def _judge(self) -> Joined:
        joined, before, at = self._live.verdict(), self._last, self._now()
        self._last = joined
        if before is None or (before.verdict, before.health) != (joined.verdict, joined.health):
            self._note(joined, before, at)
        fired = self._fires()
        self._alerts.judge(joined, at, self._live.model_name or "")
        if joined.verdict is Verdict.UNKNOWN and fired and not self._fires():
            # Else the next sidecar would take the verdict of before for one that still stands.
            self._keep(Event(at=at, actor=ITSELF, what=_REFUTED, detail={"reason": joined.reason}))
        return joined

    def _fires(self) -> bool:
        return any(alert.name == VERDICT for alert in self._alerts.firing)

    async def _tell(self, joined: Joined) -> None:
        for listener in self._listeners:
            await listener(joined)

    def _note(self, joined: Joined, before: Joined | None, at: float) -> None:
        was = None if before is None else before.verdict.value
        level = _log.info if joined.health in (Health.OK, Health.UNKNOWN) else _log.warning
        level(_CHANGED, verdict=joined.verdict.value, was=was, reason=joined.reason)
        detail = {
            "from": was,
            "to": joined.verdict.value,
            "health": joined.health.value,
            "reason": joined.reason,
            "action": joined.action.value,
            "blocks": list(joined.blocks),
            "rests_on": [question.value for question in joined.rests_on],
            "grounds": list(joined.grounds),
        }
        self._keep(Event(at=at, actor=ITSELF, what=_CHANGED, detail=detail))

    def _keep(self, event: Event) -> None:
        try:
            self._store.add_event(event)
        except StoreError as full:
            _log.error("event not stored", what=event.what, reason=str(full))


def _gist(joined: Joined) -> Joined:
    """Without the sentences, whose numbers change while nothing else does."""
    return joined.model_copy(update={"reason": "", "signs": ()})
