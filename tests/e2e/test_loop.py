"""The whole loop with real programs: vLLM, the sidecar, HTTP, a webhook."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from ..vllm_server import VllmServer
from .sidecar import Sidecar, Webhook, wait_for

pytestmark = pytest.mark.vllm

BURST = {"block": 4, "tensor": "mlp.up_proj", "kind": "burst", "count": 18, "seed": 4}


@pytest.fixture(scope="module")
def sidecar(vllm: VllmServer, webhook: Webhook, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """Scans on request and after every 5 served requests, alerts at once, acts when told."""
    process = Sidecar(tmp_path_factory.mktemp("sidecar"), vllm.url, webhook)
    process.start()
    wait_for("the first answer of the probe", lambda: process.metric("flipwatch_up") == 1.0)
    yield process
    process.close()


def _skip_flagged(sidecar: Sidecar) -> dict[str, Any]:
    made = sidecar.call("POST", "/mitigations", {"action": "skip", "blocks": "flagged"}, 202)
    return sidecar.mitigation(made["id"], "active")


def test_watch_flag_alert_skip_undo(vllm: VllmServer, sidecar: Sidecar, webhook: Webhook) -> None:
    """A burst in block 4 is flagged by the scan that served requests trigger, alerted, skipped, undone."""
    assert sidecar.state()["health"] == "unknown"
    healthy = sidecar.scan("/baselines")
    assert healthy["health"] == "ok", healthy["reason"]
    before = vllm.outputs(["The capital of France is"])

    fault = sidecar.call("POST", "/faults", BURST, 201)
    for _ in range(6):
        vllm.complete("Tell me a story.", 2)
    wait_for("the alert", lambda: webhook.seen("FlipwatchBlockFlagged", "firing", 4))
    state = sidecar.state()
    assert state["health"] == "failed"
    assert sidecar.call("GET", "/scans")[0]["trigger"] == "requests"
    assert [block["block"] for block in sidecar.call("GET", "/blocks") if block["flagged"]] == [4]
    model = 'model_name="smol"'
    assert sidecar.metric(f'flipwatch_block_flagged{{block="4",{model}}}') == 1.0
    assert sidecar.metric('flipwatch_health_state{monitor="alpha_scan",state="failed"}') == 1.0

    skip = _skip_flagged(sidecar)
    assert skip["blocks"] == [4]
    assert skip["loss_after"] < skip["loss_before"]
    assert skip["loss_after"] < healthy["base_loss_nats"] + 0.6 * (skip["loss_before"] - healthy["base_loss_nats"])
    assert vllm.facts()["gates"][4] == 0.0
    wait_for("the end of the alert", lambda: webhook.seen("FlipwatchBlockFlagged", "resolved", 4))
    wait_for("degraded", lambda: sidecar.state()["health"] == "degraded")
    assert sidecar.metric(f'flipwatch_block_gate{{block="4",{model}}}') == 0.0

    sidecar.call("DELETE", f"/faults/{fault['id']}")
    sidecar.call("DELETE", f"/mitigations/{skip['id']}", status=202)
    sidecar.mitigation(skip["id"], "reverted")
    assert set(vllm.facts()["gates"]) == {1.0}
    assert vllm.outputs(["The capital of France is"]) == before


def test_damage_outside_every_block_is_drift(sidecar: Sidecar, webhook: Webhook) -> None:
    """With the clean profile of the healthy server, a damaged final norm is failed and names no block; undone, ok."""
    profile = sidecar.call("GET", "/baselines")
    assert len(profile["blocks"]) == 30
    order = {"tensor": "model.norm", "kind": "neighbours", "count": 64}
    fault = sidecar.call("POST", "/faults", order, 201)
    finding = sidecar.scan(grid=[0.0])
    assert (finding["health"], finding["flagged"]) == ("failed", []), finding["reason"]
    assert finding["drift_nats"] > 0.1
    assert sidecar.metric('flipwatch_drift_nats{model_name="smol"}') == finding["drift_nats"]
    wait_for("the alert", lambda: webhook.seen("FlipwatchModelDrifted", "firing"))
    sidecar.call("DELETE", f"/faults/{fault['id']}")
    finding = sidecar.scan(grid=[0.0])
    assert (finding["health"], finding["profile_recorded_at"]) == ("ok", profile["recorded_at"]), finding["reason"]
    assert abs(finding["drift_nats"]) < 0.01


def test_nan_is_never_a_number(vllm: VllmServer, sidecar: Sidecar, webhook: Webhook) -> None:
    """A NaN in one block: failed with a reason, in state, metrics and alert; skipping it heals; nothing shows NaN."""
    fault = sidecar.call("POST", "/faults", {"block": 11, "tensor": "mlp.down_proj", "kind": "nan", "count": 3}, 201)
    finding = sidecar.scan()
    assert finding["health"] == "failed"
    assert finding["base_loss_nats"] is None
    assert finding["flagged"] == [11]
    assert "block 11" in finding["reason"].lower()
    text = sidecar.client.get("/metrics").text
    assert "nan" not in text.lower()
    assert sidecar.metric('flipwatch_base_loss_finite{model_name="smol"}') == 0.0
    assert sidecar.metric('flipwatch_base_loss_nats{model_name="smol"}') is None
    wait_for("the alert", lambda: webhook.seen("FlipwatchModelNotFinite", "firing"))

    skip = _skip_flagged(sidecar)
    assert skip["loss_before"] is None
    # Block 11 is worth 4 nats; guessing costs 10.8.
    assert skip["loss_after"] < 9
    assert vllm.complete("The capital of France is", 4)["logprobs"]["token_logprobs"][0] <= 0
    sidecar.call("DELETE", f"/faults/{fault['id']}")
    sidecar.call("DELETE", f"/mitigations/{skip['id']}", status=202)
    sidecar.mitigation(skip["id"], "reverted")


def test_killed_in_mid_mitigation(vllm: VllmServer, sidecar: Sidecar) -> None:
    """After kill -9 in the middle, the next start shows the mitigation truthfully and can finish and undo it."""
    made = sidecar.call("POST", "/mitigations", {"action": "skip", "blocks": [20], "force": True}, 202)
    sidecar.mitigation(made["id"], "pending", "applying", "verifying")
    assert sidecar.end(signal.SIGKILL) == -signal.SIGKILL
    sidecar.start()
    record = sidecar.mitigation(made["id"], "interrupted")
    gate = vllm.facts()["gates"][20]
    assert str(gate).rstrip("0").rstrip(".") in record["message"], record["message"]
    sidecar.call("POST", f"/mitigations/{made['id']}/finish", status=202)
    sidecar.mitigation(made["id"], "active")
    assert vllm.facts()["gates"][20] == 0.0
    sidecar.call("DELETE", f"/mitigations/{made['id']}", status=202)
    sidecar.mitigation(made["id"], "reverted")
    assert vllm.facts()["gates"][20] == 1.0


def test_vllm_restarts_under_the_sidecar(vllm: VllmServer, sidecar: Sidecar) -> None:
    """A restart of vLLM is seen: unknown, 503 while it is away, gates of the new process, scans resume."""
    made = sidecar.call("POST", "/mitigations", {"action": "skip", "blocks": [9], "force": True}, 202)
    sidecar.mitigation(made["id"], "active")
    digest = vllm.facts()["model_digest"]
    vllm.stop()
    wait_for("the absence", lambda: sidecar.metric("flipwatch_up") == 0.0)
    assert sidecar.state()["health"] == "unknown"
    problem = sidecar.call("POST", "/mitigations", {"action": "skip", "blocks": [3]}, 503)
    assert "vLLM" in problem["detail"]
    assert sidecar.client.get("/livez").status_code == 200
    vllm.start()
    assert vllm.facts()["model_digest"] == digest
    wait_for("the new process", lambda: sidecar.metric("flipwatch_up") == 1.0)
    sidecar.mitigation(made["id"], "reverted")
    assert sidecar.state()["health"] == "unknown"
    assert sidecar.metric('flipwatch_block_gate{block="9",model_name="smol"}') == 1.0
    finding = sidecar.scan()
    assert finding["health"] == "ok"
    # The same checkpoint in a new process: the profile of the old one fits.
    assert finding["profile_recorded_at"] is not None, finding["reason"]
    assert sidecar.state()["health"] == "ok"
