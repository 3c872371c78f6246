"""The steps of a repair, each stored before it is done: measure, write, look again, end the skips, measure again.

    pending -> (loss before) -> applying -> (bytes written and checked by the probe) -> verifying
            -> (all chunks looked at, skips of these blocks ended, loss after) -> repaired

The loss before can only be measured while the bytes are bad, so help waits for it, but not for long.

The probe writes no byte that a digest of the baseline does not prove: a repair that fails leaves nothing worse.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from ..monitors.fingerprint.facts import (
    ChunkName,
    ChunkRepair,
    FingerprintReading,
    Method,
    RepairOrder,
    RepairReport,
)
from .gates import names
from .guard import WeightsUnknown
from .mitigation_steps import GateKeeper, Loss, Steps
from .probe import ProbeAway, ProbeError, ProbeNonsense
from .records import LossState, MitigationRecord, MitigationState
from .repair_words import counted, outcome
from .store import Store
from .swept import Swept

Sweep = Callable[[], Awaitable[FingerprintReading]]

# Far above what a sweep takes: it ends a wait for a look that never comes.
_SWEEP_SECONDS = 600.0
# What the proof by the loss may cost those who are served by bad weights meanwhile.  The proof by digest needs no loss.
_LOSS_SECONDS = 10.0


class Mender(GateKeeper, Protocol):
    """What repair needs of the probe."""

    async def repair(self, order: RepairOrder) -> RepairReport:
        """Put the bytes of chunks right; raises `ProbeError`."""
        ...


class SweepUnavailable(Exception):
    """The chunks could not be looked at; one sentence that says why."""


class RepairSteps:
    """Carries one repair at a time from state to state, by the rules of `Steps`, which keeps the counts.

    `sweep` compares all chunks with their baseline, now; it raises `SweepUnavailable` or `ProbeError`.
    `repaired` counts the chunks that were written and seen to be right, by where their bytes came from.
    """

    def __init__(self, probe: Mender, store: Store, steps: Steps, sweep: Sweep) -> None:
        self._probe = probe
        self._store = store
        self._steps = steps
        self._sweep = sweep
        self.repaired: Counter[Method] = Counter()

    async def look(self) -> Swept:
        """Compare all chunks with the baseline; raises `WeightsUnknown` or `ProbeError`."""
        try:
            async with asyncio.timeout(_SWEEP_SECONDS):
                swept = Swept(await self._sweep())
        except TimeoutError:
            raise WeightsUnknown(f"The look at the weights took longer than {_SWEEP_SECONDS:g} s.") from None
        except SweepUnavailable as error:
            raise WeightsUnknown(f"The weights could not be looked at: {error}") from error
        if not swept.chunks:
            raise WeightsUnknown("The look at the weights saw no chunk at all.")
        return swept

    async def apply(self, record: MitigationRecord, fallback: MitigationState, actor: str) -> None:
        """Measure, write, verify.  `fallback` is the state if the probe refused."""
        before = Loss(record.loss_before, record.loss_before_state)
        if before.state is LossState.NOT_MEASURED:
            before = await self._steps.loss(seconds=_LOSS_SECONDS)
        losses = {"loss_before": before.nats, "loss_before_state": before.state}
        if not record.repairs:
            message = f"No chunk has changed in {names(record.blocks)}; loss before: {before}."
            record = self._steps.save(record, actor, MitigationState.VERIFYING, message, **losses)
            await self.verify(record, actor)
            return
        message = f"Putting {counted(record.repairs)} right; loss before: {before}."
        record = self._steps.save(record, actor, MitigationState.APPLYING, message, **losses)
        order = RepairOrder(
            boot_id=record.boot_id,
            chunks=[ChunkName(rank=repair.rank, chunk=repair.chunk) for repair in record.repairs],
        )
        try:
            report = await self._probe.repair(order)
        except ProbeError as error:
            await self._write_failed(record, fallback, error, actor)
            return
        repairs = _as_reported(record.repairs, report.chunks)
        record = self._steps.save(
            record,
            actor,
            MitigationState.VERIFYING,
            f"The probe says: {outcome(repairs)}; looking again.",
            repairs=repairs,
            paused_seconds=report.paused_seconds,
        )
        await self.verify(record, actor)

    async def resume(self, record: MitigationRecord, actor: str) -> None:
        """Go on with a repair that broke off, and write only if one of its chunks is bad still."""
        try:
            swept = await self.look()
        except (WeightsUnknown, ProbeError) as error:
            await self._not_seen(record, str(error), actor)
            return
        if record.repairs and all(swept.is_bad(repair) is False for repair in record.repairs):
            message = f"{counted(record.repairs)} had been put right before this broke off; looking again."
            record = self._steps.save(record, actor, MitigationState.VERIFYING, message)
            await self.verify(record, actor)
            return
        await self.apply(record, MitigationState.INTERRUPTED, actor)

    async def verify(self, record: MitigationRecord, actor: str) -> None:
        """Look at all chunks again, end the skips of blocks that are whole, measure."""
        try:
            swept = await self.look()
            facts = await self._probe.facts()
        except (WeightsUnknown, ProbeError) as error:
            await self._not_seen(record, str(error), actor)
            return
        if facts.boot_id != record.boot_id:
            self._steps.failed[record.action] += 1
            self._steps.restarted(record, facts, actor)
            return
        repairs = tuple(_as_seen(repair, swept) for repair in record.repairs)
        bad = [repair for repair in repairs if not repair.intact]
        self.repaired.update(repair.method for repair in repairs if repair.intact and repair.method is not None)
        ended, now, notes = (False, None, []) if bad else await self._end_skips(record, swept, actor)
        before, after = Loss(record.loss_before, record.loss_before_state), now or await self._steps.loss()
        notes.append(f"loss {before} before, {after} after")
        if record.paused_seconds is not None:
            notes.append(f"engine paused {record.paused_seconds:.3f} s")
        if self._steps.is_worse(before, after):
            notes.append("WORSE than before")
        others = swept.changed - len(bad)
        if others:
            notes.append(f"{others} other chunk{'s' * (others > 1)} changed and not part of this")
        done = not bad and (bool(repairs) or ended)
        first = outcome(repairs)
        if not repairs:
            whole = all(swept.intact(block) for block in record.blocks)
            where = names(record.blocks)
            first = f"Nothing to put right in {where}" if whole else f"Changes in {where} meanwhile: repair again"
        record = self._steps.save(
            record,
            actor,
            MitigationState.REPAIRED if done else MitigationState.FAILED,
            f"{'; '.join([first, *notes])}.",
            repairs=repairs,
            loss_after=after.nats,
            loss_after_state=after.state,
        )
        (self._steps.done if done else self._steps.failed)[record.action] += 1

    async def _end_skips(
        self, record: MitigationRecord, swept: Swept, actor: str
    ) -> tuple[bool, Loss | None, list[str]]:
        """Set the gates of what was repaired to 1: whether one was, the loss then, and half a sentence for each."""
        ended, now, notes = False, None, []
        for held in self._store.open_mitigations():
            both = sorted(set(held.held) & set(record.blocks))
            if held.boot_id != record.boot_id or not both:
                continue
            spoiled = [block for block in held.held if not swept.intact(block)]
            if held.state is not MitigationState.ACTIVE:
                why = f"which is {held.state.value}: finish or undo it"
            elif spoiled:
                why = f"since not all of {names(spoiled)} is known to be intact"
            else:
                now, why = await self._end(held, record.id, actor)
            ended = ended or not why
            still = f"{names(both)} still {_gated(held)} by mitigation {held.id}, {why}"
            notes.append(still if why else f"mitigation {held.id} ended")
        return ended, now, notes

    async def _end(self, held: MitigationRecord, repair: str, actor: str) -> tuple[Loss | None, str]:
        """Undo one mitigation; the loss then, and why it was not undone, empty when it was."""
        try:
            facts = await self._probe.facts()
        except ProbeError as error:
            return None, f"which could not be ended: {_inside(error)}"
        message = f"Setting the gate of {names(held.blocks)} to 1: repaired."
        held = self._steps.save(held, actor, MitigationState.REVERTING, message)
        why = f"Repaired by mitigation {repair}"
        now = await self._steps.revert(held, facts.gates, MitigationState.ACTIVE, why, actor, repaired=True)
        if now is not None:
            return now, ""
        kept = self._store.mitigation(held.id)
        return None, f"which could not be ended: {'' if kept is None else _inside(kept.message)}"

    async def _write_failed(
        self, record: MitigationRecord, fallback: MitigationState, error: ProbeError, actor: str
    ) -> None:
        why = _inside(error)
        chunks = counted(record.repairs)
        try:
            facts = await self._probe.facts()
        except ProbeError:
            message = f"{chunks} may have been put right or not, vLLM does not say ({why}): finish when it answers."
            self._steps.fail(record, actor, MitigationState.INTERRUPTED, message)
            return
        if facts.boot_id != record.boot_id:
            self._steps.failed[record.action] += 1
            self._steps.restarted(record, facts, actor)
        elif isinstance(error, ProbeAway | ProbeNonsense):
            # Without an answer the order may still be waiting for its turn.
            message = f"{chunks} may have been put right or not, there was no clear answer ({why}): finish."
            self._steps.fail(record, actor, MitigationState.INTERRUPTED, message)
        else:
            message = f"The probe failed to put {chunks} right ({why}); what it wrote is as in the baseline."
            self._steps.fail(record, actor, fallback, message)

    async def _not_seen(self, record: MitigationRecord, why: str, actor: str) -> None:
        """It could not be looked at what was written: nobody may call that repaired."""
        try:
            facts = await self._probe.facts()
        except ProbeError:
            facts = None
        if facts is not None and facts.boot_id != record.boot_id:
            self._steps.failed[record.action] += 1
            self._steps.restarted(record, facts, actor)
            return
        message = f"What has been put right was not seen ({why.rstrip('.')}): finish."
        self._steps.fail(record, actor, MitigationState.INTERRUPTED, message)


def _as_reported(found: Sequence[ChunkRepair], reported: Iterable[ChunkRepair]) -> tuple[ChunkRepair, ...]:
    """What the probe says of each chunk, and what was known before of one that it found intact."""
    known = {(repair.rank, repair.chunk): repair for repair in reported}
    made = []
    for was in found:
        now = known.get((was.rank, was.chunk))
        if now is None:
            now = was.model_copy(update={"reason": "the probe did not say what became of it"})
        method = now.method or (was.method if now.intact else None)
        diagnoses, pieces = now.diagnoses or was.diagnoses, now.pieces or was.pieces
        made.append(now.model_copy(update={"method": method, "diagnoses": diagnoses, "pieces": pieces}))
    return tuple(made)


def _as_seen(repair: ChunkRepair, swept: Swept) -> ChunkRepair:
    """What a fresh look says of a chunk overrules what was said before."""
    bad = swept.is_bad(repair)
    if bad is None or bad is not repair.intact:
        return repair
    reason = "It changed again after it had been put right." if bad else None
    return repair.model_copy(update={"intact": not bad, "reason": reason})


def _gated(record: MitigationRecord) -> str:
    return "skipped" if record.alpha == 0.0 else f"scaled to alpha {record.alpha:g}"


def _inside(sentence: object) -> str:
    return str(sentence).rstrip(".")
