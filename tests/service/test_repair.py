"""Repair: which chunks it takes, what is stored before it is done, and what is true after all that can go wrong."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from flipwatch.monitors.fingerprint.facts import Method, RepairOrder, RepairReport
from flipwatch.monitors.wire import Gate, SelfTestState
from flipwatch.service import repair_steps
from flipwatch.service.guard import (
    BreakerOpen,
    InvalidOrder,
    MitigationBusy,
    ModeForbids,
    NothingToRepair,
    UnknownBlock,
    WeightsUnknown,
    WrongState,
)
from flipwatch.service.mitigation import Mitigator
from flipwatch.service.mitigation_steps import LossUnavailable
from flipwatch.service.probe import ProbeAway, ProbeRefused
from flipwatch.service.records import LossState, MitigationAction, MitigationRecord, MitigationState
from flipwatch.service.repair_steps import SweepUnavailable
from flipwatch.service.store import Store

from .mitigation_rig import FakeProbe, Rig

ATTENUATE, REPAIR, SKIP = MitigationAction.ATTENUATE, MitigationAction.REPAIR, MitigationAction.SKIP
SENTENCE = (
    "1 bit of model.layers.4.mlp.up_proj.weight changed: element [12, 345], bit 14, 0.01 became 4 (single bit flip)"
)


def ordered(rig: Rig, at: int = -1) -> list[tuple[int, int]]:
    """Rank and chunk of what the probe was asked to repair."""
    return [(chunk.rank, chunk.chunk) for chunk in rig.probe.repairs[at].chunks]


async def test_changed_chunks_are_repaired_verified_and_told() -> None:
    """Every changed chunk of every rank is put right; record and audit log say what had happened to it, and how."""
    rig = Rig()
    rig.probe.weights.ranks = 2
    rig.probe.weights.damage(7, 4)
    rig.probe.weights.damage(9, None, rank=1, parity="Two chunks of one group have changed.")
    pending = await rig.mitigator.repair(None, reason="test", actor="alice")
    assert (pending.state, pending.message) == (
        MitigationState.PENDING,
        "Will put 2 chunks right as soon as the loss before is measured.",
    )
    record = await rig.ended(pending)
    assert record.state is MitigationState.REPAIRED
    assert ordered(rig) == [(0, 7), (1, 9)]
    assert (record.blocks, record.alpha, record.gates_before) == ((4,), None, ())
    assert (record.loss_before, record.loss_after, record.paused_seconds) == (7.0, 3.0, 0.25)
    assert [(repair.intact, repair.method) for repair in record.repairs] == [
        (True, Method.PARITY),
        (True, Method.CHECKPOINT),
    ]
    assert record.message == (
        "2 chunks put right (1 by parity, 1 from the checkpoint); loss 7.000 nats before, 3.000 nats after; "
        "engine paused 0.250 s."
    )
    assert rig.history() == ["pending", "applying", "verifying", "repaired"]
    last = rig.store.events()[0]
    assert last.actor == "alice"
    assert last.detail["chunks"][0] == {
        "rank": 0,
        "chunk": 7,
        "tensors": ["model.layers.4.mlp.up_proj.weight"],
        "intact": True,
        "method": "parity",
        "diagnoses": [SENTENCE],
        "reason": None,
    }
    assert (rig.mitigator.done, rig.mitigator.failed) == ({REPAIR: 1}, {})
    assert rig.mitigator.repaired == {Method.PARITY: 1, Method.CHECKPOINT: 1}
    assert rig.store.open_mitigations() == []


async def test_applying_is_stored_before_a_byte_is_written() -> None:
    """At the moment of the POST the store says `applying`, with the diagnosis of the first look."""
    rig = Rig()
    rig.probe.weights.damage(7, 4)
    seen: list[MitigationRecord] = []

    async def look() -> None:
        seen.extend(rig.store.mitigations())

    rig.probe.on_repair = look
    await rig.repair()
    [record] = seen
    assert record.state is MitigationState.APPLYING
    assert [(repair.chunk, repair.intact, repair.method) for repair in record.repairs] == [(7, False, None)]
    assert record.repairs[0].diagnoses[0].sentence() == SENTENCE


async def test_only_chunks_that_reach_into_the_named_blocks() -> None:
    """A border chunk belongs to both of its blocks, the change to one; what else has changed is left and told."""
    rig = Rig()
    rig.probe.weights.damage(7, 3, 4)
    rig.probe.weights.damage(8, 5)
    rig.probe.weights.damage(9, None)
    record = await rig.repair(4)
    assert (record.state, record.blocks, ordered(rig)) == (MitigationState.REPAIRED, (3,), [(0, 7)])
    assert record.message.endswith("; 2 other chunks changed and not part of this.")
    with pytest.raises(NothingToRepair) as refusal:
        await rig.repair(4)
    assert str(refusal.value) == (
        "Nothing to repair in block 4: all chunks there are those of the baseline; 2 chunks elsewhere changed."
    )


async def test_nothing_to_repair_is_refused_and_recorded_nowhere() -> None:
    """Where all chunks are those of the baseline there is no record and no event, and the next order is taken."""
    rig = Rig()
    with pytest.raises(NothingToRepair, match=r"^Nothing to repair: all 40 chunks are those of the baseline\.$"):
        await rig.repair()
    with pytest.raises(UnknownBlock):
        await rig.repair(6)
    with pytest.raises(InvalidOrder, match="each block once"):
        await rig.repair(4, 4)
    assert (rig.store.mitigations(), rig.store.events(), rig.probe.repairs) == ([], [], [])
    rig.probe.weights.damage(7, 4)
    assert (await rig.repair()).state is MitigationState.REPAIRED


async def test_a_look_that_tells_too_little_is_not_taken_for_health() -> None:
    """Weights that could not be looked at, saw nothing, or only counted, are never called those of the baseline."""
    rig = Rig()
    rig.readings = [SweepUnavailable("The probe holds no baseline.")]
    with pytest.raises(WeightsUnknown, match=r"^The weights could not be looked at: The probe holds no baseline\.$"):
        await rig.repair()
    rig.probe.weights.ranks = 0
    with pytest.raises(WeightsUnknown, match="saw no chunk at all"):
        await rig.repair()
    rig.probe.weights.ranks, rig.probe.weights.named = 1, 1
    rig.probe.weights.damage(7, 4)
    rig.probe.weights.damage(8, 5)
    with pytest.raises(NothingToRepair, match=r"^2 chunks have changed, .*: repair without naming blocks\.$"):
        await rig.repair(5)
    record = await rig.repair()
    assert (record.state, ordered(rig)) == (MitigationState.REPAIRED, [(0, 7)])
    assert record.message.endswith("; 1 other chunk changed and not part of this.")
    rig.probe.weights.bad.clear()
    rig.probe.weights.replaced = ["model.norm.weight", "lm_head.weight"]
    with pytest.raises(NothingToRepair, match=r"model\.norm\.weight and 1 more were replaced since"):
        await rig.repair()


async def test_observe_refuses_and_dry_run_says_how() -> None:
    """In `observe` nothing is looked at; in `dry-run` the record says which chunks, and from where."""
    rig = Rig(mode="observe")
    with pytest.raises(ModeForbids, match="observe"):
        await rig.repair()
    assert rig.sweeps == 0
    rig = Rig(mode="dry-run")
    rig.probe.weights.damage(7, 4)
    rig.probe.weights.damage(9, None, parity="Parity is lost.")
    record = await rig.repair()
    assert record.state is MitigationState.DRY_RUN
    assert record.message == (
        "Dry run: would put right chunk 7 of rank 0 (model.layers.4.mlp.up_proj.weight) by parity; chunk 9 of rank 0 "
        "(model.embed_tokens.weight) from the checkpoint (Parity is lost); nothing was touched."
    )
    assert (rig.probe.repairs, rig.mitigator.busy, rig.history()) == ([], False, ["dry_run"])


async def test_what_a_sweep_has_just_found_is_enough() -> None:
    """A recent reading with changed chunks saves the first look; the last look is never saved."""
    rig = Rig()
    rig.probe.weights.damage(7, 4)
    recent = rig.probe.weights.reading()
    rig.mitigator = Mitigator(
        rig.probe, rig.store, rig.settings, rig.measure, lambda boot_id: None, rig.sweep, recent=lambda facts: recent
    )
    rig.probe.weights.damage(9, 5)
    record = await rig.repair()
    assert (record.state, ordered(rig), rig.sweeps) == (MitigationState.REPAIRED, [(0, 7)], 1)
    assert "1 other chunk changed and not part of this" in record.message
    # Nothing in block 5 by then: only a new look tells.
    record = await rig.repair(5)
    assert (record.state, ordered(rig), rig.sweeps) == (MitigationState.REPAIRED, [(0, 9)], 3)


async def test_repair_does_not_wait_long_for_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the loss of the damaged model takes long, the bytes are put right without it."""
    monkeypatch.setattr(repair_steps, "_LOSS_SECONDS", 0.01)
    rig = Rig()
    rig.probe.weights.damage(7, 4)
    measure, losses = rig.measure, 0

    async def slow_at_first(as_if: Sequence[Gate]) -> float | None:
        nonlocal losses
        losses += 1
        if losses == 1:
            await asyncio.Event().wait()
        return await measure(as_if)

    rig.mitigator = Mitigator(rig.probe, rig.store, rig.settings, slow_at_first, lambda boot_id: None, rig.sweep)
    record = await rig.repair(4)
    assert (record.state, record.loss_before, record.loss_after) == (MitigationState.REPAIRED, None, 3.0)
    assert "loss before: not measured (took longer than 0.01 s)" in rig.store.events()[2].detail["message"]


