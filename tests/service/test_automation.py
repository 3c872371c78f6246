"""Automation: one decision about each verdict, done or said why not; what it remembers, and what it never does."""

import sqlite3
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from flipwatch.monitors.finding import Health
from flipwatch.monitors.verdict.verdict import Joined, Verdict
from flipwatch.monitors.wire import SelfTestState
from flipwatch.service.automation import Memory, Says, Situation, decide
from flipwatch.service.guard import BreakerOpen
from flipwatch.service.live import MonitorState
from flipwatch.service.policy import Rule
from flipwatch.service.probe import ProbeAway
from flipwatch.service.records import MitigationAction, MitigationState, Mode
from flipwatch.service.store import Store

from .mitigation_rig import FakeProbe, Rig
from .test_skippability import finding

ACTIVE, REPAIRED, REVERTED = MitigationState.ACTIVE, MitigationState.REPAIRED, MitigationState.REVERTED
FAILED, DRY_RUN = MitigationState.FAILED, MitigationState.DRY_RUN
OLD, BYTES, LATENT = Verdict.OLD_FAULT, Verdict.WEIGHT_FAULT, Verdict.LATENT_WEIGHT_FAULT


def rule(verdict: Verdict, action: str, **more: Any) -> dict[str, Any]:
    """A rule that acts at once, unless said."""
    return {"verdict": verdict, "action": action, "k": 1, "n": 1, **more}


SKIP = rule(OLD, "skip")
LADDER = [rule(BYTES, "repair"), rule(BYTES, "skip"), rule(BYTES, "drain")]


# The decision alone


@pytest.mark.parametrize("mode", [Mode.DRY_RUN, Mode.ENFORCE])
def test_a_decision_counts_the_last_verdicts(mode: Mode) -> None:
    """k of the last n must be this one; other verdicts in between count against it, and the sentence has the counts."""
    rules = [Rule.model_validate(rule(OLD, "skip", k=2, n=3))]

    def decided(*verdicts: Verdict) -> tuple[Says, str]:
        joined = Joined(verdict=verdicts[-1], health=Health.FAILED, reason="Block 4 does harm.", blocks=(4,))
        memory = Memory(boot_id="boot-1", verdicts=verdicts)
        situation = Situation(joined, memory, confirmed={4}, acts=(), held=(), mode=mode, now=0.0)
        decision = decide(rules, situation, {})
        return decision.says, decision.message

    act = Says.ACTS if mode is Mode.ENFORCE else Says.WOULD_ACT
    waits = "old_fault: skip: 1 of the last 3 verdicts, and 2 of 3 are needed."
    assert decided(OLD) == (Says.WAITS, "old_fault: skip: 1 of the last 1 verdicts, and 2 of 3 are needed.")
    assert decided(OLD, Verdict.OK, Verdict.OK, OLD) == (Says.WAITS, waits)
    assert decided(OLD, Verdict.OK, OLD) == (act, "old_fault: skip: 2 of the last 3 verdicts; Block 4 does harm.")
    assert decided(OLD, OLD, Verdict.OK)[0] is Says.NOTHING


# Acting


async def test_without_a_policy_nothing_is_done_nor_said() -> None:
    """The default: no rule, no line in the audit log."""
    rig = Rig()
    assert await rig.judged(OLD, 4) is None
    assert (rig.store.events(), rig.store.automation()) == ([], None)


async def test_a_rule_acts_once_and_says_why() -> None:
    """The record names the rule; the decision is in the audit log with the mitigation; the same block is left alone."""
    rig = Rig(rules=[SKIP])
    record = await rig.judged(OLD, 4)
    assert record is not None
    assert (record.state, record.blocks, record.actor, record.automatic) == (ACTIVE, (4,), "flipwatch", True)
    assert (record.rule, record.reason) == ("old_fault: skip", rig.decisions()[0][1])
    assert rig.decisions() == [("acts", "old_fault: skip: 1 of the last 1 verdicts; Block 4 does harm.")]
    [event] = [event for event in rig.store.events() if event.what == "automation acts"]
    assert event.detail | {"message": ""} == {
        "verdict": "old_fault",
        "rule": "old_fault: skip",
        "blocks": [4],
        "message": "",
        "id": record.id,
    }
    rig.clock += 3600
    assert await rig.judged(OLD, 4) is None
    assert await rig.judged(OLD, 4) is None
    assert rig.decisions()[1:] == [("in effect", "old_fault: skip: block 4 left out or scaled already.")]


