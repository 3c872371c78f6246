"""The light look at vLLM every few seconds: is it there, is it the same process, do its gates act?"""

import asyncio
from collections.abc import Callable

import structlog

from ..monitors.wire import ModelFacts, SelfTestState
from .heart import Heart
from .live import Live
from .probe import Probe, ProbeAsleep, ProbeError, ProbeLate
from .vllm import Vllm, VllmError

_log = structlog.get_logger(__name__)


class Watcher:
    """Keeps `Live` true about the served model.

    `seen` is called with the facts of each look; `arrived`, after it, with those of each vLLM process once, the first
    as well as every restarted one.
    """

    def __init__(
        self,
        live: Live,
        probe: Probe,
        vllm: Vllm,
        heart: Heart,
        *,
        seen: Callable[[ModelFacts], None],
        arrived: Callable[[ModelFacts], None],
    ) -> None:
        self._live = live
        self._probe = probe
        self._vllm = vllm
        self._heart = heart
        self._seen = seen
        self._arrived = arrived
        self._one_at_a_time = asyncio.Lock()

    async def look(self) -> ModelFacts:
        """The facts of now, self-test included; raises `ProbeError`, after the state has been set to away."""
        async with self._one_at_a_time:
            try:
                with self._heart.asking():
                    facts = await self._probe.facts()
            except ProbeError as error:
                if not isinstance(error, ProbeLate):
                    self._heart.heard(asleep=isinstance(error, ProbeAsleep))
                if self._live.up or self._live.away != str(error):
                    _log.warning("probe away", reason=str(error))
                self._live.lost(str(error), silent=isinstance(error, ProbeLate))
                raise
            self._heart.heard()
            self._see(facts, await self._name(facts))
            if facts.armed and facts.self_test.state is SelfTestState.NOT_RUN:
                facts = await self._self_tested(facts)
                self._live.facts = facts
            return facts

    async def glance(self) -> None:
        """As `look`, for the scheduler: an absent probe is no error there, it is what is seen."""
        try:
            await self.look()
        except ProbeError:
            return

    def _see(self, facts: ModelFacts, name: str | None) -> None:
        before = self._live.facts
        if before is not None and before.gates != facts.gates:
            self._live.regated_at = self._live.now()
        if not self._live.up:
            _log.info("probe answers", model=name, boot_id=facts.boot_id, armed=facts.armed)
        self._live.facts = facts
        self._live.model_name = name
        self._live.up = True
        new = before is None or before.boot_id != facts.boot_id
        if before is not None and new:
            _log.warning("vLLM was restarted", boot_id=facts.boot_id, was=before.boot_id)
            self._live.restarted()
        self._seen(facts)
        if new:
            self._arrived(facts)

    async def _self_tested(self, facts: ModelFacts) -> ModelFacts:
        try:
            result = await self._probe.self_test()
        except ProbeError as error:
            # vLLM may be paused or gone meanwhile.  The state stays "not run", and the next look tries again.
            _log.warning("gates self-test could not run", reason=str(error))
            return facts
        log = _log.info if result.state is SelfTestState.PASSED else _log.error
        log("gates self-test", state=result.state.value, reason=result.reason)
        return facts.model_copy(update={"self_test": result})

    async def _name(self, facts: ModelFacts) -> str | None:
        known = self._live.facts
        if known is not None and known.boot_id == facts.boot_id and self._live.model_name is not None:
            return self._live.model_name
        try:
            return await self._vllm.model()
        except VllmError as error:
            _log.warning("served model name not known", reason=str(error))
            return None