async def test_neither_gates_nor_a_loss_are_needed() -> None:
    """Without gates, and with a loss that nobody can measure, bytes are put right all the same."""
    rig = Rig()
    rig.probe.armed, rig.probe.self_test = False, SelfTestState.FAILED
    rig.probe.weights.damage(7, 4)
    rig.losses = [LossUnavailable("There is no validation set."), ProbeRefused(501, "Not supported.")]
    record = await rig.repair(4)
    assert record.state is MitigationState.REPAIRED
    assert record.loss_before_state is record.loss_after_state is LossState.NOT_MEASURED
    assert "; loss not measured before, not measured (Not supported) after;" in record.message
    assert "not measured (There is no validation set)" in rig.store.events()[2].detail["message"]


async def test_the_breaker_counts_repairs_but_not_their_blocks() -> None:
    """A repair gates nothing, so `max_blocks` is no limit; `max_actions` is."""
    rig = Rig(max_blocks=1, max_actions=1)
    for chunk in range(6):
        rig.probe.weights.damage(chunk, chunk)
    assert (await rig.repair()).state is MitigationState.REPAIRED
    rig.probe.weights.damage(7, 4)
    with pytest.raises(BreakerOpen, match="1 mitigations in the last 60 minutes"):
        await rig.repair()


async def test_one_at_a_time_with_the_others() -> None:
    """While a repair runs, every other order is busy."""
    rig = Rig()
    rig.probe.weights.damage(7, 4)
    reached, release = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        reached.set()
        await release.wait()

    rig.probe.on_repair = hold
    running = await rig.mitigator.repair(None, reason="test", actor="alice")
    await reached.wait()
    with pytest.raises(MitigationBusy):
        await rig.mitigator.repair(None, reason="test", actor="bob")
    with pytest.raises(MitigationBusy):
        await rig.mitigator.apply(SKIP, [3], reason="test", actor="bob")
    release.set()
    assert (await rig.ended(running)).state is MitigationState.REPAIRED


