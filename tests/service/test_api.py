"""The API: who may do what, wrong input, mitigations, faults, health, the page."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from .fake_server import FakeServer

Start = Callable[..., Any]


def _problem(response: httpx.Response, status: int, name: str) -> dict[str, Any]:
    """The problem document of a response, checked for what all of them have."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["type"] == f"urn:flipwatch:problem:{name}"
    assert body["status"] == status
    assert body["title"]
    assert body["detail"].endswith((".", '"'))
    return body


# Who may do what


async def test_a_bad_token_is_401_everywhere(start: Start) -> None:
    """A token that nobody has is refused also where none would be needed."""
    api = await start()
    for path in ("/v1/states", "/v1/scans", "/v1/info", "/"):
        response = await api.get(path, who="thief")
        _problem(response, 401, "unauthenticated")
        assert response.headers["www-authenticate"].startswith("Bearer")
    _problem(await api.post("/v1/scans", {}, who=None), 401, "unauthenticated")
    _problem(await api.client.get("/v1/states", headers={"authorization": "Basic eDp5"}), 401, "unauthenticated")


async def test_a_token_without_the_scope_is_403(start: Start) -> None:
    """Reading does not include mitigating, mitigating not injecting faults; the other way round it does."""
    api = await start(faults={"enabled": True})
    body = {"action": "skip", "blocks": [4]}
    assert "reader" in _problem(await api.post("/v1/mitigations", body, who="reader"), 403, "forbidden")["detail"]
    _problem(await api.get("/v1/faults", who="operator"), 403, "forbidden")
    assert (await api.get("/v1/faults", who="boss")).status_code == 200
    assert (await api.get("/v1/states", who="boss")).status_code == 200


async def test_without_configured_tokens_nothing_can_be_changed(start: Start) -> None:
    """Mutating routes refuse with a clear text while nobody could have the right token; reading works on loopback."""
    api = await start(tokens=[])
    detail = _problem(await api.post("/v1/scans", {}, who=None), 403, "forbidden")["detail"]
    assert "tokens" in detail
    assert (await api.get("/v1/states", who=None)).status_code == 200


async def test_reading_from_elsewhere_needs_a_token(start: Start) -> None:
    """Only callers on the loopback interface read without a token; health and metrics are open."""
    api = await start()
    far = httpx.AsyncClient(
        transport=httpx.ASGITransport(api.client._transport.app, client=("192.0.2.7", 4711)), base_url="http://sidecar"
    )
    async with far:
        _problem(await far.get("/v1/states"), 401, "unauthenticated")
        _problem(await far.get("/"), 401, "unauthenticated")
        for path in ("/metrics", "/livez", "/readyz"):
            assert (await far.get(path)).status_code == 200


# Wrong input


@pytest.mark.parametrize(
    "body",
    [
        {"action": "skip", "blocks": [False]},
        {"action": "skip", "blocks": ["4"]},
        {"action": "skip", "blocks": [4.0]},
        {"action": "skip", "blocks": []},
        {"action": "skip", "blocks": [-1]},
        {"action": "skip", "blocks": [4, 4]},
        {"action": "skip", "blocks": [4], "alpha": 0.5},
        {"action": "skip", "blocks": [4], "force": 1},
        {"action": "skip", "blocks": [4], "really": True},
        {"action": "skip", "blocks": "all"},
        {"action": "attenuate", "blocks": [4]},
        {"action": "attenuate", "blocks": [4], "alpha": 3.0},
        {"action": "attenuate", "blocks": [4], "alpha": True},
        {"action": "attenuate", "blocks": [4], "alpha": 1e-60},
        {"action": "remove", "blocks": [4]},
        {"block": False},
        {},
        [],
        None,
    ],
)
async def test_a_wrong_mitigation_is_422_and_touches_nothing(start: Start, server: FakeServer, body: object) -> None:
    """`false` is not block 0, an unknown field is no decoration, and the gates stay as they are."""
    api = await start()
    _problem(await api.post("/v1/mitigations", body), 422, "invalid-request")
    assert server.gates == [1.0] * 8