async def test_attenuate_sets_its_alpha() -> None:
    """The rule's alpha is what the gates are set to."""
    rig = Rig(rules=[rule(OLD, "attenuate", alpha=0.5)])
    record = await rig.judged(OLD, 4)
    assert record is not None
    assert (record.state, record.alpha, rig.probe.gates[4]) == (ACTIVE, 0.5, 0.5)


async def test_observe_does_nothing_and_says_so() -> None:
    """Whatever the policy says."""
    rig = Rig(rules=[*LADDER, SKIP], mode="observe")
    rig.probe.weights.damage(7, 4)
    assert await rig.judged(BYTES, 4) is None
    assert rig.decisions() == [
        ("observes", "The mode is observe: nothing is done about weight_fault, whatever the policy says.")
    ]
    assert (rig.probe.writes, rig.probe.repairs, rig.store.mitigations()) == ([], [], [])


@pytest.mark.parametrize("settings", [{"mode": "dry-run"}, {"rules": [rule(OLD, "skip", dry_run=True)]}])
async def test_a_dry_run_only_says(settings: dict[str, Any]) -> None:
    """That of the mode and that of the rule: a record and a line, nothing written; then it rests as if it had acted."""
    rig = Rig(**{"rules": [SKIP], **settings})
    record = await rig.judged(OLD, 4)
    assert record is not None
    assert (record.state, record.automatic, rig.probe.writes) == (DRY_RUN, True, [])
    assert await rig.judged(OLD, 4) is None
    assert [what for what, _ in rig.decisions()] == ["would act", "cooling down"]
    rig.clock += 600
    again = await rig.judged(OLD, 4)
    assert again is not None
    assert (again.state, rig.mitigator.done) == (DRY_RUN, {})


async def test_dry_runs_do_not_keep_a_rule_from_acting_later() -> None:
    """After the operator has read what would be done and allows it, it is done at once."""
    rig = Rig(rules=[SKIP], mode="dry-run")
    await rig.judged(OLD, 4)
    rig = Rig(store=rig.store, probe=rig.probe, rules=[SKIP])
    record = await rig.judged(OLD, 4)
    assert record is not None
    assert record.state is ACTIVE


@pytest.mark.parametrize("action", ["repair", "skip", "drain"])
async def test_dry_run_of_one_rule(action: str) -> None:
    """Each action can only be said while other rules act."""
    rig = Rig(rules=[rule(BYTES, action, dry_run=True)])
    rig.probe.weights.damage(7, 4)
    record = await rig.judged(BYTES, 4)
    assert record is not None
    assert (record.state, record.action) == (DRY_RUN, MitigationAction(action))
    assert (rig.probe.writes, rig.probe.repairs, rig.store.open_mitigations()) == ([], [], [])


# The ladder


async def test_the_ladder_goes_on_when_an_act_fails() -> None:
    """Repair fails, then skip makes it worse and is undone, then drain; each rests, and the end says so."""
    rig = Rig(rules=LADDER)
    rig.probe.weights.damage(7, 4, checkpoint="The checkpoint has moved.")
    repair = await rig.judged(BYTES, 4)
    assert repair is not None
    assert (repair.action, repair.state) == (MitigationAction.REPAIR, FAILED)
    rig.losses = [4.0, 5.0, 4.0]
    skip = await rig.judged(BYTES, 4)
    assert skip is not None
    assert (skip.action, skip.state, skip.undone_by) == (MitigationAction.SKIP, REVERTED, "flipwatch")
    assert rig.probe.gates == [1.0] * 6
    drain = await rig.judged(BYTES, 4)
    assert drain is not None
    assert (drain.action, drain.state) == (MitigationAction.DRAIN, ACTIVE)
    assert await rig.judged(BYTES, 4) is None
    assert await rig.judged(BYTES, 4) is None
    assert [what for what, _ in rig.decisions()] == ["acts", "acts", "acts", "in effect"]
    assert rig.decisions()[-1][1] == f"weight_fault: drain: mitigation {drain.id} drains the server."


