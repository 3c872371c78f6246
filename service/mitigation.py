"""Changes of the served model: skip or attenuate blocks, prove it by the loss, undo it.

One at a time.  Each step is stored before it is done, so that a sidecar that was killed in between finds at its next
look at vLLM what may have happened, compares it with the live gates, and says so (`recover`).  Refusals are the tree in
`guard.py`; an error of the probe while an order is still being checked is raised as the `ProbeError` that it is, later
ones end in the record.

    pending -> (loss before) -> applying -> (gates written, read back) -> verifying -> (loss after) -> active
    active  -> reverting -> (gates written, read back, loss) -> reverted
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

import structlog

from ..monitors.finding import Action, Finding
from ..monitors.wire import Gate, ModelFacts
from .gates import differing, interruption, names, readback, with_gates
from .guard import (
    HarmfulOrder,
    MitigationBusy,
    MitigationError,
    ModeForbids,
    UnknownMitigation,
    WrongState,
    check_actions_in_window,
    check_blocks_at_once,
    check_mode,
    check_model,
    check_not_held,
    check_order,
    harm,
)
from .live import MonitorState
from .mitigation_steps import ITSELF, GateKeeper, Steps
from .probe import ProbeError
from .records import IN_FLIGHT, Event, MitigationAction, MitigationRecord, MitigationState, Mode
from .settings import MitigationSettings
from .store import Store, StoreError

# Nobody carries these on, once it is sure that no mitigation is on its way: the sidecar, or its store, failed them.
_BROKEN_OFF = IN_FLIGHT | {MitigationState.INTERRUPTED}

_log = structlog.get_logger(__name__)


class Mitigator:
    """The only part that changes the served model.

    `measure` returns the loss of the model as served now, in nats per scored token, None when it is not finite; it
    raises `LossUnavailable` (or a `ProbeError`) when no number can be had.  A mitigation waits for it no longer than
    `measure_seconds`: help without proof beats no help, and the record says so.  An automatic mitigation that makes the
    loss worse by more than `worse_nats` is undone at once; one that a person asked for is kept, with a warning.  Either
    is refused beforehand where the last scan says so: `scanned` tells what was found in the vLLM process of a boot id.
    """

    def __init__(
        self,
        probe: GateKeeper,
        store: Store,
        settings: MitigationSettings,
        measure: Callable[[], Awaitable[float | None]],
        scanned: Callable[[str], MonitorState | None],
        *,
        now: Callable[[], float] = time.time,
        measure_seconds: float = 120.0,
        worse_nats: float = 0.05,
    ) -> None:
        self._probe = probe
        self._store = store
        self._settings = settings
        self._scanned = scanned
        self._worse_nats = worse_nats
        self._now = now
        self._steps = Steps(probe, store, measure, now=now, measure_seconds=measure_seconds, worse_nats=worse_nats)
        self._checking = False
        self._task: asyncio.Task[None] | None = None
        self._tried: set[int] = set()

    @property
    def done(self) -> Counter[MitigationAction]:
        """Mitigations that became active since the start of this process."""
        return self._steps.done

    @property
    def failed(self) -> Counter[MitigationAction]:
        """Mitigations and undos that did not do what they should, or may not have, since the start of this process."""
        return self._steps.failed

    # Orders: checked at once, carried out in the background

    async def apply(
        self,
        action: MitigationAction,
        blocks: Sequence[int],
        *,
        reason: str,
        actor: str,
        alpha: float = 0.0,
        automatic: bool = False,
        force: bool = False,
    ) -> MitigationRecord:
        """Check the order and start it; the record returned is `pending`, or `dry_run` and done.

        `force` overrides what the last scan says, nothing else.  Raises `MitigationError` or `ProbeError`; nothing was
        changed then, and nothing recorded.
        """
        check_order(action, blocks, alpha)
        check_mode(self._settings)
        with self._claimed():
            facts = await self._probe.facts()
            check_model(facts, blocks)
            check_not_held(blocks, facts.boot_id, self._store.open_mitigations())
            check_blocks_at_once(self._settings, facts.gates, blocks)
            check_actions_in_window(self._settings, self._store.mitigations(limit=1000), self._now())
            worse = harm(self._scanned(facts.boot_id), facts.gates, blocks, alpha, self._worse_nats)
            if worse is not None and not force:
                raise HarmfulOrder(f"{worse}: not done without force.")
            order, mode = f"set the gate of {names(blocks)} to {alpha:g}", Mode(self._settings.mode)
            state, message = MitigationState.PENDING, f"Will {order} as soon as the loss before is measured."
            if mode is Mode.DRY_RUN:
                state, message = MitigationState.DRY_RUN, f"Dry run: would {order}; nothing was touched."
            record = MitigationRecord(
                id=uuid4().hex,
                action=action,
                blocks=tuple(blocks),
                alpha=alpha,
                reason=reason,
                actor=actor,
                automatic=automatic,
                forced=worse is not None,
                mode=mode,
                state=state,
                gates_before=tuple(Gate(block=block, alpha=facts.gates[block]) for block in blocks),
                boot_id=facts.boot_id,
                created_at=self._now(),
                updated_at=self._now(),
                message=message,
            )
            if worse is not None:
                detail = {"id": record.id, "blocks": list(blocks), "alpha": alpha, "message": f"{worse}."}
                self._store.add_event(Event(at=self._now(), actor=actor, what="mitigation forced", detail=detail))
            record = self._steps.save(record, actor, state, message)
            if state is MitigationState.PENDING:
                self._start(record, self._steps.apply(record, facts.gates, MitigationState.FAILED, actor))
            return record

    async def undo(self, mitigation_id: str, *, actor: str) -> MitigationRecord:
        """Start to take a mitigation back; allowed in every mode, whatever the breaker says.

        A record that is reverted already is returned as it is.  Raises `UnknownMitigation`, `WrongState`,
        `MitigationBusy` or `ProbeError`.
        """
        with self._claimed():
            record = self._known(mitigation_id)
            if record.state is MitigationState.REVERTED:
                return record
            if record.state is not MitigationState.ACTIVE and record.state not in _BROKEN_OFF:
                raise WrongState(f"Mitigation {record.id} is {record.state.value}: there is nothing to undo.")
            facts = await self._probe.facts()
            if facts.boot_id != record.boot_id:
                return self._steps.restarted(record, facts, actor)
            fallback = record.state if record.state is MitigationState.ACTIVE else MitigationState.INTERRUPTED
            message = f"Setting the gate of {names(record.blocks)} to 1."
            record = self._steps.save(record, actor, MitigationState.REVERTING, message)
            self._start(record, self._steps.revert(record, facts.gates, fallback, "Undone", actor))
            return record

    async def finish(self, mitigation_id: str, *, actor: str) -> MitigationRecord:
        """Start to bring an interrupted mitigation into effect, or only to verify it when its gates are set already.

        Raises `MitigationError` or `ProbeError`.
        """
        if Mode(self._settings.mode) is not Mode.ENFORCE:
            raise ModeForbids(
                f"The mode is {self._settings.mode}: finishing a mitigation needs enforce, undo does not."
            )
        with self._claimed():
            record = self._known(mitigation_id)
            if record.state not in _BROKEN_OFF:
                raise WrongState(
                    f"Mitigation {record.id} is {record.state.value}: only interrupted ones can be finished."
                )
            facts = await self._probe.facts()
            if facts.boot_id != record.boot_id:
                return self._steps.restarted(record, facts, actor)
            check_model(facts, record.blocks)
            check_blocks_at_once(self._settings, facts.gates, record.blocks)
            if not differing(facts.gates, with_gates(facts.gates, record.gates_wanted)):
                message = f"{readback(facts.gates, record.blocks)} already; measuring the loss."
                record = self._steps.save(record, actor, MitigationState.VERIFYING, message)
                self._start(record, self._steps.verify(record, facts.gates, actor))
            else:
                message = f"Will set the gate of {names(record.blocks)} to {record.alpha:g}."
                record = self._steps.save(record, actor, MitigationState.PENDING, message)
                self._start(record, self._steps.apply(record, facts.gates, MitigationState.INTERRUPTED, actor))
            return record

    async def consider(self, finding: Finding, confirmed: Collection[int]) -> MitigationRecord | None:
        """Act on a finding if the operator allows it; None when nothing was started.

        `confirmed` are the blocks that an alert fires for (k of the last n findings).  A block is tried once for as
        long as its alert fires.  A refusal is logged and written to the audit log, never raised.
        """
        self._tried &= set(confirmed)
        blocks = sorted(({place.block for place in finding.places} & set(confirmed)) - self._tried)
        allowed = self._settings.automatic and Mode(self._settings.mode) is not Mode.OBSERVE
        if not allowed or finding.action is not Action.SKIP or not blocks:
            return None
        try:
            record = await self.apply(
                MitigationAction.SKIP, blocks, reason=finding.reason, actor=ITSELF, automatic=True
            )
        except (MitigationError, ProbeError, StoreError) as error:
            detail = {"blocks": blocks, "message": str(error)}
            _log.warning("automatic mitigation refused", **detail)
            with suppress(StoreError):
                self._store.add_event(Event(at=self._now(), actor=ITSELF, what="mitigation refused", detail=detail))
            return None
        self._tried |= set(blocks)
        return record

    # At each look at vLLM

    def recover(self, facts: ModelFacts) -> list[MitigationRecord]:
        """Compare the open records with the live gates; returns those that had to change.

        Does nothing while a mitigation is on its way: `facts` may be older than its last step.  Raises `StoreError`.
        """
        if self.busy:
            return []
        changed = []
        for record in self._store.open_mitigations():
            if record.boot_id != facts.boot_id:
                changed.append(self._steps.restarted(record, facts, ITSELF))
                continue
            message = interruption(record, facts.gates)
            if message is not None:
                changed.append(self._steps.save(record, ITSELF, MitigationState.INTERRUPTED, message))
        return changed

    # Running

    @property
    def busy(self) -> bool:
        """Is a mitigation being checked or carried out?"""
        return self._checking or (self._task is not None and not self._task.done())

    async def settled(self) -> None:
        """Wait until the mitigation that is on its way has ended, if there is one."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def close(self, grace: float = 10.0) -> None:
        """Give the mitigation that is on its way `grace` seconds, then leave it to `recover` of the next start."""
        if self._task is not None:
            _, late = await asyncio.wait({self._task}, timeout=grace)
            if late:
                self._task.cancel()
                await asyncio.wait(late)

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        if self.busy:
            raise MitigationBusy("Another mitigation is on its way: wait for it and try again.")
        self._checking = True
        try:
            yield
        finally:
            self._checking = False

    def _known(self, mitigation_id: str) -> MitigationRecord:
        record = self._store.mitigation(mitigation_id)
        if record is None:
            raise UnknownMitigation(f"There is no mitigation {mitigation_id}.")
        return record

    def _start(self, record: MitigationRecord, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.create_task(self._drive(record.id, work), name=f"mitigation {record.id}")

    async def _drive(self, mitigation_id: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            # The one broad catch: a mistake of ours must not leave a record that looks as if it were still moving.
            _log.exception("mitigation broke off", id=mitigation_id)
            message = f"Flipwatch itself failed ({type(error).__name__}: {error}): look at the gates, finish or undo."
            try:
                self._steps.fail(self._known(mitigation_id), ITSELF, MitigationState.INTERRUPTED, message)
            except StoreError as full:
                # The record looks as if it moved until the store works again: `recover`, undo and finish know that.
                _log.error("mitigation's end not stored", id=mitigation_id, reason=str(full))
