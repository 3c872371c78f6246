"""Each verdict by a real fault on a real vLLM with a real sidecar: what is wrong is told from what else it might be.

Two starts of vLLM: a good checkpoint, on which faults come and go, and one that was damaged on the disk.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from flipwatch.monitors.faults import FaultKind, FaultSpec, inject

from ..vllm_server import VllmServer
from .sidecar import Sidecar, Webhook, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

VERDICT = "FlipwatchVerdict"
BURST = {"block": 4, "tensor": "mlp.up_proj", "kind": "burst", "count": 18, "seed": 4}
LOWEST_BIT = {"block": 4, "tensor": "mlp.up_proj", "kind": "bit", "bit": 0, "count": 1, "seed": 4}
LOST_CACHE = {"tensor": "kv_cache", "kind": "lost", "count": 10**9}
# All: on some CPUs the lost caches of a few blocks move the answers hardly further than rounding does.
BLOCKS = range(30)
DAMAGED = "model.layers.4.mlp.up_proj.weight"


@contextmanager
def _pair(model: Path, folder: Path, webhook: Webhook) -> Iterator[tuple[VllmServer, Sidecar]]:
    """vLLM, and a sidecar that looks when vLLM arrives, when it is asked to, and when its monitors need each other."""
    rarely = {"every_minutes": 1000}
    with VllmServer(model, ["--enforce-eager"]) as vllm:
        process = Sidecar(
            folder,
            vllm.url,
            webhook,
            scan={**rarely, "grid": [0.0], "part_budget_ms": 1000, "duty": 1.0},
            fingerprint=rarely,
            # Each token of an answer may wait for a part of the scan, which takes all the engine here.
            canary={**rarely, "timeout_seconds": 30, "hung_seconds": 6},
            validation={"max_items": 8, "max_tokens": 24},
        )
        try:
            process.start()
            yield vllm, process
        finally:
            process.close()


def _becomes(sidecar: Sidecar, verdict: str, health: str, since: float) -> dict[str, Any]:
    """The joined verdict as soon as it is this one; prints how long that took."""

    def there() -> dict[str, Any] | None:
        joined = sidecar.call("GET", "/states")["verdict"]
        return joined if (joined["verdict"], joined["health"]) == (verdict, health) else None

    try:
        joined = dict(wait_for(f"the verdict {verdict}", there, 240))
    except AssertionError as error:
        raise AssertionError(f"{error}; it is {sidecar.call('GET', '/states')['verdict']}") from None
    print(f"{verdict} after {time.monotonic() - since:.1f} s: {joined['reason']}")
    assert sidecar.metric(f'flipwatch_verdict{{verdict="{verdict}"}}') == 1.0
    return joined


def _engine(vllm: VllmServer) -> int:
    """Process id of its engine."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(vllm.pid)], capture_output=True, text=True)
    return next(int(line.split()[0]) for line in listed.stdout.splitlines() if "EngineCore" in line)


def _answers(joined: dict[str, Any]) -> dict[str, str]:
    return {sign["question"]: sign["answer"] for sign in joined["signs"]}


