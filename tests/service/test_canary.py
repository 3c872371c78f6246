"""The canary through the whole sidecar: what is expected, what is found, what must not become normal, its clock."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flipwatch.monitors.canary.answers import Answer, Failure
from flipwatch.monitors.canary.plan import PROMPTS
from flipwatch.service.alert import ANSWERS_WRONG, UNKNOWN
from flipwatch.service.vllm import VllmLate

from .fake_server import FakeServer

Start = Callable[..., Any]

PATH = "/v1/canary"
NAME = "canary"
BURST = {"block": 4, "tensor": "mlp.up_proj", "kind": "burst"}


async def _ended(api: Any, accepted: Any) -> dict[str, Any]:
    assert accepted.status_code == 202, accepted.text
    await api.sidecar.runner.ended(NAME)
    record: dict[str, Any] = (await api.get(accepted.headers["location"])).json()
    return record


async def _asked(api: Any) -> dict[str, Any]:
    """One run by request; its finding."""
    scan = await _ended(api, await api.post("/v1/scans", {"monitor": NAME}))
    assert scan["state"] == "done", scan
    finding: dict[str, Any] = scan["finding"]
    return finding


async def _recorded(api: Any) -> dict[str, Any]:
    return await _ended(api, await api.post(PATH, {}, who="boss"))


def _is(finding: dict[str, Any], health: str, symptom: str = "none", reference: str | None = None) -> None:
    found = finding["health"], finding["symptom"], finding["reference"]
    assert found == (health, symptom, reference), finding["reason"]


# Asking


async def test_it_asks_like_any_client_with_salts_of_its_own(start: Start, server: FakeServer) -> None:
    """Each prompt greedily with few tokens, once with a salt that nobody had before and once with one that stays."""
    server.answers.rounding = 0.01
    api = await start(vllm={"api_key": "the-key"})
    await _asked(api)
    await _asked(api)
    bodies = server.answers.asked
    # The first run asks all of them at once as well, three times over.
    assert len(bodies) == 12 + 18 + 12
    first, second = bodies[:12], bodies[30:]
    assert [body["prompt"] for body in second] == [prompt for prompt in PROMPTS for _ in range(2)]
    assert {(body["max_tokens"], body["temperature"], body["model"]) for body in bodies} == {(16, 0, "toy-model")}
    stays = {body["cache_salt"] for body in first[1::2]}
    assert stays == {body["cache_salt"] for body in second[1::2]}
    assert len(stays) == 1
    others = [body["cache_salt"] for body in (*first[::2], *bodies[12:30], *second[::2])]
    assert len(set(others) | stays) == len(others) + 1


# The first answers


async def test_the_first_answers_are_what_is_expected(start: Start, server: FakeServer) -> None:
    """Their rounding is the tolerance; what moves by more, or is another token, is a change."""
    server.answers.rounding = 0.02
    api = await start()
    _is(await _asked(api), "ok", "none", "first")
    finding = await _asked(api)
    _is(finding, "ok", "none", "first")
    assert finding["tolerance"] == pytest.approx(3 * 0.02 / 0.3935, rel=1e-2)
    server.answers.move = {1: 0.03}
    _is(await _asked(api), "ok", "none", "first")
    server.answers.move = {1: 0.5}
    server.answers.flip = {4: 3}
    finding = await _asked(api)
    _is(finding, "failed", "changed", "first")
    assert finding["wrong"] == [1, 4]
    metrics = await api.metrics()
    assert metrics['flipwatch_canary_symptom{model_name="toy-model",symptom="changed"}'] == 1
    assert metrics['flipwatch_canary_wrong_prompts{model_name="toy-model"}'] == 2


async def test_a_new_process_gives_first_answers_of_its_own(start: Start, server: FakeServer) -> None:
    """What an old one said is not expected of it."""
    api = await start()
    _is(await _asked(api), "ok", "none", "first")
    server.restart()
    server.answers.move = {1: 0.5}
    _is(await _asked(api), "ok", "none", "first")
    server.answers.move = {}
    _is(await _asked(api), "failed", "changed", "first")


async def test_first_answers_outlive_a_sweep_and_not_a_baseline_that_was_announced(
    start: Start, server: FakeServer
) -> None:
    """A sweep that tells of the baseline for the first time changes nothing; weights changed on purpose answer anew."""
    api = await start()
    _is(await _asked(api), "ok", "none", "first")
    await api.post("/v1/scans", {"monitor": "fingerprint"})
    await api.sidecar.runner.idle()
    server.answers.move = {1: 0.5}
    _is(await _asked(api), "failed", "changed", "first")
    await api.post("/v1/integrity", {"reason": "weight sync"}, who="boss")
    await api.sidecar.runner.idle()
    _is(await _asked(api), "ok", "none", "first")
    server.answers.move = {}
    _is(await _asked(api), "failed", "changed", "first")


# Replicas


async def test_every_replica_is_asked_and_judged_by_itself(start: Start, server: FakeServer) -> None:
    """The first replica's answers are expected of all; the one that departs is named, in whichever it is."""
    server.engines = [0, 1]
    api = await start()
    finding = await _asked(api)
    _is(finding, "ok", "none", "first")
    assert server.answers.sent_to == ["0"] * 12 + ["1"] * 12 + ["0"] * 18
    for bad, sound in ((1, 0), (0, 1)):
        server.answers.bad_engine, server.answers.move = bad, {2: 0.5}
        finding = await _asked(api)
        _is(finding, "failed", "changed", "first")
        assert finding["reason"].startswith(f"Engine {bad}: 1 of 6 prompts (2) ")
        assert finding["reason"].endswith(f"; engine {sound} is ok")
    server.answers.bad_engine, server.answers.move = 1, {2: 0.03}
    finding = await _asked(api)
    _is(finding, "ok", "none", "first")
    assert finding["scatter"] == pytest.approx(0.03 / 0.3935, rel=0.1), "that of the one that moved further"


