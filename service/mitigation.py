"""Changes of the served model: skip or attenuate blocks, prove it by the loss, undo it; repair their weights.

One at a time.  Each step is stored before it is done, so that a sidecar that was killed in between finds at its next
look at vLLM what may have happened, compares it with the live gates, and says so (`recover`).  Refusals are the tree in
`guard.py`; an error of the probe while an order is still being checked is raised as the `ProbeError` that it is, later
ones end in the record.

    pending -> applying -> (gates written, read back) -> verifying -> (loss before and after) -> active
    active  -> reverting -> (gates written, read back, loss) -> reverted

A repair goes its own way, told in `repair_steps.py`.  A drain has no steps: it is `active` from the start, and ends by
an undo or with its vLLM process.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import structlog

from ..monitors.fingerprint.facts import FingerprintReading, Method
from ..monitors.wire import Gate, ModelFacts
from .drain_orders import DrainOrders
from .gate_orders import GateOrders
from .gates import differing, interruption, names, readback, with_gates
from .guard import (
    ModeForbids,
    UnknownMitigation,
    WrongState,
    check_blocks_at_once,
    check_mode,
    check_model,
)
from .live import MonitorState
from .mitigation_steps import Steps
from .records import IN_FLIGHT, ITSELF, Mandate, MitigationAction, MitigationRecord, MitigationState, Mode
from .repair_orders import RepairOrders
from .repair_steps import Mender, RepairSteps, Sweep
from .settings import MitigationSettings
from .store import Store, StoreError
from .turn import Turn

# Nobody carries these on, once it is sure that no mitigation is on its way: the sidecar, or its store, failed them.
_BROKEN_OFF = IN_FLIGHT | {MitigationState.INTERRUPTED}

_log = structlog.get_logger(__name__)


class Mitigator:
    """The only part that changes the served model.

    `measure` returns the loss of the model as served now, but for the gates that it is given, in nats per scored
    token, None when it is not finite; it raises `LossUnavailable` (or a `ProbeError`) when no number can be had.  A
    mitigation waits for it no longer than `measure_seconds`, and only behind the change that it is to prove.  An
    automatic mitigation that makes the loss worse by more than `worse_nats` is undone at once; one that a person asked
    for is kept, with a warning.  Either is refused beforehand where the last scan says so: `scanned` tells what was
    found in the vLLM process of a boot id.
    `sweep` compares the weights with their baseline, for repairs (see `RepairSteps`), and `recent` tells what a sweep
    has just found in the vLLM process of these facts.
    """

    def __init__(
        self,
        probe: Mender,
        store: Store,
        settings: MitigationSettings,
        measure: Callable[[Sequence[Gate]], Awaitable[float | None]],
        scanned: Callable[[str], MonitorState | None],
        sweep: Sweep,
        *,
        recent: Callable[[ModelFacts], FingerprintReading | None] = lambda facts: None,
        now: Callable[[], float] = time.time,
        measure_seconds: float = 120.0,
        worse_nats: float = 0.05,
    ) -> None:
        self._probe = probe
        self._store = store
        self._settings = settings
        self._now = now
        self._steps = Steps(probe, store, measure, now=now, measure_seconds=measure_seconds, worse_nats=worse_nats)
        self._orders = GateOrders(probe, store, settings, scanned, now=now, worse_nats=worse_nats)
        self._repair_steps = RepairSteps(probe, store, self._steps, sweep)
        self._repairs = RepairOrders(probe, store, settings, self._repair_steps, recent, now=now)
        self._drains = DrainOrders(store, settings, now=now)
        self._turn = Turn()

    @property
    def done(self) -> Counter[MitigationAction]:
        """Mitigations that became active, and repairs that were verified, since the start of this process."""
        return self._steps.done

    @property
    def failed(self) -> Counter[MitigationAction]:
        """Mitigations and undos that did not do what they should, or may not have, since the start of this process."""
        return self._steps.failed

    @property
    def repaired(self) -> Counter[Method]:
        """Chunks that were put right since the start of this process, by where their bytes came from."""
        return self._repair_steps.repaired

    # Orders: checked at once, carried out in the background

    async def apply(
        self,
        action: MitigationAction,
        blocks: Sequence[int],
        *,
        reason: str,
        actor: str,
        alpha: float = 0.0,
        force: bool = False,
        mandate: Mandate | None = None,
    ) -> MitigationRecord:
        """Check the order and start it; the record returned is `pending`, or `dry_run` and done.

        `force` overrides what the last scan says, nothing else.  `mandate` is that of a rule of the policy, where
        no person asked.  Raises `MitigationError` or `ProbeError`; nothing was
        changed then, and nothing recorded.
        """
        mode = self._mode(mandate)
        with self._turn.claimed():
            record, gates = await self._orders.check(
                action, blocks, alpha, reason=reason, actor=actor, mandate=mandate, force=force, mode=mode
            )
            record = self._steps.save(record, actor, record.state, record.message)
            if record.state is MitigationState.PENDING:
                self._start(record, self._steps.apply(record, gates, MitigationState.FAILED, actor))
            return record

    async def repair(
        self,
        blocks: Sequence[int] | None,
        *,
        reason: str,
        actor: str,
        mandate: Mandate | None = None,
    ) -> MitigationRecord:
        """Look at the weights and start to put right what has changed in these blocks, or anywhere for None.

        The record returned is `pending`, or `dry_run` and done.  A skip of a named block that is whole is ended.
        Raises `MitigationError` or `ProbeError`; nothing was changed then, and nothing recorded.
        """
        mode = self._mode(mandate)
        with self._turn.claimed():
            record = await self._repairs.check(blocks, reason=reason, actor=actor, mandate=mandate, mode=mode)
            record = self._steps.save(record, actor, record.state, record.message)
            if record.state is MitigationState.PENDING:
                self._start(record, self._repair_steps.apply(record, MitigationState.FAILED, actor))
            return record

    def drain(self, boot_id: str, *, reason: str, actor: str, mandate: Mandate | None = None) -> MitigationRecord:
        """Call the server not ready; the record returned is `active`, or `dry_run`.

        `boot_id` is that of the vLLM process as last heard: it need not answer now, and another mitigation may be on
        its way in it.  Raises `MitigationError`; nothing is changed then, and nothing recorded.
        """
        mode = self._mode(mandate)
        record = self._drains.check(boot_id, reason=reason, actor=actor, mandate=mandate, mode=mode)
        if record.state is MitigationState.ACTIVE:
            self._steps.done[record.action] += 1
        return self._steps.save(record, actor, record.state, record.message)

    async def undo(self, mitigation_id: str, *, actor: str) -> MitigationRecord:
        """Start to take a mitigation back; allowed in every mode, whatever the breaker says.

        A record that is reverted already is returned as it is, a drain is `reverted` at once.  Raises
        `UnknownMitigation`, `WrongState`, `MitigationBusy` or `ProbeError`.
        """
        record = self._known(mitigation_id)
        if record.action is MitigationAction.DRAIN and record.state is MitigationState.ACTIVE:
            message = "Undone: /readyz says again whether the sidecar works."
            return self._steps.save(record, actor, MitigationState.REVERTED, message, undone_by=actor)
        with self._turn.claimed():
            record = self._known(mitigation_id)
            if record.state is MitigationState.REVERTED:
                return record
            if record.action is MitigationAction.REPAIR:
                raise WrongState(
                    f"Mitigation {record.id} is a repair: it only puts the bytes of the baseline back, so there is "
                    "nothing to undo."
                )
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
        with self._turn.claimed():
            record = self._known(mitigation_id)
            if record.state not in _BROKEN_OFF:
                raise WrongState(
                    f"Mitigation {record.id} is {record.state.value}: only interrupted ones can be finished."
                )
            facts = await self._probe.facts()
            if facts.boot_id != record.boot_id:
                return self._steps.restarted(record, facts, actor)
            if record.action is MitigationAction.REPAIR:
                message = "Will look at the weights and go on."
                record = self._steps.save(record, actor, MitigationState.PENDING, message)
                self._start(record, self._repair_steps.resume(record, actor))
                return record
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
        return self._turn.taken

    async def settled(self) -> None:
        """Wait until the mitigation that is on its way has ended, if there is one."""
        await self._turn.over()

    async def close(self, grace: float = 10.0) -> None:
        """Give the mitigation that is on its way `grace` seconds, then leave it to `recover` of the next start."""
        await self._turn.close(grace)

    def _mode(self, mandate: Mandate | None) -> Mode:
        """In which mode an order is carried out; raises `ModeForbids`."""
        check_mode(self._settings)
        return Mode.DRY_RUN if mandate is not None and mandate.dry_run else Mode(self._settings.mode)

    def _known(self, mitigation_id: str) -> MitigationRecord:
        record = self._store.mitigation(mitigation_id)
        if record is None:
            raise UnknownMitigation(f"There is no mitigation {mitigation_id}.")
        return record

    def _start(self, record: MitigationRecord, work: Coroutine[Any, Any, object]) -> None:
        self._turn.start(f"mitigation {record.id}", self._drive(record.id, work))

    async def _drive(self, mitigation_id: str, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        except Exception as error:
            # The one broad catch: a mistake of ours must not leave a record that looks as if it were still moving.
            _log.exception("mitigation broke off", id=mitigation_id)
            try:
                record = self._known(mitigation_id)
                repair = record.action is MitigationAction.REPAIR
                help_ = "finish it" if repair else "look at the gates, finish or undo"
                message = f"Flipwatch itself failed ({type(error).__name__}: {error}): {help_}."
                self._steps.fail(record, ITSELF, MitigationState.INTERRUPTED, message)
            except StoreError as full:
                # The record looks as if it moved until the store works again: `recover`, undo and finish know that.
                _log.error("mitigation's end not stored", id=mitigation_id, reason=str(full))
