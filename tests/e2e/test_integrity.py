"""The fingerprint with real programs: the checkpoint when vLLM arrives, and a change that somebody announces."""

import signal
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from ..vllm_server import VllmServer
from .sidecar import Sidecar, Webhook, wait_for

pytestmark = pytest.mark.vllm

# Values that a training step might have written.
SYNC = {"block": 4, "tensor": "mlp.up_proj", "kind": "neighbours", "count": 4, "seed": 4}
CHANGED = "FlipwatchWeightsChanged"
FLIP = {"block": 4, "tensor": "mlp.up_proj", "kind": "bit", "count": 1, "seed": 4}


@pytest.fixture(scope="module")
def sidecar(
    vllm: VllmServer, webhook: Webhook, smol: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sidecar]:
    """Sweeps when vLLM arrives and on request, checks the checkpoint against a manifest, never scans by itself."""
    folder = tmp_path_factory.mktemp("sidecar")
    manifest = folder / "SHA256SUMS"
    files = sorted(smol.glob("*.safetensors"))
    manifest.write_text("".join(f"{sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files))
    process = Sidecar(
        folder,
        vllm.url,
        webhook,
        scan={"every_minutes": None, "grid": "quick", "part_budget_ms": 1000, "duty": 1.0},
        fingerprint={"every_minutes": 60, "manifest": str(manifest), "check_checkpoint": True},
    )
    process.start()
    checked = 'flipwatch_checkpoint_verified{model_name="smol"}'
    wait_for("the check of the checkpoint", lambda: process.metric(checked) is not None)
    yield process
    process.close()


def test_a_fresh_server_is_that_of_its_checkpoint(sidecar: Sidecar) -> None:
    """All bytes are covered, memory is the checkpoint's, and the file is the manifest's."""
    shown = sidecar.call("GET", "/integrity")
    assert shown["verified"] is True, shown["summary"]
    assert shown["verdict"]["problems"] == []
    [seal] = shown["ranks"]
    assert seal["not_covered"] == []
    assert seal["covered_bytes"] > 200e6
    finding = sidecar.scan(monitor="fingerprint")
    assert finding["health"] == "ok", finding["reason"]
    assert finding["chunks"] == seal["chunks"]


def test_a_flipped_bit_is_named_alerted_on_and_repaired(vllm: VllmServer, sidecar: Sidecar, webhook: Webhook) -> None:
    """The sweep names tensor, element and bit; the repair puts the answer back as it was; the alert ends."""
    before = vllm.outputs(["The capital of France is"])
    sidecar.call("POST", "/faults", FLIP, 201)
    finding = sidecar.scan(monitor="fingerprint")
    assert (finding["health"], finding["action"], finding["bad_chunks"]) == ("failed", "repair", 1), finding["reason"]
    assert finding["blocks"] == [4]
    [diagnosis] = finding["bad"][0]["diagnoses"]
    assert (diagnosis["elements"], diagnosis["bits"], diagnosis["pattern"]) == (1, 1, "single_flip")
    assert f"element {diagnosis['first']}" in finding["reason"]
    assert sidecar.metric('flipwatch_weights_changed_chunks{model_name="smol",rank="0"}') == 1.0
    wait_for("the alert", lambda: webhook.seen(CHANGED, "firing"))
    made = sidecar.call("POST", "/mitigations", {"action": "repair"}, 202)
    record = sidecar.mitigation(made["id"], "repaired")
    assert [repair["method"] for repair in record["repairs"]] == ["parity"]
    wait_for("the end of the alert", lambda: webhook.seen(CHANGED, "resolved"))
    assert vllm.outputs(["The capital of France is"]) == before
    assert sidecar.call("GET", "/faults") == []


def test_a_repair_ends_the_skip_of_its_block(vllm: VllmServer, sidecar: Sidecar) -> None:
    """The bad block is skipped at once; the repair brings the first answer back and the block with it."""
    before = vllm.outputs(["The capital of France is"])
    burst = {"block": 7, "tensor": "mlp.down_proj", "kind": "neighbours", "count": 18, "seed": 4}
    sidecar.call("POST", "/faults", burst, 201)
    skip = sidecar.call("POST", "/mitigations", {"action": "skip", "blocks": [7], "force": True}, 202)
    sidecar.mitigation(skip["id"], "active")
    made = sidecar.call("POST", "/mitigations", {"action": "repair"}, 202)
    repair = sidecar.mitigation(made["id"], "repaired", "failed")
    assert repair["state"] == "repaired", repair["message"]
    changed = [diagnosis["elements"] for chunk in repair["repairs"] for diagnosis in chunk["diagnoses"]]
    assert sum(changed) == 18
    assert sidecar.mitigation(skip["id"], "reverted")["message"].startswith(f"Repaired by mitigation {made['id']}")
    facts = vllm.facts()
    assert (set(facts["gates"]), facts["faults"]) == ({1.0}, [])
    assert vllm.outputs(["The capital of France is"]) == before


def test_killed_in_mid_repair(vllm: VllmServer, sidecar: Sidecar) -> None:
    """After kill -9 in the middle of a repair, the next start says so, and finishing it brings the right bytes back."""
    before = vllm.outputs(["The capital of France is"])
    sidecar.call("POST", "/faults", {"block": 13, "tensor": "mlp.down_proj", "kind": "lost"}, 201)
    assert vllm.outputs(["The capital of France is"]) != before
    made = sidecar.call("POST", "/mitigations", {"action": "repair"}, 202)
    sidecar.mitigation(made["id"], "pending", "applying", "verifying")
    assert sidecar.end(signal.SIGKILL) == -signal.SIGKILL
    sidecar.start()
    sidecar.mitigation(made["id"], "interrupted")
    sidecar.call("POST", f"/mitigations/{made['id']}/finish", status=202)
    repair = sidecar.mitigation(made["id"], "repaired", "failed")
    assert repair["state"] == "repaired", repair["message"]
    assert vllm.outputs(["The capital of France is"]) == before
    assert sidecar.scan(monitor="fingerprint")["health"] == "ok"


def test_an_announced_change_becomes_the_baseline(sidecar: Sidecar) -> None:
    """Who changes weights on purpose says so, and is not called a fault; the check of the old bytes counts no more."""
    fault = sidecar.call("POST", "/faults", SYNC, 201)
    assert sidecar.scan("/integrity", reason="weight sync")["health"] == "ok"
    assert sidecar.call("GET", "/integrity")["verified"] is None
    recorded = next(event for event in sidecar.call("GET", "/events") if event["what"] == "fingerprint recorded")
    assert (recorded["actor"], recorded["detail"]["changed_chunks"]) == ("operator", 1)
    finding = sidecar.scan("/integrity/checkpoint")
    assert (finding["health"], finding["bad_chunks"]) == ("failed", 0)
    assert "up_proj" in finding["reason"]
    sidecar.call("DELETE", f"/faults/{fault['id']}", None, 204)
    assert sidecar.scan("/integrity", reason="back again")["bad_chunks"] == 0
    assert sidecar.scan("/integrity/checkpoint")["health"] == "ok"