@pytest.mark.parametrize("alpha", ["NaN", "Infinity", "1e999"])
async def test_an_alpha_that_is_not_finite_is_422(start: Start, alpha: str) -> None:
    """Python's JSON reads NaN; the API does not."""
    api = await start()
    text = f'{{"action": "attenuate", "blocks": [1], "alpha": {alpha}}}'
    headers = {"authorization": "Bearer token-of-the-operator", "content-type": "application/json"}
    _problem(await api.client.post("/v1/mitigations", content=text, headers=headers), 422, "invalid-request")


@pytest.mark.parametrize("body", [{"grid": "fine"}, {"grid": [1.0]}, {"grid": [0.5, 0.5]}, {"grid": []}, {"x": 1}, 3])
async def test_a_wrong_scan_is_422(start: Start, body: object) -> None:
    """A grid is a name or different alphas without 1."""
    api = await start()
    _problem(await api.post("/v1/scans", body), 422, "invalid-request")


async def test_unknown_things_are_404_and_405(start: Start) -> None:
    """Paths, scans, mitigations, faults and blocks that are not there, and methods that a path does not have."""
    api = await start(faults={"enabled": True})
    _problem(await api.get("/v2/states"), 404, "not-found")
    _problem(await api.get("/v1/scans/nothing"), 404, "not-found")
    _problem(await api.get("/v1/mitigations/nothing"), 404, "not-found")
    _problem(await api.delete("/v1/mitigations/nothing"), 404, "not-found")
    _problem(await api.delete("/v1/faults/nothing", who="boss"), 404, "not-found")
    response = await api.delete("/v1/states")
    _problem(response, 405, "method-not-allowed")
    assert response.headers["allow"] == "GET"
    body = {"action": "skip", "blocks": [8]}
    assert "0 to 7" in _problem(await api.post("/v1/mitigations", body), 404, "unknown-block")["detail"]
    body = {"action": "skip", "blocks": [100_001]}
    _problem(await api.post("/v1/mitigations", body), 404, "unknown-block")


