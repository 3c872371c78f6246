"""Automation with real programs: from a fault to sane answers without anybody, and the three ways it must not act.

Parity has one group, so that it puts one changed chunk right and not two; the checkpoint is a folder of links that can
be taken away.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..vllm_server import VllmServer
from .sidecar import Sidecar, Webhook, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = "The capital of France is"
FLIP = {"block": 4, "tensor": "mlp.up_proj", "kind": "bit", "count": 1, "seed": 4}
# 18 values all over the tensor: more than one chunk.
BURST = {"block": 4, "tensor": "mlp.up_proj", "kind": "burst", "count": 18, "seed": 4}
POLICY = [
    {"verdict": "latent_weight_fault", "action": "repair"},
    {"verdict": "weight_fault", "action": "repair"},
    {"verdict": "weight_fault", "action": "skip"},
]
SWEEPS = {"every_minutes": 0.1}
SCANS = {"every_minutes": 60, "grid": [0.0], "part_budget_ms": 1000, "duty": 1.0}
NO_SCANS = {"every_minutes": None}
Start = Callable[..., Sidecar]


@pytest.fixture(scope="module")
def vllm(with_one_group: VllmServer) -> VllmServer:
    """Two bad chunks are too many for its parity."""
    return with_one_group


@pytest.fixture
def start(vllm: VllmServer, webhook: Webhook, tmp_path: Path) -> Iterator[Start]:
    """Starts a sidecar that looks at the weights every six seconds; sections can be given by name."""
    started: list[Sidecar] = []

    def make(**sections: Any) -> Sidecar:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        settings = {"fingerprint": SWEEPS, "scan": NO_SCANS, "automation": {"rules": POLICY}, **sections}
        process = Sidecar(folder, vllm.url, webhook, **settings)
        started.append(process)
        process.start()
        return process

    yield make
    for process in started:
        process.close()


def _decisions(sidecar: Sidecar) -> list[dict[str, Any]]:
    """What automation decided, oldest first."""
    events = reversed(sidecar.call("GET", "/events?limit=1000"))
    return [event for event in events if event["what"].startswith("automation")]


def _decided(sidecar: Sidecar, what: str) -> dict[str, Any] | None:
    """The first decision of this kind."""
    return next((event for event in _decisions(sidecar) if event["what"] == f"automation {what}"), None)


def _mitigation(sidecar: Sidecar, action: str, *states: str) -> dict[str, Any] | None:
    """The last mitigation of this kind that is in one of these states."""
    records = sidecar.call("GET", "/mitigations")
    return next((record for record in records if record["action"] == action and record["state"] in states), None)


def _found_at(sidecar: Sidecar, after: float) -> float:
    """When the first sweep ended that found the fault."""
    findings = sidecar.call("GET", "/findings?monitor=fingerprint")
    return min(found["created_at"] for found in findings if found["health"] == "failed" and found["created_at"] > after)


def _tell(what: str, injected: float, moments: dict[str, float]) -> None:
    told = ", ".join(f"{name} after {moment - injected:.1f} s" for name, moment in moments.items())
    print(f"\n{what}: {told}")


def test_from_fault_to_sane_answers_by_repair_and_by_skip(vllm: VllmServer, start: Start, checkpoint: Path) -> None:
    """A flipped bit is repaired; what neither parity nor the checkpoint can repair is skipped; nobody asks for it."""
    healthy = vllm.outputs([PROMPT])
    words = vllm.tokens(PROMPT + healthy[0][0])
    sidecar = start(scan=SCANS, mitigation={"mode": "enforce"})
    wait_for("the first scan", lambda: sidecar.state()["health"] == "ok", 240)

    injected = time.time()
    vllm.inject(**FLIP)
    faulty = vllm.outputs([PROMPT])
    assert faulty != healthy
    repair = wait_for("the repair", lambda: _mitigation(sidecar, "repair", "repaired"))
    wait_for("the healthy answer", lambda: vllm.outputs([PROMPT]) == healthy)
    sane = time.time()
    assert (repair["automatic"], repair["actor"]) == (True, "flipwatch")
    assert repair["rule"].endswith("weight_fault: repair")
    assert [chunk["method"] for chunk in repair["repairs"]] == ["parity"]
    moments = {"found": _found_at(sidecar, injected), "ordered": repair["created_at"], "healthy answer": sane}
    _tell(f"repair ({faulty[0][0]!r} -> {healthy[0][0]!r})", injected, moments)
    acted = _decided(sidecar, "acts")
    assert acted is not None
    assert acted["detail"]["id"] == repair["id"]

    # The scan that verifies the repair must not be the one that flags the next block.
    wait_for("the scan after the repair", lambda: not sidecar.call("GET", "/states")["scanning"])
    likely = sum(vllm.prompt_logprobs(words))
    checkpoint.rename(checkpoint.with_name("moved"))
    try:
        injected = time.time()
        vllm.inject(**BURST)
        broken = sum(vllm.prompt_logprobs(words))
        failed = wait_for("the repair that fails", lambda: _mitigation(sidecar, "repair", "failed"))
        # The gate is written before the proof is measured.
        skip = wait_for("the skip", lambda: _mitigation(sidecar, "skip", "verifying", "active"), 240)
        skipped, answer = sum(vllm.prompt_logprobs(words)), vllm.outputs([PROMPT])[0][0]
        sane = time.time()
        skip = sidecar.mitigation(skip["id"], "active")
    finally:
        checkpoint.with_name("moved").rename(checkpoint)
    assert (skip["automatic"], skip["rule"], skip["blocks"]) == (True, "weight_fault: skip", [4])
    assert vllm.facts()["gates"][4] == 0.0
    assert skip["loss_after"] < skip["loss_before"]
    # Halfway back at least from the fault, by how likely the healthy answer is.
    assert skipped > broken + 0.5 * (likely - broken), (likely, broken, skipped)
    moments = {
        "found": _found_at(sidecar, injected),
        "repair refuted": failed["updated_at"],
        "skip ordered": skip["created_at"],
        "sane answer": sane,
    }
    told = f"{likely:.0f} -> {broken:.0f} -> {skipped:.0f} nats for the healthy answer, now {answer!r}"
    _tell(f"skip ({told})", injected, moments)

    # The fault is still there, and the checkpoint again: a person's repair ends both, and nobody undid the skip.
    made = sidecar.call("POST", "/mitigations", {"action": "repair"}, 202)
    sidecar.mitigation(made["id"], "repaired")
    assert sidecar.mitigation(skip["id"], "reverted")["undone_by"] is None
    assert vllm.outputs([PROMPT]) == healthy


def test_the_three_ways_it_must_not_act(vllm: VllmServer, start: Start) -> None:
    """Observe, dry-run and an open breaker: the fault stays, no gate moves, and the audit log says why."""
    fault = vllm.inject(**FLIP)
    before = vllm.facts()
    damaged = vllm.outputs([PROMPT])

    observes = start(mitigation={"mode": "observe"})
    told = wait_for("the decision to observe", lambda: _decided(observes, "observes"))
    assert "The mode is observe" in told["detail"]["message"]
    assert observes.call("GET", "/mitigations") == []
    observes.close()

    says = start(mitigation={"mode": "dry-run"})
    told = wait_for("the decision of the dry run", lambda: _decided(says, "would act"))
    [record] = says.call("GET", "/mitigations")
    assert (record["state"], record["id"]) == ("dry_run", told["detail"]["id"])
    assert record["message"].startswith("Dry run: would put right chunk ")
    says.close()

    # The one action that is allowed has been a drain by a person.
    breaker = start(fingerprint={"every_minutes": None}, mitigation={"mode": "enforce", "max_actions": 1})
    wait_for("the first answer of the probe", lambda: breaker.metric("flipwatch_up") == 1.0)
    drain = breaker.call("POST", "/mitigations", {"action": "drain"}, 202)
    assert breaker.scan(monitor="fingerprint")["bad_chunks"] == 1
    told = wait_for("the decision of the breaker", lambda: _decided(breaker, "breaker open"))
    assert "mitigation.max_actions allows 1" in told["detail"]["message"]
    assert [record["action"] for record in breaker.call("GET", "/mitigations")] == ["drain"]
    assert breaker.client.get("/readyz").status_code == 503
    assert breaker.call("DELETE", f"/mitigations/{drain['id']}", status=202)["state"] == "reverted"
    assert breaker.client.get("/readyz").status_code == 200

    assert set(before["gates"]) == {1.0}
    assert vllm.facts()["gates"] == before["gates"]
    assert vllm.outputs([PROMPT]) == damaged
    for sidecar in (observes, says):
        assert "automation acts" not in sidecar.log.read_text()
    vllm.heal(fault)