async def test_what_cannot_be_repaired_is_a_failure_with_the_reason_of_each_chunk() -> None:
    """The good chunk is right, the other one as bad as before, and the message names it."""
    rig = Rig()
    rig.probe.weights.damage(7, 4)
    rig.probe.weights.damage(9, 2, parity="Parity is lost.", checkpoint="The checkpoint has moved.")
    record = await rig.repair()
    assert record.state is MitigationState.FAILED
    assert record.message == (
        "1 of 2 chunks could not be put right: chunk 9 of rank 0 (model.layers.2.mlp.up_proj.weight): The checkpoint "
        "has moved; loss 7.000 nats before, 3.000 nats after; engine paused 0.250 s."
    )
    assert [repair.intact for repair in record.repairs] == [True, False]
    assert (rig.mitigator.done, rig.mitigator.failed) == ({}, {REPAIR: 1})
    assert rig.mitigator.repaired == {Method.PARITY: 1}
    assert rig.probe.gates == [1.0] * 6


async def test_a_chunk_that_changes_again_is_not_called_repaired() -> None:
    """The fresh look overrules the probe's own report."""
    rig = Rig()
    rig.probe.weights.damage(7, 4)
    rig.probe.weights.stuck.add((0, 7))
    record = await rig.repair()
    assert record.state is MitigationState.FAILED
    assert "It changed again after it had been put right" in record.message
    assert rig.mitigator.repaired == {}