async def test_an_exception_is_a_problem_without_its_text(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of our own is 500 as a problem; what the exception says goes to the log only."""
    api = await start()

    def broken(_: int) -> None:
        raise RuntimeError("with a secret inside")

    monkeypatch.setattr(api.sidecar.store, "scans", broken)
    response = await api.get("/v1/scans")
    assert "secret" not in _problem(response, 500, "internal")["detail"]


# Mitigations


async def test_the_flagged_block_is_skipped_and_the_skip_undone(start: Start, server: FakeServer) -> None:
    """Flagged by a scan, skipped over REST, proved by the loss, scanned again, undone."""
    server.harm[4] = 5.0
    api = await start()
    await api.scanned()
    accepted = await api.post("/v1/mitigations", {"action": "skip", "blocks": "flagged", "reason": "drill"})
    assert accepted.status_code == 202
    await api.sidecar.mitigator.settled()
    record = (await api.get(accepted.headers["location"])).json()
    assert (record["state"], record["blocks"], record["actor"]) == ("active", [4], "operator")
    assert record["loss_before"] > record["loss_after"] + 4
    assert server.gates[4] == 0.0
    metrics = await api.metrics()
    assert metrics['flipwatch_mitigation_active{block="4",model_name="toy-model"}'] == 1
    assert metrics['flipwatch_mitigations_total{action="skip"}'] == 1
    await _verified(api, 2)
    state = (await api.get("/v1/states")).json()["states"][0]
    assert (state["health"], "without block 4" in state["reason"]) == ("degraded", True)
    undone = await api.delete(accepted.headers["location"])
    assert undone.status_code == 202
    await api.sidecar.mitigator.settled()
    assert (await api.get(undone.headers["location"])).json()["state"] == "reverted"
    assert server.gates == [1.0] * 8
    await _verified(api, 3)


async def _verified(api: Any, scans: int) -> None:
    """Wait for the scan that the sidecar runs by itself after a mitigation."""
    await asyncio.gather(*api.sidecar._followers)
    await api.sidecar.runner.idle()
    ended = (await api.get("/v1/scans")).json()
    assert (len(ended), ended[0]["trigger"], ended[0]["state"]) == (scans, "verification", "done")


async def test_a_nan_block_can_be_skipped(start: Start, server: FakeServer) -> None:
    """The loss before is not finite, the loss after is a number."""
    server.nan.add(2)
    api = await start()
    await api.scanned()
    accepted = await api.post("/v1/mitigations", {"action": "skip", "blocks": "flagged"})
    await api.sidecar.mitigator.settled()
    record = (await api.get(accepted.headers["location"])).json()
    assert (record["state"], record["loss_before_state"], record["loss_before"]) == ("active", "not_finite", None)
    assert math.isfinite(record["loss_after"])


async def test_a_mitigation_while_one_runs_is_409(start: Start, server: FakeServer) -> None:
    """The second order waits for nobody and changes nothing."""
    api = await start()
    server.hold()
    assert (await api.post("/v1/mitigations", {"action": "skip", "blocks": [4]})).status_code == 202
    _problem(await api.post("/v1/mitigations", {"action": "skip", "blocks": [5]}), 409, "conflict")
    _problem(await api.post("/v1/scans", {}), 409, "conflict")
    server.release()
    await api.sidecar.mitigator.settled()
    assert server.gates[5] == 1.0


async def test_a_mitigation_does_not_wait_for_a_scan(start: Start, server: FakeServer) -> None:
    """A running scan gives way, is recorded as interrupted, and the monitor's state stays what it was."""
    api = await start()
    await api.scanned()
    server.hold()
    scan = await api.post("/v1/scans", {})
    await asyncio.to_thread(server.holding.wait, 10)
    order = {"action": "attenuate", "blocks": [4], "alpha": 0.5, "force": True}
    assert (await api.post("/v1/mitigations", order)).status_code == 202
    server.release()
    await api.sidecar.mitigator.settled()
    assert server.gates[4] == 0.5
    assert "gave way" not in (await api.get(scan.headers["location"])).json()["error"]
    assert (await api.metrics())['flipwatch_scans_skipped_total{reason="interrupted"}'] == 1


async def test_flagged_without_a_flagged_block_is_409(start: Start) -> None:
    """`flagged` never means nothing, and never all."""
    api = await start()
    _problem(await api.post("/v1/mitigations", {"action": "skip", "blocks": "flagged"}), 409, "conflict")


async def test_the_mode_observe_forbids_mitigations(start: Start) -> None:
    """The default mode only looks."""
    api = await start(mitigation={"mode": "observe"})
    detail = _problem(await api.post("/v1/mitigations", {"action": "skip", "blocks": [4]}), 403, "forbidden")["detail"]
    assert "observe" in detail
    assert (await api.get("/v1/states")).json()["mitigation"]["offered"] is False


async def test_vllm_away_is_503(start: Start, server: FakeServer) -> None:
    """Without vLLM there is nothing to scan or to mitigate, and the answer says so."""
    api = await start(faults={"enabled": True})
    server.stop()
    _problem(await api.post("/v1/mitigations", {"action": "skip", "blocks": [4]}), 503, "vllm-away")
    _problem(await api.get("/v1/faults", who="boss"), 503, "vllm-away")


async def test_flagged_while_vllm_is_away_is_503(start: Start, server: FakeServer) -> None:
    """What is flagged is not known then: not the same as nothing being flagged."""
    server.harm[4] = 5.0
    api = await start()
    await api.scanned()
    server.stop()
    await api.sidecar.schedule.look()
    _problem(await api.post("/v1/mitigations", {"action": "skip", "blocks": "flagged"}), 503, "vllm-away")


async def _skipped(api: Any, block: int) -> str:
    """Skip a block, wait for the end of it; the path of its record."""
    accepted = await api.post("/v1/mitigations", {"action": "skip", "blocks": [block]})
    await _at_rest(api)
    path: str = accepted.headers["location"]
    return path


async def _at_rest(api: Any) -> None:
    """Wait until nothing that a mitigation started runs any more."""
    await api.sidecar.mitigator.settled()
    await asyncio.gather(*api.sidecar._followers)
    await api.sidecar.runner.idle()


async def test_a_restart_of_vllm_under_a_mitigation_leaves_nothing_active(start: Start, server: FakeServer) -> None:
    """A mitigation that was being verified in a process that is gone does not end as active."""
    api = await start()
    server.hold_after_gates = True
    accepted = await api.post("/v1/mitigations", {"action": "skip", "blocks": [4]})
    await asyncio.to_thread(server.holding.wait, 10)
    server.restart()
    server.hold_after_gates = False
    server.release()
    await _at_rest(api)
    record = (await api.get(accepted.headers["location"])).json()
    assert (record["state"], "vLLM was restarted" in record["message"]) == ("reverted", True)


async def test_a_gate_that_somebody_else_changed_is_seen_at_the_next_look(start: Start, server: FakeServer) -> None:
    """A mitigation whose gate was reset behind its back is not called active, in the record and in the metrics."""
    api = await start()
    path = await _skipped(api, 3)
    server.gates[3] = 1.0
    await api.sidecar.schedule.look()
    record = (await api.get(path)).json()
    assert (record["state"], "Somebody else changed the gates" in record["message"]) == ("interrupted", True)
    assert (await api.metrics())['flipwatch_mitigation_active{block="3",model_name="toy-model"}'] == 0


async def test_a_store_error_at_a_restart_of_vllm_is_made_up_for(start: Start, server: FakeServer) -> None:
    """A restart that could not be stored when it was seen is stored at the next look."""
    api = await start()
    path = await _skipped(api, 4)
    server.restart()
    _refuse_writes(api, True)
    await api.sidecar.schedule.look()
    assert (await api.get(path)).json()["state"] == "active"
    _refuse_writes(api, False)
    await api.sidecar.schedule.look()
    assert (await api.get(path)).json()["state"] == "reverted"


def _refuse_writes(api: Any, refuse: bool) -> None:
    """Let SQLite refuse every write, as on a full disk."""
    api.sidecar.store._file._db.execute(f"PRAGMA query_only = {int(refuse)}")


async def test_without_a_working_store_scans_and_alerts_go_on(start: Start, server: FakeServer) -> None:
    """What a scan finds is shown and alerted on though nothing can be stored, and the sidecar is not ready."""
    api = await start(alerts={"k": 1, "n": 1})
    await api.scanned()
    server.harm[4] = 5.0
    assert (await api.get("/readyz")).status_code == 200
    _refuse_writes(api, True)
    assert "store" in _problem(await api.get("/readyz"), 503, "not-ready")["detail"]
    await api.sidecar.schedule._scan_by_clock("alpha_scan")
    states = (await api.get("/v1/states")).json()
    assert (states["states"][0]["health"], states["states"][0]["flagged"]) == ("failed", [4])
    assert [alert["name"] for alert in states["alerts"]] == ["FlipwatchBlockFlagged"]
    scan = await api.scanned()
    assert (scan["state"], "readonly" in scan["error"]) == ("done", True)
    _refuse_writes(api, False)
    assert (await api.scanned())["error"] is None


async def test_metrics_do_without_the_store(start: Start) -> None:
    """A scrape never fails: what only the store knows is left out."""
    api = await start()
    assert "flipwatch_mitigation_active" in " ".join(await api.metrics())
    api.sidecar.store.close()
    metrics = await api.metrics()
    assert metrics["flipwatch_up"] == 1
    assert "flipwatch_mitigation_active" not in " ".join(metrics)


async def test_a_refused_model_has_no_blocks_and_no_offer(start: Start, server: FakeServer) -> None:
    """Of an architecture that the probe refuses nothing is known but the reason."""
    server.armed = False
    api = await start()
    assert (await api.get("/v1/blocks")).json() == []
    assert "ToyLayer is not supported" in (await api.scanned())["error"]
    states = (await api.get("/v1/states")).json()
    assert states["gates"] is None
    assert "ToyLayer is not supported" in states["mitigation"]["reason"]
    assert (await api.metrics())["flipwatch_gates_usable"] == 0


async def test_the_alert_reaches_the_webhook(start: Start, server: FakeServer) -> None:
    """k of n findings send one message to the receiver, over HTTP."""
    server.harm[4] = 5.0
    api = await start(alerts={"webhook_url": server.url + "/webhook", "k": 2, "n": 3})
    await api.scanned()
    await api.scanned()
    await api.sidecar.webhook.drained()
    assert [body["commonLabels"]["block"] for body in server.webhooks] == ["4"]
    assert (await api.metrics())["flipwatch_alerts_sent_total"] == 1


# Faults


async def test_faults_are_injected_and_undone_by_admin(start: Start, server: FakeServer) -> None:
    """The whole round over the API, and both sides write it down."""
    api = await start(faults={"enabled": True})
    order = {"block": 4, "tensor": "mlp.up_proj", "kind": "burst"}
    made = await api.post("/v1/faults", order, who="boss")
    assert made.status_code == 201
    assert server.harm[4] == 5.0
    assert [fault["id"] for fault in (await api.get("/v1/faults", who="boss")).json()] == [made.json()["id"]]
    assert (await api.delete(made.headers["location"], who="boss")).status_code == 204
    assert server.harm[4] == 0.0
    assert [event.what for event in api.sidecar.store.events(2)] == ["fault undone", "fault injected"]


async def test_a_fault_outside_the_blocks_names_all_that_it_damages(start: Start) -> None:
    """No block, and the other name of a tied tensor; flips come through as they were ordered."""
    api = await start(faults={"enabled": True})
    order = {"tensor": "embed_tokens", "kind": "flips", "flips": [[7, 30], [8, 14]]}
    made = await api.post("/v1/faults", order, who="boss")
    assert made.status_code == 201
    assert made.json()["block"] is None
    assert made.json()["shared_with"] == ["lm_head.weight"]
    assert made.json()["flips"] == [[7, 30], [8, 14]]
    assert (await api.get("/v1/faults", who="boss")).json() == [made.json()]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"block": False, "tensor": "x", "kind": "nan"}, "block"),
        ({"block": 1}, "kind"),
        ({"block": 1, "x": 2}, "kind"),
        ({"tensor": "x", "kind": "nan", "bit": 3}, "bit is for kind bit only"),
        ({"tensor": "x", "kind": "flips"}, "needs a list of flips"),
        ({"tensor": "x", "kind": "stale"}, "needs a source"),
        ({"tensor": "x", "kind": "nan", "source": "y"}, "needs a source"),
        ({"tensor": "x", "kind": "burst", "factor": "much"}, "factor"),
    ],
)
async def test_a_wrong_fault_is_422(start: Start, body: object, words: str) -> None:
    """Wrong types (`{"block": false}`), missing fields, and fields of another kind, each with its sentence."""
    api = await start(faults={"enabled": True})
    assert words in _problem(await api.post("/v1/faults", body, who="boss"), 422, "invalid-request")["detail"]