async def test_a_failed_act_is_not_repeated_before_its_rule_has_rested() -> None:
    """The same rule rests for its cool-down, whatever comes; then it has its turn again."""
    rig = Rig(rules=[rule(BYTES, "repair", cool_down_minutes=30)], max_actions=100)
    rig.probe.weights.damage(7, 4, checkpoint="The checkpoint has moved.")
    first = await rig.judged(BYTES, 4)
    assert first is not None
    for _ in range(3):
        rig.clock += 500
        assert await rig.judged(BYTES, 4) is None
    assert rig.decisions()[1:] == [
        (
            "cooling down",
            f"weight_fault: repair: mitigation {first.id} did not help, and the rule rests until "
            "1970-01-01 00:46:41 UTC.",
        )
    ]
    rig.clock += 500
    assert await rig.judged(BYTES, 4) is not None


async def test_a_rule_that_did_help_rests_without_the_next_one() -> None:
    """Another block right after a skip waits, instead of a drain that may not be needed."""
    rig = Rig(rules=[SKIP, rule(OLD, "drain")])
    skip = await rig.judged(OLD, 4)
    assert skip is not None
    assert skip.state is ACTIVE
    assert await rig.judged(OLD, 2, 4) is None
    assert rig.decisions()[-1][0] == "cooling down"
    assert "is active, and the rule rests until" in rig.decisions()[-1][1]
    rig.clock += 600
    again = await rig.judged(OLD, 2, 4)
    assert again is not None
    assert again.blocks == (2,)


async def test_a_repair_that_did_help_does_not_rest() -> None:
    """Its proof is a digest: what is bad now is new, and only the breaker bounds how often."""
    rig = Rig(rules=LADDER, max_actions=3)
    for chunk in (7, 8, 9):
        rig.probe.weights.damage(chunk, 4)
        repair = await rig.judged(BYTES, 4)
        assert repair is not None
        assert repair.state is REPAIRED
    rig.probe.weights.damage(7, 4)
    assert await rig.judged(BYTES, 4) is None
    assert rig.decisions()[-1][0] == "breaker open"


async def test_what_failed_for_one_verdict_is_not_tried_again_for_the_next() -> None:
    """A repair that failed while nothing showed yet is over when it shows: the ladder of that verdict goes on."""
    rig = Rig(rules=[rule(LATENT, "repair"), *LADDER])
    rig.probe.weights.damage(7, 4, checkpoint="The checkpoint has moved.")
    repair = await rig.judged(LATENT, 4)
    assert repair is not None
    assert repair.state is FAILED
    skip = await rig.judged(BYTES, 4)
    assert skip is not None
    assert (skip.action, skip.state) == (MitigationAction.SKIP, ACTIVE)


@pytest.mark.parametrize("why", ["none is named", "no block", "harmful", "gates"])
async def test_the_ladder_goes_on_where_a_rule_cannot_do_anything(why: str) -> None:
    """No changed chunk is named; no block known; harmful by the last scan; no gates: at once the next rule."""
    rules = [LADDER[0] if why == "none is named" else LADDER[1], LADDER[2]]
    rig = Rig(rules=rules)
    if why == "none is named":
        rig.probe.weights.damage(7, 4)
        reading = rig.probe.weights.reading()
        ranks = [rank.model_copy(update={"bad": []}) for rank in reading.ranks]
        rig.readings = [reading.model_copy(update={"ranks": ranks})]
    if why == "harmful":
        rig.scanned = MonitorState("alpha_scan", Health.FAILED, "", 1.0, finding(), "id")
    if why == "gates":
        rig.probe.self_test = SelfTestState.FAILED
    blocks = {"no block": (), "harmful": (0,)}.get(why, (4,))
    record = await rig.judged(BYTES, *blocks)
    assert record is not None
    assert (record.action, record.state, rig.probe.writes) == (MitigationAction.DRAIN, ACTIVE, [])
    assert [what for what, _ in rig.decisions()] == ["acts"]


