"""The loop that an operator has: a fault, a rule of Prometheus, Alertmanager's webhook, a mitigation, the end of the
alert.  Real programs, and the repository's own rules and configuration; then every query of every board.

Parity has one group, so that it puts one changed chunk right and not two; the checkpoint is a folder of links that can
be taken away.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..deploy.dashboards import Query, queries
from ..vllm_server import VllmServer
from .monitoring import Stack
from .sidecar import Sidecar, Webhook, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = "The capital of France is"
FLIP = {"block": 4, "tensor": "mlp.up_proj", "kind": "bit", "count": 1, "seed": 4}
# So many values all over the tensor lie in more than one chunk, and show in a few short texts.
BURST = {"block": 4, "tensor": "mlp.up_proj", "kind": "burst", "count": 200, "seed": 4}
VERDICT, LATENT = "FlipwatchVerdict", "FlipwatchVerdictLatent"
# On a busy machine a scan takes a minute.
LONG = 300
SETTINGS = {
    "fingerprint": {"every_minutes": 0.1},
    "scan": {"every_minutes": 60, "grid": [0.0], "part_budget_ms": 1000, "duty": 1.0},
    "canary": {"every_minutes": 5},
    "validation": {"max_items": 8, "max_tokens": 16},
    "mitigation": {"mode": "enforce", "max_actions": 20},
}
EMPTY = {"vLLM restarted": "vLLM is not restarted here"}
"""Title of a query that rightly has no data -> why."""


@pytest.fixture(scope="module")
def vllm(with_one_group: VllmServer) -> VllmServer:
    """Two bad chunks are too many for its parity."""
    return with_one_group


@pytest.fixture
def sidecar(vllm: VllmServer, webhook: Webhook, tmp_path: Path) -> Iterator[Sidecar]:
    """Sweeps every six seconds, and has everything to compare with that an operator can record."""
    process = Sidecar(tmp_path, vllm.url, webhook, **SETTINGS)
    process.start()
    wait_for("the first scan", lambda: process.state()["health"] == "ok", LONG)
    process.scan("/baselines")
    process.scan("/recordings")
    process.scan("/canary")
    _check_checkpoint(process)
    yield process
    process.close()


def _check_checkpoint(sidecar: Sidecar) -> None:
    """Hold memory against the checkpoint; a sweep that is under way refuses it."""
    order = "/v1/integrity/checkpoint"
    wait_for("the order to check", lambda: sidecar.client.post(order, json={}).status_code == 202)
    name = 'flipwatch_checkpoint_verified{model_name="smol"}'
    wait_for("the check of the checkpoint", lambda: sidecar.metric(name) is not None)


@pytest.fixture
def stack(sidecar: Sidecar, vllm: VllmServer, tmp_path: Path) -> Iterator[Stack]:
    """Prometheus, Alertmanager and a fake dcgm-exporter."""
    started = Stack(tmp_path, sidecar.port, vllm.port)
    try:
        started.ready()
        yield started
    finally:
        started.close()


class Course:
    """What happened when, after a fault."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.time()
        self._moments: dict[str, float] = {}

    def now(self, moment: str, at: float | None = None) -> None:
        """This has happened, now unless said."""
        self._moments[moment] = (time.time() if at is None else at) - self._began

    def tell(self, effect: str) -> None:
        """Print it, and what came of it."""
        in_order = sorted(self._moments.items(), key=lambda moment: moment[1])
        print(f"\n{self._what} ({effect}): " + ", ".join(f"{name} after {after:.1f} s" for name, after in in_order))


def _last(sidecar: Sidecar, action: str, *states: str) -> dict[str, Any] | None:
    """The last mitigation of this kind that is in one of these states."""
    records = sidecar.call("GET", "/mitigations")
    return next((record for record in records if record["action"] == action and record["state"] in states), None)


def _found(sidecar: Sidecar, monitor: str, after: float) -> float:
    """When the first finding was made that says `failed`."""
    findings = sidecar.call("GET", f"/findings?monitor={monitor}")
    return min(found["created_at"] for found in findings if found["health"] == "failed" and found["created_at"] > after)


def _no_data(stack: Stack, begin: float) -> list[Query]:
    """Queries of the boards that had no data at any moment since."""
    end = time.time()
    return [query for query in queries() if query.title not in EMPTY and not stack.over(query.expr, begin, end)]