def test_faults_that_come_and_go(smol: Path, webhook: Webhook, tmp_path: Path) -> None:
    """A burst, its block left out, repaired, a bit that nothing else shows, a lost KV cache, a hang."""
    begun = time.monotonic()
    with _pair(smol, tmp_path, webhook) as (vllm, sidecar):
        print(f"started in {time.monotonic() - begun:.1f} s")
        begun = time.monotonic()
        _becomes(sidecar, "ok", "ok", begun)

        at = time.monotonic()
        sidecar.call("POST", "/faults", BURST, 201)
        sidecar.scan(monitor="fingerprint")
        joined = _becomes(sidecar, "weight_fault", "failed", at)
        assert (joined["action"], joined["blocks"]) == ("repair", [4])
        wait_for("the alert", lambda: webhook.seen(VERDICT, "firing"))

        at = time.monotonic()
        skip = sidecar.call("POST", "/mitigations", {"action": "skip", "blocks": [4], "force": True}, 202)
        sidecar.mitigation(skip["id"], "active")
        joined = _becomes(sidecar, "mitigated", "degraded", at)
        assert joined["action"] == "repair"
        wait_for("the end of the alert", lambda: webhook.seen(VERDICT, "resolved"))

        at = time.monotonic()
        repair = sidecar.call("POST", "/mitigations", {"action": "repair"}, 202)
        sidecar.mitigation(repair["id"], "repaired")
        _becomes(sidecar, "ok", "ok", at)

        at = time.monotonic()
        fault = sidecar.call("POST", "/faults", LOWEST_BIT, 201)
        sidecar.scan(monitor="fingerprint")
        joined = _becomes(sidecar, "latent_weight_fault", "degraded", at)
        signs = _answers(joined)
        assert [signs[name] for name in ("bytes_changed", "block_stands_out", "answers_wrong")] == ["yes", "no", "no"]
        sidecar.call("DELETE", f"/faults/{fault['id']}", status=204)
        sidecar.scan(monitor="fingerprint")
        _becomes(sidecar, "ok", "ok", at)

        # The end of a fault empties the cache: there must be something to lose.
        sidecar.scan(monitor="canary")
        at = time.monotonic()
        faults = [sidecar.call("POST", "/faults", LOST_CACHE | {"block": block}, 201) for block in BLOCKS]
        sidecar.scan(monitor="canary")
        joined = _becomes(sidecar, "serving_fault", "failed", at)
        assert (joined["action"], joined["blocks"]) == ("drain", [])
        # That clears all caches, and the other faults in them with that.
        sidecar.call("DELETE", f"/faults/{faults[0]['id']}", status=204)
        sidecar.scan(monitor="canary")
        _becomes(sidecar, "ok", "ok", at)

        at = time.monotonic()
        engine = _engine(vllm)
        os.kill(engine, signal.SIGSTOP)
        try:
            sidecar.call("POST", "/scans", {"monitor": "canary"}, 202)
            joined = _becomes(sidecar, "hung", "failed", at)
            assert (joined["action"], joined["grounds"]) == ("drain", ["heartbeat"])
        finally:
            os.kill(engine, signal.SIGCONT)
        wait_for("the probe's answer", lambda: sidecar.call("GET", "/states")["up"])
        sidecar.scan(monitor="canary")
        _becomes(sidecar, "ok", "ok", at)
        print(f"all of them in {time.monotonic() - begun:.1f} s")

        changes = [event for event in sidecar.call("GET", "/events") if event["what"] == "verdict changed"]
        # Nothing was taken for a fault older than the baseline in between.
        right = {"unknown", "ok", "weight_fault", "mitigated", "latent_weight_fault", "serving_fault", "hung"}
        assert {event["detail"]["to"] for event in changes} == right


@pytest.fixture
def damaged(smol: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint with 18 values of one tensor 64 times too large."""
    copy = tmp_path / "damaged"
    shutil.copytree(smol, copy)
    [file] = copy.glob("*.safetensors")
    tensors = load_file(file)
    inject(FaultSpec(kind=FaultKind.BURST, count=18, seed=4), tensors[DAMAGED])
    save_file(tensors, file, {"format": "pt"})
    return copy


def test_a_checkpoint_that_was_damaged_on_the_disk(damaged: Path, webhook: Webhook, tmp_path: Path) -> None:
    """No byte changes after the start, and block 4 does harm all the same: the fault is older than the baseline."""
    begun = time.monotonic()
    (tmp_path / "sidecar").mkdir()
    with _pair(damaged, tmp_path / "sidecar", webhook) as (_, sidecar):
        print(f"started in {time.monotonic() - begun:.1f} s")
        joined = _becomes(sidecar, "old_fault", "failed", time.monotonic())
        assert (joined["action"], joined["blocks"]) == ("skip", [4])
        signs = _answers(joined)
        assert (signs["bytes_changed"], signs["block_stands_out"]) == ("no", "yes")

        def alerted() -> list[str]:
            labels = [alert["labels"] for alert in webhook.alerts]
            return [label["severity"] for label in labels if label.get("verdict") == "old_fault"]

        assert wait_for("the alert", lambda: alerted() or None) == ["critical"]