async def test_the_end_of_a_ladder_says_why_nothing_was_done() -> None:
    """Each rule that was passed by has its sentence."""
    rig = Rig(rules=[LADDER[1], rule(BYTES, "attenuate", alpha=0.5)])
    rig.probe.self_test = SelfTestState.FAILED
    assert await rig.judged(BYTES, 4) is None
    why = "The gates were not seen to act (self-test failed): Tried on 6 blocks."
    assert rig.decisions() == [("refused", f"weight_fault: skip: {why} weight_fault: attenuate to 0.5: {why}")]


async def test_weights_that_are_good_again_are_no_reason_for_the_next_rule() -> None:
    """Before it repairs it looks: where nothing has changed the verdict is out of date, and nothing else is done."""
    rig = Rig(rules=LADDER)
    assert await rig.judged(BYTES, 4) is None
    assert rig.decisions() == [
        ("refused", "weight_fault: repair: Nothing to repair: all 40 chunks are those of the baseline.")
    ]
    assert (rig.probe.writes, rig.store.open_mitigations()) == ([], [])


async def test_a_skip_waits_for_scans_that_flag_the_block() -> None:
    """One finding is not enough for a block, and no reason for a stronger rule; others that are confirmed go ahead."""
    rig = Rig(rules=[LADDER[1], LADDER[2]])
    assert await rig.judged(BYTES, 3, 4, confirmed=()) is None
    assert rig.decisions() == [
        ("waits", "weight_fault: skip: too few scans flag blocks 3 and 4 so far (alerts.k of alerts.n).")
    ]
    record = await rig.judged(BYTES, 3, 4, confirmed={4, 5})
    assert record is not None
    assert record.blocks == (4,)


async def test_what_cannot_be_done_now_is_no_reason_for_the_next_rule() -> None:
    """vLLM away for a moment: the same rule again at the next verdict."""
    rig = Rig(rules=LADDER)
    rig.probe.weights.damage(7, 4)
    rig.probe.away = True
    assert await rig.judged(BYTES, 4) is None
    assert rig.decisions() == [("refused", "weight_fault: repair: vLLM cannot be reached.")]
    rig.probe.away = False
    rig.readings = [ProbeAway("vLLM did not answer in time.")]
    assert await rig.judged(BYTES, 4) is None
    record = await rig.judged(BYTES, 4)
    assert record is not None
    assert record.state is REPAIRED


@pytest.mark.parametrize("action", ["repair", "skip"])
async def test_no_other_process_is_changed_than_the_verdict_was_about(action: str) -> None:
    """vLLM was restarted since the last look: what was found in the old process is no reason to change the new one."""
    rig = Rig(rules=[rule(BYTES, action), rule(BYTES, "drain")])
    rig.probe.restart()
    rig.probe.weights.damage(7, 4)
    joined = Joined(verdict=BYTES, health=Health.FAILED, reason="Block 4 does harm.", blocks=(4,))
    assert await rig.automatic.consider(joined, "boot-1", {4}, 1.0) is None
    assert (rig.probe.writes, rig.probe.repairs, rig.store.mitigations()) == ([], [], [])
    assert rig.decisions()[0][0] == "refused"
    assert "vLLM was restarted since that verdict" in rig.decisions()[0][1]


# The breaker


async def test_the_breaker_stops_automation_and_never_an_undo() -> None:
    """Too many actions: the audit log says so and nothing is changed; what was done can be taken back."""
    rig = Rig(rules=[SKIP], max_actions=1)
    skip = await rig.judged(OLD, 4)
    assert skip is not None
    rig.clock += 1200
    assert await rig.judged(OLD, 2, 4) is None
    assert rig.decisions()[-1] == (
        "breaker open",
        "old_fault: skip: 1 mitigations in the last 60 minutes, mitigation.max_actions allows 1: wait, or raise it.",
    )
    with pytest.raises(BreakerOpen):
        await rig.apply(2)
    assert rig.probe.gates == [1, 1, 1, 1, 0, 1]
    assert (await rig.undo(skip)).state is REVERTED
    assert rig.probe.gates == [1.0] * 6