async def test_replicas_that_differ_from_the_start_give_nothing_to_expect(start: Start, server: FakeServer) -> None:
    """Nobody knows which one is right: neither becomes what is expected, also not of an operator who asks for it."""
    server.engines = [0, 1]
    server.answers.bad_engine, server.answers.move = 0, {2: 0.5}
    api = await start()
    for _ in range(2):
        finding = await _asked(api)
        _is(finding, "failed", "changed", "first")
        assert finding["reason"].startswith("Engine 1: ")
        assert finding["reason"].endswith("and nobody knows which one is right")
    refused = await _recorded(api)
    assert "Engine 1: 1 of 6 prompts (2) " in refused["recording_refusal"]
    assert (await api.get(PATH)).status_code == 404
    server.answers.move = {}
    _is(await _asked(api), "ok", "none", "first")
    assert (await _recorded(api))["state"] == "done"
    _is(await _asked(api), "ok", "none", "recorded")


@pytest.mark.parametrize(("busy", "symptom"), [(True, "none"), (False, "timed_out")])
async def test_a_replica_that_hangs_is_named(start: Start, server: FakeServer, *, busy: bool, symptom: str) -> None:
    """Its own counters say whether it is busy: those of the other one move."""
    server.engines = [0, 1]
    api = await start(canary={"timeout_seconds": 0.2})
    await _asked(api)
    server.answers.bad_engine = 1 - busy
    server.answers.busy, server.answers.stuck = True, 1
    server.answers.hang()
    try:
        finding = await _asked(api)
    finally:
        server.answers.go_on()
    _is(finding, "unknown" if busy else "failed", symptom, "first")
    assert finding["reason"].startswith(f"Engine {1 - busy}: 1 of 1 prompts (0) ")
    assert finding["reason"].endswith(f"; engine {int(busy)} is ok")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda server: server.gates.__setitem__(3, 0.5), "block 3 is not in it as it was"),
        (lambda server: server.weights.damage(7, 4), "has given no answers that can be trusted"),
    ],
)
async def test_a_changed_or_suspected_model_gives_no_first_answers(
    start: Start, server: FakeServer, spoil: Callable[[FakeServer], None], words: str
) -> None:
    """They are sound, but nothing is known to compare them with, and that is no reason for an alert."""
    api = await start()
    spoil(server)
    accepted = await api.post("/v1/scans", {"monitor": "fingerprint"})
    await api.sidecar.runner.idle()
    assert accepted.status_code == 202
    for _ in range(3):
        finding = await _asked(api)
        _is(finding, "unknown")
        assert finding["answered"] == 6
        assert words in finding["reason"]
    assert UNKNOWN not in {alert.name for alert in api.sidecar.alerts.firing if alert.monitor == NAME}