async def test_repair_ends_the_skip_of_its_block() -> None:
    """After the bytes are seen to be right the block runs again, and both records say why."""
    rig = Rig()
    rig.probe.weights.damage(7, 4)
    skip = await rig.apply(4)
    record = await rig.repair(4)
    assert record.state is MitigationState.REPAIRED
    assert (record.loss_before, record.loss_after) == (4.0, 3.0)
    assert f"; mitigation {skip.id} ended; loss 4.000 nats before, 3.000 nats after" in record.message
    assert rig.probe.gates == [1.0] * 6
    ended = rig.stored(skip)
    assert ended.state is MitigationState.REVERTED
    assert ended.message.startswith(f"Repaired by mitigation {record.id}: gate of block 4 is 1, loss now 3.000 nats")
    assert rig.history()[4:] == ["pending", "applying", "verifying", "reverting", "reverted", "repaired"]


async def test_repair_of_an_intact_skipped_block_only_ends_the_skip() -> None:
    """Where the bytes were put right before, the block runs again and nothing is written."""
    rig = Rig()
    skip = await rig.apply(4, action=ATTENUATE, alpha=0.5)
    rig.probe.weights.repaired.add(4)
    rig.probe.weights.damage(9, 2)
    with pytest.raises(NothingToRepair):
        await rig.repair(3)
    record = await rig.repair(4)
    assert (record.state, record.repairs, rig.probe.repairs) == (MitigationState.REPAIRED, (), [])
    assert record.message.startswith(f"Nothing to put right in block 4; mitigation {skip.id} ended; loss 4.000 nats")
    assert (rig.stored(skip).state, rig.probe.gates) == (MitigationState.REVERTED, [1.0] * 6)
    assert rig.history()[4:] == ["pending", "verifying", "reverting", "reverted", "repaired"]


async def test_only_the_skip_of_a_changed_or_a_named_block_ends() -> None:
    """A block that shares a chunk with a repaired one stays skipped: something else may be wrong with it."""
    rig = Rig()
    rig.probe.weights.damage(7, 3, 4)
    skip = await rig.apply(4)
    record = await rig.repair()
    assert (record.state, record.blocks) == (MitigationState.REPAIRED, (3,))
    assert (rig.stored(skip).state, rig.probe.gates[4]) == (MitigationState.ACTIVE, 0.0)
    rig.probe.weights.damage(7, 3, 4)
    record = await rig.repair(4)
    assert (record.state, record.blocks) == (MitigationState.REPAIRED, (3, 4))
    assert (rig.stored(skip).state, rig.probe.gates[4]) == (MitigationState.REVERTED, 1.0)


async def test_dry_run_would_end_the_skip() -> None:
    """A dry run of a repair of an intact skipped block says that the block would run again."""
    rig = Rig()
    await rig.apply(4)
    cautious = Rig(rig.store, rig.probe, mode="dry-run")
    record = await cautious.repair(4)
    assert record.message == (
        "Dry run: would let block 4 run again, as nothing has changed there; nothing was touched."
    )
    assert rig.probe.gates[4] == 0.0


async def test_skip_that_cannot_be_ended_is_told() -> None:
    """A gate that could not be written, or another block that is not intact, leaves the skip and is told."""
    rig = Rig()
    rig.probe.weights.damage(7, 4)
    skip = await rig.apply(4)

    async def refuse() -> None:
        raise ProbeRefused(409, "vLLM is paused by somebody else.")

    rig.probe.on_set = refuse
    record = await rig.repair(4)
    assert record.state is MitigationState.REPAIRED
    assert f"; block 4 still skipped by mitigation {skip.id}, which could not be ended: The gates" in record.message
    assert (rig.stored(skip).state, rig.probe.gates[4]) == (MitigationState.ACTIVE, 0.0)
    record = await rig.repair(4)
    assert record.state is MitigationState.FAILED
    rig.probe.on_set = None
    assert (await rig.repair(4)).state is MitigationState.REPAIRED

    rig = Rig()
    rig.probe.weights.damage(7, 4)
    rig.probe.weights.damage(8, 3)
    skip = await rig.apply(3, 4)
    record = await rig.repair(4)
    assert record.state is MitigationState.REPAIRED
    assert f" by mitigation {skip.id}, since not all of block 3 is known to be intact;" in record.message
    assert rig.probe.gates[3] == rig.probe.gates[4] == 0.0