async def test_too_many_blocks_go_to_the_next_rule() -> None:
    """A drain gates no block: the breaker of blocks does not hold it."""
    rig = Rig(rules=[LADDER[1], LADDER[2]], max_blocks=1)
    record = await rig.judged(BYTES, 2, 4)
    assert record is not None
    assert (record.action, rig.probe.gates) == (MitigationAction.DRAIN, [1.0] * 6)
    rig = Rig(rules=[LADDER[1]], max_blocks=1)
    assert await rig.judged(BYTES, 2, 4) is None
    assert rig.decisions()[0][0] == "breaker open"


# Verification and undo


@pytest.mark.parametrize("action", [SKIP, rule(OLD, "attenuate", alpha=0.5)])
@pytest.mark.parametrize(("before", "after"), [(4.0, 4.1), (4.0, None), (None, None)])
async def test_what_made_it_worse_is_undone_at_once(
    action: dict[str, Any], before: float | None, after: float | None
) -> None:
    """Also what left the loss not finite; the gates are as before, and it counts as failed."""
    rig = Rig(rules=[action])
    rig.losses = [before, after, before]
    record = await rig.judged(OLD, 2)
    assert record is not None
    assert (record.state, record.undone_by) == (REVERTED, "flipwatch")
    loss = "not finite" if before is None else "4.000 nats"
    assert record.message.startswith(f"Undone at once, loss {loss} before, ")
    assert rig.probe.gates == [1.0] * 6
    assert (rig.mitigator.failed, rig.mitigator.done) == ({record.action: 1}, {})
    assert await rig.judged(OLD, 2) is None
    assert rig.decisions()[-1][0] == "cooling down"


@pytest.mark.parametrize("last", ["skip", "drain"])
async def test_what_a_person_undid_stays_undone(last: str) -> None:
    """No rule works against the operator, nor does a stronger one take its place, until the server was well again."""
    rig = Rig(rules=[LADDER[1], LADDER[2]] if last == "skip" else [LADDER[2]], max_actions=100)
    record = await rig.judged(BYTES, 4)
    assert record is not None
    assert record.action is MitigationAction(last)
    await rig.undo(record)
    rig.clock += 3600
    assert await rig.judged(BYTES, 4) is None
    assert rig.decisions()[-1] == (
        "refused",
        f"weight_fault: {last}: bob undid mitigation {record.id}, which stands until a verdict is ok or vLLM restarts.",
    )
    assert await rig.judged(Verdict.OK) is None
    again = await rig.judged(BYTES, 4)
    assert again is not None
    assert again.action is MitigationAction(last)


async def test_a_skip_that_a_repair_ended_was_not_undone() -> None:
    """Neither did it fail nor did a person take it back: a new fault may be skipped at once, and nothing is drained."""
    rig = Rig(rules=[LADDER[1], LADDER[2]], max_actions=100)
    rig.probe.weights.damage(7, 4)
    skip = await rig.judged(BYTES, 4)
    assert skip is not None
    await rig.repair(4)
    assert (rig.stored(skip).state, rig.stored(skip).undone_by, rig.probe.gates[4]) == (REVERTED, None, 1.0)
    rig.probe.weights.damage(9, 2)
    again = await rig.judged(BYTES, 2)
    assert again is not None
    assert (again.action, again.blocks) == (MitigationAction.SKIP, (2,))


# What is remembered


