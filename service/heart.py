"""Feels the pulse of vLLM every few seconds, from its own counters, whether its probe answers or not."""

import time
from collections.abc import Callable

import structlog

from ..monitors.canary.pulse import Beat, Look, Pulse, heartbeat, remember
from .live import Live
from .vllm import Vllm, VllmError

_log = structlog.get_logger(__name__)

# The counters come from the API server, not from the engine: they come at once, or that server hangs itself.
_PATIENCE_SECONDS = 5.0


class Heart:
    """Keeps `live.beat` true.

    Who asks the engine something says so, and tells when an answer came, of whatever kind: a question that stays open
    is work that the counters do not know of.  `resting` says whether Flipwatch itself keeps the engine standing.
    """

    def __init__(
        self,
        live: Live,
        vllm: Vllm,
        hung_seconds: float,
        *,
        resting: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._live = live
        self._vllm = vllm
        self._hung_seconds = hung_seconds
        self._resting = resting
        self._clock = clock
        self._looks: tuple[Look, ...] = ()
        self._unanswered = False
        self._asleep = False

    def asked(self) -> None:
        """A question of ours goes to the engine."""
        self._unanswered = True

    def answered(self, *, asleep: bool = False) -> None:
        """The engine, or who speaks for it, has answered, or is not there at all; `asleep`: that it stands still."""
        self._unanswered = False
        self._asleep = asleep

    async def feel(self) -> Beat:
        """One look at the counters, and what they say now."""
        at = self._clock()
        try:
            counts = await self._vllm.counts(_PATIENCE_SECONDS)
        except VllmError as error:
            counts, why = None, str(error)
        look = Look(at, counts, unanswered=self._unanswered, resting=self._asleep or self._resting())
        self._looks = remember(self._looks, look)
        beat = heartbeat(self._looks, self._hung_seconds) if counts is not None else Beat(Pulse.UNKNOWN, why)
        if beat.pulse is not self._live.beat.pulse:
            log = _log.error if beat.pulse is Pulse.HUNG else _log.info
            log("pulse", pulse=beat.pulse.value, was=self._live.beat.pulse.value, reason=beat.reason)
        self._live.beat = beat
        return beat
