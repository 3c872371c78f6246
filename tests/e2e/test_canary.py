"""The canary and the heartbeat, with real programs: sound answers, damaged weights, a damaged KV cache, a hang."""

import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ..vllm_server import VllmServer
from .sidecar import Sidecar, Webhook, wait_for

pytestmark = pytest.mark.vllm

WRONG = "FlipwatchAnswersWrong"
EVERYTHING = 10**9
# On some CPUs the lost caches of a few blocks move the answers hardly further than rounding does.
BLOCKS = range(30)


@pytest.fixture(scope="module")
def vllm(smol: Path) -> Iterator[VllmServer]:
    """bf16, with a prefix cache; eager, because nothing here is about compiled code."""
    with VllmServer(smol, ["--enforce-eager"]) as server:
        yield server


@pytest.fixture(scope="module")
def sidecar(vllm: VllmServer, webhook: Webhook, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """Asks when a test says so; its first answers are those of the healthy model."""
    process = Sidecar(
        tmp_path_factory.mktemp("sidecar"),
        vllm.url,
        webhook,
        scan={"every_minutes": None, "grid": "quick", "part_budget_ms": 1000, "duty": 1.0},
        canary={"every_minutes": 1000, "timeout_seconds": 30, "hung_seconds": 6},
    )
    process.start()
    wait_for("the first answers", lambda: _state(process)["health"] == "ok", 300)
    yield process
    process.close()


def _state(sidecar: Sidecar) -> dict[str, Any]:
    states = sidecar.call("GET", "/states")["states"]
    return next(dict(state) for state in states if state["monitor"] == "canary")


def _asked(sidecar: Sidecar) -> dict[str, Any]:
    return sidecar.scan(monitor="canary")


@contextmanager
def _damaged(sidecar: Sidecar, **order: Any) -> Iterator[None]:
    fault = sidecar.call("POST", "/faults", order, 201)
    try:
        yield
    finally:
        # Undoing one fault in a KV cache clears all caches, and the other faults in them with that.
        if fault["id"] in {one["id"] for one in sidecar.call("GET", "/faults")}:
            sidecar.call("DELETE", f"/faults/{fault['id']}", status=204)


def _engine(vllm: VllmServer) -> int:
    """Process id of its engine."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(vllm.pid)], capture_output=True, text=True)
    return next(int(line.split()[0]) for line in listed.stdout.splitlines() if "EngineCore" in line)


def test_a_healthy_server_stays_healthy(sidecar: Sidecar) -> None:
    """Asked again it gives what it gave before, within the measured tolerance: the first answers, and recorded ones."""
    finding = _asked(sidecar)
    assert (finding["health"], finding["reference"]) == ("ok", "first"), finding["reason"]
    finding = sidecar.scan("/canary")
    assert (finding["health"], finding["reference"]) == ("ok", "recorded"), finding["reason"]
    assert min(sidecar.call("GET", "/canary")["tokens"]) > 0
    sidecar.call("DELETE", "/canary", status=204)
    assert sidecar.call("GET", "/states")["pulse"]["pulse"] in ("idle", "moving")


@pytest.mark.parametrize(
    ("order", "symptom"),
    [
        ({"block": 4, "tensor": "mlp.up_proj", "kind": "burst", "seed": 4}, "changed"),
        ({"block": 4, "tensor": "self_attn.o_proj", "kind": "bit", "count": 1, "seed": 1}, "degenerate"),
        ({"block": 12, "tensor": "mlp.down_proj", "kind": "nan"}, "not_finite"),
    ],
)
def test_damaged_weights_show_in_the_answers(
    sidecar: Sidecar, webhook: Webhook, order: dict[str, Any], symptom: str
) -> None:
    """Each kind of damage with its symptom, and the alert."""
    with _damaged(sidecar, **order):
        finding = _asked(sidecar)
    print(finding["reason"])
    assert (finding["health"], finding["symptom"]) == ("failed", symptom), finding["reason"]
    wait_for("the alert", lambda: webhook.seen(WRONG, "firing"))


@pytest.mark.parametrize(
    ("kind", "blocks", "symptom"), [("nan", (4,), "not_finite"), ("lost", BLOCKS, "cache_differs")]
)
def test_a_damaged_kv_cache_shows_in_the_answers_alone(
    sidecar: Sidecar, kind: str, blocks: Iterable[int], symptom: str
) -> None:
    """No weight is touched: the sweep and the scan find nothing, the canary does, until the damage is undone."""
    finding = _asked(sidecar)
    assert finding["health"] == "ok", finding["reason"]
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(_damaged(sidecar, block=block, tensor="kv_cache", kind=kind, count=EVERYTHING))
        finding = _asked(sidecar)
        print(finding["reason"])
        others = [sidecar.scan(monitor="fingerprint"), *([sidecar.scan()] if kind == "nan" else [])]
        print(sidecar.call("GET", "/states")["verdict"]["reason"])
    assert (finding["health"], finding["symptom"]) == ("failed", symptom), finding["reason"]
    assert {other["health"] for other in others} == {"ok"}, [other["reason"] for other in others]


def test_an_engine_that_hangs_is_told_from_a_busy_one(sidecar: Sidecar, vllm: VllmServer) -> None:
    """Stopped, it answers neither the canary nor the probe, and its counters stand; let go, all is well again."""
    engine = _engine(vllm)
    os.kill(engine, signal.SIGSTOP)
    try:
        finding = _asked(sidecar)
        assert (finding["health"], finding["symptom"]) == ("failed", "timed_out"), finding["reason"]
        pulse = wait_for("the pulse of a hang", lambda: _hung(sidecar))
        assert "no counter has moved" in pulse["reason"]
        assert sidecar.metric('flipwatch_pulse{state="hung"}') == 1.0
        assert _state(sidecar)["health"] == "failed"
        print(pulse["reason"], sidecar.call("GET", "/states")["verdict"])
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_for("the probe's answer", lambda: sidecar.call("GET", "/states")["up"])
    wait_for("an idle pulse", lambda: sidecar.call("GET", "/states")["pulse"]["pulse"] == "idle")
    finding = _asked(sidecar)
    assert (finding["health"], finding["reference"]) == ("ok", "first"), finding["reason"]


def _hung(sidecar: Sidecar) -> dict[str, Any] | None:
    pulse = sidecar.call("GET", "/states")["pulse"]
    return dict(pulse) if pulse["pulse"] == "hung" else None