async def test_counts_and_rests_survive_a_restart_of_the_sidecar(tmp_path: Path) -> None:
    """From the store: the verdicts so far, the cool-down, and what was said last."""
    path, probe = tmp_path / "flipwatch.db", FakeProbe()
    rules = [rule(OLD, "skip", k=3, n=4), rule(BYTES, "repair")]
    probe.weights.damage(7, 4, checkpoint="The checkpoint has moved.")

    minutes = count(20)

    def started() -> Rig:
        rig = Rig(store=Store(path), probe=probe, rules=rules)
        rig.clock = 60.0 * next(minutes)
        return rig

    for verdict in (OLD, OLD, BYTES):
        rig = started()
        await rig.judged(verdict, 4)
        rig.store.close()
    rig = started()
    assert await rig.judged(BYTES, 4) is None
    assert rig.decisions()[-1][0] == "cooling down"
    before = len(rig.store.events(1000))
    rig.store.close()
    rig = started()
    assert await rig.judged(BYTES, 4) is None
    assert len(rig.store.events(1000)) == before
    for verdict, acts in ((OLD, False), (OLD, False), (OLD, True)):
        record = await rig.judged(verdict, 4)
        assert (record is not None) is acts
        rig.store.close()
        rig = started()
    rig.store.close()


async def test_a_new_vllm_process_starts_anew() -> None:
    """What was counted, done or undone in the old one says nothing about it."""
    rig = Rig(rules=[rule(OLD, "skip", k=2, n=2), rule(BYTES, "repair")], max_actions=100)
    rig.probe.weights.damage(7, 4, checkpoint="The checkpoint has moved.")
    assert await rig.judged(BYTES, 4) is not None
    await rig.judged(OLD, 4)
    rig.probe.restart()
    assert await rig.judged(OLD, 4) is None
    assert rig.decisions()[-1][0] == "waits"
    assert await rig.judged(OLD, 4) is not None
    rig.probe.weights.damage(7, 4)
    assert await rig.judged(BYTES, 4) is not None


async def test_the_same_evidence_counts_once() -> None:
    """Joined again, also behind another verdict, it is no second verdict; with a finding of its own it is."""
    rig = Rig(rules=[rule(OLD, "skip", k=2, n=3)])
    for _ in range(3):
        assert await rig.judged(OLD, 4, news=False) is None
    assert await rig.judged(Verdict.OK, news=False) is None
    memory = rig.store.automation()
    assert memory is not None
    assert memory.verdicts == (OLD, Verdict.OK)
    # The probe was away for a moment.
    for verdict in (OLD, Verdict.UNKNOWN, OLD):
        assert await rig.judged(verdict, 4, news=False) is None
    memory = rig.store.automation()
    assert memory is not None
    assert memory.verdicts == (Verdict.OK, Verdict.UNKNOWN, OLD)
    assert await rig.judged(OLD, 4) is not None


async def test_the_same_evidence_is_still_a_reason_behind_another_verdict() -> None:
    """Where one verdict is enough, a moment without the probe takes nothing away."""
    rig = Rig(rules=[SKIP], mode="dry-run")
    for verdict in (OLD, Verdict.UNKNOWN, OLD):
        await rig.judged(verdict, 4, news=False)
    assert [what for what, _ in rig.decisions()] == ["would act", "nothing to do", "cooling down"]


async def test_a_memory_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    """That of another version: counted anew, and no traceback."""
    path = tmp_path / "flipwatch.db"
    Store(path).close()
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("INSERT INTO automation VALUES (?)", ('{"boot_id": "boot-1", "of_another_version": 1}',))
    rig = Rig(store=Store(path), rules=[rule(OLD, "skip", k=2, n=3)])
    assert await rig.judged(OLD, 4) is None
    assert await rig.judged(OLD, 4) is not None
    rig.store.close()


async def test_verdicts_without_a_rule_are_told_once() -> None:
    """Nothing to do is a decision too: it says that the last one is over."""
    rig = Rig(rules=[SKIP])
    for _ in range(3):
        await rig.judged(Verdict.UNKNOWN)
    await rig.judged(LATENT, 4)
    assert rig.decisions() == [
        ("nothing to do", "The verdict is unknown, and no rule is about it."),
        ("nothing to do", "The verdict is latent_weight_fault, and no rule is about it."),
    ]
