"""The comparison with a clean model, with real programs: recorded states, the checkpoint, a peer, and a repair."""

from collections.abc import Iterator

import pytest

from ..vllm_server import PROBE_TOKEN, VllmServer
from .sidecar import Sidecar, Webhook, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FLIP = {"block": 4, "tensor": "mlp.up_proj", "kind": "bit", "count": 1, "seed": 4}
BURST = {"block": 20, "tensor": "self_attn.o_proj", "kind": "burst", "seed": 4}
DEPARTS = "FlipwatchBlockDeparts"


@pytest.fixture(scope="module")
def sidecar(vllm: VllmServer, webhook: Webhook, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """Compares on request only; the server is its own peer."""
    process = Sidecar(
        tmp_path_factory.mktemp("sidecar"),
        vllm.url,
        webhook,
        scan={"every_minutes": None, "grid": "quick", "part_budget_ms": 1000, "duty": 1.0},
        differential={"peer_url": vllm.url, "peer_token": PROBE_TOKEN},
    )
    process.start()
    wait_for("the probe's answer", lambda: process.call("GET", "/states")["up"])
    finding = process.scan("/recordings")
    assert finding["health"] == "ok", finding["reason"]
    yield process
    process.close()


@pytest.mark.parametrize("reference", ["recorded", "checkpoint", "peer"])
def test_a_healthy_server_agrees_with_each_reference(sidecar: Sidecar, reference: str) -> None:
    """No block departs, and all of them were compared."""
    finding = sidecar.scan(monitor="differential", reference=reference)
    assert finding["health"] == "ok", finding["reason"]
    assert [block["departs"] for block in finding["blocks"]] == [False] * 30


def test_two_faults_are_named_alerted_on_and_repaired(vllm: VllmServer, sidecar: Sidecar, webhook: Webhook) -> None:
    """Both blocks in one pass, their tensors by the checkpoint; the repair brings the old answer back."""
    before = vllm.outputs(["The capital of France is"])
    for fault in (FLIP, BURST):
        sidecar.call("POST", "/faults", fault, 201)
    finding = sidecar.scan(monitor="differential")
    assert finding["health"] == "failed"
    assert [(found["block"], found["sublayer"]) for found in finding["locations"]] == [(4, "mlp"), (20, "self_attn")]
    wait_for("the alerts", lambda: webhook.seen(DEPARTS, "firing", 4) and webhook.seen(DEPARTS, "firing", 20))
    finding = sidecar.scan(monitor="differential", reference="checkpoint")
    assert [found["tensor"] for found in finding["locations"]] == [
        "model.layers.4.mlp.gate_up_proj.weight",
        "model.layers.20.self_attn.o_proj.weight",
    ]
    assert finding["locations"][0]["parts"] == ["up_proj"]
    assert finding["locations"][0]["diagnosis"]["bits"] == 1
    repair = sidecar.call("POST", "/mitigations", {"action": "repair"}, 202)
    record = sidecar.mitigation(repair["id"], "repaired", "failed", "interrupted")
    assert record["state"] == "repaired", record["message"]

    def compared() -> bool:
        kinds = [(scan["monitor"], scan["trigger"], scan["state"]) for scan in sidecar.call("GET", "/scans")]
        return ("differential", "verification", "done") in kinds

    # Behind a sweep and a scan.
    wait_for("the comparison after the repair", compared, 300)
    [state] = [state for state in sidecar.call("GET", "/states")["states"] if state["monitor"] == "differential"]
    assert state["health"] == "ok", state["reason"]
    wait_for("the end of the alerts", lambda: webhook.seen(DEPARTS, "resolved", 20))
    assert vllm.outputs(["The capital of France is"]) == before