def test_alerts_of_prometheus_mitigate_and_end(
    vllm: VllmServer, sidecar: Sidecar, stack: Stack, checkpoint: Path
) -> None:
    """A flipped bit is repaired, what cannot be repaired is skipped, by order of Alertmanager, and the alerts end."""
    healthy = vllm.complete(PROMPT)["text"]
    words = vllm.tokens(PROMPT + healthy)
    likely = sum(vllm.prompt_logprobs(words))
    begin = time.time()

    course = Course("a flipped bit, repaired")
    vllm.inject(**FLIP)
    faulty = vllm.complete(PROMPT)["text"]
    assert faulty != healthy
    wait_for("an alert in Prometheus", lambda: stack.firing(VERDICT, LATENT))
    course.now("firing in Prometheus")
    repair = wait_for("the repair", lambda: _last(sidecar, "repair", "repaired"))
    course.now("found", _found(sidecar, "fingerprint", begin))
    course.now("webhook", repair["created_at"])
    course.now("repaired", repair["updated_at"])
    # By digests bit for bit; the canary's requests are in the same batches, so that log probabilities may round.
    assert [chunk["intact"] for chunk in repair["repairs"]] == [True]
    assert vllm.complete(PROMPT)["text"] == healthy
    assert sum(vllm.prompt_logprobs(words)) == pytest.approx(likely, abs=0.5)
    assert (repair["actor"], repair["automatic"]) == ("operator", False)
    assert repair["reason"].startswith("Alertmanager: FlipwatchVerdict"), repair["reason"]
    wait_for("the end in Prometheus", lambda: not stack.firing(VERDICT, LATENT), LONG)
    course.now("resolved in Prometheus")
    wait_for("the end in Alertmanager", lambda: not stack.active(VERDICT, LATENT), LONG)
    course.now("resolved in Alertmanager")
    course.tell(f"{faulty!r} -> {healthy!r}")

    # The scan that verifies the repair must not be the one that flags the next block.
    wait_for("the scan after the repair", lambda: not sidecar.call("GET", "/states")["scanning"], LONG)
    checkpoint.rename(checkpoint.with_name("moved"))
    try:
        course, injected = Course("a burst that cannot be repaired, skipped"), time.time()
        vllm.inject(**BURST)
        broken = sum(vllm.prompt_logprobs(words))
        wait_for("the alert in Prometheus", lambda: stack.firing(VERDICT), LONG)
        course.now("weight_fault firing in Prometheus")
        skip = wait_for("the skip", lambda: _last(sidecar, "skip", "verifying", "active"), LONG)
        skipped, answer = sum(vllm.prompt_logprobs(words)), vllm.complete(PROMPT)["text"]
        course.now("sane answer")
        skip = sidecar.mitigation(skip["id"], "active")
        failed = wait_for("the repair that fails", lambda: _last(sidecar, "repair", "failed"))
    finally:
        checkpoint.with_name("moved").rename(checkpoint)
    course.now("found by the sweep", _found(sidecar, "fingerprint", injected))
    course.now("found by the scan", _found(sidecar, "alpha_scan", injected))
    course.now("repair refuted", failed["updated_at"])
    course.now("webhook", skip["created_at"])
    assert failed["reason"].startswith("Alertmanager: FlipwatchVerdict")
    assert skip["reason"] == "Alertmanager: FlipwatchVerdict (weight_fault)"
    assert skip["blocks"] == [4]
    assert vllm.facts()["gates"][4] == 0.0
    # Halfway back at least from the fault, by how likely the healthy answer is.
    assert skipped > broken + 0.5 * (likely - broken), (likely, broken, skipped)
    wait_for("the end in Prometheus", lambda: not stack.firing(VERDICT), LONG)
    course.now("resolved in Prometheus")
    wait_for("the end in Alertmanager", lambda: not stack.active(VERDICT), LONG)
    course.now("resolved in Alertmanager")
    course.tell(f"{likely:.0f} -> {broken:.0f} -> {skipped:.0f} nats for the healthy answer, now {answer!r}")

    # The fault is still there, and the checkpoint again: a person's repair ends both.
    made = sidecar.call("POST", "/mitigations", {"action": "repair"}, 202)
    sidecar.mitigation(made["id"], "repaired")
    assert vllm.complete(PROMPT)["text"] == healthy
    wait_for("the mark of the end of the skip", lambda: len(stack.query("flipwatch_mitigation_active == 0")) == 30)

    without = _no_data(stack, begin)
    print(f"{len(list(queries()))} queries of the boards, {len(without)} without data")
    assert [(query.board, query.title, query.expr) for query in without] == []