async def test_a_skip_that_is_not_sure_to_be_needless_stays() -> None:
    """An interrupted skip, one of another process, and one of a block that no look sees whole are left alone."""
    rig = Rig(max_actions=100)
    skip = await rig.apply(4)
    rig.probe.weights.replaced = ["model.layers.4.input_layernorm.weight"]
    rig.probe.weights.damage(7, 4)
    record = await rig.repair(4)
    assert (record.state, rig.stored(skip).state) == (MitigationState.REPAIRED, MitigationState.ACTIVE)
    assert f"block 4 still skipped by mitigation {skip.id}, since not all of block 4 is known" in record.message
    rig.probe.weights.replaced = []
    rig.probe.gates[4] = 0.5
    rig.mitigator.recover(await rig.probe.facts())
    with pytest.raises(NothingToRepair):
        await rig.repair(4)
    rig.probe.weights.damage(7, 4)
    record = await rig.repair(4)
    assert f" by mitigation {skip.id}, which is interrupted: finish or undo it;" in record.message
    assert rig.probe.gates[4] == 0.5
    await rig.ended(await rig.mitigator.finish(skip.id, actor="bob"))
    rig.probe.restart()
    with pytest.raises(NothingToRepair):
        await rig.repair(4)
    rig.probe.weights.damage(7, 4)
    record = await rig.repair(4)
    assert (record.state, skip.id in record.message) == (MitigationState.REPAIRED, False)
    assert rig.stored(skip).state is MitigationState.ACTIVE


async def test_a_loss_that_rises_is_told() -> None:
    """Bytes that were bad when the baseline was taken can make it worse: the record says so."""
    rig = Rig()
    rig.probe.weights.damage(7, 4)
    rig.losses = [4.0, 9.0]
    record = await rig.repair()
    assert record.state is MitigationState.REPAIRED
    assert record.message.endswith("; WORSE than before.")


async def test_a_report_without_a_chunk_leaves_it_to_the_look() -> None:
    """What the probe does not mention is what the fresh look says of it; where that says nothing, it is not right."""
    rig = Rig()
    whole = rig.probe.weights.repair

    def silent(order: RepairOrder) -> RepairReport:
        return whole(order).model_copy(update={"chunks": []})

    rig.probe.weights.repair = silent  # type: ignore[method-assign]
    rig.probe.weights.damage(7, 4)
    record = await rig.repair()
    assert (record.state, record.repairs[0].method) == (MitigationState.REPAIRED, None)
    rig.probe.weights.damage(7, 4, checkpoint="The checkpoint has moved.")
    rig.probe.weights.named = 1

    async def one_more() -> None:
        rig.probe.weights.damage(3, 2)

    rig.probe.on_repair = one_more
    record = await rig.repair()
    assert record.state is MitigationState.FAILED
    assert "(model.layers.4.mlp.up_proj.weight): the probe did not say what became of it;" in record.message


async def test_a_block_that_changes_while_its_skip_is_to_be_ended_stays_skipped() -> None:
    """The look before the gate is written counts, not the one when the order came."""
    rig = Rig()
    await rig.apply(4)
    good = rig.probe.weights.reading()
    rig.probe.weights.damage(7, 4)
    rig.readings = [good]
    record = await rig.repair(4)
    assert record.state is MitigationState.FAILED
    assert record.message.startswith("Changes in block 4 meanwhile: repair again; block 4 still skipped by ")
    assert rig.probe.gates[4] == 0.0


async def test_a_repair_holds_no_block() -> None:
    """A block can be skipped although a repair of it was interrupted, and its gate belongs to nobody."""
    rig = Rig()
    rig.probe.weights.damage(7, 4)

    async def vanish() -> None:
        raise ProbeAway("vLLM did not answer in time.")

    rig.probe.on_repair = vanish
    assert (await rig.repair()).state is MitigationState.INTERRUPTED
    assert (await rig.apply(4)).state is MitigationState.ACTIVE


