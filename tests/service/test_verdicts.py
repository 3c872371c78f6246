"""The verdict in the sidecar: where it is shown, when it alerts, what is written down, evidence that is taken anew."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from flipwatch.monitors.canary.finding import NAME as CANARY
from flipwatch.monitors.canary.finding import CanaryFinding, Symptom
from flipwatch.monitors.finding import Action, Health
from flipwatch.monitors.fingerprint.judgement import NAME as FINGERPRINT
from flipwatch.monitors.verdict.evidence import HEARTBEAT, Answer, Question, Sign
from flipwatch.monitors.verdict.verdict import Joined, Verdict
from flipwatch.service.alert import ALERTING, VERDICT
from flipwatch.service.alerts import Alerts
from flipwatch.service.records import FindingRecord, ScanTrigger
from flipwatch.service.settings import Settings
from flipwatch.service.sidecar import Sidecar

from .fake_server import FakeServer

Start = Callable[..., Any]


def _joined(verdict: Verdict, *grounds: str) -> Joined:
    return Joined(verdict=verdict, health=Health.FAILED, reason=f"It is {verdict.value}.", grounds=grounds)


def _record(monitor: str, health: Health) -> FindingRecord:
    body = {"monitor": monitor, "health": health.value, "reason": "so", "places": []}
    return FindingRecord(id="f", scan_id="s", monitor=monitor, created_at=1.0, health=health, body=body)


def _verdicts(alerts: Alerts) -> list[Verdict | None]:
    return [alert.verdict for alert in alerts.firing if alert.name == VERDICT]


async def _swept(sidecar: Sidecar) -> None:
    await sidecar.runner.run(sidecar.sweeps.sweep(ScanTrigger.REQUEST))


async def _scanned(sidecar: Sidecar) -> None:
    await sidecar.runner.run(sidecar.scans.job(ScanTrigger.REQUEST))


async def test_a_weight_fault_is_shown_everywhere(start: Start, server: FakeServer) -> None:
    """States, metric, page, alert and audit log say the same of a block whose bytes have changed and that does harm."""
    api = await start()
    sidecar = api.sidecar
    server.weights.damage(7, 4)
    server.harm[4] = 5.0
    await _scanned(sidecar)
    await _swept(sidecar)
    shown = (await api.get("/v1/states")).json()["verdict"]
    assert (shown["verdict"], shown["health"], shown["action"]) == ("weight_fault", "failed", "repair")
    assert (shown["blocks"], shown["grounds"]) == ([4], ["fingerprint", "alpha_scan"])
    assert "block 4" in shown["reason"]
    metrics = await api.metrics()
    states = {name: value for name, value in metrics.items() if name.startswith("flipwatch_verdict{")}
    assert len(states) == len(Verdict)
    assert {name for name, value in states.items() if value == 1.0} == {'flipwatch_verdict{verdict="weight_fault"}'}
    assert metrics['flipwatch_alert_firing{alert="FlipwatchVerdict"}'] == 1.0
    page = (await api.get("/")).text
    assert page.index("Weight fault") < page.index("Corrupted")
    events = [event for event in (await api.get("/v1/events")).json() if event["what"] == "verdict changed"]
    assert events[0]["detail"]["to"] == "weight_fault"
    assert events[0]["detail"]["from"] == events[1]["detail"]["to"] == "unknown"
    assert events[0]["detail"]["reason"] == shown["reason"]


async def test_without_a_canary_nothing_is_ok(start: Start) -> None:
    """A clean sweep and a clean scan are not all the evidence there is."""
    api = await start()
    await _swept(api.sidecar)
    await _scanned(api.sidecar)
    joined = api.sidecar.live.verdict()
    assert (joined.verdict, joined.health) == (Verdict.UNKNOWN, Health.UNKNOWN)
    assert "canary" in joined.reason


async def test_a_verdict_that_stays_is_written_down_once(start: Start) -> None:
    """The audit log has changes, not looks; who listens hears of each finding all the same."""
    api = await start()
    sidecar = api.sidecar
    heard: list[Verdict] = []

    async def listen(joined: Joined) -> None:
        heard.append(joined.verdict)

    sidecar.verdicts.listen(listen)
    for _ in range(2):
        await _swept(sidecar)
    await sidecar.verdicts.looked()
    events = [event for event in (await api.get("/v1/events")).json() if event["what"] == "verdict changed"]
    assert [(event["detail"]["from"], event["detail"]["to"]) for event in events] == [(None, "unknown")]
    assert heard == [Verdict.UNKNOWN] * 2


async def test_a_monitor_with_a_clock_looks_again_when_another_one_sees_something(
    start: Start, server: FakeServer
) -> None:
    """A block is flagged after the last sweep: a sweep of its own follows, and only then is it a weight fault."""
    api = await start(fingerprint={"every_minutes": 60})
    sidecar = api.sidecar
    await sidecar.schedule.met()
    changed = asyncio.Event()
    heard: list[tuple[Verdict, Health]] = []

    async def listen(joined: Joined) -> None:
        heard.append((joined.verdict, joined.health))
        if joined.verdict is Verdict.WEIGHT_FAULT:
            changed.set()

    sidecar.verdicts.listen(listen)
    server.weights.damage(7, 4)
    server.harm[4] = 5.0
    await _scanned(sidecar)
    async with asyncio.timeout(20):
        await changed.wait()
    assert heard == [(Verdict.UNKNOWN, Health.FAILED), (Verdict.WEIGHT_FAULT, Health.FAILED)]
    scans = (await api.get("/v1/scans")).json()
    assert (scans[0]["monitor"], scans[0]["trigger"]) == ("fingerprint", "evidence")


async def test_what_was_found_before_a_change_of_the_model_counts_no_more(start: Start, server: FakeServer) -> None:
    """After a skip the flags of the whole model say nothing; the bytes are what they were."""
    api = await start()
    sidecar = api.sidecar
    server.harm[4] = 5.0
    await _scanned(sidecar)
    await _swept(sidecar)
    assert sidecar.live.verdict().verdict is Verdict.OLD_FAULT
    sidecar.live.regated_at = sidecar.now()
    answers = {sign.question.value: sign.answer.value for sign in sidecar.live.verdict().signs}
    assert (answers["block_stands_out"], answers["bytes_changed"]) == ("unknown", "no")
    sidecar.live.repaired_at = sidecar.now()
    answers = {sign.question.value: sign.answer.value for sign in sidecar.live.verdict().signs}
    assert answers["bytes_changed"] == "unknown"


async def test_other_gates_are_noticed(start: Start, server: FakeServer) -> None:
    """Whoever changes them."""
    api = await start()
    assert api.sidecar.live.regated_at == 0.0
    await api.sidecar.watcher.look()
    assert api.sidecar.live.regated_at == 0.0
    server.gates[4] = 0.0
    before = api.sidecar.now()
    await api.sidecar.watcher.look()
    assert api.sidecar.live.regated_at >= before


async def test_a_lasting_finding_keeps_the_time_of_the_first(start: Start) -> None:
    """Another block, or another health, begins anew."""
    live = (await start()).sidecar.live
    wrong = CanaryFinding(
        monitor=CANARY, health=Health.FAILED, reason="Wrong.", action=Action.INVESTIGATE, symptom=Symptom.CHANGED
    )
    for at in (10.0, 20.0):
        live.found(wrong, "id", at, at - 1)
    state = live.state(CANARY)
    assert (state.since, state.began, state.at) == (10.0, 19.0, 20.0)
    live.found(wrong.model_copy(update={"health": Health.OK}), "id", 30.0, 29.0)
    assert live.state(CANARY).since == 30.0


@pytest.mark.parametrize("verdict", ALERTING)
@pytest.mark.parametrize("monitor", [FINGERPRINT, HEARTBEAT])
def test_what_does_not_err_fires_at_once(verdict: Verdict, monitor: str) -> None:
    """Changed bytes and the heartbeat need no second finding; the label says which verdict it is, and how bad."""
    sent: list[dict[str, Any]] = []
    alerts = Alerts(k=2, n=3, send=sent.append)
    alerts.judge(_joined(verdict, monitor), 5.0, "toy")
    assert _verdicts(alerts) == [verdict]
    [alert] = sent[0]["alerts"]
    severity = "warning" if verdict is Verdict.LATENT_WEIGHT_FAULT else "critical"
    assert (alert["labels"]["verdict"], alert["labels"]["severity"]) == (verdict.value, severity)


def test_what_may_err_needs_k_of_n_findings_of_one_monitor() -> None:
    """One bad answer is none; the same finding joined again and again is still one; the second one fires."""
    alerts = Alerts(k=2, n=3)
    serving = _joined(Verdict.SERVING_FAULT, CANARY)
    alerts.observe(_record(CANARY, Health.FAILED), "toy")
    for _ in range(5):
        alerts.judge(serving, 5.0, "toy")
    assert _verdicts(alerts) == []
    alerts.observe(_record(CANARY, Health.FAILED), "toy")
    alerts.judge(serving, 6.0, "toy")
    assert _verdicts(alerts) == [Verdict.SERVING_FAULT]


def test_unknown_leaves_the_alert_and_another_verdict_ends_it() -> None:
    """What is not known neither fires nor resolves; wrong answers after a repair are another alert."""
    sent: list[dict[str, Any]] = []
    alerts = Alerts(k=1, n=1, send=sent.append)
    alerts.judge(_joined(Verdict.WEIGHT_FAULT, FINGERPRINT), 1.0, "toy")
    alerts.judge(_joined(Verdict.UNKNOWN, FINGERPRINT), 2.0, "toy")
    assert _verdicts(alerts) == [Verdict.WEIGHT_FAULT]
    alerts.observe(_record(CANARY, Health.FAILED), "toy")
    alerts.judge(_joined(Verdict.SERVING_FAULT, CANARY), 3.0, "toy")
    assert _verdicts(alerts) == [Verdict.SERVING_FAULT]
    alerts.judge(_joined(Verdict.OK), 4.0, "toy")
    assert _verdicts(alerts) == []
    told = [
        (body["status"], body["alerts"][0]["labels"]["verdict"])
        for body in sent
        if body["groupLabels"]["alertname"] == VERDICT
    ]
    assert told == [
        ("firing", "weight_fault"),
        ("firing", "serving_fault"),
        ("resolved", "weight_fault"),
        ("resolved", "serving_fault"),
    ]


@pytest.mark.parametrize(("answer", "fires"), [(Answer.UNKNOWN, True), (Answer.YES, True), (Answer.NO, False)])
def test_what_is_refuted_ends_though_the_verdict_is_unknown(answer: Answer, fires: bool) -> None:
    """Without a canary a repaired server is not `ok`, but its bytes are known to be right: that alert is over."""
    alerts = Alerts(k=1, n=1)
    fault = _joined(Verdict.WEIGHT_FAULT, FINGERPRINT).model_copy(update={"rests_on": (Question.BYTES_CHANGED,)})
    alerts.judge(fault, 1.0, "toy")
    sign = Sign(question=Question.BYTES_CHANGED, answer=answer, sentence="so")
    alerts.judge(_joined(Verdict.UNKNOWN).model_copy(update={"signs": (sign,)}), 2.0, "toy")
    assert _verdicts(alerts) == [Verdict.WEIGHT_FAULT] * fires


async def test_the_alert_survives_a_restart_of_the_sidecar(
    settings: Callable[..., Settings], server: FakeServer
) -> None:
    """A new sidecar fires it since the same time without sending it again, until another verdict comes."""
    server.weights.damage(7, 4)
    async with Sidecar(settings()) as before:
        await _swept(before)
        [alert] = [alert for alert in before.alerts.firing if alert.name == VERDICT]
    async with Sidecar(settings()) as after:
        [same] = [alert for alert in after.alerts.firing if alert.name == VERDICT]
        assert (same.verdict, same.since) == (alert.verdict, alert.since)
        after.alerts.judge(_joined(Verdict.OK), 9.0, "toy")
        assert _verdicts(after.alerts) == []


async def test_an_alert_that_was_refuted_does_not_come_back_with_a_restart(
    settings: Callable[..., Settings], server: FakeServer
) -> None:
    """Its end under a verdict that is `unknown` is written down, so that the next sidecar knows of it."""
    server.weights.damage(7, 4)
    async with Sidecar(settings()) as before:
        await _swept(before)
        assert VERDICT in {alert.name for alert in before.alerts.firing}
        server.weights.bad.clear()
        await _swept(before)
        assert before.live.verdict().verdict is Verdict.UNKNOWN
        assert not before.alerts.firing
    async with Sidecar(settings()) as after:
        assert not after.alerts.firing