async def test_a_fault_on_purpose_is_held_against_what_came_before(start: Start, server: FakeServer) -> None:
    """It makes no first answers, and the old ones tell."""
    api = await start(faults={"enabled": True})
    assert (await api.post("/v1/faults", BURST, who="boss")).status_code == 201
    _is(await _asked(api), "unknown")
    [fault] = server.faults
    assert (await api.delete(f"/v1/faults/{fault}", who="boss")).status_code == 204
    _is(await _asked(api), "ok", "none", "first")
    await api.post("/v1/faults", BURST, who="boss")
    server.answers.flip = {0: 0}
    _is(await _asked(api), "failed", "changed", "first")


async def test_answers_that_do_not_repeat_themselves_are_no_first_ones(start: Start, server: FakeServer) -> None:
    """A log probability that jumps by a nat is no rounding."""
    server.answers.rounding = 1.0
    api = await start()
    finding = (await _ended(api, await api.post("/v1/scans", {"monitor": NAME})))["finding"]
    assert (finding["health"], finding["symptom"]) == ("failed", "cache_differs")
    server.answers.rounding = 0.22
    finding = await _asked(api)
    _is(finding, "unknown")
    assert "that is no rounding" in finding["reason"]


async def test_no_answer_of_one_replica_hides_what_another_one_says(
    start: Start, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that are not finite outweigh a time-out; a replica that gave no answer is not counted among the sound."""
    server.engines = [0, 1]
    server.answers.stuck = 1
    api = await start(canary={"timeout_seconds": 0.2})
    await _asked(api)
    complete = api.sidecar.vllm.complete
    not_finite = Answer(seconds=0.1, failure=Failure.NOT_FINITE, detail="has no finite numbers")

    async def answered(*model_and_prompt: str, engine: int, **more: Any) -> Answer:
        if engine == late:
            raise VllmLate("vLLM did not answer in time.")
        return not_finite if spoilt else await complete(*model_and_prompt, engine=engine, **more)

    monkeypatch.setattr(api.sidecar.vllm, "complete", answered)
    late, spoilt = 0, True
    finding = await _asked(api)
    _is(finding, "failed", "not_finite", "first")
    assert finding["reason"].startswith("Engine 1: ")
    server.gates[4] = 0.0
    server.answers.busy = True
    spoilt = False
    for late in (0, 1):
        finding = await _asked(api)
        _is(finding, "failed" if late else "unknown", "timed_out" if late else "none")
        assert (finding["answered"], finding["reason"][:10]) == (0, f"Engine {late}: ")


# Symptoms that need no reference


@pytest.mark.parametrize(
    ("spoil", "symptom"),
    [
        ({"nan": True}, "not_finite"),
        ({"status": 500}, "refused"),
        ({"repeat": True}, "degenerate"),
        ({"move": dict.fromkeys(range(6), 9.0)}, "degenerate"),
        ({"stale": 2.0}, "cache_differs"),
    ],
)
async def test_what_is_wrong_without_any_reference(
    start: Start, server: FakeServer, spoil: dict[str, Any], symptom: str
) -> None:
    """Also in the first run; the alert takes k of n, and ends with sound answers."""
    api = await start()
    for name, value in spoil.items():
        setattr(server.answers, name, value)
    for count in range(1, 4):
        finding = await _asked(api)
        # In the first run nothing comes from the cache.
        if symptom == "cache_differs" and count == 1:
            server.answers._seen.update({(prompt, api.sidecar.canaries._asking._salt, None): 1 for prompt in PROMPTS})
            continue
        _is(finding, "failed", symptom, finding["reference"])
    assert [alert.name for alert in api.sidecar.alerts.firing] == [ANSWERS_WRONG]
    server.answers.restart()
    for _ in range(2):
        await _asked(api)
    assert api.sidecar.alerts.firing == []


async def test_a_server_that_gives_no_answer_at_all(start: Start, server: FakeServer) -> None:
    """Its counters stand still meanwhile: a time-out, and the rest of the prompts is not asked."""
    api = await start(canary={"timeout_seconds": 0.2})
    server.answers.hang()
    finding = await _asked(api)
    server.answers.go_on()
    _is(finding, "failed", "timed_out")
    assert finding["wrong"] == [0]
    assert "0 has had no answer for 0.2 s" in finding["reason"]


async def test_a_busy_server_is_not_at_fault(start: Start, server: FakeServer) -> None:
    """It gives no answer in time, and computes other tokens meanwhile."""
    api = await start(canary={"timeout_seconds": 0.5})
    server.answers.hang()
    server.answers.busy = True
    finding = await _asked(api)
    server.answers.go_on()
    _is(finding, "unknown")
    assert "it computes other tokens meanwhile" in finding["reason"]


@pytest.mark.parametrize("meanwhile", [False, True])
async def test_a_server_that_sleeps_is_not_at_fault(start: Start, server: FakeServer, meanwhile: bool) -> None:
    """It was told to stand still: it is not asked, and what it leaves unanswered meanwhile says nothing about it."""
    api = await start(canary={"timeout_seconds": 0.2})
    asleep = {"GET /model": (503, "vLLM is asleep, or paused by somebody else; nothing is read or changed.")}
    server.refuse_title = "Asleep"
    if meanwhile:
        server.answers.hang()
    else:
        server.refuse.update(asleep)
    accepted = await api.post("/v1/scans", {"monitor": NAME})
    if meanwhile:
        await server.answers.reached()
        server.refuse.update(asleep)
    scan = await _ended(api, accepted)
    server.answers.go_on()
    assert (scan["state"], scan["finding"]["health"]) == ("failed", "unknown")
    assert scan["error"].startswith("vLLM is asleep")
    assert len(server.answers.asked) == meanwhile


async def test_who_cannot_be_asked_is_unknown(start: Start, server: FakeServer) -> None:
    """A key that is refused says nothing about the model; nor does a server that is not there."""
    api = await start()
    server.answers.status = 401
    scan = await _ended(api, await api.post("/v1/scans", {"monitor": NAME}))
    assert (scan["state"], scan["finding"]["health"]) == ("failed", "unknown")
    assert "set vllm.api_key" in scan["error"]
    server.stop()
    scan = await _ended(api, await api.post("/v1/scans", {"monitor": NAME}))
    assert "cannot be reached" in scan["error"]


async def test_a_model_that_changes_meanwhile_is_not_judged(start: Start, server: FakeServer) -> None:
    """Half of the answers would be of another model."""
    api = await start()
    server.answers.hang()
    accepted = await api.post("/v1/scans", {"monitor": NAME})
    await server.answers.reached()
    server.gates[2] = 0.0
    server.answers.go_on()
    scan = await _ended(api, accepted)
    assert (scan["state"], scan["error"]) == ("failed", "The model was changed while it was asked.")


async def test_it_waits_for_no_scan(start: Start, server: FakeServer) -> None:
    """It holds no engine: a scan of an hour must not keep it from asking."""
    api = await start()
    server.hold()
    assert (await api.post("/v1/scans", {})).status_code == 202
    _is(await _asked(api), "ok", "none", "first")
    assert api.sidecar.runner.running
    server.release()
    await api.sidecar.runner.idle()


async def test_it_is_asked_and_told_while_the_probe_is_away(start: Start, server: FakeServer) -> None:
    """What it finds then counts; what it found before does not."""
    api = await start(canary={"every_minutes": 1000})
    await api.sidecar.schedule.met()
    assert api.sidecar.live.state(NAME).health == "ok"
    server.refuse["GET /model"] = (503, "vLLM is starting.")
    await api.sidecar.schedule.look()
    assert api.sidecar.live.state(NAME).reason == "vLLM is starting."
    server.answers.nan = True
    finding = await _asked(api)
    _is(finding, "failed", "not_finite")
    assert api.sidecar.live.state(NAME).health == "failed"


# Recorded answers


async def test_recorded_answers_are_shown_and_can_be_removed(start: Start, server: FakeServer) -> None:
    """Whose they are and how far they may move; what was done with them is in the audit log."""
    server.answers.rounding = 0.02
    api = await start()
    assert (await api.get(PATH)).status_code == 404
    scan = await _recorded(api)
    assert (scan["monitor"], scan["trigger"], scan["recording_refusal"]) == (NAME, "baseline", None)
    _is(scan["finding"], "ok", "none", "recorded")
    made = (await api.get(PATH, who="reader")).json()
    assert (made["prompts"], made["tokens"], made["runs"], made["misfit"]) == (6, [16] * 6, 5, None)
    assert made["tolerance"] == pytest.approx(3 * made["scatter"])
    assert (await api.metrics())["flipwatch_canary_recorded_timestamp_seconds"] == made["recorded_at"]
    server.answers.flip = {2: 2}
    _is(await _asked(api), "failed", "changed", "recorded")
    server.answers.flip = {}
    assert [(await api.delete(PATH)).status_code, (await api.post(PATH, {})).status_code] == [403, 403]
    assert (await api.delete(PATH, who="boss")).status_code == 204
    assert (await api.delete(PATH, who="boss")).status_code == 404
    _is(await _asked(api), "ok", "none", "first")
    events = [event.what for event in api.sidecar.store.events(20) if event.actor == "boss"]
    assert events == ["answers removed", "answers recorded", "answers asked for"]


async def test_recorded_answers_outlive_the_sidecar_and_vllm(start: Start, server: FakeServer) -> None:
    """They lie in the store; a new process that was loaded with other weights is not held against them."""
    first = await start()
    await _recorded(first)
    await first.sidecar.__aexit__(None, None, None)
    server.restart()
    second = await start()
    _is(await _asked(second), "ok", "none", "recorded")
    server.model_digest = "another"
    finding = await _asked(second)
    _is(finding, "ok", "none", "first")
    why = "the answers were recorded of toy-model, loaded with other weights"
    assert why in finding["reason"]
    assert (await second.get(PATH)).json()["misfit"] == why


async def test_recorded_answers_that_cannot_be_read_are_none(start: Start, tmp_path: Path) -> None:
    """What another version has stored does not keep the sidecar from its start."""
    first = await start()
    await _recorded(first)
    await first.sidecar.__aexit__(None, None, None)
    db = sqlite3.connect(tmp_path / "data" / "flipwatch.db")
    db.execute("UPDATE expectation SET body = '{}'")
    db.commit()
    db.close()
    second = await start()
    assert (await second.get(PATH)).status_code == 404


async def test_unsound_answers_are_not_recorded(start: Start, server: FakeServer) -> None:
    """Nor those of a mitigated model, nor of one that a monitor calls failed."""
    api = await start()
    server.answers.repeat = True
    scan = await _recorded(api)
    assert "one token 16 times in a row" in scan["recording_refusal"]
    assert scan["finding"]["health"] == "unknown"
    server.answers.repeat = False
    server.weights.damage(7, 4)
    await api.post("/v1/scans", {"monitor": "fingerprint"})
    await api.sidecar.runner.idle()
    refused = await api.post(PATH, {}, who="boss")
    assert (refused.status_code, "failed by fingerprint" in refused.json()["detail"]) == (409, True)
    server.gates[1] = 0.0
    refused = await api.post(PATH, {}, who="boss")
    assert (refused.status_code, "mitigated (block 1)" in refused.json()["detail"]) == (409, True)
    assert (await api.get(PATH)).status_code == 404


# The clock


async def test_it_runs_by_itself_when_vllm_arrives(start: Start, server: FakeServer) -> None:
    """And is a state that is always shown; without a clock it is shown once somebody has asked."""
    api = await start(canary={"every_minutes": 5})
    await api.sidecar.schedule.met()
    [scan] = (await api.get("/v1/scans")).json()
    assert (scan["monitor"], scan["trigger"], scan["state"]) == (NAME, "schedule", "done")
    assert [state["monitor"] for state in (await api.get("/v1/states")).json()["states"]][-1] == NAME
