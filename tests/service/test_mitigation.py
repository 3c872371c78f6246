"""Mitigation: what is refused, what is stored before it is done, what is true after all that can go wrong."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flipwatch.monitors.verdict.verdict import Verdict
from flipwatch.monitors.wire import Gate, SelfTestState
from flipwatch.service.gates import unrecorded
from flipwatch.service.guard import (
    AlreadyMitigated,
    BreakerOpen,
    GatesUnusable,
    InvalidOrder,
    MitigationBusy,
    ModeForbids,
    UnknownBlock,
    UnknownMitigation,
    WrongState,
)
from flipwatch.service.mitigation import Mitigator
from flipwatch.service.mitigation_steps import LossUnavailable
from flipwatch.service.probe import ProbeAway, ProbeRefused
from flipwatch.service.records import Event, LossState, MitigationAction, MitigationRecord, MitigationState
from flipwatch.service.settings import MitigationSettings
from flipwatch.service.store import Store, StoreError

from .mitigation_rig import FakeProbe, Rig, unswept

SKIP = MitigationAction.SKIP
ATTENUATE = MitigationAction.ATTENUATE


async def test_skip_is_applied_verified_and_told() -> None:
    """A skip sets the gate, measures before and after, and its record and audit log say so with the numbers."""
    rig = Rig()
    pending = await rig.mitigator.apply(SKIP, [4], reason="test", actor="alice")
    assert pending.state is MitigationState.PENDING
    record = await rig.ended(pending)
    assert rig.probe.gates == [1, 1, 1, 1, 0, 1]
    assert record.state is MitigationState.ACTIVE
    assert (record.loss_before, record.loss_after) == (7.0, 4.0)
    assert record.loss_before_state is record.loss_after_state is LossState.FINITE
    assert record.gates_before == (Gate(block=4, alpha=1.0),)
    assert record.paused_seconds == 0.125
    assert record.message == "Block 4 skipped: loss 7.000 nats before, 4.000 nats after, engine paused 0.125 s."
    assert rig.history() == ["pending", "applying", "verifying", "active"]
    assert {event.actor for event in rig.store.events()} == {"alice"}
    assert rig.mitigator.done == {SKIP: 1}


async def test_attenuate_survives_float32_rounding() -> None:
    """An alpha that float32 cannot hold exactly is still recognised when it is read back."""
    rig = Rig()
    record = await rig.apply(4, action=ATTENUATE, alpha=0.3)
    assert record.state is MitigationState.ACTIVE
    assert "Block 4 scaled to alpha 0.3: " in record.message
    assert rig.mitigator.recover(await rig.probe.facts()) == []


async def test_applying_is_stored_before_the_gates_are_sent() -> None:
    """At the moment of the PUT the store says `applying`."""
    rig = Rig()
    seen = []

    async def look() -> None:
        seen.append(rig.store.mitigations()[0].state)

    rig.probe.on_set = look
    record = await rig.apply(4)
    await rig.undo(record)
    assert seen == [MitigationState.APPLYING, MitigationState.REVERTING]


async def test_help_comes_before_its_proof() -> None:
    """No loss is measured before the gates are written; the one of before is that of a model with its gates."""
    rig = Rig()
    measured: list[tuple[float, tuple[Gate, ...]]] = []

    async def measure(as_if: Sequence[Gate]) -> float:
        measured.append((rig.probe.gates[4], tuple(as_if)))
        return 4.0

    rig.probe.gates[4] = 0.5
    mitigator = Mitigator(rig.probe, rig.store, rig.settings, measure, lambda boot_id: None, unswept)
    await mitigator.apply(SKIP, [4], reason="test", actor="alice")
    await mitigator.settled()
    assert measured == [(0.0, (Gate(block=4, alpha=0.5),)), (0.0, ())]


async def test_undo_restores_the_gate() -> None:
    """Undo sets the gate to 1, measures again, and can be repeated without harm."""
    rig = Rig()
    record = await rig.undo(await rig.apply(4))
    assert rig.probe.gates == [1.0] * 6
    assert record.state is MitigationState.REVERTED
    assert record.message == "Undone: gate of block 4 is 1, loss now 7.000 nats, engine paused 0.125 s."
    assert (await rig.undo(record)) == record
    assert len(rig.probe.writes) == 2


@pytest.mark.parametrize(
    ("order", "error"),
    [
        ({"blocks": []}, InvalidOrder),
        ({"blocks": [4, 4]}, InvalidOrder),
        ({"blocks": [4], "alpha": 0.5}, InvalidOrder),
        ({"blocks": [4], "action": ATTENUATE, "alpha": 1.0}, InvalidOrder),
        ({"blocks": [4], "action": ATTENUATE, "alpha": float("nan")}, InvalidOrder),
        ({"blocks": [4], "action": ATTENUATE, "alpha": 1e-60}, InvalidOrder),
        ({"blocks": [4], "action": ATTENUATE, "alpha": 1.0 + 1e-12}, InvalidOrder),
        ({"blocks": [6]}, UnknownBlock),
        ({"blocks": [-1]}, UnknownBlock),
        ({"blocks": [1, 2, 3]}, BreakerOpen),
    ],
)
async def test_bad_orders_change_and_record_nothing(order: dict[str, Any], error: type[Exception]) -> None:
    """A refused order leaves gates, store and audit log alone, and the next one is accepted."""
    rig = Rig()
    with pytest.raises(error):
        await rig.apply(**order)
    assert (rig.probe.writes, rig.store.mitigations(), rig.store.events()) == ([], [], [])
    assert (await rig.apply(4)).state is MitigationState.ACTIVE


async def test_observe_refuses_and_dry_run_touches_nothing() -> None:
    """In `observe` nothing is applied; in `dry-run` a record says what would be done."""
    rig = Rig(mode="observe")
    with pytest.raises(ModeForbids, match="observe"):
        await rig.apply(4)
    rig = Rig(mode="dry-run")
    record = await rig.apply(4)
    assert record.state is MitigationState.DRY_RUN
    assert record.message == "Dry run: would set the gate of block 4 to 0; nothing was touched."
    assert rig.probe.writes == []
    assert not rig.mitigator.busy
    with pytest.raises(WrongState, match="dry_run: there is nothing to undo"):
        await rig.undo(record)


@pytest.mark.parametrize("state", [SelfTestState.NOT_RUN, SelfTestState.FAILED])
async def test_gates_that_were_not_seen_to_act_are_not_used(state: SelfTestState) -> None:
    """Without gates, or with gates that did not pass the self-test, nothing is done, and the reason is told."""
    rig = Rig()
    rig.probe.self_test = state
    with pytest.raises(GatesUnusable, match=f"self-test {state.value}.: Tried on 6 blocks"):
        await rig.apply(4)
    rig.probe.armed = False
    with pytest.raises(GatesUnusable, match="LlamaDecoderLayer is not supported"):
        await rig.apply(4)


async def test_block_that_is_held_is_refused() -> None:
    """A block that an active mitigation holds cannot be mitigated again, another one can."""
    rig = Rig()
    record = await rig.apply(4)
    with pytest.raises(AlreadyMitigated, match=f"{record.id} .active. holds block 4: undo it"):
        await rig.apply(4, action=ATTENUATE, alpha=0.5)
    assert (await rig.apply(3)).state is MitigationState.ACTIVE


async def test_breaker_counts_blocks_and_actions_but_never_stops_undo() -> None:
    """Too many blocks at once or actions in the window are refused; undo is not, and the window moves on."""
    rig = Rig(max_blocks=2, max_actions=2, window_minutes=1.0)
    first = await rig.apply(4)
    await rig.apply(3)
    with pytest.raises(BreakerOpen, match=r"3 blocks would be gated at once, mitigation.max_blocks allows 2"):
        await rig.apply(2)
    assert (await rig.undo(first)).state is MitigationState.REVERTED
    with pytest.raises(BreakerOpen, match="2 mitigations in the last 1 minutes"):
        await rig.apply(4)
    rig.clock += 61.0
    assert (await rig.apply(4)).state is MitigationState.ACTIVE


async def test_undo_works_in_observe_and_with_a_failed_self_test(tmp_path: Path) -> None:
    """After the operator has gone back to `observe`, what is active can still be undone."""
    rig = Rig()
    record = await rig.apply(4)
    cautious = Rig(rig.store, rig.probe, mode="observe", max_actions=1)
    rig.probe.self_test = SelfTestState.FAILED
    assert (await cautious.undo(record)).state is MitigationState.REVERTED


async def test_one_at_a_time() -> None:
    """While one mitigation runs, or is still being checked, every other order and undo is busy."""
    rig = Rig()
    record = await rig.apply(4)
    release = asyncio.Event()
    reached = asyncio.Event()

    async def hold() -> None:
        reached.set()
        await release.wait()

    rig.probe.on_set = hold
    running = await rig.mitigator.apply(SKIP, [3], reason="test", actor="alice")
    await reached.wait()
    assert rig.mitigator.busy
    for order in (
        rig.mitigator.apply(SKIP, [2], reason="test", actor="alice"),
        rig.mitigator.undo(record.id, actor="alice"),
        rig.mitigator.finish(record.id, actor="alice"),
    ):
        with pytest.raises(MitigationBusy):
            await order
    assert rig.mitigator.recover(await rig.probe.facts()) == []
    release.set()
    assert (await rig.ended(running)).state is MitigationState.ACTIVE

    both = await asyncio.gather(*(rig.undo(record) for _ in range(2)), return_exceptions=True)
    assert sorted(type(result).__name__ for result in both) == ["MitigationBusy", "MitigationRecord"]


async def test_unknown_id() -> None:
    """An id that nobody gave out is unknown to undo and to finish."""
    rig = Rig()
    with pytest.raises(UnknownMitigation):
        await rig.mitigator.undo("nonsense", actor="alice")
    with pytest.raises(UnknownMitigation):
        await rig.mitigator.finish("nonsense", actor="alice")


async def test_loss_that_is_not_finite_or_not_measured_is_no_number() -> None:
    """None of the two losses is ever a made-up number: state and message tell which it is."""
    rig = Rig()
    rig.losses = [None, LossUnavailable("There is no validation set.")]
    record = await rig.apply(4)
    assert record.state is MitigationState.ACTIVE
    assert (record.loss_before, record.loss_before_state) == (None, LossState.NOT_FINITE)
    assert (record.loss_after, record.loss_after_state) == (None, LossState.NOT_MEASURED)
    assert "loss not finite before, not measured (There is no validation set) after" in record.message
    rig.losses = [float("nan")]
    assert "loss now not finite" in (await rig.undo(record)).message


async def test_measurement_that_hangs_does_not_hold_up_the_mitigation() -> None:
    """The gates are set even when the loss cannot be had in time."""
    probe = FakeProbe()

    async def hang(as_if: Sequence[Gate]) -> float:
        await asyncio.Event().wait()
        return 0.0

    settings = MitigationSettings(mode="enforce")
    store = Store(None)
    mitigator = Mitigator(probe, store, settings, hang, lambda boot_id: None, unswept, measure_seconds=0.01)
    await mitigator.apply(SKIP, [4], reason="test", actor="alice")
    await mitigator.settled()
    record = store.mitigations()[0]
    assert record.state is MitigationState.ACTIVE
    assert record.loss_before_state is record.loss_after_state is LossState.NOT_MEASURED
    assert "took longer than 0.01 s" in record.message
    assert probe.gates[4] == 0.0


@pytest.mark.parametrize("after", [4.1, None])
async def test_operators_mitigation_that_makes_it_worse_is_kept_with_a_warning(after: float | None) -> None:
    """What a person asked for stays, and the message warns."""
    rig = Rig()
    rig.losses = [4.0, after]
    record = await rig.apply(2)
    assert record.state is MitigationState.ACTIVE
    assert "WORSE than before, kept because a person asked for it" in record.message
    assert rig.probe.gates[2] == 0.0


async def test_refusal_of_the_probe_is_a_failure_and_nothing_changed() -> None:
    """When the probe refuses the write and the gates are as before, the record is `failed` and the block is free."""
    rig = Rig()

    async def refuse() -> None:
        raise ProbeRefused(409, "vLLM is paused by somebody else.")

    rig.probe.on_set = refuse
    record = await rig.apply(4)
    assert record.state is MitigationState.FAILED
    assert record.message == (
        "The gates could not be written (vLLM is paused by somebody else); gate of block 4 is 1 now."
    )
    assert rig.mitigator.failed == {SKIP: 1}
    rig.probe.on_set = None
    active = await rig.apply(4)
    rig.probe.on_set = refuse
    kept = await rig.undo(active)
    assert kept.state is MitigationState.ACTIVE
    assert "could not be written" in kept.message


async def test_write_without_an_answer_is_interrupted_whatever_the_gates_show() -> None:
    """A write that timed out may still happen: the record stays open and says what is known."""
    rig = Rig()

    async def time_out() -> None:
        raise ProbeAway("vLLM did not answer in time.")

    rig.probe.on_set = time_out
    record = await rig.apply(4)
    assert record.state is MitigationState.INTERRUPTED
    assert record.message.endswith("gate of block 4 is 1 now: finish or undo.")

    async def vanish() -> None:
        rig.probe.away = True
        raise ProbeAway("vLLM cannot be reached.")

    rig.probe.on_set = vanish
    record = await rig.apply(3)
    assert record.state is MitigationState.INTERRUPTED
    assert "block 3 may have changed or not, vLLM does not say" in record.message


async def test_gates_read_back_otherwise_are_not_believed() -> None:
    """A write that had no effect fails; one that changed something else is left for a person."""
    rig = Rig()
    rig.probe.deaf = True
    record = await rig.apply(4)
    assert record.state is MitigationState.FAILED
    assert record.message == ("The gates read back are not as wanted: gate of block 4 is 1; not gate of block 4 is 0.")
    rig.probe.deaf = False

    async def also_block_2() -> None:
        rig.probe.gates[2] = 0.5

    rig.probe.on_set = also_block_2
    record = await rig.apply(4)
    assert record.state is MitigationState.INTERRUPTED
    assert "gate of block 2 is 0.5; not gate of block 2 is 1" in record.message


async def test_vllm_restart_in_the_middle_is_told() -> None:
    """When vLLM is restarted while gates are written, the record says that the new gates are all 1."""
    rig = Rig()

    async def restart() -> None:
        rig.probe.restart()

    rig.probe.on_set = restart
    record = await rig.apply(4)
    assert record.state is MitigationState.REVERTED
    assert record.message == "vLLM was restarted; the gates of the new process are all 1."


async def test_undo_after_a_vllm_restart_writes_nothing() -> None:
    """The gates of a new vLLM process are 1 already: undo says so and writes nothing."""
    rig = Rig()
    record = await rig.apply(4)
    rig.probe.restart()
    record = await rig.undo(record)
    assert record.state is MitigationState.REVERTED
    assert "vLLM was restarted" in record.message
    assert len(rig.probe.writes) == 1


async def killed(path: Path, probe: FakeProbe, *, write: bool) -> MitigationRecord:
    """A sidecar that dies inside the PUT, before or after the gates were written; returns what the file holds."""
    rig = Rig(Store(path), probe)
    reached = asyncio.Event()

    async def die() -> None:
        if write:
            probe.gates[4] = 0.0
        reached.set()
        await asyncio.Event().wait()

    probe.on_set = die
    record = await rig.mitigator.apply(SKIP, [4], reason="test", actor="alice")
    await reached.wait()
    await rig.mitigator.close(grace=0.0)
    record = rig.stored(record)
    rig.store.close()
    probe.on_set = None
    return record


@pytest.mark.parametrize("written", [False, True])
async def test_kill_in_the_middle_can_be_finished(tmp_path: Path, written: bool) -> None:
    """The next start shows the truth about the gates, and finishing brings the mitigation into effect."""
    path = tmp_path / "flipwatch.db"
    probe = FakeProbe()
    left = await killed(path, probe, write=written)
    assert left.state is MitigationState.APPLYING

    rig = Rig(Store(path), probe)
    [record] = rig.mitigator.recover(await probe.facts())
    assert record.state is MitigationState.INTERRUPTED
    shown = 0 if written else 1
    assert record.message == f"This broke off while it was applying; gate of block 4 is {shown} now: finish or undo."
    with pytest.raises(AlreadyMitigated, match=r"interrupted. holds block 4: finish or undo it"):
        await rig.apply(4)

    record = await rig.ended(await rig.mitigator.finish(record.id, actor="bob"))
    assert record.state is MitigationState.ACTIVE
    assert (record.loss_before, record.loss_after) == (7.0, 4.0)
    assert probe.gates[4] == 0.0
    assert len(probe.writes) == (1 if written else 2)
    rig.store.close()


@pytest.mark.parametrize("written", [False, True])
async def test_kill_in_the_middle_can_be_undone(tmp_path: Path, written: bool) -> None:
    """The next start can also take it back, whether the gates were written or not."""
    path = tmp_path / "flipwatch.db"
    probe = FakeProbe()
    await killed(path, probe, write=written)
    rig = Rig(Store(path), probe, mode="observe")
    [record] = rig.mitigator.recover(await probe.facts())
    with pytest.raises(ModeForbids, match="finishing a mitigation needs enforce, undo does not"):
        await rig.mitigator.finish(record.id, actor="bob")
    assert (await rig.undo(record)).state is MitigationState.REVERTED
    assert probe.gates == [1.0] * 6
    rig.store.close()


async def test_recover_after_a_vllm_restart_closes_what_was_open(tmp_path: Path) -> None:
    """Active and half-done mitigations of a vLLM process that is gone are reverted, and the sentence says why."""
    path = tmp_path / "flipwatch.db"
    probe = FakeProbe()
    await killed(path, probe, write=True)
    rig = Rig(Store(path), probe)
    await rig.apply(3)
    probe.restart()
    changed = rig.mitigator.recover(await probe.facts())
    assert {record.state for record in changed} == {MitigationState.REVERTED}
    assert {record.message for record in changed} == {"vLLM was restarted; the gates of the new process are all 1."}
    assert len(changed) == 2
    assert rig.mitigator.recover(await probe.facts()) == []
    rig.store.close()


async def test_gates_changed_by_somebody_else_are_seen() -> None:
    """An active mitigation whose gate is not what it set is no longer called active."""
    rig = Rig()
    await rig.apply(4)
    rig.probe.gates[4] = 1.0
    [record] = rig.mitigator.recover(await rig.probe.facts())
    assert record.state is MitigationState.INTERRUPTED
    assert record.message == "Somebody else changed the gates: gate of block 4 is 1, not 0: finish or undo."
    assert (await rig.ended(await rig.mitigator.finish(record.id, actor="bob"))).state is MitigationState.ACTIVE


async def test_unrecorded_gates_are_reported_and_can_be_taken_over() -> None:
    """A gate that no record explains is named; a mitigation takes it over, and its undo lets the block run."""
    rig = Rig()
    rig.probe.gates[4] = 0.5
    assert unrecorded(await rig.probe.facts(), rig.store.open_mitigations()) == [Gate(block=4, alpha=0.5)]
    record = await rig.apply(4)
    assert record.gates_before == (Gate(block=4, alpha=0.5),)
    assert unrecorded(await rig.probe.facts(), rig.store.open_mitigations()) == []
    record = await rig.undo(record)
    assert record.state is MitigationState.REVERTED
    assert rig.probe.gates == [1, 1, 1, 1, 1, 1]


async def test_finish_is_for_interrupted_ones_only() -> None:
    """An active mitigation has nothing to finish; after a vLLM restart an interrupted one has not either."""
    rig = Rig()
    record = await rig.apply(4)
    with pytest.raises(WrongState, match="only interrupted ones"):
        await rig.mitigator.finish(record.id, actor="bob")
    rig.probe.gates[4] = 1.0
    rig.mitigator.recover(await rig.probe.facts())
    rig.probe.restart()
    record = await rig.mitigator.finish(record.id, actor="bob")
    assert record.state is MitigationState.REVERTED


async def test_mistake_of_ours_leaves_no_record_that_seems_to_move() -> None:
    """An exception that nobody expected ends in `interrupted` and frees the way for the undo."""
    rig = Rig()
    rig.losses = [ZeroDivisionError("oops")]
    record = await rig.apply(4)
    assert record.state is MitigationState.INTERRUPTED
    assert "Flipwatch itself failed (ZeroDivisionError: oops)" in record.message
    assert (await rig.undo(record)).state is MitigationState.REVERTED


def break_store(rig: Rig, *states: MitigationState) -> Callable[[], None]:
    """Let the store refuse mitigations in these states; returns what repairs it."""
    save = rig.store.save_mitigation

    def refuse(record: MitigationRecord, event: Event | None = None) -> None:
        if record.state in states:
            raise StoreError("the disk is full")
        save(record, event)

    def repair() -> None:
        rig.store.save_mitigation = save  # type: ignore[method-assign]

    rig.store.save_mitigation = refuse  # type: ignore[method-assign]
    return repair


@pytest.mark.parametrize("order", ["undo", "finish"])
async def test_record_that_the_store_left_in_the_middle_can_be_undone_and_finished(order: str) -> None:
    """When neither the step nor its failure could be stored after the gates were written, both ways stay open."""
    rig = Rig()
    repair = break_store(rig, MitigationState.VERIFYING, MitigationState.INTERRUPTED)
    record = await rig.apply(4)
    repair()
    assert (record.state, rig.probe.gates[4], rig.mitigator.busy) == (MitigationState.APPLYING, 0.0, False)
    with pytest.raises(AlreadyMitigated, match=r"applying. holds block 4: finish or undo it"):
        await rig.apply(4)
    record = await rig.ended(await getattr(rig.mitigator, order)(record.id, actor="bob"))
    undone = order == "undo"
    assert record.state is (MitigationState.REVERTED if undone else MitigationState.ACTIVE)
    assert rig.probe.gates[4] == (1.0 if undone else 0.0)


async def test_undo_that_fails_again_leaves_a_broken_off_record_interrupted() -> None:
    """A record that was found in the middle never goes back to a state that looks as if it moved."""
    rig = Rig()
    repair = break_store(rig, MitigationState.VERIFYING, MitigationState.INTERRUPTED)
    record = await rig.apply(4)
    repair()

    async def refuse() -> None:
        raise ProbeRefused(409, "vLLM is paused by somebody else.")

    rig.probe.on_set = refuse
    assert (await rig.undo(record)).state is MitigationState.INTERRUPTED


async def test_undo_of_a_broken_off_record_needs_vllm_and_says_so(tmp_path: Path) -> None:
    """Right after a start, with vLLM away, the reason is that vLLM is away, and not the state of the record."""
    path = tmp_path / "flipwatch.db"
    probe = FakeProbe()
    left = await killed(path, probe, write=True)
    rig = Rig(Store(path), probe)
    probe.away = True
    for order in (rig.mitigator.undo, rig.mitigator.finish):
        with pytest.raises(ProbeAway):
            await order(left.id, actor="bob")
    probe.away = False
    assert (await rig.undo(left)).state is MitigationState.REVERTED
    rig.store.close()


async def test_nothing_is_done_that_cannot_be_recorded() -> None:
    """With a store that does not work, an automatic action is refused in the log and an order raises; no gate moves."""
    rig = Rig(rules=[{"verdict": "old_fault", "action": "skip", "k": 1, "n": 1}])
    rig.store.close()
    assert await rig.judged(Verdict.OLD_FAULT, 4) is None
    with pytest.raises(StoreError, match="cannot be used"):
        await rig.apply(4)
    assert rig.probe.writes == []
    assert not rig.mitigator.busy


async def test_close_waits_for_what_is_on_its_way() -> None:
    """An orderly shutdown lets a short mitigation come to its end."""
    rig = Rig()
    await rig.mitigator.close()
    record = await rig.mitigator.apply(SKIP, [4], reason="test", actor="alice")
    await rig.mitigator.close()
    assert rig.stored(record).state is MitigationState.ACTIVE