async def test_refusal_of_the_probe_is_a_failure() -> None:
    """When the probe refuses, the record says why."""
    rig = Rig()
    rig.probe.weights.damage(7, 4)

    async def refuse() -> None:
        raise ProbeRefused(409, "vLLM is paused by somebody else.")

    rig.probe.on_repair = refuse
    record = await rig.repair()
    assert record.state is MitigationState.FAILED
    assert record.message == (
        "The probe failed to put 1 chunk right (vLLM is paused by somebody else); what it wrote is as in the baseline."
    )
    assert (len(rig.store.mitigations()), rig.mitigator.failed) == (1, {REPAIR: 1})

    async def time_out() -> None:
        raise ProbeAway("vLLM did not answer in time.")

    rig.probe.on_repair = time_out
    record = await rig.repair()
    rig.probe.on_repair = refuse
    record = await rig.ended(await rig.mitigator.finish(record.id, actor="bob"))
    assert record.state is MitigationState.INTERRUPTED


async def test_write_without_an_answer_is_interrupted_and_can_be_finished() -> None:
    """A repair that timed out may still happen; finishing looks again, whichever it was."""
    rig = Rig()
    rig.probe.weights.damage(7, 4)

    async def time_out() -> None:
        rig.probe.away = True
        raise ProbeAway("vLLM did not answer in time.")

    rig.probe.on_repair = time_out
    record = await rig.repair()
    assert record.state is MitigationState.INTERRUPTED
    assert record.message == (
        "1 chunk may have been put right or not, vLLM does not say (vLLM did not answer in time): "
        "finish when it answers."
    )
    rig.probe.away, rig.probe.on_repair = False, None
    rig.losses = [3.5]
    with pytest.raises(WrongState, match="is a repair: it only puts the bytes of the baseline back"):
        await rig.undo(record)
    record = await rig.ended(await rig.mitigator.finish(record.id, actor="bob"))
    assert (record.state, record.repairs[0].method) == (MitigationState.REPAIRED, Method.PARITY)
    assert (record.loss_before, record.loss_after) == (7.0, 3.5)


@pytest.mark.parametrize("written", [False, True])
async def test_sidecar_killed_in_the_write_can_be_finished(tmp_path: Path, written: bool) -> None:
    """The next start calls it interrupted; finishing repairs what is bad still, and keeps the first diagnosis."""
    path = tmp_path / "flipwatch.db"
    probe = FakeProbe()
    probe.weights.damage(7, 4)
    rig = Rig(Store(path), probe)
    reached = asyncio.Event()

    async def die() -> None:
        if written:
            probe.weights.repair(probe.repairs[-1])
        reached.set()
        await asyncio.Event().wait()

    probe.on_repair = die
    record = await rig.mitigator.repair(None, reason="test", actor="alice")
    await reached.wait()
    await rig.mitigator.close(grace=0.0)
    assert rig.stored(record).state is MitigationState.APPLYING
    rig.store.close()

    probe.on_repair = None
    rig = Rig(Store(path), probe)
    [record] = rig.mitigator.recover(await probe.facts())
    assert record.state is MitigationState.INTERRUPTED
    assert record.message == (
        "This broke off while it was applying, and what it has put right is not known: finish it."
    )
    assert rig.mitigator.recover(await probe.facts()) == []
    record = await rig.ended(await rig.mitigator.finish(record.id, actor="bob"))
    assert record.state is MitigationState.REPAIRED
    assert len(probe.repairs) == (1 if written else 2)
    assert record.repairs[0].diagnoses[0].sentence() == SENTENCE
    assert (record.loss_before, record.loss_after) == (7.0, 3.0)
    assert probe.weights.bad == {}
    rig.store.close()