async def test_faults_need_both_switches(start: Start, server: FakeServer) -> None:
    """Off here, or off at the probe, is 403 even for admin."""
    order = {"block": 4, "tensor": "mlp.up_proj", "kind": "burst"}
    api = await start()
    _problem(await api.post("/v1/faults", order, who="boss"), 403, "forbidden")
    assert server.harm[4] == 0.0


async def test_faults_that_are_off_at_the_probe_are_403(start: Start, server: FakeServer) -> None:
    """The probe's refusal comes through with its words."""
    server.faults_enabled = False
    api = await start(faults={"enabled": True})
    order = {"block": 4, "tensor": "mlp.up_proj", "kind": "burst"}
    detail = _problem(await api.post("/v1/faults", order, who="boss"), 403, "forbidden")["detail"]
    assert "FLIPWATCH_FAULTS=1" in detail


# The audit log, health, info, page


async def test_the_audit_log_can_be_read(start: Start) -> None:
    """Who did what, newest first and bounded, for everybody who may read."""
    api = await start()
    await _skipped(api, 4)
    events = (await api.get("/v1/events", who="reader")).json()
    assert [(event["actor"], event["what"]) for event in events] == [
        *(("operator", f"mitigation {state}") for state in ("active", "verifying", "applying", "pending")),
        ("flipwatch", "verdict changed"),
        ("flipwatch", "vllm arrived"),
    ]
    assert (await api.get("/v1/events?limit=2")).json() == events[:2]
    _problem(await api.get("/v1/events?limit=0"), 422, "invalid-request")
    _problem(await api.get("/v1/events", who="thief"), 401, "unauthenticated")


