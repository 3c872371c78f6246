"""What Flipwatch does by itself: it acts on findings where the operator allows it, once for as long as they stand."""

import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any

import structlog

from ..monitors.finding import Action, Finding
from ..monitors.fingerprint.judgement import FingerprintFinding
from .guard import MitigationError
from .mitigation import Mitigator
from .mitigation_steps import ITSELF
from .probe import ProbeError
from .records import Event, MitigationAction, MitigationRecord, Mode
from .settings import MitigationSettings
from .store import Store, StoreError

_log = structlog.get_logger(__name__)


class Automatic:
    """Asks the mitigator for what findings suggest.  A refusal is logged and put into the audit log, never raised."""

    def __init__(
        self, mitigator: Mitigator, store: Store, settings: MitigationSettings, *, now: Callable[[], float] = time.time
    ) -> None:
        self._mitigator = mitigator
        self._store = store
        self._settings = settings
        self._now = now
        self._tried: set[int] = set()
        self._tried_chunks: set[tuple[int, int]] = set()

    async def consider(self, finding: Finding, confirmed: Collection[int]) -> MitigationRecord | None:
        """Skip the blocks that a finding suggests to skip; None when nothing was started.

        `confirmed` are the blocks that an alert fires for (k of the last n findings).  A block is tried once for as
        long as its alert fires.
        """
        self._tried &= set(confirmed)
        blocks = sorted(({place.block for place in finding.places} & set(confirmed)) - self._tried)
        if not self._allowed or finding.action is not Action.SKIP or not blocks:
            return None
        order = self._mitigator.apply(
            MitigationAction.SKIP, blocks, reason=finding.reason, actor=ITSELF, automatic=True
        )
        record = await self._ordered(order, {"blocks": blocks})
        if record is not None:
            self._tried |= set(blocks)
        return record

    async def consider_repair(self, finding: FingerprintFinding) -> MitigationRecord | None:
        """Repair what has changed; None when nothing was started.

        One finding is enough: a digest does not err.  A chunk is tried once for as long as it stays bad.
        """
        bad = {(chunk.rank, chunk.chunk) for chunk in finding.bad}
        self._tried_chunks &= bad
        if not self._allowed or finding.action is not Action.REPAIR or not bad - self._tried_chunks:
            return None
        order = self._mitigator.repair(None, reason=finding.reason, actor=ITSELF, automatic=True)
        record = await self._ordered(order, {"blocks": list(finding.blocks)})
        if record is not None:
            self._tried_chunks |= bad
        return record

    def forget(self) -> None:
        """vLLM is a new process: nothing has been tried in it."""
        self._tried.clear()
        self._tried_chunks.clear()

    @property
    def _allowed(self) -> bool:
        return self._settings.automatic and Mode(self._settings.mode) is not Mode.OBSERVE

    async def _ordered(
        self, order: Coroutine[Any, Any, MitigationRecord], what: dict[str, Any]
    ) -> MitigationRecord | None:
        try:
            return await order
        except (MitigationError, ProbeError, StoreError) as error:
            detail = {**what, "message": str(error)}
            _log.warning("automatic mitigation refused", **detail)
            with suppress(StoreError):
                self._store.add_event(Event(at=self._now(), actor=ITSELF, what="mitigation refused", detail=detail))
            return None
