"""The steps of a mitigation, each stored before it is done: write the gates, compare, measure the loss.

Help comes first: on a busy server a loss takes up to minutes.  The loss before is measured when the gates are in
place, of a model that has those of before.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

import structlog

from ..monitors.wire import Gate, GateChange, GateReport, ModelFacts
from .gates import differing, names, readback, with_gates
from .probe import ProbeAway, ProbeError, ProbeNonsense
from .records import ITSELF, Event, LossState, MitigationAction, MitigationRecord, MitigationState
from .repair_words import told
from .store import Store

_log = structlog.get_logger(__name__)


class GateKeeper(Protocol):
    """What mitigation needs of the probe."""

    async def facts(self) -> ModelFacts:
        """The live model as it is now; raises `ProbeError`."""
        ...

    async def set_gates(self, change: GateChange) -> GateReport:
        """Write gates, all or nothing; raises `ProbeError`."""
        ...


class LossUnavailable(Exception):
    """The loss could not be measured; one sentence that says why."""


class Loss(NamedTuple):
    """A loss in nats per scored token, or None and why."""

    nats: float | None
    state: LossState
    why: str = ""

    def __str__(self) -> str:
        if self.state is LossState.FINITE:
            return f"{self.nats:.3f} nats"
        words = "not finite" if self.state is LossState.NOT_FINITE else "not measured"
        return f"{words} ({self.why})" if self.why else words


class Steps:
    """Carries one mitigation at a time from state to state.

    Nothing is raised for what goes wrong with vLLM: it ends in the record, whose message says how the gates are.
    `done` and `failed` count by action: those that became active, and those that did not or may not have.
    """

    def __init__(
        self,
        probe: GateKeeper,
        store: Store,
        measure: Callable[[Sequence[Gate]], Awaitable[float | None]],
        *,
        now: Callable[[], float],
        measure_seconds: float,
        worse_nats: float,
    ) -> None:
        self._probe = probe
        self._store = store
        self._measure = measure
        self._now = now
        self._measure_seconds = measure_seconds
        self._worse_nats = worse_nats
        self.done: Counter[MitigationAction] = Counter()
        self.failed: Counter[MitigationAction] = Counter()

    async def apply(
        self, record: MitigationRecord, gates: Sequence[float], fallback: MitigationState, actor: str
    ) -> None:
        """Write the gates, verify.  `gates` are all live gates; `fallback` is the state if nothing changed."""
        message = f"Setting the gate of {names(record.blocks)} to {record.alpha:g}."
        record = self.save(record, actor, MitigationState.APPLYING, message)
        report = await self._write(record, gates, record.gates_wanted, fallback, actor)
        if report is None:
            return
        record = self.save(
            record,
            actor,
            MitigationState.VERIFYING,
            f"{readback(report.gates, record.blocks)}; measuring the loss, before and now.",
            paused_seconds=report.paused_seconds,
        )
        await self.verify(record, report.gates, actor)

    async def verify(self, record: MitigationRecord, gates: Sequence[float], actor: str) -> None:
        """Measure the losses, with the gates in place; an automatic mitigation that did not help is taken back."""
        before = Loss(record.loss_before, record.loss_before_state)
        if before.state is LossState.NOT_MEASURED:
            before = await self.loss(record.gates_before)
        after = await self.loss()
        change = f"loss {before} before, {after} after"
        worse = self.is_worse(before, after)
        # Also where the loss was not finite before: nobody asked for a skip that leaves the model broken.
        useless = worse or after.state is LossState.NOT_FINITE
        losses = {"loss_before": before.nats, "loss_before_state": before.state}
        record = record.model_copy(update={**losses, "loss_after": after.nats, "loss_after_state": after.state})
        if useless and record.automatic:
            record = self.save(record, actor, MitigationState.REVERTING, f"It did not help ({change}): taking it back.")
            self.failed[record.action] += 1
            await self.revert(record, gates, MitigationState.INTERRUPTED, f"Undone at once, {change}", ITSELF)
            return
        verb = "skipped" if record.action is MitigationAction.SKIP else f"scaled to alpha {record.alpha:g}"
        paused = "" if record.paused_seconds is None else f", engine paused {record.paused_seconds:.3f} s"
        warning = "; WORSE than before, kept because a person asked for it: consider an undo" if worse else ""
        message = f"{names(record.blocks).capitalize()} {verb}: {change}{paused}{warning}."
        self.save(record, actor, MitigationState.ACTIVE, message)
        self.done[record.action] += 1

    async def revert(
        self,
        record: MitigationRecord,
        gates: Sequence[float],
        fallback: MitigationState,
        why: str,
        actor: str,
        *,
        repaired: bool = False,
    ) -> Loss | None:
        """Set the blocks' gates to 1 and measure; None when it went wrong.  `fallback` is the state if nothing changed.

        `repaired`: nobody takes it back, it has become needless.
        Before the mitigation they were 1 too, unless it took over gates that no record explained: then 1 is the only
        way back to the whole model.
        """
        whole = tuple(Gate(block=block, alpha=1.0) for block in record.blocks)
        report = await self._write(record, gates, whole, fallback, actor)
        if report is None:
            return None
        now = await self.loss()
        self.save(
            record,
            actor,
            MitigationState.REVERTED,
            f"{why}: {readback(report.gates, record.blocks)}, loss now {now}, engine paused "
            f"{report.paused_seconds:.3f} s.",
            paused_seconds=report.paused_seconds,
            undone_by=None if repaired else actor,
        )
        return now

    def restarted(self, record: MitigationRecord, facts: ModelFacts, actor: str) -> MitigationRecord:
        """Close a record whose vLLM process is gone, and its gates and bytes with it."""
        if record.action is MitigationAction.REPAIR:
            message = "vLLM was restarted; the new process has loaded its weights anew."
            return self.save(record, actor, MitigationState.REVERTED, message)
        if record.action is MitigationAction.DRAIN:
            message = "vLLM was restarted, which ends the drain of the old process."
            return self.save(record, actor, MitigationState.REVERTED, message)
        odd = [block for block, alpha in enumerate(facts.gates) if alpha != 1.0]
        gates = f"are all 1 but for {names(odd)}" if odd else "are all 1"
        return self.save(
            record, actor, MitigationState.REVERTED, f"vLLM was restarted; the gates of the new process {gates}."
        )

    def save(
        self,
        record: MitigationRecord,
        actor: str,
        state: MitigationState,
        message: str,
        **changes: object,
    ) -> MitigationRecord:
        """Store the next state with its line in the audit log, and log it."""
        record = record.model_copy(update={**changes, "state": state, "message": message, "updated_at": self._now()})
        what: dict[str, object] = {"action": record.action.value}
        if record.action is MitigationAction.REPAIR:
            what["chunks"] = told(record.repairs)
        elif record.alpha is not None:
            what["alpha"] = record.alpha
        detail = {"id": record.id, "blocks": list(record.blocks), **what, "message": message}
        event = Event(at=record.updated_at, actor=actor, what=f"mitigation {state.value}", detail=detail)
        self._store.save_mitigation(record, event)
        _log.info(event.what, actor=actor, **detail)
        return record

    def fail(self, record: MitigationRecord, actor: str, state: MitigationState, message: str) -> None:
        """Store an outcome that is not the wanted one, and count it."""
        self.failed[record.action] += 1
        self.save(record, actor, state, message)

    async def _write(
        self,
        record: MitigationRecord,
        gates: Sequence[float],
        change: Sequence[Gate],
        fallback: MitigationState,
        actor: str,
    ) -> GateReport | None:
        """Write and compare; None when it went wrong, which the record then tells."""
        try:
            report = await self._probe.set_gates(GateChange(boot_id=record.boot_id, gates=list(change)))
        except ProbeError as error:
            await self._write_failed(record, gates, fallback, error, actor)
            return None
        wanted = with_gates(gates, change)
        odd = differing(report.gates, wanted)
        if not odd:
            return report
        state = MitigationState.INTERRUPTED if differing(report.gates, gates) else fallback
        message = f"The gates read back are not as wanted: {readback(report.gates, odd)}; not {readback(wanted, odd)}."
        self.fail(record, actor, state, message)
        return None

    async def _write_failed(
        self,
        record: MitigationRecord,
        gates: Sequence[float],
        fallback: MitigationState,
        error: ProbeError,
        actor: str,
    ) -> None:
        why = str(error).rstrip(".")
        try:
            facts = await self._probe.facts()
        except ProbeError:
            self.fail(
                record,
                actor,
                MitigationState.INTERRUPTED,
                f"The gates of {names(record.blocks)} may have changed or not, vLLM does not say ({why}): "
                "finish or undo when it answers.",
            )
            return
        if facts.boot_id != record.boot_id:
            self.failed[record.action] += 1
            self.restarted(record, facts, actor)
            return
        # Without an answer the write may still be waiting for its turn: what the gates show now proves nothing.
        answered = not isinstance(error, ProbeAway | ProbeNonsense)
        settled = answered and not differing(facts.gates, gates)
        help_ = "" if settled else ": finish or undo"
        self.fail(
            record,
            actor,
            fallback if settled else MitigationState.INTERRUPTED,
            f"The gates could not be written ({why}); {readback(facts.gates, record.blocks)} now{help_}.",
        )

    async def loss(self, as_if: Sequence[Gate] = (), seconds: float | None = None) -> Loss:
        """The loss of the model as served now, or why there is no number.

        `as_if` are gates in place of the served ones; `seconds`, how long it may take where that is shorter than usual.
        """
        seconds = min(self._measure_seconds, seconds or self._measure_seconds)
        try:
            async with asyncio.timeout(seconds):
                nats = await self._measure(as_if)
        except TimeoutError:
            return Loss(None, LossState.NOT_MEASURED, f"took longer than {seconds:g} s")
        except (LossUnavailable, ProbeError) as error:
            return Loss(None, LossState.NOT_MEASURED, str(error).rstrip("."))
        if nats is None or not math.isfinite(nats):
            return Loss(None, LossState.NOT_FINITE)
        return Loss(nats, LossState.FINITE)

    def is_worse(self, before: Loss, after: Loss) -> bool:
        """Whether the loss has risen by more than `worse_nats`; False where it was no number before."""
        if before.nats is None:
            return False
        if after.nats is None:
            return after.state is LossState.NOT_FINITE
        return after.nats > before.nats + self._worse_nats