async def test_health_does_not_depend_on_the_model(start: Start, server: FakeServer) -> None:
    """/livez and /readyz stay good without vLLM; /readyz lists that it is away."""
    api = await start()
    server.stop()
    await api.sidecar.schedule.look()
    assert (await api.get("/livez", who=None)).json() == {"status": "alive"}
    ready = await api.get("/readyz", who=None)
    assert ready.status_code == 200
    checks = {check["name"]: check for check in ready.json()["checks"]}
    assert (checks["probe"]["ok"], checks["probe"]["required"]) == (False, False)


async def test_a_stopped_schedule_is_not_ready(start: Start) -> None:
    """A sidecar that would never scan again says so."""
    api = await start()
    api.sidecar.schedule.stop()
    # APScheduler stops in the next turn of the loop.
    await asyncio.sleep(0)
    problem = _problem(await api.get("/readyz"), 503, "not-ready")
    assert "schedule" in problem["detail"]


async def test_info_shows_no_secret(start: Start) -> None:
    """Settings are shown to readers, tokens and keys are not."""
    api = await start(vllm={"api_key": "key-of-vllm"}, alerts={"webhook_url": "http://127.0.0.1:9/hook-secret"})
    response = await api.get("/v1/info")
    assert response.json()["caller"] == {"name": "operator", "scopes": ["mitigate"]}
    for secret in ("token-of-the", "key-of-vllm", "hook-secret"):
        assert secret not in response.text


async def test_the_page_shows_the_verdict_and_escapes_everything(start: Start, server: FakeServer) -> None:
    """Names from outside cannot become HTML."""
    server.model = "<script>alert(1)</script>"
    server.harm[4] = 5.0
    api = await start()
    await api.scanned()
    page = await api.get("/", who=None)
    assert page.headers["content-type"].startswith("text/html")
    assert "Corrupted" in page.text
    assert '<tr class="flagged"><td class="n">4</td>' in page.text
    [row] = [row for row in page.text.split("<tr ") if row.startswith('class="flagged"')]
    assert f'<td class="n">{(await api.get("/v1/blocks")).json()[4]["loss_without_nats"]:.3f}</td>' in row
    assert "<script" not in page.text
    assert "&lt;script&gt;" in page.text


async def test_the_page_works_before_anything_is_known(start: Start, server: FakeServer) -> None:
    """An empty sidecar has a page too."""
    server.stop()
    api = await start()
    page = await api.get("/", who=None)
    assert page.status_code == 200
    assert "Not known" in page.text
