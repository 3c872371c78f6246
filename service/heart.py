"""Feels the pulse of vLLM every few seconds, from its own counters, whether its probe answers or not."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import structlog

from ..monitors.canary.pulse import Beat, Counts, Look, Pulse, heartbeat, remember, total
from .live import Live
from .vllm import Vllm, VllmError

_log = structlog.get_logger(__name__)

# The counters come from the API server, not from the engine: they come at once, or that server hangs itself.
_PATIENCE_SECONDS = 5.0
# A look that comes so much later than it should: this process stood still, and vLLM may have with it.
_LATE_SECONDS = 20.0

# In the place of an engine's name.
_ALL = None


class Heart:
    """Keeps `live.beat` true.

    Who asks the engine something says so, and tells what came of it: a question that stays open is work that the
    counters do not know of.  `resting` says whether Flipwatch itself keeps the engine standing.  Between two looks
    are `every_seconds`; of a much longer time nobody knows what happened in it, so that watching begins anew.
    """

    def __init__(
        self,
        live: Live,
        vllm: Vllm,
        hung_seconds: float,
        *,
        every_seconds: float,
        resting: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._live = live
        self._vllm = vllm
        self._hung_seconds = hung_seconds
        self._longest_gap = every_seconds + _LATE_SECONDS
        self._resting = resting
        self._clock = clock
        self._looks: dict[str | None, tuple[Look, ...]] = {}
        """Of each engine that answers beside others, and of all together."""
        self._felt_at: float | None = None
        self._open: Counter[str | None] = Counter()
        """Questions that somebody waits for, by the engine that was asked."""
        self._silent_since: dict[str | None, float] = {}
        """From when on it has owed an answer."""
        self._asleep = False

    @contextmanager
    def asking(self, engine: str | None = None) -> Iterator[None]:
        """Around a question of ours to one engine, or to all; where an answer came, `heard` is to be told."""
        self._open[engine] += 1
        self._silent_since.setdefault(engine, self._clock())
        try:
            yield
        finally:
            # Nobody waits any more, but the engine may owe the answer still.
            self._open[engine] -= 1

    def heard(self, engine: str | None = None, *, asleep: bool = False) -> None:
        """This engine, or all, or who speaks for them, have answered somebody, or are not there; `asleep`: they stand
        still."""
        self._asleep = asleep
        for asked in list(self._silent_since) if engine is _ALL else [engine]:
            if self._open[asked]:
                self._silent_since[asked] = self._clock()
            else:
                self._silent_since.pop(asked, None)

    async def feel(self) -> Beat:
        """One look at the counters, and what they say now."""
        began, before = self._clock(), self._felt_at
        if before is not None and began - before > self._longest_gap:
            _log.warning("nobody felt the pulse", seconds=round(began - before))
            self._looks.clear()
        self._felt_at = began
        try:
            beat = self._heard(await self._vllm.counts(_PATIENCE_SECONDS))
        except VllmError as error:
            self._remember(_ALL, None)
            beat = Beat(Pulse.UNKNOWN, str(error))
        if beat.pulse is not self._live.beat.pulse:
            log = _log.error if beat.pulse is Pulse.HUNG else _log.info
            log("pulse", pulse=beat.pulse.value, was=self._live.beat.pulse.value, reason=beat.reason)
        self._live.beat = beat
        return beat

    def _heard(self, engines: Mapping[str, Counts]) -> Beat:
        """All engines together; and each alone, since one that hangs is hidden by others that move."""
        first = min(self._silent_since.values(), default=None)
        together = self._remember(_ALL, total(engines.values()), silent_since=first)
        if len(engines) > 1:
            for engine, counts in engines.items():
                # Whoever owes an answer to a question to all, it need not be this one.
                alone = self._remember(engine, counts, silent_since=self._silent_since.get(engine))
                if alone.pulse is Pulse.HUNG and together.pulse is not Pulse.HUNG:
                    together = Beat(Pulse.HUNG, f"Engine {engine}: {alone.reason}")
        return together

    def _remember(self, whose: str | None, counts: Counts | None, *, silent_since: float | None = None) -> Beat:
        look = Look(self._clock(), counts, silent_since, resting=self._asleep or self._resting())
        self._looks[whose] = remember(self._looks.get(whose, ()), look)
        return heartbeat(self._looks[whose], self._hung_seconds)
