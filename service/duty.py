"""How much of the time measurements may hold the engine: a cap over any minute, over all monitors together."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

WINDOW_SECONDS = 60.0


class Part(NamedTuple):
    """One stretch for which a measurement held the engine."""

    end: float
    held: float
    busy: bool


class Duty:
    """The ledger of one engine.

    While requests are there (`busy`), parts hold the engine for at most the share `busy_share` of any minute, and one
    part more; all parts together, busy or not, for at most `idle_share`, and one part more: a part begins only while
    no more than that was held in the minute in front of it.  Between two parts there is a rest, so that they do not
    come all at once.  A share of 1 is no cap.
    """

    def __init__(self, busy_share: float, idle_share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._busy_share = busy_share
        # Nobody is spared by resting longer while nothing is served.
        self._idle_share = max(idle_share, busy_share)
        self._clock = clock
        self._parts: deque[Part] = deque()
        self._next = 0.0
        self.turn = asyncio.Lock()
        """Held from the rest in front of a part to its end: of two that measure, one at a time, in turn."""

    def record(self, held: float, *, busy: bool) -> None:
        """A part has just ended that held the engine for so many seconds; also one that did not wait for its turn."""
        now = self._clock()
        self._parts.append(Part(now, held, busy))
        share = self._busy_share if busy else self._idle_share
        self._next = max(self._next, now + held * (1.0 / share - 1.0))

    def rest(self) -> float:
        """Seconds until the next part may begin.  Whether requests are there then is only known behind it."""
        now = self._clock()
        while self._parts and self._parts[0].end <= now - WINDOW_SECONDS:
            self._parts.popleft()
        with_requests = (part for part in self._parts if part.busy)
        begin = max(self._next, _below(self._parts, self._idle_share), _below(with_requests, self._busy_share))
        return max(0.0, begin - now)


def _below(parts: Iterable[Part], share: float) -> float:
    """The time from which on no more than the share of a minute was held in the minute before."""
    if share >= 1.0:
        return 0.0
    known = list(parts)
    over = sum(part.held for part in known) - share * WINDOW_SECONDS
    begin = 0.0
    for part in known:
        # Sums of parts that rest as they should are the share but for rounding.
        if over <= 1e-6:
            break
        over -= part.held
        begin = part.end + WINDOW_SECONDS
    return begin