async def test_finish_needs_a_look() -> None:
    """As long as nobody can look at the weights, the repair stays interrupted."""
    rig = Rig()
    rig.probe.weights.damage(7, 4)
    rig.readings = [rig.probe.weights.reading(), SweepUnavailable("The measurement is void.")]
    record = await rig.repair()
    assert record.state is MitigationState.INTERRUPTED
    assert record.message == (
        "What has been put right was not seen (The weights could not be looked at: The measurement is void): finish."
    )
    rig.readings = [SweepUnavailable("The measurement is void.")]
    record = await rig.ended(await rig.mitigator.finish(record.id, actor="bob"))
    assert record.state is MitigationState.INTERRUPTED
    record = await rig.ended(await rig.mitigator.finish(record.id, actor="bob"))
    assert (record.state, record.repairs[0].method) == (MitigationState.REPAIRED, Method.PARITY)
    assert record.message.startswith("1 chunk put right (1 by parity)")


async def test_finish_keeps_what_is_known_of_chunks_that_were_right_already() -> None:
    """Method, tensor and diagnosis of the first try stay, while the second one puts the rest right."""
    rig = Rig()
    rig.probe.weights.damage(7, 4)
    rig.probe.weights.damage(8, 5)
    rig.readings = [rig.probe.weights.reading(), SweepUnavailable("The measurement is void.")]
    record = await rig.repair()
    rig.probe.weights.damage(8, 5, parity="Parity is lost.")
    record = await rig.ended(await rig.mitigator.finish(record.id, actor="bob"))
    assert [repair.method for repair in record.repairs] == [Method.PARITY, Method.CHECKPOINT]
    assert record.repairs[0].diagnoses[0].sentence() == SENTENCE
    assert record.repairs[0].pieces[0].block == 4
    assert rig.mitigator.repaired == {Method.PARITY: 1, Method.CHECKPOINT: 1}


async def test_an_end_of_a_skip_that_broke_off_can_be_finished() -> None:
    """It measures the loss before and ends the skip, as it would have done."""
    rig = Rig()
    await rig.apply(4)
    rig.losses = [ZeroDivisionError("oops")]
    record = await rig.repair(4)
    assert record.state is MitigationState.INTERRUPTED
    record = await rig.ended(await rig.mitigator.finish(record.id, actor="bob"))
    assert (record.state, record.loss_before, rig.probe.gates[4]) == (MitigationState.REPAIRED, 4.0, 1.0)


@pytest.mark.parametrize("when", ["write", "look", "broken look"])
async def test_vllm_restart_in_the_middle_closes_the_record(when: str) -> None:
    """The new process has loaded its weights anew: there is nothing to go on with."""
    rig = Rig()
    rig.probe.weights.damage(7, 4)

    async def restart() -> None:
        rig.probe.restart()

    def restart_after_the_second() -> None:
        if rig.sweeps == 2:
            rig.probe.restart()
            if when == "broken look":
                raise SweepUnavailable("vLLM was restarted while it was measured.")

    if when == "write":
        rig.probe.on_repair = restart
    else:
        rig.on_sweep = restart_after_the_second
    record = await rig.repair()
    assert record.state is MitigationState.REVERTED
    assert record.message == "vLLM was restarted; the new process has loaded its weights anew."
    assert rig.mitigator.done == {}


async def test_recover_after_a_vllm_restart_closes_an_interrupted_repair() -> None:
    """What was interrupted in a process that is gone is closed, by the next look or by finish."""
    rig = Rig()

    async def time_out() -> None:
        raise ProbeAway("vLLM did not answer in time.")

    rig.probe.on_repair = time_out
    for way in ("recover", "finish"):
        rig.probe.weights.damage(7, 4)
        record = await rig.repair()
        assert record.state is MitigationState.INTERRUPTED
        assert "there was no clear answer" in record.message
        rig.probe.boot_id = way
        if way == "recover":
            [record] = rig.mitigator.recover(await rig.probe.facts())
        else:
            record = await rig.mitigator.finish(record.id, actor="bob")
        assert record.state is MitigationState.REVERTED


async def test_mistake_of_ours_leaves_a_repair_that_can_be_finished() -> None:
    """An exception that nobody expected ends in `interrupted`."""
    rig = Rig()
    rig.probe.weights.damage(7, 4)
    rig.losses = [ZeroDivisionError("oops")]
    record = await rig.repair()
    assert record.message == "Flipwatch itself failed (ZeroDivisionError: oops): finish it."
    assert (await rig.ended(await rig.mitigator.finish(record.id, actor="bob"))).state is MitigationState.REPAIRED
